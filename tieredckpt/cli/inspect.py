"""``tieredckpt inspect``: the tensors and objects of a step, and the shards that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from peerstore.sizes_and_durations import show_count, show_size
from tieredckpt.cli.command_output import CommandOutput, format_ranges, iso_time, literal, text_table
from tieredckpt.cli.common_options import pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import describe_other_branches, open_tier_client
from tieredckpt.errors import CheckpointNotFoundError
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT
from tieredckpt.format.shard_layout import TensorEntry
from tieredckpt.format.slice_boxes import Box
from tieredckpt.location import parse_location
from tieredckpt.restore.step_index import StepIndex


@with_exit_code_help
@click.command("inspect", short_help="List the tensors and objects of a step.")
@click.argument("target", metavar="JOB[/step-N[@EPOCH]]")
@click.option(
    "--match", "-m", "patterns", multiple=True, metavar="GLOB", help="List only matching names; may be repeated."
)
@click.option("--pieces", is_flag=True, help="List the pieces of each sharded tensor with their shards as well.")
@tier_options
@pass_output
def inspect_command(
    screen: CommandOutput,
    *,
    target: str,
    patterns: tuple[str, ...],
    pieces: bool,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Show the tensors and objects of a step with their types, shapes, sizes and shards.

    JOB alone means the step that a load would use. JOB/step-N means the newest attempt at the step, and
    JOB/step-N@EPOCH the attempt of one run.
    """
    with open_tier_client(settings_from_options(agent_dir, durable, target)) as client:
        location = parse_location(target)
        survey = client.survey(location.job)
        view = client.choose_attempt(location, survey)
        if others := describe_other_branches(location, view.version_id, survey):
            screen.info(others)
        step = StepIndex(client.describe(location.job, view.version_id))
    tensors = [_tensor(step, name) for name in sorted(step.tensors) if _matches(name, patterns)]
    objects = [_object(step, name) for name in sorted(step.objects) if _matches(name, patterns)]
    if patterns and not tensors and not objects:
        raise CheckpointNotFoundError(
            f"no name in step {view.version_id.version} is like {' or '.join(patterns)}; there are {len(step.tensors)} "
            f"tensors and {len(step.objects)} objects"
        )
    value = _summary(step) | {"quarantined": view.quarantined or None, "tensors": tensors, "objects": objects}
    screen.result(value, lambda out: _show(out, value, pieces=pieces))
    return ExitCode.OK


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _summary(step: StepIndex) -> dict[str, Any]:
    manifest = step.manifest
    return {
        "job": manifest.job,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "incarnation": manifest.incarnation,
        "attempt": manifest.attempt,
        "parts": len(step.shards) if manifest.parts == UNKNOWN_PART_COUNT else manifest.parts,
        "saved": iso_time(max((shard.meta.saved_ns for shard in manifest.shards), default=0)),
        "size_bytes": sum(shard.size_bytes for shard in manifest.shards),
        "shards": [
            {
                "part": part,
                "tiers": [tier.value for tier in step.found[part]],
                "object": shard.object or None,
                "encoding": shard.encoding,
                "size_bytes": shard.size_bytes,
                "stored_bytes": sum(shard.frames) if shard.encoding == "zstd" else shard.size_bytes,
                "tensors": len(step.layouts[part].tensors),
                "items": len(step.layouts[part].items),
            }
            for part, shard in sorted(step.shards.items())
        ],
    }


def _tensor(step: StepIndex, name: str) -> dict[str, Any]:
    places = sorted(step.tensors[name], key=lambda place: (place.entry.box, place.part))
    entry = places[0].entry
    boxes = sorted({place.entry.box for place in places})
    return {
        "name": name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "size_bytes": _volume(entry) * entry.itemsize,
        "sharding": _sharding(entry, boxes),
        "archived": any(place.item >= 0 for place in places),
        "pieces": [
            {"part": place.part, "offsets": list(place.entry.box.offsets), "sizes": list(place.entry.box.sizes)}
            for place in places
        ],
    }


def _object(step: StepIndex, name: str) -> dict[str, Any]:
    parts = step.objects[name]
    first = min(parts)
    return {"name": name, "parts": sorted(parts), "size_bytes": step.shards[first].meta.item_sizes[parts[first]]}


def _volume(entry: TensorEntry) -> int:
    return Box((0,) * len(entry.shape), entry.shape).volume


def _sharding(entry: TensorEntry, boxes: Sequence[Box]) -> str:
    """Return the sharding: ``whole`` or ``4 pieces along 0``. Empty pieces do not count."""
    real = [box for box in boxes if box.volume or box.sizes == entry.shape]
    if len(real) == 1 and real[0].sizes == entry.shape:
        return "whole"
    axes = [axis for axis, size in enumerate(entry.shape) if any(box.sizes[axis] != size for box in real)]
    return f"{len(real)} pieces along {','.join(map(str, axes))}"


def _show(out: Console, value: dict[str, Any], *, pieces: bool) -> None:
    shown, tensors, objects = value["shards"], value["tensors"], value["objects"]
    out.print(
        f"[bold]{literal(value['job'])}/step-{value['step']}[/]  epoch {value['epoch']}, incarnation "
        f"{value['incarnation']}, saved {value['saved']}, {show_size(value['size_bytes'])} in "
        f"{show_count(value['parts'], 'part')}"
    )
    if value["quarantined"]:
        out.print(f"[red]quarantined:[/] {literal(value['quarantined'])}")
    rows = [
        [
            str(one["part"]),
            ", ".join(one["tiers"]),
            show_size(one["size_bytes"]),
            literal(one["encoding"]),
            literal(one["object"] or "-"),
        ]
        for one in shown
    ]
    out.print()
    out.print(text_table(["PART", "TIERS", "SIZE", "STORED", "OBJECT"], rows, right=("PART", "SIZE")))
    if tensors:
        out.print()
        out.print(text_table(["TENSOR", "TYPE", "SHAPE", "SIZE", "SHARDING", "PARTS"], _rows(tensors), right=("SIZE",)))
    if pieces:
        for one in tensors:
            _show_pieces(out, one)
    if objects:
        out.print()
        rows = [[literal(one["name"]), show_size(one["size_bytes"]), format_ranges(one["parts"])] for one in objects]
        out.print(text_table(["OBJECT", "SIZE", "PARTS"], rows, right=("SIZE",)))
    total = sum(one["size_bytes"] for one in tensors)
    out.print(f"\n{show_count(len(tensors), 'tensor')} with {show_size(total)}, {show_count(len(objects), 'object')}")


def _rows(tensors: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            literal(one["name"]),
            literal(one["dtype"]),
            "x".join(map(str, one["shape"])) or "scalar",
            show_size(one["size_bytes"]),
            one["sharding"] + (" (archive)" if one["archived"] else ""),
            format_ranges(sorted({piece["part"] for piece in one["pieces"]})),
        ]
        for one in tensors
    ]


def _show_pieces(out: Console, tensor: dict[str, Any]) -> None:
    out.print(f"\n{literal(tensor['name'])}")
    for piece in tensor["pieces"]:
        offsets, sizes = (", ".join(map(str, piece[key])) for key in ("offsets", "sizes"))
        out.print(f"  part {piece['part']}: from ({offsets}) size ({sizes})")
