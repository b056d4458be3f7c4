"""``elastic status``, ``resize``, ``drain``, ``stop``, ``inject``: one request to the coordinator."""

from __future__ import annotations

import secrets

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from elastic import settings
from elastic.cli.common import ElasticScreen, job_options, pass_elastic_screen
from elastic.control.control_messages import (
    CoordinatorRequest,
    DrainRequest,
    ElasticJobStatus,
    InjectRequest,
    ResizeRequest,
    StatusRequest,
    StopJobRequest,
)
from elastic.control.coordinator_client import call_coordinator
from elastic.control.run_directory import LocalRun, RunDirectory, describe_no_job, list_runs, run_secret
from elastic.errors import JobNotFoundError, PolicyError
from elastic.fault_injection.fault_spec import FaultInjection, InjectionKind, InjectionPhase, parse_injection
from peerstore.sizes_and_durations import show_count
from tieredckpt.cli.command_output import format_age, text_table
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.settings import run_directory


def find_run(job: str | None) -> tuple[RunDirectory, LocalRun]:
    """Return the directory and record of ``job``; ``None`` means the only job on this machine."""
    root = run_directory()
    if job is not None:
        place = RunDirectory(root, job)
        return place, place.read()
    found = list_runs(root)
    if not found:
        raise JobNotFoundError(describe_no_job(root))
    if len(found) > 1:
        raise PolicyError(f"several jobs run on this machine, name one: {', '.join(run.job for run in found)}")
    return RunDirectory(root, found[0].job), found[0]


def call_job(job: str | None, coordinator: str, secret: str, question: CoordinatorRequest) -> ElasticJobStatus:
    if coordinator:
        loaded_secret = settings.load_secret(secret)
        if loaded_secret is None or job is None:
            raise PolicyError("a job elsewhere needs --job, --coordinator and --secret file:/path")
        return call_coordinator(coordinator, question, job=RunDirectory(run_directory(), job).job, secret=loaded_secret)
    _, run = find_run(job)
    return call_coordinator(run.coordinator, question, job=run.job, secret=run_secret(run))


@click.command("status", short_help="Show the world, nodes and ranks of a job.")
@job_options
@pass_elastic_screen
def job_status_command(screen: ElasticScreen, /, *, job: str | None, coordinator: str, secret: str) -> int:
    """Show the state of a job: its world, its nodes and their steps."""
    answer = call_job(job, coordinator, secret, StatusRequest())
    screen.result(msgspec.to_builtins(answer), lambda out: show_job_status(out, answer))
    return ExitCode.OK


@click.command("resize")
@click.option("--nodes", required=True, metavar="N|max", help="Largest number of nodes; max: the policy's limit.")
@click.option("--reason", default="elastic resize", show_default=True, help="Reason to log and show.")
@job_options
@pass_elastic_screen
def resize_command(
    screen: ElasticScreen, /, *, nodes: str, reason: str, job: str | None, coordinator: str, secret: str
) -> int:
    """Change the number of nodes.

    Returns once the job has received the request; `elastic status` shows the progress.

    All ranks stop after the same step, save it, and continue in the next world. Unused nodes wait as spares.
    """
    if nodes != "max" and not (nodes.isascii() and nodes.isdigit() and int(nodes)):
        raise PolicyError(f"--nodes {nodes!r}: write a positive number, or max")
    answer = call_job(job, coordinator, secret, ResizeRequest(None if nodes == "max" else int(nodes), reason))
    screen.result(msgspec.to_builtins(answer), lambda out: show_job_status(out, answer))
    return ExitCode.OK


@click.command("drain")
@click.argument("nodes", nargs=-1, required=True)
@click.option(
    "--deadline",
    "deadline_s",
    type=float,
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds until the nodes must be free; ranks still running then are killed.",
)
@click.option("--reason", default="requested with elastic drain", show_default=True, help="Reason to log and show.")
@job_options
@pass_elastic_screen
def drain_command(
    screen: ElasticScreen,
    /,
    *,
    nodes: tuple[str, ...],
    deadline_s: float,
    reason: str,
    job: str | None,
    coordinator: str,
    secret: str,
) -> int:
    """Remove NODES from the job, which continues without them."""
    answer = call_job(job, coordinator, secret, DrainRequest(nodes, deadline_s, reason))
    screen.result(msgspec.to_builtins(answer), lambda out: show_job_status(out, answer))
    return ExitCode.OK


@click.command("stop")
@click.option(
    "--deadline",
    "deadline_s",
    type=float,
    metavar="S",
    help="Seconds until the job must have stopped; ranks still running then are killed. [default: the policy's]",
)
@click.option("--reason", default="elastic stop", show_default=True, help="Reason to log and show.")
@job_options
@pass_elastic_screen
def stop_command(
    screen: ElasticScreen, /, *, deadline_s: float | None, reason: str, job: str | None, coordinator: str, secret: str
) -> int:
    """Stop a job: its ranks agree on a step, save it and exit. The same `elastic run` command resumes it."""
    answer = call_job(job, coordinator, secret, StopJobRequest(reason, deadline_s))
    screen.result(msgspec.to_builtins(answer), lambda out: show_job_status(out, answer))
    return ExitCode.OK


def show_job_status(out: Console, answer: ElasticJobStatus) -> None:
    ranks = show_count(len([node for node in answer.nodes if node.node_rank is not None]) * answer.nproc, "rank")
    reason = f": {answer.reason}" if answer.reason else ""
    out.print(f"[bold]{escape(answer.job)}[/] {answer.phase.value}, world {answer.epoch}, {ranks}{escape(reason)}")
    if answer.pause is not None:
        left = "" if answer.pause.within_s is None else f", {answer.pause.within_s:.0f} s left"
        out.print(f"stopping at a common step{left}: {escape(answer.pause.reason)}")
    if answer.replacement_wait is not None:
        out.print(f"the job {escape(str(answer.replacement_wait))}")
    elif answer.requested_nodes:
        out.print(f"the job could use {show_count(answer.requested_nodes, 'more node')}")
    rows = [
        (
            node.node,
            "-" if node.node_rank is None else str(node.node_rank),
            node.state,
            str(node.local_ranks),
            str(node.spares),
            "-" if node.step < 0 else str(node.step),
            "-" if node.sealed < 0 else str(node.sealed),
            format_age(node.last_heartbeat_s),
        )
        for node in answer.nodes
    ]
    columns = ("node", "node rank", "state", "ranks", "spares", "step", "sealed", "last heartbeat")
    out.print(text_table(columns, rows, right=("node rank", "ranks", "spares", "step", "sealed", "last heartbeat")))


@click.command("inject", short_help="Inject a fault into a running job.")
@click.argument("places", nargs=-1, metavar="[NAME=VALUE]...")
@click.option(
    "--at",
    required=True,
    metavar="NAME=VALUE...",
    help=f"rank=, node=, local_rank=; step=, after_s=, phase= (one of "
    f"{', '.join(phase.value for phase in InjectionPhase)}).",
)
@click.option(
    "--kind", required=True, metavar="KIND", help=f"One of {', '.join(kind.value for kind in InjectionKind)}."
)
@job_options
@pass_elastic_screen
def inject_command(
    screen: ElasticScreen,
    /,
    *,
    places: tuple[str, ...],
    at: str,
    kind: str,
    job: str | None,
    coordinator: str,
    secret: str,
) -> int:
    """Inject a fault once: `elastic inject --at step=30 rank=8 --kind sigkill`.

    Without a step, phase or time, sigkill, sigstop, node and partition happen at once, and the others at the next
    forward pass. The job's --hang-timeout decides how soon sigstop, hold_gil and hang are detected.
    """
    one = parse_injection([*at.replace(",", " ").split(), *places], kind)
    answer = call_job(job, coordinator, secret, InjectRequest(with_unique_name(one)))
    screen.result(msgspec.to_builtins(answer), lambda out: show_job_status(out, answer))
    return ExitCode.OK


def with_unique_name(one: FaultInjection) -> FaultInjection:
    """Return the injection with a unique name, unless it has a name."""
    return one if one.name else msgspec.structs.replace(one, name=f"cli-{secrets.token_hex(4)}")
