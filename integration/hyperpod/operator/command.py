"""``hyperpod-operator-sim``: what otherwise needs a cluster, on one machine."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.markup import escape

from elastic.errors import ControlLostError, ElasticError, PolicyError
from integration.hyperpod.operator.actions import Event
from integration.hyperpod.operator.client import AgentClient
from integration.hyperpod.operator.local_pods import LocalPods
from integration.hyperpod.operator.operating import Operating
from integration.hyperpod.operator.pods import FixedPods, Pods
from integration.hyperpod.operator.showing import show_job
from integration.hyperpod.operator.sim_place import DIRECTORY, SimPlace, the_place
from integration.hyperpod.operator.spec import JobSpec, read_job
from integration.hyperpod.operator.state import Phase
from integration.hyperpod.operator.status import status_of
from peerstore.errors import PeerStoreError
from peerstore.signals import heed
from tieredckpt.cli.options import printing
from tieredckpt.cli.screen import Screen
from tieredckpt.yaml_text import load_yaml

_PROGRAM = "hyperpod-operator-sim"
_PORTS = range(15_000, 28_000)
"""Where worlds of one machine meet: below what the kernel gives out by itself."""
_INTERRUPTED = 130
_EXITS = """\b
Exit codes:
  0  done; `run`: the job completed
  1  failed; `run`: the job failed, the message says why
  2  the command line or the job is wrong
  5  no such job is operated here, or what is kept of it cannot be read
  130  interrupted; agents of --agents run on, those of --spawn are ended"""

pass_screen = click.make_pass_decorator(Screen)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=_EXITS)
def commands() -> None:
    """Operates a HyperPodPyTorchJob: drives real HyperPod agents over HTTP, as the operator of a cluster does.

    `run` starts and keeps it; `status`, `scale` and `fault` are about a job that runs. Node faults and the number of
    admitted replicas, which a cluster would know, are said by hand.
    """


@commands.command("run")
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
@printing
@pass_screen
def run(screen: Screen, /, *, job: Path, agents: str, spawn: int | None, every: float, **limits: float) -> int:
    """Operate the job of JOB.yaml until it has ended.

    With --spawn the first container's command of every replica spec is run here, with `hyperpodrun` on loopback; what
    agents and ranks print is in the job's folder. Started again, it goes on with whatever runs already.
    """
    if bool(agents) is bool(spawn):
        raise PolicyError("either --agents HOST:PORT,... or --spawn N")
    spec = _read(job, silent_s=limits["lost_after"], master_port=random.choice(_PORTS))
    place = SimPlace(spec.name)
    with place.held(), AgentClient(limits["timeout"]) as client, _interrupted() as stop:
        pods: Pods = (
            LocalPods(spec, spawn, place.folder)
            if spawn
            else FixedPods([one.strip() for one in agents.split(",") if one.strip()], spec.groups[0].name)
        )
        screen.note(f"job {spec.name}: what is kept of it is in {place.folder}")
        try:
            operating = Operating(spec, pods, place, client, told=_teller(screen), every_s=every)
            ended = operating.run(stop)
        finally:
            pods.close()
        state = operating.state
        kept = place.kept()
        if kept is not None:
            value = {"job": spec.name, "phase": state.phase.value, "status": status_of(spec, state, kept.seen)}
            screen.result(value, lambda out: show_job(out, kept))
        if ended or spawn:
            place.forget()
    if not ended:
        return _INTERRUPTED
    return 0 if state.phase is Phase.SUCCEEDED else 1


@commands.command("status")
@click.option("--job", default=None, metavar="NAME", help="Which job. [default: the only one here]")
@printing
@pass_screen
def status(screen: Screen, /, *, job: str | None) -> int:
    """How a job is: its phase, its agents, its conditions."""
    place = the_place(job)
    kept = place.kept()
    if kept is None:
        raise ControlLostError(f"no job {place.job} is operated on this machine (looked in {place.root})")
    value = {
        "job": place.job,
        "phase": kept.state.phase.value,
        "age_s": round(time.time() - kept.at_s, 3),
        "members": list(kept.state.members),
        "spares": list(kept.state.spares),
        "pods": [msgspec.to_builtins(pod) for pod in kept.seen.pods],
        "capacity": kept.seen.capacity,
        "status": status_of(kept.spec, kept.state, kept.seen),
    }
    screen.result(value, lambda out: show_job(out, kept))
    return 0


@commands.command("scale")
@click.argument("replicas", metavar="N|max")
@click.option("--job", default=None, metavar="NAME", help="Which job. [default: the only one here]")
@printing
@pass_screen
def scale(screen: Screen, /, *, replicas: str, job: str | None) -> int:
    """Let N replicas be admitted; max: as many as the job allows.

    What a queue does on a cluster. The job changes its size gracefully, to the greatest one its elasticPolicy has.
    """
    if replicas != "max" and not (replicas.isascii() and replicas.isdigit()):
        raise PolicyError(f"{replicas!r}: write a number, or max")
    place = the_place(job)
    wishes = msgspec.structs.replace(place.wishes(), capacity=None if replicas == "max" else int(replicas))
    place.wish(wishes)
    screen.result({"job": place.job, "capacity": wishes.capacity}, lambda out: out.print(f"{replicas} are admitted"))
    return 0


@commands.command("fault")
@click.argument("node")
@click.option(
    "--word", default="UnschedulablePendingReplacement", show_default=True, help="What the health label says."
)
@click.option("--healed", is_flag=True, help="The node is schedulable again.")
@click.option("--job", default=None, metavar="NAME", help="Which job. [default: the only one here]")
@printing
@pass_screen
def fault(screen: Screen, /, *, node: str, word: str, healed: bool, job: str | None) -> int:
    """Say that NODE is bad, as the health label of a cluster's node does."""
    place = the_place(job)
    wishes = place.wishes()
    bad = {name: said for name, said in wishes.bad_nodes.items() if name != node}
    if not healed:
        bad[node] = word
    place.wish(msgspec.structs.replace(wishes, bad_nodes=bad))
    said = "schedulable" if healed else word
    screen.result({"job": place.job, "bad_nodes": bad}, lambda out: out.print(f"{escape(node)} is {escape(said)}"))
    return 0


def _read(path: Path, **ours: Any) -> JobSpec:
    import yaml

    try:
        resource = load_yaml(path.read_text())
    except yaml.YAMLError as wrong:
        raise PolicyError(f"{path} is no YAML: {wrong}") from None
    if not isinstance(resource, dict):
        raise PolicyError(f"{path} has no resource")
    return read_job(resource, **ours)


def _teller(screen: Screen) -> Callable[[float, Event], None]:
    """A line for each event, on standard error."""

    def told(at_s: float, event: Event) -> None:
        moment = datetime.fromtimestamp(at_s).astimezone().strftime("%H:%M:%S")
        style = "bold red" if event.warning else "bold green"
        screen.err.print(f"[dim]{moment}[/] [{style}]{escape(event.reason)}[/] {escape(event.message)}")

    return told


@contextlib.contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM."""
    stop = threading.Event()
    undo = heed({signal.SIGINT: stop.set, signal.SIGTERM: stop.set})
    try:
        yield stop
    finally:
        undo()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors are one message; ``--debug`` shows where from."""
    screen = Screen(_PROGRAM)
    words = None if argv is None else list(argv)
    try:
        result = commands.main(args=words, prog_name=_PROGRAM, standalone_mode=False, obj=screen)
        sys.stdout.flush()
        return int(result or 0)
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except click.ClickException as wrong:
        wrong.show()
        return int(wrong.exit_code)
    except (click.Abort, KeyboardInterrupt):
        screen.err.print("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ElasticError, PeerStoreError, OSError) as error:
        if screen.debug:
            raise
        screen.err.print(f"[bold red]{_PROGRAM}:[/] {escape(str(error) or type(error).__name__)}")
        wrong_words = isinstance(error, PolicyError)
        return 2 if wrong_words else 5 if isinstance(error, ControlLostError) else 1


__all__ = ["DIRECTORY", "main"]
