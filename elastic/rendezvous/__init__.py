"""The torch.distributed stores at which ranks rendezvous."""
