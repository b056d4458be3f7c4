"""Rendezvous without a root: a ``torch.distributed.Store`` whose keys are spread over the nodes of a world."""
