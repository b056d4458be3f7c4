"""``tieredckpt pin`` and ``unpin``: protect a step from retention and eviction."""

from __future__ import annotations

from pathlib import Path

import click

from tieredckpt.cli.command_output import CommandOutput, literal
from tieredckpt.cli.common_options import (
    parse_job_and_step,
    pass_output,
    settings_from_options,
    step_argument,
    tier_options,
    with_exit_code_help,
)
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import TierClient, describe_other_branches, open_tier_client
from tieredckpt.errors import UsageError
from tieredckpt.location import Location
from tieredckpt.step_inventory import StepInventory, StepStatus


@with_exit_code_help
@click.command("pin", short_help="Protect a step from retention and eviction.")
@step_argument
@tier_options
@pass_output
def pin_command(
    screen: CommandOutput,
    *,
    target: str,
    step: str | None,
    epoch: int | None,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Keep STEP of JOB (or JOB/step-N), in memory and in the durable tier, until it is unpinned.

    If several runs saved STEP, STEP@EPOCH names one of them; `tieredckpt ls` shows the epochs. Default: the newest.

    All nodes of the job keep the step. It does not count towards durable.keep_last, and no save evicts it: a save that
    finds no other memory fails. A pin does not protect against the loss of nodes. It ends in memory agent.job_ttl_s
    after the job's last process.
    """
    return _set_pin(screen, parse_job_and_step(target, step, epoch), agent_dir, durable, kept=True)


@with_exit_code_help
@click.command("unpin", short_help="Let a step go when newer ones need its room.")
@step_argument
@tier_options
@pass_output
def unpin_command(
    screen: CommandOutput,
    *,
    target: str,
    step: str | None,
    epoch: int | None,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Remove the pin of STEP of JOB (or JOB/step-N), set by `tieredckpt pin` or save(keep=True)."""
    return _set_pin(screen, parse_job_and_step(target, step, epoch), agent_dir, durable, kept=False)


def _set_pin(
    screen: CommandOutput, location: Location, agent_dir: Path | None, durable: str | None, *, kept: bool
) -> ExitCode:
    with open_tier_client(settings_from_options(agent_dir, durable, location.job)) as client:
        survey = client.survey(location.job)
        # Pin the attempt that a load would use. Unpin all attempts.
        views = [client.choose_attempt(location, survey)] if kept else client.attempts_at(location, survey)
        before = any(view.kept for view in views)
        if kept:
            if client.agent is not None and not before:
                _require_no_other_pin(location, views[0], survey)
            if others := describe_other_branches(location, views[0].version_id, survey):
                screen.info(others)
        marked = _mark_in_tiers(client, location, views, kept=kept)
    value = {
        "job": location.job,
        "step": location.step,
        "epoch": views[0].version_id.epoch if kept else location.epoch,
        "kept": kept,
        "before": before,
        "marked": marked,
    }
    where = " and ".join(f"the {tier} tier" for tier in marked)
    said = f"is pinned in {where}" if kept else f"is no longer pinned in {where}"
    if not kept and not before:
        said = "was not pinned"
    screen.result(value, lambda out: out.print(f"{literal(str(location))} {said}"))
    return ExitCode.OK


def _require_no_other_pin(location: Location, view: StepStatus, survey: StepInventory) -> None:
    """Raise if another epoch's attempt at the step is pinned: agents retain only one pin per step."""
    group = view.version_id
    for other in survey.views:
        if not (other.kept and other.found and other.version_id.version == group.version):
            continue
        if other.version_id.epoch != group.epoch:
            name = f"{location.job}/step-{group.version}@{other.version_id.epoch}"
            raise UsageError(
                f"cannot pin step {group.version} of epoch {group.epoch}: the same step of epoch "
                f"{other.version_id.epoch} is pinned, and agents keep one pin per step. Export one of them "
                f"(`tieredckpt export`), or unpin the other first: tieredckpt unpin {name}"
            )


def _mark_in_tiers(client: TierClient, location: Location, views: list[StepStatus], *, kept: bool) -> list[str]:
    marked = []
    if client.agent is not None:
        for view in views:
            client.agent.store.versions.retain(location.job, view.version_id, kept=kept)
        marked.append("memory")
    if any(view.durable for view in views):
        for view in views:
            client.catalog(location.job).keep(view.version_id, kept=kept)
        marked.append("durable")
    return marked
