"""Transformers: a ``Trainer`` in the tiers, text generation, and the LZ penalty.

``trainer.train()`` resumes from the tiers. ``Trainer`` folders remain as exports. ``elastic map --task generate``
completes prompts with the weights of a job.
"""

from peerstore.optional_packages import optional_imports

with optional_imports("integration.transformers", "'tieredckpt[transformers]'"):
    from integration.transformers.lz_penalty import LZPenalty
    from integration.transformers.tiered_trainer import TieredTrainerMixin, tiered

__all__ = ["LZPenalty", "TieredTrainerMixin", "tiered"]
