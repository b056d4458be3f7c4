"""torchtitan: checkpoints as steps of a job.

``--override.imports integration.torchtitan.tiered`` activates it.
"""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.torchtitan", "'tieredckpt[torchtitan]'"):
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.config.override import override

    from integration.torchtitan.checkpoint_manager import TieredCheckpointManager, tiered_config

__all__ = ["TieredCheckpointManager", "tiered"]


@override(  # type: ignore[untyped-decorator]  # mypy does not read torchtitan
    target=CheckpointManager.Config, exact=True, description="checkpoints in node memory (tieredckpt)"
)
def tiered(
    config: CheckpointManager.Config, url: str = "", durable: str | None = None, durable_every: int | None = None
) -> TieredCheckpointManager.Config:
    """Replace torchtitan's checkpoint manager by a :class:`TieredCheckpointManager`.

    ``url`` is ``tiered://JOB``; without it ``checkpoint.folder`` is the URL. ``durable`` and ``durable_every`` are
    those of the :class:`~tieredckpt.Checkpointer`. All other fields of ``--checkpoint`` are unchanged.
    """
    return tiered_config(config, url, durable, durable_every)
