"""``tieredckpt top``: a job's nodes, copies and drains, watched."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from peerstore.errors import PeerStoreError
from tieredckpt.agent_node import AgentNode
from tieredckpt.cli.exits import Exit
from tieredckpt.cli.frames import Frame, frame, frame_json
from tieredckpt.cli.jobs import agent_of, the_job
from tieredckpt.cli.options import ANY_JOB, looking, pass_screen, settings_for, with_exits
from tieredckpt.cli.screen import Screen
from tieredckpt.cli.sight import open_sight
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.traffic import Moment

_REFRESH_S = 1.0
_WINDOW = 5
"""Refreshes that rates are averaged over: a copy is counted when it is there, which comes in jumps."""


@click.command("top", short_help="Watch a job's nodes, copies and drains.")
@click.argument("job", required=False)
@click.option("--once", is_flag=True, help="One look; so it is when the output is no terminal.")
@looking
@pass_screen
@with_exits
def top(screen: Screen, *, job: str | None, once: bool, agent_dir: Path | None, durable: str | None) -> Exit:
    """Watch the nodes of JOB: who is there, what is being sent, which step is settled, what lacks copies.

    Refreshed every second until Ctrl-C. With --json one object a line. JOB may be left out where there is only one.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts it in the background ignores it
    with open_sight(settings_for(agent_dir, durable, job or ANY_JOB)) as sight:
        agent, name = agent_of(sight), the_job(sight, job)
        if once or not (screen.as_json or screen.out.is_terminal):
            seen = look(agent, name)
            screen.result(frame_json(seen, []), lambda out: out.print(frame(seen, [], out.height), soft_wrap=False))
            return Exit.OK
        try:
            if screen.as_json:
                _stream(agent, name)
            else:
                _live(screen.out, agent, name)
        except KeyboardInterrupt:  # the way out
            return Exit.OK
    return Exit.OK


def look(agent: AgentNode, job: str) -> Frame:
    """One look: what the agent knows by now. The durable tier is not listed anew for it."""
    view = agent.cluster(job)
    survey = agent.survey(job)
    drains = agent.drains(job)
    return Frame(view, survey, drains, Moment.of(time.monotonic(), view, drains, agent.store.status()), time.time_ns())


def _looks(agent: AgentNode, job: str) -> Iterator[tuple[Frame, list[Moment]]]:
    """A look a second, and what was seen before it; each begins a second after the one before it began."""
    before: deque[Moment] = deque(maxlen=_WINDOW)
    while True:
        began = time.monotonic()
        seen = look(agent, job)
        yield seen, list(before)
        before.append(seen.moment)
        time.sleep(max(0.0, began + _REFRESH_S - time.monotonic()))


def _stream(agent: AgentNode, job: str) -> None:
    for seen, before in _looks(agent, job):
        sys.stdout.write(json.dumps(frame_json(seen, before)) + "\n")
        sys.stdout.flush()


def _live(out: Console, agent: AgentNode, job: str) -> None:
    last: RenderableType = Text(f"asking the nodes of {job}")
    with Live(last, console=out, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for seen, before in _looks(agent, job):
                    last = frame(seen, before, out.height)
                    live.update(last, refresh=True)
            except (PeerStoreError, TieredCheckpointError, OSError) as error:
                # It may come back; until then what was seen last stays, and says that it is old.
                away = Text.from_markup(f"[bold red]the agent does not answer:[/] {escape(str(error))}")
                live.update(Group(away, last), refresh=True)
                time.sleep(_REFRESH_S)
