"""``elastic plan``: the batch plan of a job at every world size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from elastic.batch_scaling.batch_plan import BatchPlan, RankPlan
from elastic.errors import PolicyError
from tieredckpt.cli.command_output import CommandOutput, text_table

_COLUMNS = ("WORLD", "PASSES", "MICROBATCH", "MICROBATCHES", "EMPTY", "BUSY", "RANKS x SAMPLES")


def batch_plan_table(plans: Sequence[BatchPlan]) -> Table:
    """Return a table with one line per plan."""
    rows = [
        (
            str(plan.world_size),
            str(plan.accumulation_steps),
            str(plan.microbatch_size),
            str(plan.microbatch_count),
            str(plan.empty_passes),
            f"{100 * plan.utilization:.1f} %",
            format_quotas(plan),
        )
        for plan in plans
    ]
    return text_table(_COLUMNS, rows, right=_COLUMNS[:-1])


def format_quotas(plan: BatchPlan) -> str:
    """Return the ranks and samples of a plan, as ``8 x 6 + 16 x 5``."""
    return " + ".join(f"{quota.ranks} x {quota.samples}" for quota in plan.quotas)


def batch_plan_json(plan: BatchPlan) -> dict[str, Any]:
    return {
        "global_batch": plan.global_batch,
        "world_size": plan.world_size,
        "accumulation": plan.accumulation_steps,
        "microbatch_size": plan.microbatch_size,
        "microbatch_count": plan.microbatch_count,
        "world_independent": plan.is_world_independent,
        "empty": plan.empty_passes,
        "utilization": plan.utilization,
        "quotas": [quota._asdict() for quota in plan.quotas],
    }


def rank_plan_table(share: RankPlan) -> Table:
    """Return a table with the passes of a rank."""
    rows = [(str(m.id), str(m.first), str(m.samples)) for m in share.microbatches]
    rows += [("-", "-", "0")] * share.empty_passes
    columns = ("MICROBATCH", "FIRST", "SAMPLES")
    return text_table(columns, rows, right=columns)


def rank_plan_json(share: RankPlan) -> dict[str, Any]:
    return {
        "rank": share.rank,
        "first": share.first,
        "samples": share.samples,
        "microbatches": [microbatch._asdict() for microbatch in share.microbatches],
        "empty": share.empty_passes,
        "weight": share.weight,
    }


@click.command("plan", short_help="Show how a global batch is split among ranks.")
@click.option("--global-batch", type=int, help="Samples per step, over all ranks.")
@click.option(
    "--world",
    "worlds",
    multiple=True,
    metavar="N[,N...]",
    help="Number of ranks with different samples; several for a comparison.",
)
@click.option("--max-microbatch", type=int, help="Largest number of samples per forward pass.")
@click.option(
    "--microbatch", type=int, help="Size of the microbatches, which are then the same at every number of ranks."
)
@click.option("--allow-idle", is_flag=True, help="Allow ranks without samples.")
@click.option("--rank", type=int, help="Show each forward pass of this rank.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def batch_plan_command(*, rank: int | None, as_json: bool, **asked: Any) -> int:
    """Show how a global batch is split among ranks: samples, microbatches and passes of each."""
    try:
        plans = _plans(**asked)
        value = {"plans": [_one(each, rank) for each in plans]}
    except PolicyError as impossible:
        raise click.UsageError(str(impossible)) from impossible
    screen = CommandOutput()
    screen.as_json = as_json
    screen.result(value, lambda out: _show(out, plans, rank))
    return 0


def _plans(
    *,
    global_batch: int | None,
    worlds: tuple[str, ...],
    max_microbatch: int | None,
    microbatch: int | None,
    allow_idle: bool,
) -> list[BatchPlan]:
    if global_batch is None or not worlds:
        raise PolicyError("--global-batch and --world are needed")
    return [
        BatchPlan(global_batch, world, max_microbatch, microbatch=microbatch, allow_idle=allow_idle)
        for world in _numbers(worlds)
    ]


def _numbers(texts: tuple[str, ...]) -> list[int]:
    parts = [part for text in texts for part in text.split(",")]
    if not all(part.strip().isdecimal() for part in parts):
        raise PolicyError(f"{','.join(parts)} is not a list of numbers: write for example 8,16,24")
    return [int(part) for part in parts]


def _one(each: BatchPlan, rank: int | None) -> dict[str, Any]:
    return batch_plan_json(each) | ({} if rank is None else {"share": rank_plan_json(each.for_rank(rank))})


def _show(out: Console, plans: list[BatchPlan], rank: int | None) -> None:
    out.print(batch_plan_table(plans))
    if rank is not None:
        print_rank_plans(out, plans, rank)


def print_rank_plans(out: Console, plans: Sequence[BatchPlan], rank: int) -> None:
    """Print every pass of this rank, in each of the plans."""
    for each in plans:
        out.print(f"\nrank {rank} of {each.world_size}")
        out.print(rank_plan_table(each.for_rank(rank)))
