"""The node agent's half of the checkpoint: no tensors, no torch."""
