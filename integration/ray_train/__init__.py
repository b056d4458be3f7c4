"""Ray Train: the steps of a run in the tiers, and small pointers to them as Ray's checkpoints."""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.ray_train", "'tieredckpt[ray]'"):
    from integration.ray_train.run_checkpoints import load_checkpoint, open_checkpointer, report, restore

__all__ = ["load_checkpoint", "open_checkpointer", "report", "restore"]
