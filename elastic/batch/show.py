"""Plans for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from elastic.batch.plan import BatchPlan, Share
from tieredckpt.cli.screen import table

_COLUMNS = ("WORLD", "PASSES", "MICROBATCH", "MICROBATCHES", "EMPTY", "BUSY", "RANKS x SAMPLES")


def as_table(plans: Sequence[BatchPlan]) -> Table:
    """One line for each plan."""
    rows = [
        (
            str(plan.world_size),
            str(plan.accumulation),
            str(plan.microbatch_size),
            str(plan.microbatch_count),
            str(plan.empty),
            f"{100 * plan.utilization:.1f} %",
            show_quotas(plan),
        )
        for plan in plans
    ]
    return table(_COLUMNS, rows, right=_COLUMNS[:-1])


def show_quotas(plan: BatchPlan) -> str:
    """``8 x 6 + 16 x 5``."""
    return " + ".join(f"{quota.ranks} x {quota.samples}" for quota in plan.quotas)


def as_json(plan: BatchPlan) -> dict[str, Any]:
    return {
        "global_batch": plan.global_batch,
        "world_size": plan.world_size,
        "accumulation": plan.accumulation,
        "microbatch_size": plan.microbatch_size,
        "microbatch_count": plan.microbatch_count,
        "world_independent": plan.world_independent,
        "empty": plan.empty,
        "utilization": plan.utilization,
        "quotas": [quota._asdict() for quota in plan.quotas],
    }


def share_table(share: Share) -> Table:
    """A rank's passes."""
    rows = [(str(m.id), str(m.first), str(m.samples)) for m in share.microbatches]
    rows += [("-", "-", "0")] * share.empty
    columns = ("MICROBATCH", "FIRST", "SAMPLES")
    return table(columns, rows, right=columns)


def share_json(share: Share) -> dict[str, Any]:
    return {
        "rank": share.rank,
        "first": share.first,
        "samples": share.samples,
        "microbatches": [microbatch._asdict() for microbatch in share.microbatches],
        "empty": share.empty,
        "weight": share.weight,
    }
