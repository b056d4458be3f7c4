"""``tieredckpt pin`` and ``unpin``: protect a step from retention and eviction."""

from __future__ import annotations

from pathlib import Path

import click

from tieredckpt.agent.agent_api import StepStatus
from tieredckpt.cli.command_output import CommandOutput, literal
from tieredckpt.cli.common_options import (
    parse_job_and_step,
    pass_output,
    settings_from_options,
    tier_options,
    with_exit_code_help,
)
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import TierClient, open_tier_client
from tieredckpt.location import Location


@with_exit_code_help
@click.command("pin", short_help="Keep a step: nothing newer takes its place.")
@click.argument("target", metavar="JOB")
@click.argument("step", type=click.IntRange(min=0), required=False)
@tier_options
@pass_output
def pin_command(
    screen: CommandOutput, *, target: str, step: int | None, agent_dir: Path | None, durable: str | None
) -> ExitCode:
    """Keep STEP of JOB (or JOB/step-N), in memory and in the durable tier, until it is unpinned.

    It does not count towards durable.keep_last, and no save takes its room in memory: one that finds none says so. All
    nodes of the job hear of it. Memory still goes with its nodes, and agent.job_ttl_s after the job's last process.
    """
    return _say(screen, parse_job_and_step(target, step), agent_dir, durable, kept=True)


@with_exit_code_help
@click.command("unpin", short_help="Let a step go when newer ones need its room.")
@click.argument("target", metavar="JOB")
@click.argument("step", type=click.IntRange(min=0), required=False)
@tier_options
@pass_output
def unpin_command(
    screen: CommandOutput, *, target: str, step: int | None, agent_dir: Path | None, durable: str | None
) -> ExitCode:
    """Take back a pin of STEP of JOB (or JOB/step-N), whether it came from a command or from save(keep=True)."""
    return _say(screen, parse_job_and_step(target, step), agent_dir, durable, kept=False)


def _say(
    screen: CommandOutput, location: Location, agent_dir: Path | None, durable: str | None, *, kept: bool
) -> ExitCode:
    with open_tier_client(settings_from_options(agent_dir, durable, location.job)) as sight:
        survey = sight.survey(location.job)
        # What a load would use is kept; of what is kept, nothing stays so.
        views = [sight.choose_attempt(location, survey)] if kept else sight.attempts_at(location, survey)
        before = any(view.kept for view in views)
        marked = _mark(sight, location, views, kept=kept)
    value = {"job": location.job, "step": location.step, "kept": kept, "before": before, "marked": marked}
    where = " and ".join(f"the {tier} tier" for tier in marked)
    said = f"is kept in {where} until it is unpinned" if kept else f"is not kept any more in {where}"
    if not kept and not before:
        said = "was not kept"
    screen.result(value, lambda out: out.print(f"{literal(str(location))} {said}"))
    return ExitCode.OK


def _mark(sight: TierClient, location: Location, views: list[StepStatus], *, kept: bool) -> list[str]:
    marked = []
    if sight.agent is not None:
        for view in views:
            sight.agent.store.retain(location.job, view.version_id, kept=kept)
        marked.append("memory")
    if any(view.durable for view in views):
        for view in views:
            sight.catalog(location.job).keep(view.version_id, kept=kept)
        marked.append("durable")
    return marked
