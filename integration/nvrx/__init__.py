"""NVIDIA's resiliency extension: its local checkpoints are steps in the memory tier."""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.nvrx", "'tieredckpt[nvrx]'"):
    from integration.nvrx.local_checkpoint_manager import TieredLocalCheckpointManager

__all__ = ["TieredLocalCheckpointManager"]
