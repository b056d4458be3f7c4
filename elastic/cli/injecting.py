"""``elastic inject``: a fault on purpose, in a job that runs."""

from __future__ import annotations

import secrets

import click
import msgspec

from elastic.cli.asking import ask_job, show_answer
from elastic.cli.exits import Exit
from elastic.cli.options import asking, pass_screen
from elastic.cli.screen import ElasticScreen
from elastic.control.messages import Inject
from elastic.inject.plan import Injection, Kind, Phase
from elastic.inject.reading import injection_of


@click.command("inject")
@click.argument("places", nargs=-1, metavar="[NAME=VALUE]...")
@click.option(
    "--at",
    required=True,
    metavar="NAME=VALUE...",
    help=f"rank=, node=, local_rank=; step=, after_s=, phase= (one of {', '.join(phase.value for phase in Phase)}).",
)
@click.option("--kind", required=True, metavar="KIND", help=f"One of {', '.join(kind.value for kind in Kind)}.")
@asking
@pass_screen
def inject(
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
    """Have a fault happen, once: `elastic inject --at step=30 rank=8 --kind sigkill`.

    With no step, phase or time, sigkill, sigstop, node and partition happen at once, whatever the rank is doing; the
    others at the next forward pass. How soon sigstop, gil and hang are noticed is up to the job's --hang-timeout.
    """
    one = injection_of([*at.replace(",", " ").split(), *places], kind)
    answer = ask_job(job, coordinator, secret, Inject(named(one)))
    screen.result(msgspec.to_builtins(answer), lambda out: show_answer(out, answer))
    return Exit.OK


def named(one: Injection) -> Injection:
    """With a name that no other one has."""
    return one if one.name else msgspec.structs.replace(one, name=f"cli-{secrets.token_hex(4)}")
