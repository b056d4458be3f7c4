"""Shares of a batch, as most tests want them."""

from elastic.batch.plan import BatchPlan
from elastic.samples.shares import PlanShares


def even(batch, microbatch, rank=0, world=1):
    """Microbatches of one size, the same in every world; ranks may be idle."""
    return PlanShares(BatchPlan(batch, world, microbatch=microbatch, allow_idle=True), rank)
