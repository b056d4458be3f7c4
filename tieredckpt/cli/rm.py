"""``tieredckpt rm``: delete a step from memory on all nodes and from the durable tier."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tieredckpt.cli.command_output import CommandOutput, literal
from tieredckpt.cli.common_options import (
    parse_job_and_step,
    pass_output,
    settings_from_options,
    tier_options,
    with_exit_code_help,
)
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import open_tier_client
from tieredckpt.errors import TierUnavailableError, UsageError


@with_exit_code_help
@click.command("rm", short_help="Delete a step from every tier.")
@click.argument("target", metavar="JOB")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--yes", "-y", is_flag=True, help="Delete without confirmation.")
@click.option(
    "--force",
    is_flag=True,
    help="Delete even if no agent answers. An agent that is still uploading the step would recreate it.",
)
@tier_options
@pass_output
def rm_command(
    screen: CommandOutput,
    *,
    target: str,
    step: int | None,
    yes: bool,
    force: bool,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Delete STEP of JOB (or JOB/step-N), every attempt at it: from memory on all nodes and from the durable tier.

    Pinned steps are deleted too. Exit code 5: some node or store did not answer and may still have the step.
    """
    location = parse_job_and_step(target, step)
    with open_tier_client(settings_from_options(agent_dir, durable, target)) as sight:
        survey = sight.survey(location.job)
        views = sight.attempts_at(location, survey)
        tiers = sorted({tier.value for view in views for where in view.found.values() for tier in where})
        tiers += ["durable"] if any(view.durable for view in views) else []
        why = sight.agent_error
        if why and not force:
            raise TierUnavailableError(
                f"{why}: whether a node has {location} in memory, or uploads it now and brings it back, is not known. "
                "Run this on a node of the job; where none of its agents is left, say --force"
            )
        if not yes:
            _ask(screen, f"delete {location} from {' and '.join(tiers)}?")
        sight.delete_attempts(location.job, [view.version_id for view in views])
    value = {"job": location.job, "step": location.step, "attempts": len(views), "not_asked": why}
    said = f"{location} is deleted from {' and '.join(tiers)}" + (f"; memory was not asked: {why}" if why else "")
    screen.result({**value, "deleted_from": tiers}, lambda out: out.print(literal(said)))
    return ExitCode.OK


def _ask(screen: CommandOutput, question: str) -> None:
    if screen.as_json or not sys.stdin.isatty():
        raise UsageError(f"{question} Say so with --yes: nobody can be asked here")
    click.confirm(question, abort=True, err=True)
