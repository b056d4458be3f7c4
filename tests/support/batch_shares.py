"""Shares of a batch with the options that most tests use."""

from elastic.batch_scaling.batch_plan import BatchPlan
from elastic.samples.sample_schedule import RankShare


def even_share(batch, microbatch, rank=0, world=1):
    """Return a rank's share with a fixed microbatch size; ranks may be idle."""
    return RankShare(BatchPlan(batch, world, microbatch=microbatch, allow_idle=True), rank)
