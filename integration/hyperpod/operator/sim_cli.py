"""``hyperpod-operator-sim``: run, status, scale, fault."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from elastic.cli.common import ElasticScreen
from elastic.errors import ControlPlaneUnavailableError, PolicyError
from integration.hyperpod.job_resource import JobSpec, NodeHealth, parse_job_resource
from integration.hyperpod.operator.decision import OperatorEvent
from integration.hyperpod.operator.elastic_agent_client import ElasticAgentClient
from integration.hyperpod.operator.job_state import JobPhase, resource_status
from integration.hyperpod.operator.sim_loop import (
    SIM_DIRECTORY_ENV,
    SimDirectory,
    SimulatedOperator,
    StoredSimulation,
    find_sim_directory,
)
from integration.hyperpod.operator.sim_pods import ExternalAgents, LocalPods, PodProvider
from peerstore.daemon_process import handle_signals
from tieredckpt.bounded_yaml import load_yaml
from tieredckpt.cli.command_output import CommandOutput, text_table
from tieredckpt.cli.common_options import output_options
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.help_format import SuggestingGroup
from tieredckpt.cli.run_program import run_program

__all__ = ["SIM_DIRECTORY_ENV", "main"]

_MARKS = {"Running": "green", "Succeeded": "green", "Failed": "red", "Stopping": "yellow"}


def print_job(out: Console, stored: StoredSimulation) -> None:
    state, policy = stored.state, stored.spec.policy
    color = _MARKS.get(state.phase.value, "cyan")
    sizes = f"{policy.smallest_size} to {policy.max_replicas}" if stored.spec.elastic else str(policy.max_replicas)
    out.print(f"[bold]{escape(stored.spec.name)}[/]  [{color}]{state.phase.value}[/]", end="")
    out.print(f"  {len(state.members)} of {sizes} replicas, {state.restarts} restarts")
    rows = []
    for pod in stored.observed.pods:
        status = pod.agent_status
        rank = state.members.index(pod.name) if pod.name in state.members else None
        rank_text = "spare" if pod.name in state.spares else "-" if rank is None else str(rank)
        agent_text = "[dim]silent[/]" if status is None else status.state.value
        steps = (
            "" if status is None else ", ".join(str(condition.progress_count) for condition in status.progress.values())
        )
        note = (
            pod.node_health_problem
            or ("leaving" if pod.terminating else "")
            or (status.reason if status is not None else "")
        )
        rows.append([escape(pod.name), escape(pod.node), rank_text, agent_text, steps or "-", escape(note)])
    if rows:
        out.print(text_table(["pod", "node", "rank", "agent", "step", ""], rows, right=["rank", "step"]))
    for condition in state.conditions:
        mark = "[green]yes[/]" if condition.status else "[dim]no[/] "
        out.print(f"{mark} {condition.type:<12} {escape(condition.message or condition.reason)}")


_PROGRAM = "hyperpod-operator-sim"
_PORTS = range(15_000, 28_000)
"""Ports at which worlds of one machine meet, below the kernel's ephemeral ports."""
_EXITS = """\b
Exit codes:
  0  done; `run`: the job completed
  1  failed; `run`: the job failed, the message says why
  2  the command line or the job is wrong
  5  this operator has no such job, or cannot read its state
  130  interrupted; agents of --agents run on, those of --spawn are ended"""


class SimScreen(ElasticScreen):
    """Output of a command about a simulated operator. Its errors carry no advice."""

    def advice_for(self, error: BaseException) -> str:
        del error
        return ""


pass_sim_output = click.make_pass_decorator(CommandOutput)


@click.group(
    cls=SuggestingGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EXITS,
)
def operator_sim_cli() -> None:
    """Operate a HyperPodPyTorchJob: drive HyperPod agents over HTTP, as a cluster's operator does.

    `sim_run_command` starts and operates it; `sim_status_command`, `sim_scale_command` and `sim_fault_command` act on a
    running job. Node faults and the number of admitted replicas, which a cluster would report, are set by commands.
    """


@operator_sim_cli.command("run")
@click.argument("job", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="JOB.yaml")
@click.option("--agents", default="", metavar="HOST:PORT,...", help="Agents that run already; a node each.")
@click.option(
    "--spawn", type=click.IntRange(1, 64), metavar="N", help="Start agents here, on up to N nodes n0, n1, ..."
)
@click.option("--every", type=click.FloatRange(0.05), default=0.5, show_default=True, help="Seconds between looks.")
@click.option("--timeout", type=click.FloatRange(0.1), default=5.0, show_default=True, help="Seconds for one call.")
@click.option(
    "--lost-after",
    type=click.FloatRange(0.1),
    default=30.0,
    show_default=True,
    help="Seconds of silence: a lost agent.",
)
@output_options
@pass_sim_output
def sim_run_command(
    screen: CommandOutput, /, *, job: Path, agents: str, spawn: int | None, every: float, **limits: float
) -> int:
    """Operate the job of JOB.yaml until it has ended.

    With --spawn, run the first container's command of every replica spec here, with `hyperpodrun` on loopback. The
    job's folder contains the output of agents and ranks. After a restart, the command adopts the agents that still run.
    """
    if bool(agents) is bool(spawn):
        raise PolicyError("either --agents HOST:PORT,... or --spawn N")
    spec = _read(job, agent_timeout_s=limits["lost_after"], master_port=random.choice(_PORTS))
    directory = SimDirectory(spec.name)
    with directory.lock(), ElasticAgentClient(limits["timeout"]) as client, _interrupted() as stop:
        pods: PodProvider = (
            LocalPods(spec, spawn, directory.folder)
            if spawn
            else ExternalAgents(
                [address.strip() for address in agents.split(",") if address.strip()], spec.groups[0].name
            )
        )
        screen.info(f"job {spec.name}: state in {directory.folder}")
        try:
            operator = SimulatedOperator(spec, pods, directory, client, told=_event_printer(screen), every_s=every)
            finished = operator.run(stop)
        finally:
            pods.close()
        state = operator.state
        stored = directory.load()
        if stored is not None:
            value = {
                "job": spec.name,
                "phase": state.phase.value,
                "status": resource_status(spec, state, stored.observed),
            }
            screen.result(value, lambda out: print_job(out, stored))
        if finished or spawn:
            directory.clear()
    if not finished:
        return ExitCode.INTERRUPTED
    return 0 if state.phase is JobPhase.SUCCEEDED else 1


@operator_sim_cli.command("status")
@click.option("--job", default=None, metavar="NAME", help="Name of the job. [default: the only job here]")
@output_options
@pass_sim_output
def sim_status_command(screen: CommandOutput, /, *, job: str | None) -> int:
    """Show the phase, agents and conditions of a job."""
    directory = find_sim_directory(job)
    stored = directory.load()
    if stored is None:
        raise ControlPlaneUnavailableError(
            f"no job {directory.job} is operated on this machine (looked in {directory.root})"
        )
    value = {
        "job": directory.job,
        "phase": stored.state.phase.value,
        "age_s": round(time.time() - stored.at_s, 3),
        "members": list(stored.state.members),
        "spares": list(stored.state.spares),
        "pods": [msgspec.to_builtins(pod) for pod in stored.observed.pods],
        "capacity": stored.observed.capacity,
        "status": resource_status(stored.spec, stored.state, stored.observed),
    }
    screen.result(value, lambda out: print_job(out, stored))
    return 0


@operator_sim_cli.command("scale")
@click.argument("replicas", metavar="N|max")
@click.option("--job", default=None, metavar="NAME", help="Name of the job. [default: the only job here]")
@output_options
@pass_sim_output
def sim_scale_command(screen: CommandOutput, /, *, replicas: str, job: str | None) -> int:
    """Let N replicas be admitted; max: the job's limit.

    On a cluster, a queue does this. The job changes its size gracefully, to the largest size that its elasticPolicy
    allows.
    """
    if replicas != "max" and not (replicas.isascii() and replicas.isdigit()):
        raise PolicyError(f"{replicas!r}: write a number, or max")
    directory = find_sim_directory(job)
    overrides = msgspec.structs.replace(
        directory.load_overrides(), capacity=None if replicas == "max" else int(replicas)
    )
    directory.save_overrides(overrides)
    screen.result(
        {"job": directory.job, "capacity": overrides.capacity}, lambda out: out.print(f"{replicas} are admitted")
    )
    return 0


@operator_sim_cli.command("fault")
@click.argument("node")
@click.option(
    "--health",
    default=NodeHealth.PENDING_REPLACEMENT.value,
    show_default=True,
    help="The node's health label.",
)
@click.option("--healthy", is_flag=True, help="The node is schedulable again.")
@click.option("--job", default=None, metavar="NAME", help="Name of the job. [default: the only job here]")
@output_options
@pass_sim_output
def sim_fault_command(screen: CommandOutput, /, *, node: str, health: str, healthy: bool, job: str | None) -> int:
    """Mark NODE as bad, as the health label of a cluster's node does."""
    directory = find_sim_directory(job)
    overrides = directory.load_overrides()
    bad = {name: status for name, status in overrides.bad_nodes.items() if name != node}
    if not healthy:
        bad[node] = health
    directory.save_overrides(msgspec.structs.replace(overrides, bad_nodes=bad))
    status = "schedulable" if healthy else health
    screen.result(
        {"job": directory.job, "bad_nodes": bad}, lambda out: out.print(f"{escape(node)} is {escape(status)}")
    )
    return 0


def _read(path: Path, **ours: Any) -> JobSpec:
    import yaml

    try:
        resource = load_yaml(path.read_text())
    except yaml.YAMLError as error:
        raise PolicyError(f"{path} is not YAML: {error}") from None
    if not isinstance(resource, dict):
        raise PolicyError(f"{path} has no resource")
    return parse_job_resource(resource, **ours)


def _event_printer(screen: CommandOutput) -> Callable[[float, OperatorEvent], None]:
    """Return a function that prints one line per event to standard error."""

    def print_event(at_s: float, event: OperatorEvent) -> None:
        time_text = datetime.fromtimestamp(at_s).astimezone().strftime("%H:%M:%S")
        style = "bold red" if event.warning else "bold green"
        screen.err.print(f"[dim]{time_text}[/] [{style}]{escape(event.reason)}[/] {escape(event.message)}")

    return print_event


@contextlib.contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set."""
    stop = threading.Event()
    undo = handle_signals({signal.SIGINT: stop.set, signal.SIGTERM: stop.set})
    try:
        yield stop
    finally:
        undo()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``hyperpod-operator-sim`` and return its exit code."""
    return run_program(operator_sim_cli, SimScreen(_PROGRAM), argv)
