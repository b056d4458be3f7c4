"""Division of the global batch among ranks, and learning rates that follow its size."""
