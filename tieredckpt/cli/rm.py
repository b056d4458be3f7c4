"""``tieredckpt rm``: delete a step or all of a job, in memory and in the durable tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from peerstore.sizes_and_durations import show_size
from tieredckpt.agent.agent_api import StepStatus
from tieredckpt.cli.command_output import CommandOutput, literal, pluralized
from tieredckpt.cli.common_options import (
    confirm_deletion,
    parse_job_and_step,
    pass_output,
    settings_from_options,
    step_argument,
    tier_options,
    with_exit_code_help,
)
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import TierClient, open_tier_client
from tieredckpt.errors import TierUnavailableError, UsageError
from tieredckpt.location import parse_location


@with_exit_code_help
@click.command("rm", short_help="Delete a step, or a whole job, from every tier.")
@step_argument
@click.option("--yes", "-y", is_flag=True, help="Delete without confirmation.")
@click.option(
    "--force",
    is_flag=True,
    help="Delete even if no agent answers, or the job runs. An agent that is still uploading a step would recreate it.",
)
@tier_options
@pass_output
def rm_command(
    screen: CommandOutput,
    *,
    target: str,
    step: str | None,
    epoch: int | None,
    yes: bool,
    force: bool,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Delete STEP of JOB (or JOB/step-N) from all nodes and the durable tier.

    Without STEP, deletes all steps. Deletes every attempt at a step, STEP@EPOCH those of one run, and pinned steps too.
    Exit code 5: some node or store did not answer and may still have the step.
    """
    location = parse_location(target)
    if location.step is not None or step is not None or epoch is not None:
        location = parse_job_and_step(target, step, epoch)
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
        if location.step is None and not force:
            _require_stopped(sight, location.job)
        steps = sorted({view.version_id.version for view in views})
        what = str(location) if location.step is not None else _whole_job(location.job, steps, views)
        if not yes:
            confirm_deletion(screen, f"delete {what} from {' and '.join(tiers)}?")
        sight.delete_attempts(location.job, [view.version_id for view in views])
    value = {"job": location.job, "step": location.step, "steps": steps, "attempts": len(views), "not_asked": why}
    said = f"deleted {what} from {' and '.join(tiers)}" + (f"; memory was not asked: {why}" if why else "")
    screen.result({**value, "deleted_from": tiers}, lambda out: out.print(literal(said)))
    return ExitCode.OK


def _whole_job(job: str, steps: Sequence[int], views: Sequence[StepStatus]) -> str:
    size = sum(view.size_bytes for view in views)
    first = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
    return f"all {pluralized(len(steps), 'step')} of job {job!r} ({first}, {show_size(size)} in memory)"


def _require_stopped(sight: TierClient, job: str) -> None:
    """Raise if processes of ``job`` run on this node: they would save more steps."""
    states = sight.agent.store.status().jobs if sight.agent is not None else []
    for state in states:
        if state.job == job and state.clients:
            count = f"{state.clients} process" + ("es" if state.clients > 1 else "")
            raise UsageError(f"job {job!r} has {count} on this node: stop the job first, or use --force")
