"""``tieredckpt status``: this node's agent, or all nodes of a job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from peerstore.shard_records import ArenaStatus, JobStatus, StoreStatus
from peerstore.sizes_and_durations import show_count, show_size
from tieredckpt.agent.agent_api import ClusterStatus
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.cli.cluster_tables import (
    cluster_json,
    drain_json,
    nodes_table,
    protection_line,
    step_warnings,
    steps_table,
    steps_to_show,
    unreachable_lines,
)
from tieredckpt.cli.command_output import CommandOutput, format_age, literal, text_table
from tieredckpt.cli.common_options import ANY_JOB, pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import TierClient, open_tier_client, require_agent, resolve_job_name
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import StepInventory
from tieredckpt.whatif.redundancy import (
    StepRedundancy,
    newest_replicated,
    pending_drains,
    redundancy_by_step,
    unknown_nodes,
)


@with_exit_code_help
@click.command("status", short_help="This node's agent; with --cluster all nodes of a job.")
@click.argument("job", required=False)
@click.option("--cluster", is_flag=True, help="Show the job's nodes, their steps, and the protection of each step.")
@tier_options
@pass_output
def status_command(
    screen: CommandOutput, *, job: str | None, cluster: bool, agent_dir: Path | None, durable: str | None
) -> ExitCode:
    """Show this node's agent: memory, jobs, newest complete and replicated steps, drains.

    With --cluster, shows the nodes of JOB from this node's view. Exit code 5: a node did not answer, so its steps are
    unknown. JOB is optional if the agent has only one. Exit code 1: an upload failed and no newer step is durable.
    """
    with open_tier_client(settings_from_options(agent_dir, durable, job or ANY_JOB)) as client:
        if not cluster:
            return _node(screen, client, None if job is None else resolve_job_name(client, job))
        name = resolve_job_name(client, job)
        with screen.spinner(f"asking the nodes of {name}"):
            view, survey, steps = survey_cluster(client, name)
        screen.result(cluster_json(view, survey, steps), lambda out: _show_cluster(out, view, survey, steps))
        if unknown_nodes(view) or Tier.DURABLE in survey.unreachable:
            return ExitCode.UNAVAILABLE
        newest = max((one.version_id for one in steps if one.durable), default=None)
        failed = [one.version_id for one in steps if one.drain is not None and one.drain.state == "failed"]
        return ExitCode.FAILED if failed and (newest is None or max(failed) > newest) else ExitCode.OK


def survey_cluster(client: TierClient, job: str) -> tuple[ClusterStatus, StepInventory, list[StepRedundancy]]:
    agent = require_agent(client)
    view = agent.cluster_status(job)
    survey = client.survey(job)
    views = tuple(client.with_quarantine_reason(job, one) for one in survey.views)
    survey = msgspec.structs.replace(survey, views=views)
    return view, survey, redundancy_by_step(view, survey, agent.drain_status(job))


def _show_cluster(out: Console, view: ClusterStatus, survey: StepInventory, steps: list[StepRedundancy]) -> None:
    out.print(cluster_headline(view))
    out.print()
    out.print(nodes_table(view, view.nodes))
    for line in unreachable_lines(view):
        out.print(line)
    shown, hidden = steps_to_show(steps)
    out.print()
    if shown:
        out.print(steps_table(view, survey, shown, time.time_ns()))
    else:
        out.print("no steps are saved yet" if not unknown_nodes(view) else "no steps on the nodes that answered")
    for line in step_warnings(view, shown):
        out.print(line)
    if hidden:
        out.print(f"{show_count(hidden, 'older step')} in the durable tier: tieredckpt ls {literal(view.job)}")
    if Tier.DURABLE in survey.unreachable:
        out.print(f"[yellow]durable tier unavailable:[/] {literal(survey.unreachable[Tier.DURABLE])}")


def cluster_headline(view: ClusterStatus) -> str:
    name = f"[bold]{literal(view.job)}[/]"
    if not view.member_list_version:
        return f"{name}  only on this node ({literal(view.this_node)}): no copies on others{protection_line(view)}"
    replicated = newest_replicated(view)
    seen = f"{literal(view.this_node)} {literal(view.sees)}"
    wanted = "parity" if view.mode == "parity" else f"{view.copies} copies"
    text = f"{name}  {wanted} wanted" + (f", replicated step {replicated.version}" if replicated else "")
    return f"{text}\n{seen if view.quorum else f'[yellow]{seen}[/]'}{protection_line(view)}"


def _node(screen: CommandOutput, client: TierClient, only: str | None) -> ExitCode:
    agent = require_agent(client)
    state = agent.store.status()
    jobs = [one for one in state.jobs if only in (None, one.job) and (only or one.versions or one.clients)]
    avoid_after = client.settings.memory.avoid_after_crashed_loads
    with screen.spinner("looking at the jobs of this node"):
        rows = [_job_json(agent, one, avoid_after) for one in jobs]
    damages = [f"{one.what}: {one.reason}" for one in state.damage_reports if only in (None, one.job)]
    unread = [f"{one.name}: {one.reason}" for one in state.unrecognized if only in (None, one.job)]
    problems = {"unsupported": unread, "damaged": damages}
    value = {
        "agent": str(agent.place.directory),
        "arena": {name: getattr(state.arena, name) for name in ArenaStatus.__struct_fields__},
        "verifying": state.verifying,
        "jobs": rows,
        "damage_reports": damages,
        "unrecognized": unread,
    }
    screen.result(value, lambda out: _show_node(out, agent, state, rows, problems))
    if any(row["unreachable"] for row in rows):
        return ExitCode.UNAVAILABLE
    return ExitCode.FAILED if any(_upload_failed(row) for row in rows) else ExitCode.OK


def _upload_failed(row: Mapping[str, Any]) -> bool:
    """Return whether an upload failed and no newer step is durable."""
    done = max((one["step"] for one in row["drains"] if one["state"] == "done"), default=-1)
    return any(one["state"] == "failed" and one["step"] > done for one in row["pending"])


def _job_json(agent: NodeAgentClient, state: JobStatus, avoid_after: int) -> dict[str, Any]:
    survey, drains = agent.list_steps(state.job, fresh=True), agent.drain_status(state.job)
    newest = survey.choose(avoid_after=avoid_after).step
    return {
        "job": state.job,
        "epoch": state.epoch,
        "processes": state.clients,
        "steps_in_memory": state.versions,
        "newest_complete": newest if newest >= 0 else None,
        "newest_replicated": state.newest_replicated,
        "forgotten_in_s": state.expires_in_s,
        "drains": [drain_json(one) for one in drains],
        "pending": [drain_json(one) for one in pending_drains(drains, survey)],
        "unreachable": {tier.value: text for tier, text in survey.unreachable.items()},
    }


def _show_node(
    out: Console,
    agent: NodeAgentClient,
    state: StoreStatus,
    rows: list[dict[str, Any]],
    problems: Mapping[str, Sequence[str]],
) -> None:
    arena = state.arena
    free = f", {arena.free_slots} free" if arena.free_slots else ""
    out.print(f"[bold]agent[/]   {literal(str(agent.place.directory))}")
    out.print(
        f"[bold]memory[/]  {show_size(arena.allocated_bytes)} of {show_size(arena.budget_bytes)} in "
        f"{show_count(arena.slots, 'slot')}{free}; {show_size(arena.sealed_bytes)} sealed"
    )
    if state.verifying:
        out.print(f"[yellow]{show_count(state.verifying, 'shard')} of a killed agent still to be verified[/]")
    out.print()
    if not rows:
        out.print("no jobs")
    else:
        columns = ["JOB", "EPOCH", "PROCESSES", "STEPS", "NEWEST COMPLETE", "REPLICATED", "DRAIN"]
        out.print(text_table(columns, [_cells(row) for row in rows], right=columns[1:6]))
    for row in rows:
        left = row["forgotten_in_s"]
        if left is not None:
            out.print(f"{literal(row['job'])}: no process left, its memory is released in {format_age(left)}")
        for tier, text in row["unreachable"].items():
            out.print(f"[yellow]{literal(row['job'])}: {tier} tier unavailable:[/] {literal(text)}")
        for one in row["pending"]:
            if one["error"]:
                colour = "red" if one["state"] == "failed" else "yellow"
                out.print(
                    f"[{colour}]{literal(row['job'])} step {one['step']} is not durable:[/] {literal(one['error'])}"
                )
    for problem, texts in problems.items():
        for text in texts[-3:]:
            out.print(f"[red]{problem}:[/] {literal(text)}")


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = [row[name] for name in ("epoch", "processes", "steps_in_memory", "newest_complete", "newest_replicated")]
    return [literal(row["job"]), *("-" if one is None else str(one) for one in numbers), _drain_cell(row)]


def _drain_cell(row: dict[str, Any]) -> str:
    """Return the state of the job's drain in a few words."""
    waiting = [one for one in row["pending"] if one["state"] == "waiting"]
    for one in row["pending"]:
        if one["state"] == "running":
            done = f" {100 * one['bytes_done'] // one['bytes_total']} %" if one["bytes_total"] else ""
            return f"step {one['step']}{done}" + (f", {len(waiting)} waiting" if waiting else "")
    if waiting:
        return f"{len(waiting)} waiting"
    failed = [one["step"] for one in row["pending"]]
    if failed:
        return f"[red]step {max(failed)} failed[/]"
    finished = [one["step"] for one in row["drains"] if one["state"] in ("done", "waiting")]
    return f"step {max(finished)} done" if finished else "-"
