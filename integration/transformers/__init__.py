"""Adapter of the Transformers ``Trainer``, which saves its state to the tiers.

``trainer.train()`` resumes from them. ``Trainer`` folders remain as exports.
"""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.transformers", "'tieredckpt[transformers]'"):
    from integration.transformers.tiered_trainer import TieredTrainerMixin, tiered

__all__ = ["TieredTrainerMixin", "tiered"]
