"""Checkpoints as files: ``tiered://`` for fsspec, so that unmodified DCP and frameworks can use it."""
