"""``tieredckpt quarantine``: a step is not chosen automatically any more, or again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from tieredckpt.cli.exits import Exit
from tieredckpt.cli.options import looking, pass_screen, settings_for, with_exits
from tieredckpt.cli.screen import Screen
from tieredckpt.cli.sight import Sight, open_sight
from tieredckpt.durable import names
from tieredckpt.errors import UsageError
from tieredckpt.location import Location, parse_location
from tieredckpt.node import StepView


@click.command("quarantine", short_help="Keep a step from being chosen, or lift that.")
@click.argument("target", metavar="JOB/step-N")
@click.option("--lift", is_flag=True, help="Let the step be chosen again.")
@click.option("--reason", default="", help="Why, for whoever sees it later.")
@looking
@pass_screen
@with_exits
def quarantine(
    screen: Screen, *, target: str, lift: bool, reason: str, agent_dir: Path | None, durable: str | None
) -> Exit:
    """Keep a step from being loaded unless it is named; nothing of it is deleted.

    The mark goes where the step is: to this node's agent, and to the durable tier, where every node sees it.
    """
    if lift and reason:
        raise UsageError("--lift takes no --reason")
    with open_sight(settings_for(agent_dir, durable, target)) as sight:
        location = step_of(target)
        views = sight.groups(location, sight.survey(location.job))
        before = [view.quarantined for view in views]
        marked = _lift(sight, location, views) if lift else _mark(sight, location, views, reason or "by hand")
        after = sight.groups(location, sight.survey(location.job))
    value = {
        "job": location.job,
        "step": location.step,
        "quarantined": not lift,
        "reason": None if lift else reason or "by hand",
        "before": [text or None for text in before],
        "marked": marked,
        "now": [view.quarantined or None for view in after],
    }
    screen.result(value, lambda out: _show(out, location, value))
    return Exit.OK


def step_of(target: str) -> Location:
    """A location that names a step."""
    location = parse_location(target)
    if location.step is None:
        raise UsageError(f"{target!r} names no step: write {location.job}/step-N (`tieredckpt ls {location.job}`)")
    return location


def _mark(sight: Sight, location: Location, views: Sequence[StepView], reason: str) -> list[str]:
    marked = []
    if sight.agent is not None:
        for view in views:
            sight.agent.quarantine(location.job, view.group, reason)
        marked.append("memory")
    if any(view.durable for view in views):
        for view in views:
            sight.catalog(location.job).quarantine(view.group, reason)
        marked.append("durable")
    return marked


def _lift(sight: Sight, location: Location, views: Sequence[StepView]) -> list[str]:
    marked = []
    if sight.agent is not None:
        for view in views:
            sight.agent.lift(location.job, view.group)
        marked.append("memory")
    if sight.durable(location.job).url:
        catalog = sight.catalog(location.job)
        catalog.store.delete([names.quarantine(location.job, view.group) for view in views])
        catalog.forget()
        marked.append("durable")
    return marked


def _show(out: Console, location: Location, value: dict[str, Any]) -> None:
    where = " and ".join(f"the {tier} tier" for tier in value["marked"])
    if value["quarantined"]:
        out.print(f"{escape(str(location))} is quarantined in {where}: {escape(value['reason'])}")
    elif any(value["before"]):
        out.print(f"{escape(str(location))} may be chosen again, its mark is gone from {where}")
    else:
        out.print(f"{escape(str(location))} was not quarantined")
