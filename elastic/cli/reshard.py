"""``elastic reshard``: convert a checkpoint to another number of ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from elastic.reshard.checkpoint_urls import parse_source_url, parse_target_url
from peerstore.sizes_and_durations import show_count, show_seconds, show_size
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.common_options import pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from elastic.reshard.offline import ReshardPlan, ReshardSource
    from tieredckpt.settings import Settings


@with_exit_code_help
@click.command("reshard", short_help="Rewrite a checkpoint for another number of ranks.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--ranks", type=click.IntRange(1, 1 << 16), metavar="M", help="Number of ranks of the new checkpoint.")
@click.option(
    "--layout",
    type=click.Choice(["fsdp", "whole"]),
    help="Layout for --ranks: cut tensors along the first axis as fully_shard does, or distribute whole tensors. "
    "[default: fsdp]",
)
@click.option("--like", metavar="CHECKPOINT", help="Shard like this other checkpoint of the same tensors.")
@click.option("--force", is_flag=True, help="Replace an existing checkpoint.")
@tier_options
@pass_output
def reshard_command(
    screen: CommandOutput,
    *,
    source: str,
    target: str,
    ranks: int | None,
    layout: str | None,
    like: str | None,
    force: bool,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Write the checkpoint SRC to DST, sharded for M ranks, and compare both.

    SRC is tiered://JOB[/step-N], a durable URL that ends with JOB[/step-N], or the folder of a plain DCP checkpoint;
    without a step, the newest complete one. DST is a durable URL (file:///path/JOB, s3://bucket/prefix/JOB), which
    TieredReader and Checkpointer load, or the folder of a plain DCP checkpoint, which dcp.load loads.

    A load at another number of ranks does not need this command: any sharding loads into any other. Use it to move a
    checkpoint, or to let each rank read one file of its own.

    Reads both checkpoints in their stored pieces, and compares checksums that do not depend on the sharding. DST
    appears if they are equal. One slice of a tensor is in memory at a time.
    """
    if (ranks is None) == (like is None):
        raise UsageError(
            "choose a number of ranks (--ranks M) or a checkpoint to copy the layout of (--like CHECKPOINT)"
        )
    if like is not None and layout is not None:
        raise UsageError("--like and --layout both set how tensors are cut: choose one")
    from elastic.reshard.offline import reshard_checkpoint as run
    from elastic.reshard.targets import open_source, open_target
    from tieredckpt.export.atomic_output import return_freed_memory_to_os

    began = time.monotonic()
    return_freed_memory_to_os()
    settings = settings_from_options(agent_dir, durable)
    target_location = parse_target_url(target)
    with open_source(parse_source_url(source), settings) as opened:
        plan = _plan(opened, ranks, layout, like, settings)
        with open_target(target_location, opened.step, settings, force=force) as destination:
            done = run(opened, destination, plan, screen.progress_bar)
            name, step = destination.name, destination.step
    value = {
        "source": opened.name,
        "target": name,
        "step": step,
        "parts_before": opened.parts,
        "parts": done.parts,
        "layout": "like" if like is not None else layout or "fsdp",
        "tensors": done.tensors,
        "objects": done.objects,
        "size_bytes": done.size_bytes,
        "checksum": f"0x{done.checksum:016x}",
        "verified": True,
        "seconds": round(time.monotonic() - began, 3),
    }
    screen.result(value, lambda out: _show(out, value))
    return ExitCode.OK


def _plan(
    source: ReshardSource, ranks: int | None, layout: str | None, like: str | None, settings: Settings
) -> ReshardPlan:
    from elastic.reshard import offline
    from elastic.reshard.targets import open_source

    if like is not None:
        with open_source(parse_source_url(like), settings) as other:
            return offline.plan_like(source.tensors, other.tensors, other.parts)
    plan_tensors = offline.plan_whole_tensors if layout == "whole" else offline.plan_fsdp
    return plan_tensors(source.tensors, ranks or 1)


def _show(out: Console, value: dict[str, Any]) -> None:
    objects = f" and {show_count(value['objects'], 'object')}" if value["objects"] else ""
    out.print(
        f"{escape(value['source'])} ({show_count(value['parts_before'], 'part')}) is at {escape(value['target'])} in "
        f"{show_count(value['parts'], 'part')}: {show_count(value['tensors'], 'tensor')}{objects}, "
        f"{show_size(value['size_bytes'])}, in {show_seconds(value['seconds'])}"
    )
    out.print(
        f"verified: checksum {value['checksum']} of {show_count(value['tensors'], 'tensor')}, "
        f"{value['size_bytes']} bytes equal on both sides"
    )
