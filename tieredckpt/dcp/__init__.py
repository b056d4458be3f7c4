"""Interfaces of torch.distributed.checkpoint (DCP): TieredWriter, TieredReader, URLs."""
