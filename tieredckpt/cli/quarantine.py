"""``tieredckpt quarantine``: exclude a step from automatic restores, or allow it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tieredckpt.cli.command_output import CommandOutput, literal
from tieredckpt.cli.common_options import (
    parse_step_target,
    pass_output,
    settings_from_options,
    tier_options,
    with_exit_code_help,
)
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import TierClient, open_tier_client
from tieredckpt.errors import UsageError
from tieredckpt.format import object_keys
from tieredckpt.location import Location
from tieredckpt.step_inventory import StepStatus


@with_exit_code_help
@click.command("quarantine", short_help="Keep a step from being chosen, or lift that.")
@click.argument("target", metavar="JOB/step-N")
@click.option("--lift", is_flag=True, help="Let the step be chosen again.")
@click.option("--reason", default="", help="Reason, which `tieredckpt ls` shows.")
@tier_options
@pass_output
def quarantine_command(
    screen: CommandOutput, *, target: str, lift: bool, reason: str, agent_dir: Path | None, durable: str | None
) -> ExitCode:
    """Exclude a step from restores that do not name it, without deleting it.

    Marks the step in this node's agent and in the durable tier, where all nodes see the mark.
    """
    if lift and reason:
        raise UsageError("--lift takes no --reason")
    with open_tier_client(settings_from_options(agent_dir, durable, target)) as client:
        location = parse_step_target(target)
        views = client.attempts_at(location, client.survey(location.job))
        before = [view.quarantined for view in views]
        marked = _lift(client, location, views) if lift else _mark(client, location, views, reason or "by hand")
        after = client.attempts_at(location, client.survey(location.job))
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
    return ExitCode.OK


def _mark(client: TierClient, location: Location, views: Sequence[StepStatus], reason: str) -> list[str]:
    marked = []
    if client.agent is not None:
        for view in views:
            client.agent.quarantine(location.job, view.version_id, reason)
        marked.append("memory")
    if any(view.durable for view in views):
        for view in views:
            client.catalog(location.job).quarantine(view.version_id, reason)
        marked.append("durable")
    return marked


def _lift(client: TierClient, location: Location, views: Sequence[StepStatus]) -> list[str]:
    marked = []
    if client.agent is not None:
        for view in views:
            client.agent.unquarantine(location.job, view.version_id)
        marked.append("memory")
    if client.durable_settings(location.job).url:
        catalog = client.catalog(location.job)
        catalog.store.delete([object_keys.quarantine_key(location.job, view.version_id) for view in views])
        catalog.invalidate()
        marked.append("durable")
    return marked


def _show(out: Console, location: Location, value: dict[str, Any]) -> None:
    where = " and ".join(f"the {tier} tier" for tier in value["marked"])
    if value["quarantined"]:
        out.print(f"{literal(str(location))} is quarantined in {where}: {literal(value['reason'])}")
    elif any(value["before"]):
        out.print(f"{literal(str(location))} may be chosen again; its mark was deleted from {where}")
    else:
        out.print(f"{literal(str(location))} was not quarantined")
