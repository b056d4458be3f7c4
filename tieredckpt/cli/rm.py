"""``tieredckpt rm``: delete a step or all of a job, in memory and in the durable tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from peerstore.sizes_and_durations import show_count, show_size
from tieredckpt.agent.durable_catalog import delete_step
from tieredckpt.agent.retention import require_no_revival
from tieredckpt.cli.command_output import CommandOutput, literal
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
from tieredckpt.cli.gc import stored_size_bytes
from tieredckpt.cli.tier_client import TierClient, open_tier_client
from tieredckpt.durable.plain_objects import delete_plain_checkpoint, list_plain_files
from tieredckpt.errors import CheckpointNotFoundError, TierUnavailableError, UsageError
from tieredckpt.format import object_keys
from tieredckpt.location import Location, parse_location
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import StepInventory, StepStatus


@with_exit_code_help
@click.command("rm", short_help="Delete a step, or a whole job, from every tier.")
@step_argument
@click.option(
    "--tier",
    type=click.Choice(["memory", "durable", "all"]),
    default="all",
    show_default=True,
    help="Delete from the memory of all nodes, from the durable tier, or from both.",
)
@click.option("--pinned", is_flag=True, help="Delete pinned steps too.")
@click.option("--dry-run", "-n", is_flag=True, help="Print what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Delete without confirmation.")
@click.option(
    "--force",
    is_flag=True,
    help="Delete even if no agent answers. An agent that is still uploading a step would recreate it.",
)
@tier_options
@pass_output
def rm_command(
    screen: CommandOutput,
    *,
    target: str,
    step: str | None,
    epoch: int | None,
    tier: str,
    pinned: bool,
    dry_run: bool,
    yes: bool,
    force: bool,
    agent_dir: Path | None,
    durable: str | None,
) -> ExitCode:
    """Delete STEP of JOB (or JOB/step-N) from all nodes and the durable tier.

    Without STEP, deletes all steps, but never while processes of JOB run on this node. Deletes every attempt at a step
    and its plain checkpoint, STEP@EPOCH only the attempts of one run. Plain checkpoints are in the durable tier. Pinned
    steps are kept unless --pinned is given. With --tier durable, an agent that restarts may upload a step again that it
    has in memory. If no agent answers, only a job of plain checkpoints is deleted without --force.

    Exit code 5: a node or the store did not answer and may still have the step.
    """
    location = parse_location(target)
    if location.step is not None or step is not None or epoch is not None:
        location = parse_job_and_step(target, step, epoch)
    with open_tier_client(settings_from_options(agent_dir, durable, target)) as client:
        survey = client.survey(location.job)
        views, plain = _steps_in(client, location, survey, tier)
        why = client.agent_error
        if why and not (force or dry_run) and _has_own_steps(client, location.job, survey):
            raise TierUnavailableError(
                f"{why}: a node may still have {location} in memory and upload it again. Run this on a node of the "
                "job. If the job has no agents left, use --force"
            )
        if location.step is None and not dry_run:
            _require_stopped(client, location.job)
        keep = [] if pinned else [view for view in views if view.kept]
        views = [view for view in views if view not in keep]
        pinned_steps = sorted({view.version_id.version for view in keep})
        plain = [one for one in plain if one not in pinned_steps]
        if not (views or plain) or (keep and location.step is not None):
            raise UsageError(_all_pinned(location, keep))
        deletion = Deletion(location, tier, views, plain, pinned_steps)
        sizes = deletion.sizes(client)
        description = deletion.describe(sizes)
        if not dry_run:
            if not yes:
                confirm_deletion(screen, f"delete {description}?")
            deletion.run(client, survey)
    value = {**deletion.as_json(), "deleted_from": list(sizes), "dry_run": dry_run, "not_asked": why}
    value["bytes"] = {"memory": 0, "durable": 0, **sizes}
    text = f"{'would delete' if dry_run else 'deleted'} {description}" + (
        f"; memory was not searched: {why}" if why else ""
    )
    screen.result(value, lambda out: out.print(literal(text)))
    return ExitCode.OK


@dataclass(frozen=True)
class Deletion:
    """Attempts and plain checkpoints that one command deletes, and the pinned steps that it skips."""

    location: Location
    tier: str
    views: Sequence[StepStatus]
    plain: Sequence[int]
    """Steps whose plain checkpoint is deleted, in order."""
    pinned: Sequence[int]

    @property
    def steps(self) -> list[int]:
        return sorted({view.version_id.version for view in self.views})

    def sizes(self, client: TierClient) -> dict[str, int]:
        """Return the bytes in each tier with one of the attempts. Several copies in memory count once."""
        found: dict[str, int] = {}
        if self.tier != "durable" and any(map(_in_memory, self.views)):
            found["memory"] = sum(view.size_bytes for view in self.views if _in_memory(view))
        stored = [view.version_id for view in self.views if view.durable]
        if self.tier != "memory" and (stored or self.plain):
            catalog, job = client.catalog(self.location.job), self.location.job
            sizes = [stored_size_bytes(catalog, group) for group in stored]
            sizes += [
                info.size_bytes for step in self.plain for info in list_plain_files(catalog.store, job, step).values()
            ]
            found["durable"] = sum(sizes)
        return found

    def describe(self, sizes: dict[str, int]) -> str:
        what, steps = str(self.location), sorted({*self.steps, *self.plain})
        if self.location.step is None:
            every = "" if self.pinned else "all "
            what = f"{every}{show_count(len(steps), 'step')} of job {self.location.job!r} ({_span(steps)})"
            if self.plain and not self.views:
                what += ", all plain checkpoints,"
            elif self.plain:
                what += f" with {show_count(len(self.plain), 'plain checkpoint')} ({_span(self.plain)})"
        elif self.plain:
            what = f"{what} with its plain checkpoint" if self.views else f"the plain checkpoint {what}"
        places = " and ".join(f"{tier} ({show_size(size)})" for tier, size in sizes.items())
        left = f", without the pinned {', '.join(map(str, self.pinned))}" if self.pinned else ""
        return f"{what}{left} from {places}"

    def run(self, client: TierClient, survey: StepInventory) -> None:
        job, groups = self.location.job, [view.version_id for view in self.views]
        if groups and self.tier != "durable":
            client.delete_attempts(job, groups, durable=self.tier == "all")
        elif groups:
            candidates = [view.candidate for view in survey.views]
            require_no_revival(job, candidates, [view.version_id for view in self.views if not _in_memory(view)])
            catalog = client.catalog(job)
            for group in groups:
                delete_step(catalog, job, group)
        for step in self.plain:
            delete_plain_checkpoint(client.catalog(job).store, job, step)

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.location.job,
            "step": self.location.step,
            "tier": self.tier,
            "steps": self.steps,
            "plain_steps": list(self.plain),
            "attempts": len(self.views),
            "pinned": list(self.pinned),
        }


def _in_memory(view: StepStatus) -> bool:
    return any(tier is not Tier.DURABLE for tiers in view.found.values() for tier in tiers)


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])


def _steps_in(
    client: TierClient, location: Location, survey: StepInventory, tier: str
) -> tuple[list[StepStatus], list[int]]:
    """Return the attempts in ``tier``, and the steps of the plain checkpoints there."""
    plain = [] if tier == "memory" else [*survey.plain_at(location), *survey.plain_at(location, incomplete=True)]
    plain.sort()
    if plain and not any(location.includes(view.version_id) for view in survey.views):
        return [], plain
    views = client.attempts_at(location, survey)
    if tier == "all":
        return views, plain
    if tier == "memory" and Tier.DURABLE in survey.unreachable:
        raise TierUnavailableError(
            f"whether {location} is in the durable tier is unknown, so its copies in memory may be the only ones: "
            f"{survey.unreachable[Tier.DURABLE]}"
        )
    found = [view for view in views if (_in_memory(view) if tier == "memory" else view.durable)]
    if not (found or plain):
        raise CheckpointNotFoundError(f"the {tier} tier has no step of {location}")
    return found, plain


def _has_own_steps(client: TierClient, job: str, survey: StepInventory) -> bool:
    """Return whether the durable tier has shards or steps of an agent."""
    if survey.views:
        return True
    return any(True for _ in client.catalog(job).store.list(object_keys.shards_prefix(job)))


def _all_pinned(location: Location, keep: Sequence[StepStatus]) -> str:
    steps = sorted({view.version_id.version for view in keep})
    first = f"step {steps[0]} of job {location.job!r} is" if len(steps) == 1 else f"all steps of {location.job!r} are"
    return f"{first} pinned: `tieredckpt unpin {location.job} {steps[0]}`, or add --pinned"


def _require_stopped(client: TierClient, job: str) -> None:
    """Raise if processes of ``job`` run on this node: they would save more steps."""
    states = client.agent.store.status().jobs if client.agent is not None else []
    for state in states:
        if state.job == job and state.clients:
            count = f"{state.clients} process" + ("es" if state.clients > 1 else "")
            raise UsageError(f"job {job!r} has {count} on this node: stop the job first")
