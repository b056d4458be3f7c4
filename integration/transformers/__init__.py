"""Adapter of the Transformers ``Trainer``: state in the tiers, resumed by ``trainer.train()``; ``Trainer`` folders
remain as exports.
"""

from integration.transformers.tiered_trainer import TieredTrainerMixin, tiered

__all__ = ["TieredTrainerMixin", "tiered"]
