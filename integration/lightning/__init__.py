"""PyTorch Lightning: checkpoints of a ``Trainer`` as steps of a job, and saves in memory between them."""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.lightning", "'tieredckpt[lightning]'"):
    from integration.lightning.trainer_callback import TieredCallback
    from integration.lightning.trainer_plugins import TieredCheckpointIO, TieredModelParallel
    from integration.lightning.trainer_steps import export_lightning_checkpoint

__all__ = ["TieredCallback", "TieredCheckpointIO", "TieredModelParallel", "export_lightning_checkpoint"]
