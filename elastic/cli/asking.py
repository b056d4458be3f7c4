"""``elastic status``, ``resize``, ``leave`` and ``stop``: questions to the coordinator of a job that runs."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from elastic.cli.exits import Exit
from elastic.cli.options import asking, pass_screen
from elastic.cli.screen import ElasticScreen
from elastic.control import settings as names
from elastic.control.link import ask
from elastic.control.messages import Answer, Leave, Question, Resize, Status, Stop
from elastic.control.runs import Run, RunPlace, runs, secret_of
from elastic.errors import ControlLostError, PolicyError
from tieredckpt.cli.screen import show_age, table


def the_run(job: str | None) -> tuple[RunPlace, Run]:
    """The job somebody means who named ``job``, or none: then there must be exactly one on this machine."""
    root = names.run_directory()
    if job is not None:
        place = RunPlace(root, job)
        return place, place.read()
    found = runs(root)
    if not found:
        raise ControlLostError(f"no job was started on this machine (looked in {root})")
    if len(found) > 1:
        raise PolicyError(f"several jobs run on this machine, name one: {', '.join(run.job for run in found)}")
    return RunPlace(root, found[0].job), found[0]


def ask_job(job: str | None, coordinator: str, secret: str, question: Question) -> Answer:
    if coordinator:
        known = names.secret_from(secret)
        if known is None or job is None:
            raise PolicyError("a job elsewhere needs --job, --coordinator and --secret file:/path")
        return ask(coordinator, question, job=RunPlace(names.run_directory(), job).job, secret=known)
    _, run = the_run(job)
    return ask(run.coordinator, question, job=run.job, secret=secret_of(run))


@click.command("status")
@asking
@pass_screen
def status(screen: ElasticScreen, /, *, job: str | None, coordinator: str, secret: str) -> int:
    """How a job is: its world, its nodes, how far they are."""
    answer = ask_job(job, coordinator, secret, Status())
    screen.result(msgspec.to_builtins(answer), lambda out: show_answer(out, answer))
    return Exit.OK


@click.command("resize")
@click.option("--nodes", required=True, metavar="N|max", help="So many nodes at the most; max: as the policy allows.")
@click.option("--reason", default="elastic resize", show_default=True, help="For people.")
@asking
@pass_screen
def resize(screen: ElasticScreen, /, *, nodes: str, reason: str, job: str | None, coordinator: str, secret: str) -> int:
    """Ask for another number of nodes. Returns when the job knows; `elastic status` shows how far it is.

    All ranks stop after the same step, seal, and go on in the next world. Nodes that are not in it wait, warm.
    """
    if nodes != "max" and not (nodes.isascii() and nodes.isdigit() and int(nodes)):
        raise PolicyError(f"--nodes {nodes!r}: write a number from 1 on, or max")
    answer = ask_job(job, coordinator, secret, Resize(None if nodes == "max" else int(nodes), reason))
    screen.result(msgspec.to_builtins(answer), lambda out: show_answer(out, answer))
    return Exit.OK


@click.command("leave")
@click.argument("nodes", nargs=-1, required=True)
@click.option("--within", "within_s", type=float, default=120.0, show_default=True, metavar="S", help="Their deadline.")
@click.option("--reason", default="asked back", show_default=True, help="For people.")
@asking
@pass_screen
def leave(
    screen: ElasticScreen,
    /,
    *,
    nodes: tuple[str, ...],
    within_s: float,
    reason: str,
    job: str | None,
    coordinator: str,
    secret: str,
) -> int:
    """Ask NODES back: the job goes on without them, and their supervisors end. Ranks that ignore it are ended."""
    answer = ask_job(job, coordinator, secret, Leave(nodes, within_s, reason))
    screen.result(msgspec.to_builtins(answer), lambda out: show_answer(out, answer))
    return Exit.OK


@click.command("stop")
@click.option("--within", "within_s", type=float, metavar="S", help="The deadline. [default: the policy's]")
@click.option("--reason", default="elastic stop", show_default=True, help="For people.")
@asking
@pass_screen
def stop(
    screen: ElasticScreen, /, *, within_s: float | None, reason: str, job: str | None, coordinator: str, secret: str
) -> int:
    """Stop a job: its ranks agree on a step, seal and end. Started again, it resumes."""
    answer = ask_job(job, coordinator, secret, Stop(reason, within_s))
    screen.result(msgspec.to_builtins(answer), lambda out: show_answer(out, answer))
    return Exit.OK


def show_answer(out: Console, answer: Answer) -> None:
    ranks = len([node for node in answer.nodes if node.rank is not None]) * answer.nproc
    said = f": {answer.reason}" if answer.reason else ""
    out.print(f"[bold]{escape(answer.job)}[/] {answer.phase.value}, epoch {answer.epoch}, {ranks} ranks{escape(said)}")
    if answer.pausing is not None:
        out.print(f"stopping at a common step, {answer.pausing.within_s:.0f} s left: {escape(answer.pausing.reason)}")
    if answer.wanted:
        out.print(f"{answer.wanted} nodes more could be used")
    rows = [
        (
            node.node,
            "-" if node.rank is None else str(node.rank),
            node.state,
            str(node.seats),
            str(node.spares),
            "-" if node.step < 0 else str(node.step),
            "-" if node.sealed < 0 else str(node.sealed),
            show_age(node.heard_s),
        )
        for node in answer.nodes
    ]
    columns = ("node", "place", "state", "ranks", "spares", "step", "sealed", "heard")
    out.print(table(columns, rows, right=("place", "ranks", "spares", "step", "sealed", "heard")))
