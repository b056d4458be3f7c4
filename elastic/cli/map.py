"""``elastic map``: apply a function to lines of JSON on any number of nodes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from elastic.cli.common import ElasticScreen, pass_elastic_screen
from elastic.errors import PolicyError
from peerstore.sizes_and_durations import show_count, show_seconds
from tieredckpt.cli.common_options import output_options
from tieredckpt.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from elastic.batch_inference.map_node import MapProgress


@click.command("map", short_help="Apply a function to lines of JSON, on nodes that come and go.")
@click.argument("paths", nargs=-1, metavar="[FUNCTION] INPUT OUTPUT", required=True)
@click.option("--task", metavar="NAME", help="Built-in task, instead of FUNCTION.")
@click.option("--model", metavar="NAME|FOLDER|tiered://JOB", help="Model of the task: the same as --option model=.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Keyword argument of FUNCTION; VALUE is JSON or text.",
)
@click.option("--workers", type=click.IntRange(1, 1024), default=1, show_default=True, help="Processes of this node.")
@click.option(
    "--chunk-size", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Inputs per chunk."
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Inputs per call. Above 1, FUNCTION receives and returns lists.",
)
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    metavar="N",
    help="Retries of an input that fails.",
)
@click.option(
    "--max-losses",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    metavar="N",
    help="Stop processing an input during which N workers were lost.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="S",
    help="Seconds that one call may take, with its retries.",
)
@click.option(
    "--lease",
    type=click.FloatRange(0.5),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Seconds without a sign of life after which other workers take a chunk over.",
)
@click.option("--work", type=click.Path(path_type=Path), help="Directory that all nodes share (default OUTPUT.work).")
@output_options
@pass_elastic_screen
def map_command(
    screen: ElasticScreen,
    /,
    *,
    paths: tuple[str, ...],
    task: str | None,
    model: str | None,
    options: tuple[str, ...],
    workers: int,
    chunk_size: int,
    batch_size: int,
    retries: int,
    max_losses: int,
    timeout: float | None,
    lease: float,
    work: Path | None,
) -> ExitCode:
    """Write the result of FUNCTION for each line of INPUT to OUTPUT, in the same order.

    FUNCTION is module:name or file.py:name: a function of one JSON value, or a class with __call__, which each worker
    constructs once. Start the same command on more nodes at any time; all of them must see the same files. The same
    command also resumes a job.

    An input that fails becomes a line {"error", "line", "input"}. The exit code is then 1, and the last line of the
    output of this command has the number.
    """
    from elastic.batch_inference.chunk_plan import plan_chunks
    from elastic.batch_inference.map_node import MapNode, join_output, stop_on_signals
    from elastic.batch_inference.map_task import resolve_options
    from elastic.batch_inference.map_worker import WorkerOptions
    from elastic.batch_inference.work_directory import WorkDirectory

    if len(paths) != (3 if task is None else 2):
        raise click.UsageError("write FUNCTION INPUT OUTPUT, or --task NAME INPUT OUTPUT")
    began = time.monotonic()
    source, output = Path(paths[-2]), Path(paths[-1])
    values = _parse_options(options) | ({} if model is None else {"model": model})
    plan = plan_chunks(source, task or _absolute(paths[0]), values, chunk_size)
    directory = WorkDirectory(work or output.with_name(f"{output.name}.work"))
    _check_output(source, output, directory.path)
    directory.begin(plan, lambda: None if task is None else resolve_options(task, values))
    worker_options = WorkerOptions(
        input=str(source.absolute()),
        work=str(directory.path.absolute()),
        batch_size=batch_size,
        retries=retries,
        max_losses=max_losses,
        lease_s=lease,
        timeout_s=timeout or 0.0,
    )
    node = MapNode(
        directory,
        plan,
        worker_options,
        workers=workers,
        on_progress=lambda progress: (
            None if screen.as_json else screen.err.print(progress_text(progress), markup=False)
        ),
        on_message=screen.info,
    )
    with stop_on_signals(node.stop):
        if not node.run():
            screen.info("stopped; the same command resumes the job")
            return ExitCode.STOPPED
        value: dict[str, Any] = {"output": str(output), **join_output(directory, plan, output)}
    if not output.exists():
        raise PolicyError(
            f"The job of {str(output)!r} is finished and its output was removed. Remove {str(directory.path)!r} to "
            "start again."
        )
    value["seconds"] = round(time.monotonic() - began, 3)
    failures = f", {value['failed']} failed" if value["failed"] else ""
    text = f"{show_count(value['inputs'], 'input')}{failures}, in {show_seconds(value['seconds'])}: {output}"
    screen.result(value, lambda out: out.print(escape(text)))
    return ExitCode.FAILED if value["failed"] else ExitCode.OK


def progress_text(progress: MapProgress) -> str:
    """Return the text of a progress line."""
    return (
        f"{progress.inputs}/{progress.all_inputs} inputs, {progress.chunks}/{progress.all_chunks} chunks done, "
        f"{show_seconds(progress.seconds)}"
    )


def _absolute(function: str) -> str:
    """Return the function with an absolute path, for other current directories."""
    module, colon, name = function.rpartition(":")
    if not colon:
        raise click.UsageError(
            f"{function!r} is not a function: write module:name or file.py:name, or --task {function}"
        )
    return f"{Path(module).absolute()}:{name}" if module.endswith(".py") else function


def _parse_options(texts: tuple[str, ...]) -> dict[str, object]:
    values: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise click.UsageError(f"--option {text}: write KEY=VALUE")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return values


def _check_output(source: Path, output: Path, work: Path) -> None:
    if output.is_dir() or (output.exists() and source.exists() and output.samefile(source)):
        raise PolicyError(
            f"Cannot write the output {str(output)!r}: it is {'a folder' if output.is_dir() else 'the input'}."
        )
    if output.exists() and not (work / "plan.json").exists():
        raise PolicyError(
            f"The output {str(output)!r} exists and does not belong to a job in {str(work)!r}. Remove it."
        )
