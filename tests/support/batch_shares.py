"""Shares of a batch, as most tests want them."""

from elastic.batch_scaling.batch_plan import BatchPlan
from elastic.samples.sample_schedule import RankShare


def even_share(batch, microbatch, rank=0, world=1):
    """Microbatches of one size, the same in every world; ranks may be idle."""
    return RankShare(BatchPlan(batch, world, microbatch=microbatch, allow_idle=True), rank)
