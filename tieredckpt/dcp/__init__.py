"""DCP's interfaces (torch.distributed.checkpoint): TieredWriter, TieredReader, URLs, plain checkpoints."""
