"""``tieredckpt export``: a step as files that other programs read."""

from __future__ import annotations

import contextlib
import ctypes
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape

from peerstore.records import Group
from peerstore.units import parse_size, show_seconds, show_size
from tieredckpt.cli.exits import Exit
from tieredckpt.cli.options import looking, pass_screen, settings_for, with_exits
from tieredckpt.cli.screen import Advance, Screen, count
from tieredckpt.cli.sight import Sight, open_sight
from tieredckpt.errors import UsageError
from tieredckpt.location import parse_location

if TYPE_CHECKING:
    from tieredckpt.export.source import StepSource

_M_MMAP_THRESHOLD = -3  # of glibc's mallopt


@dataclass(frozen=True)
class Wish:
    """What is to be written, as the command line says it."""

    destination: Path
    kind: str
    most_bytes: int
    force: bool
    allow_pickle: bool


@click.command("export", short_help="Write a step as safetensors, for Hugging Face, torch or DCP.")
@click.argument("target", metavar="JOB[/step-N]")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "hf", "torch", "dcp"]),
    default="safetensors",
    show_default=True,
    help="One safetensors file, a folder for Hugging Face's from_pretrained, a torch.save file, a plain DCP folder.",
)
@click.option("--prefix", default="", help="Only names that begin so ('model.'), without it.")
@click.option("--select", multiple=True, metavar="GLOB", help="Only names like this; may be repeated.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="No names like this; may be repeated.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="hf: the most bytes of one file.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@click.option("--allow-pickle", is_flag=True, help="torch: unpickle objects of any type, which can run any code.")
@looking
@pass_screen
@with_exits
def export(
    screen: Screen,
    *,
    target: str,
    destination: Path,
    kind: str,
    prefix: str,
    select: tuple[str, ...],
    exclude: tuple[str, ...],
    max_shard_size: str,
    force: bool,
    allow_pickle: bool,
    agent_dir: Path | None,
    durable: str | None,
) -> Exit:
    """Write a step to DEST for other programs: bit for bit, whole or not at all.

    Tensors are put together from their shards one after the other, out of the nearest good copies; the model never is
    in memory at once. JOB alone means the step that a load would use.
    """
    from tieredckpt.export.source import wanted_names

    began = time.monotonic()
    give_memory_back()
    wish = Wish(destination, kind, _most_bytes(max_shard_size), force, allow_pickle)
    with open_sight(settings_for(agent_dir, durable, target)) as sight:
        location = parse_location(target)
        view = sight.chosen(location, sight.survey(location.job))
        if view.quarantined:
            screen.note(f"step {view.group.version} is quarantined: {view.quarantined}")
        source = source_of(sight, location.job, view.group)
        with contextlib.closing(source):
            names = wanted_names(source.step, prefix=prefix, select=select, exclude=exclude)
            total = sum(
                _size(source, name)
                for name in names
                if name in source.step.tensors and not (kind in ("safetensors", "hf") and name in source.step.objects)
            )
            with screen.progress(f"writing {destination.name}", total) as advance:
                files = _write(source, names, wish, advance)
    left_out = sorted(name for name in names if name in source.step.objects) if kind in ("safetensors", "hf") else []
    value = {
        "job": location.job,
        "step": view.group.version,
        "destination": str(destination),
        "format": kind,
        "files": files,
        "tensors": sum(name in source.step.tensors for name in names),
        "objects": sum(name in source.step.objects for name in names) - len(left_out),
        "left_out": left_out,
        "size_bytes": total,
        "read_bytes": source.bytes_by_tier,
        "seconds": round(time.monotonic() - began, 3),
    }
    screen.result(value, lambda out: _show(out, value))
    return Exit.OK


def _write(source: StepSource, names: dict[str, str], wish: Wish, advance: Advance) -> int:
    from tieredckpt.export.output import check_folder, whole_file, whole_folder

    if wish.kind == "torch":
        from tieredckpt.export.torch_file import write_torch

        with whole_file(wish.destination, force=wish.force) as path:
            write_torch(path, source, names, advance, allow_pickle=wish.allow_pickle)
        return 1
    if wish.kind == "dcp":
        from tieredckpt.export.dcp_folder import write_dcp

        with whole_folder(wish.destination, force=wish.force) as folder:
            write_dcp(folder, source, names, advance)
        return 2
    from tieredckpt.export.safetensors_file import tensors_for, write_file, write_folder

    tensors = tensors_for(source, names)
    if wish.kind == "safetensors":
        with whole_file(wish.destination, force=wish.force) as path:
            write_file(path, source, tensors, advance)
        return 1
    check_folder(wish.destination, force=wish.force)
    with whole_folder(wish.destination, force=wish.force) as folder:
        return write_folder(folder, source, tensors, wish.most_bytes, advance)


def source_of(sight: Sight, job: str, group: Group) -> StepSource:
    """The bytes of a step, out of every tier that can be seen from here."""
    from tieredckpt.export.source import StepSource

    memory = sight.agent.store if sight.agent is not None else None
    return StepSource(sight.describe(job, group), memory, lambda: sight.store(job), sight.peers(job))


def give_memory_back() -> None:
    """Have large buffers returned when they are freed: glibc by itself keeps and fragments them, up to the model."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _most_bytes(text: str) -> int:
    try:
        most = parse_size(text)
    except ValueError as error:
        raise UsageError(f"--max-shard-size: {error}") from error
    if most <= 0:
        raise UsageError("--max-shard-size: must be above 0")
    return most


def _size(source: StepSource, name: str) -> int:
    entry = source.entry(name)
    size = entry.itemsize
    for length in entry.shape:
        size *= length
    return size


def _show(out: Console, value: dict[str, Any]) -> None:
    read = " and ".join(f"{show_size(size)} from {tier}" for tier, size in value["read_bytes"].items()) or "nothing"
    files = count(value["files"], "file")
    what = count(value["tensors"], "tensor") + (f" and {count(value['objects'], 'object')}" if value["objects"] else "")
    out.print(
        f"{escape(value['job'])}/step-{value['step']}: {what} ({show_size(value['size_bytes'])}) in {files} at "
        f"{escape(value['destination'])}, read {read} in {show_seconds(value['seconds'])}"
    )
    if value["left_out"]:
        names = ", ".join(value["left_out"][:6]) + (", ..." if len(value["left_out"]) > 6 else "")
        out.print(f"left out, because safetensors holds tensors only: {escape(names)}")
