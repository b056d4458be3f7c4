"""``tieredckpt export``: a step as files of other formats."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from peerstore.shard_records import VersionId
from peerstore.sizes_and_durations import parse_size, show_count, show_seconds, show_size
from tieredckpt.cli.command_output import AdvanceProgress, CommandOutput, literal
from tieredckpt.cli.common_options import pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import TierClient, describe_other_branches, open_tier_client
from tieredckpt.errors import UsageError
from tieredckpt.export.atomic_output import return_freed_memory_to_os
from tieredckpt.location import parse_location

if TYPE_CHECKING:
    from tieredckpt.export.step_source import StepSource


@dataclass(frozen=True)
class ExportRequest:
    """Options of an export, from the command line."""

    destination: Path
    file_format: str
    max_file_bytes: int
    force: bool
    allow_pickle: bool


@with_exit_code_help
@click.command("export", short_help="Write a step as safetensors, for Hugging Face, torch or DCP.")
@click.argument("target", metavar="JOB[/step-N[@EPOCH]]")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "hf", "torch", "dcp", "directory"]),
    default="safetensors",
    show_default=True,
    help="One safetensors file, a Hugging Face folder, a torch.save file, a plain DCP folder, or the files of "
    "save_directory.",
)
@click.option(
    "--prefix", default="", help="Export only tensors with this name prefix ('model.'), and strip the prefix."
)
@click.option("--select", multiple=True, metavar="GLOB", help="Export only names that match; may be repeated.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Skip names that match; may be repeated.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="hf: largest size of one file.")
@click.option("--force", is_flag=True, help="Overwrite DEST.")
@click.option("--allow-pickle", is_flag=True, help="torch: unpickle objects of any type, which can run any code.")
@tier_options
@pass_output
def export_command(
    screen: CommandOutput,
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
) -> ExitCode:
    """Write a step to DEST in the format of another program, bit for bit.

    DEST appears when it is complete. Tensors are read one by one from their nearest undamaged copies, so that the
    model need not fit in memory. JOB alone means the step that a load would use. JOB/step-N means the newest attempt at
    the step, and JOB/step-N@EPOCH the attempt of one run.
    """
    from tieredckpt.export.step_source import selected_names

    began = time.monotonic()
    return_freed_memory_to_os()
    request = ExportRequest(destination, kind, _parse_max_bytes(max_shard_size), force, allow_pickle)
    with open_tier_client(settings_from_options(agent_dir, durable, target)) as client:
        location = parse_location(target)
        survey = client.survey(location.job)
        view = client.choose_attempt(location, survey)
        if others := describe_other_branches(location, view.version_id, survey):
            screen.info(others)
        if view.quarantined:
            screen.info(f"step {view.version_id.version} is quarantined: {view.quarantined}")
        source = source_of(client, location.job, view.version_id)
        with contextlib.closing(source):
            names = selected_names(source.step, prefix=prefix, select=select, exclude=exclude)
            total = sum(
                _size(source, name)
                for name in names
                if name in source.step.tensors and not (kind in ("safetensors", "hf") and name in source.step.objects)
            )
            with screen.progress_bar(f"writing {destination.name}", total) as advance:
                files = _write(source, names, request, advance)
    left_out = sorted(name for name in names if name in source.step.objects) if kind in ("safetensors", "hf") else []
    value = {
        "job": location.job,
        "step": view.version_id.version,
        "epoch": view.version_id.epoch,
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
    return ExitCode.OK


def _write(source: StepSource, names: dict[str, str], request: ExportRequest, advance: AdvanceProgress) -> int:
    from tieredckpt.export.atomic_output import atomic_file, atomic_folder, check_export_folder

    if request.file_format == "torch":
        from tieredckpt.export.export_formats import write_torch

        with atomic_file(request.destination, force=request.force) as path:
            write_torch(path, source, names, advance, allow_pickle=request.allow_pickle)
        return 1
    if request.file_format == "dcp":
        from tieredckpt.export.export_formats import write_dcp

        with atomic_folder(request.destination, force=request.force) as folder:
            write_dcp(folder, source, names, advance)
        return 2
    if request.file_format == "directory":
        from tieredckpt.export.export_formats import write_files

        with atomic_folder(request.destination, force=request.force) as folder:
            return write_files(folder, source, names, advance)
    from tieredckpt.export.export_formats import safetensors_entries, write_safetensors, write_safetensors_folder

    tensors = safetensors_entries(source, names)
    if request.file_format == "safetensors":
        with atomic_file(request.destination, force=request.force) as path:
            write_safetensors(path, source, tensors, advance)
        return 1
    check_export_folder(request.destination, force=request.force)
    with atomic_folder(request.destination, force=request.force) as folder:
        return write_safetensors_folder(folder, source, tensors, request.max_file_bytes, advance)


def source_of(client: TierClient, job: str, group: VersionId) -> StepSource:
    """Return a source of the step's bytes from every reachable tier."""
    from tieredckpt.export.step_source import StepSource

    memory = client.agent.store if client.agent is not None else None
    return StepSource(client.describe(job, group), memory, lambda: client.object_store(job), client.peers(job))


def _parse_max_bytes(text: str) -> int:
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
    files = show_count(value["files"], "file")
    if value["format"] == "directory":
        out.print(
            f"{literal(value['job'])}/step-{value['step']}: {files} ({show_size(value['size_bytes'])}) at "
            f"{literal(value['destination'])}, read {read} in {show_seconds(value['seconds'])}"
        )
        return
    what = show_count(value["tensors"], "tensor") + (
        f" and {show_count(value['objects'], 'object')}" if value["objects"] else ""
    )
    out.print(
        f"{literal(value['job'])}/step-{value['step']}: {what} ({show_size(value['size_bytes'])}) in {files} at "
        f"{literal(value['destination'])}, read {read} in {show_seconds(value['seconds'])}"
    )
    if value["left_out"]:
        names = ", ".join(value["left_out"][:6]) + (", ..." if len(value["left_out"]) > 6 else "")
        out.print(f"skipped, because safetensors holds tensors only: {literal(names)}")
