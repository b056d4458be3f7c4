"""Shares of a batch with the options that most tests use."""

from elastic.batch_scaling.batch_plan import BatchPlan


def even_share(batch, microbatch, rank=0, world=1):
    """Return a rank's share with a fixed microbatch size; ranks may be idle."""
    return BatchPlan(batch, world, microbatch=microbatch, allow_idle=True).for_rank(rank)
