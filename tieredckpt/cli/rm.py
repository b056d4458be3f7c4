"""``tieredckpt rm``: a step is given up, in memory and in the durable tier."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.markup import escape

from tieredckpt.cli.exits import Exit
from tieredckpt.cli.options import looking, pass_screen, settings_for, with_exits
from tieredckpt.cli.pin import step_named
from tieredckpt.cli.screen import Screen
from tieredckpt.cli.sight import open_sight
from tieredckpt.errors import TierUnavailableError, UsageError


@click.command("rm", short_help="Delete a step from every tier.")
@click.argument("target", metavar="JOB")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also where no agent answers: one that uploads the step brings it back.")
@looking
@pass_screen
@with_exits
def rm(
    screen: Screen,
    *,
    target: str,
    step: int | None,
    yes: bool,
    force: bool,
    agent_dir: Path | None,
    durable: str | None,
) -> Exit:
    """Delete STEP of JOB (or JOB/step-N), every attempt at it: from memory on all nodes and from the durable tier.

    Kept steps go too. Exit code 5 names what could not be told, and may still have the step.
    """
    location = step_named(target, step)
    with open_sight(settings_for(agent_dir, durable, target)) as sight:
        survey = sight.survey(location.job)
        views = sight.groups(location, survey)
        tiers = sorted({tier.value for view in views for where in view.found.values() for tier in where})
        tiers += ["durable"] if any(view.durable for view in views) else []
        why = sight.why_no_agent
        if why and not force:
            raise TierUnavailableError(
                f"{why}: whether a node has {location} in memory, or uploads it now and brings it back, is not known. "
                "Run this on a node of the job; where none of its agents is left, say --force"
            )
        if not yes:
            _ask(screen, f"delete {location} from {' and '.join(tiers)}?")
        sight.drop(location.job, [view.group for view in views])
    value = {"job": location.job, "step": location.step, "attempts": len(views), "not_asked": why}
    said = f"{location} is deleted from {' and '.join(tiers)}" + (f"; memory was not asked: {why}" if why else "")
    screen.result({**value, "deleted_from": tiers}, lambda out: out.print(escape(said)))
    return Exit.OK


def _ask(screen: Screen, question: str) -> None:
    if screen.as_json or not sys.stdin.isatty():
        raise UsageError(f"{question} Say so with --yes: nobody can be asked here")
    click.confirm(question, abort=True, err=True)
