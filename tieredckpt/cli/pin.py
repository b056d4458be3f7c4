"""``tieredckpt pin`` and ``unpin``: a step that stays, and one that need not any more."""

from __future__ import annotations

from pathlib import Path

import click
from rich.markup import escape

from tieredckpt.cli.exits import Exit
from tieredckpt.cli.options import looking, pass_screen, settings_for, with_exits
from tieredckpt.cli.screen import Screen
from tieredckpt.cli.sight import Sight, open_sight
from tieredckpt.errors import UsageError
from tieredckpt.location import Location, parse_location
from tieredckpt.node import StepView


@click.command("pin", short_help="Keep a step: nothing newer takes its place.")
@click.argument("target", metavar="JOB")
@click.argument("step", type=click.IntRange(min=0), required=False)
@looking
@pass_screen
@with_exits
def pin(screen: Screen, *, target: str, step: int | None, agent_dir: Path | None, durable: str | None) -> Exit:
    """Keep STEP of JOB (or JOB/step-N), in memory and in the durable tier, until it is unpinned.

    It does not count towards durable.keep_last, and no save takes its room in memory: one that finds none says so. All
    nodes of the job hear of it. Memory still goes with its nodes, and agent.job_ttl_s after the job's last process.
    """
    return _say(screen, step_named(target, step), agent_dir, durable, kept=True)


@click.command("unpin", short_help="Let a step go when newer ones need its room.")
@click.argument("target", metavar="JOB")
@click.argument("step", type=click.IntRange(min=0), required=False)
@looking
@pass_screen
@with_exits
def unpin(screen: Screen, *, target: str, step: int | None, agent_dir: Path | None, durable: str | None) -> Exit:
    """Take back a pin of STEP of JOB (or JOB/step-N), whether it came from a command or from save(keep=True)."""
    return _say(screen, step_named(target, step), agent_dir, durable, kept=False)


def step_named(target: str, step: int | None) -> Location:
    """``JOB STEP`` or ``JOB/step-N``."""
    location = parse_location(target)
    if location.step is None and step is None:
        raise UsageError(f"{target!r} names no step: write {location.job} N (`tieredckpt ls {location.job}`)")
    if location.step is not None and step not in (None, location.step):
        raise UsageError(f"{target} and {step} are different steps")
    return Location(location.job, location.step if step is None else step)


def _say(screen: Screen, location: Location, agent_dir: Path | None, durable: str | None, *, kept: bool) -> Exit:
    with open_sight(settings_for(agent_dir, durable, location.job)) as sight:
        survey = sight.survey(location.job)
        # What a load would use is kept; of what is kept, nothing stays so.
        views = [sight.chosen(location, survey)] if kept else sight.groups(location, survey)
        before = any(view.kept for view in views)
        marked = _mark(sight, location, views, kept=kept)
    value = {"job": location.job, "step": location.step, "kept": kept, "before": before, "marked": marked}
    where = " and ".join(f"the {tier} tier" for tier in marked)
    said = f"is kept in {where} until it is unpinned" if kept else f"is not kept any more in {where}"
    if not kept and not before:
        said = "was not kept"
    screen.result(value, lambda out: out.print(f"{escape(str(location))} {said}"))
    return Exit.OK


def _mark(sight: Sight, location: Location, views: list[StepView], *, kept: bool) -> list[str]:
    marked = []
    if sight.agent is not None:
        for view in views:
            sight.agent.store.keep(location.job, view.group, kept=kept)
        marked.append("memory")
    if any(view.durable for view in views):
        for view in views:
            sight.catalog(location.job).keep(view.group, kept=kept)
        marked.append("durable")
    return marked
