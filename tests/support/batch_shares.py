"""Shares of a batch with the options that most tests use, and positions in a schedule."""

from elastic.batch_scaling.batch_plan import BatchPlan
from elastic.samples.sample_schedule import DataPosition


def even_share(batch, microbatch, rank=0, world=1):
    """Return a rank's share with a fixed microbatch size; ranks may be idle."""
    return BatchPlan(batch, world, microbatch=microbatch, allow_idle=True).for_rank(rank)


def position_after(schedule, steps):
    """Return the position of a job that has done ``steps`` steps of ``schedule``."""
    cursor = 0
    for _ in range(steps):
        cursor = schedule.batch_at(cursor).end_cursor
    return DataPosition(steps, cursor)
