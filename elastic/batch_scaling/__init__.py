"""The global batch divided among ranks, and learning rates that follow its size."""
