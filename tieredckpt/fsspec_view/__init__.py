"""Checkpoints as files: ``tiered://`` for fsspec, for unmodified DCP and frameworks."""
