"""``python -m integration.sagemaker.convert``: convert an AWS checkpoint and verify the copy."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console
from rich.markup import escape

from elastic.reshard.checkpoint_urls import parse_target_url
from peerstore.errors import InvalidNameError
from peerstore.shard_records import JobName, validate_job_name
from peerstore.sizes_and_durations import show_count, show_seconds, show_size
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.common_options import output_options, pass_output, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.run_program import run_program
from tieredckpt.errors import UsageError
from tieredckpt.settings import load_settings, override_settings

if TYPE_CHECKING:
    from elastic.reshard.offline import ReshardPlan
    from integration.sagemaker.checkpoint_stores import CheckpointStore
    from integration.sagemaker.format_reader import SageMakerFormatSource
    from tieredckpt.settings import Settings

_STEP = re.compile(r"step_([0-9]{1,18})")


class NamespaceUrl(NamedTuple):
    """URL of a namespace, split."""

    url: str
    namespace: JobName
    step: int | None

    @property
    def is_memory(self) -> bool:
        return self.url.startswith(("http://", "https://"))


def parse_namespace_url(text: str) -> NamespaceUrl:
    """Parse ``s3://bucket/prefix/NAMESPACE[/step_N]`` or the URL of a memory service with a namespace."""
    url, _, last = text.rstrip("/").rpartition("/")
    match = _STEP.fullmatch(last)
    if match:
        url, _, last = url.rpartition("/")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://.+", url):
        raise UsageError(
            f"{text!r} names no namespace: write s3://BUCKET/PREFIX/NAMESPACE[/step_N] or http://HOST:PORT/…"
        )
    try:
        return NamespaceUrl(url, validate_job_name(last), int(match[1]) if match else None)
    except InvalidNameError as error:
        raise UsageError(f"{text!r}: {error}") from error


@with_exit_code_help
@click.command("convert", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--ranks", type=click.IntRange(1, 1 << 16), metavar="M", help="Number of ranks of the target. [default: as in SRC]"
)
@click.option("--force", is_flag=True, help="Replace an existing checkpoint.")
@click.option("--trust-objects", is_flag=True, help="Load objects that can run code, too.")
@click.option("--token", metavar="TOKEN", default="", help="Token for a memory service that requires one.")
@output_options
@pass_output
def convert_command(
    screen: CommandOutput, *, source: str, target: str, ranks: int | None, force: bool, trust_objects: bool, token: str
) -> ExitCode:
    """Write the checkpoint SRC, which AWS's library wrote, to DST, and prove that it is the same.

    SRC is s3://BUCKET/PREFIX/NAMESPACE[/step_N], in either layout of AWS's library, or any other durable URL. It may
    also be http://HOST:PORT/NAMESPACE[/step_N] of a memory service. Without a step, the newest complete one is read.
    DST is a durable URL that ends with JOB (file:///path/JOB, s3://bucket/prefix/JOB), or the folder of a plain DCP
    checkpoint.

    DST appears only after both sides have the same checksum, which does not depend on the sharding. Metadata is read
    as data: no pickled code runs.
    """
    from elastic.reshard.offline import reshard_checkpoint
    from elastic.reshard.targets import open_target
    from integration.sagemaker.checkpoint_stores import newest_checkpoint
    from integration.sagemaker.format_reader import SageMakerFormatSource

    began = time.monotonic()
    settings = load_settings()
    where, place = parse_namespace_url(source), parse_target_url(target)
    with contextlib.closing(_open(where, settings, token)) as opened:
        written = SageMakerFormatSource(newest_checkpoint([opened], where.step), trust_objects=trust_objects)
        with contextlib.closing(written), open_target(place, written.step, settings, force=force) as destination:
            done = reshard_checkpoint(written, destination, _cut(written, ranks), screen.progress_bar)
            passed = written.checkpoint.skipped
            name = destination.name
    value = {
        "source": written.name,
        "target": name,
        "step": written.step,
        "passed_over": list(passed),
        "parts_before": written.parts,
        "parts": done.parts,
        "tensors": done.tensors,
        "objects": done.objects,
        "size_bytes": done.size_bytes,
        "checksum": f"0x{done.checksum:016x}",
        "verified": True,
        "seconds": round(time.monotonic() - began, 3),
    }
    screen.result(value, lambda out: _show(out, value))
    return ExitCode.OK


def _open(where: NamespaceUrl, settings: Settings, token: str) -> CheckpointStore:
    from integration.sagemaker.checkpoint_stores import MemoryServiceStore, S3CheckpointStore

    if where.is_memory:
        return MemoryServiceStore(where.url, where.namespace, token=token)
    changes: dict[str, Any] = {"url": where.url}
    if where.url.startswith("file:"):
        changes["options"] = {}
    return S3CheckpointStore.open(where.url, where.namespace, override_settings(settings, durable=changes).durable)


def _cut(source: SageMakerFormatSource, ranks: int | None) -> ReshardPlan:
    from elastic.reshard import offline

    if ranks is not None:
        return offline.plan_fsdp(source.tensors, ranks)
    return offline.plan_like(source.tensors, source.tensors, source.parts)


def _show(out: Console, value: dict[str, Any]) -> None:
    for reason in value["passed_over"]:
        out.print(f"passed over: {escape(reason)}")
    objects = f" and {show_count(value['objects'], 'object')}" if value["objects"] else ""
    out.print(
        f"{escape(value['source'])} is at {escape(value['target'])}: "
        f"{show_count(value['tensors'], 'tensor')}{objects}, "
        f"{show_size(value['size_bytes'])}, in {show_seconds(value['seconds'])}"
    )
    out.print(f"verified: checksum {value['checksum']}, {value['size_bytes']} bytes equal on both sides")


def main(argv: Sequence[str] | None = None) -> int:
    """Convert one checkpoint and return the exit code."""
    return run_program(convert_command, CommandOutput("convert"), argv)


if __name__ == "__main__":
    sys.exit(main())
