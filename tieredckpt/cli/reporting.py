"""``tieredckpt status``: this node's agent in a few lines, or all nodes of a job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from peerstore.records import ArenaStatus, JobStatus, StoreStatus
from peerstore.units import show_size
from tieredckpt.agent_node import AgentNode
from tieredckpt.cli.clusters import (
    cluster_json,
    drain_json,
    nodes_table,
    protection_line,
    shown_steps,
    silent_lines,
    step_notes,
    steps_table,
)
from tieredckpt.cli.exits import Exit
from tieredckpt.cli.jobs import agent_of, the_job
from tieredckpt.cli.options import ANY_JOB, looking, pass_screen, settings_for, with_exits
from tieredckpt.cli.screen import Screen, count, show_age, table
from tieredckpt.cli.sight import Sight, open_sight
from tieredckpt.holdings import Kept, kept, newest_settled, pending, unknown, whole_steps
from tieredckpt.node import ClusterView, Survey
from tieredckpt.resolve import Tier


@click.command("status", short_help="This node's agent; with --cluster all nodes of a job.")
@click.argument("job", required=False)
@click.option("--cluster", is_flag=True, help="Who of the job's nodes is there, what they hold, how safe each step is.")
@looking
@pass_screen
@with_exits
def status(screen: Screen, *, job: str | None, cluster: bool, agent_dir: Path | None, durable: str | None) -> Exit:
    """Show this node's agent: memory, jobs, newest whole and settled steps, drains.

    With --cluster: the nodes of JOB as this node sees them. A node that could not be asked is named, and the exit code
    is 5: what it holds is not known. JOB may be left out where there is only one.
    """
    with open_sight(settings_for(agent_dir, durable, job or ANY_JOB)) as sight:
        if not cluster:
            return _node(screen, sight, None if job is None else the_job(sight, job))
        name = the_job(sight, job)
        with screen.waiting(f"asking the nodes of {name}"):
            view, survey, steps = look_around(sight, name)
        screen.result(cluster_json(view, survey, steps), lambda out: _show_cluster(out, view, survey, steps))
        return Exit.UNAVAILABLE if unknown(view) or Tier.DURABLE in survey.unreachable else Exit.OK


def look_around(sight: Sight, job: str) -> tuple[ClusterView, Survey, list[Kept]]:
    agent = agent_of(sight)
    view = agent.cluster(job)
    survey = sight.survey(job)
    views = tuple(sight.reason(job, one) for one in survey.views)
    survey = msgspec.structs.replace(survey, views=views)
    return view, survey, kept(view, survey, agent.drains(job))


# -- all nodes of a job -------------------------------------------------------------------------------------------


def _show_cluster(out: Console, view: ClusterView, survey: Survey, steps: list[Kept]) -> None:
    out.print(headline(view))
    out.print()
    out.print(nodes_table(view, view.nodes))
    for line in silent_lines(view):
        out.print(line)
    shown, hidden = shown_steps(steps)
    out.print()
    if shown:
        out.print(steps_table(view, survey, shown, time.time_ns()))
    else:
        out.print("no steps are saved yet" if not unknown(view) else "no steps on the nodes that could be asked")
    for line in step_notes(view, shown):
        out.print(line)
    if hidden:
        out.print(f"{count(hidden, 'older step')} in the durable tier: tieredckpt ls {escape(view.job)}")
    if Tier.DURABLE in survey.unreachable:
        out.print(f"[yellow]durable tier not asked:[/] {escape(survey.unreachable[Tier.DURABLE])}")


def headline(view: ClusterView) -> str:
    name = f"[bold]{escape(view.job)}[/]"
    if not view.roster:
        return f"{name}  only on this node ({escape(view.me)}): no copies on others{protection_line(view)}"
    settled = newest_settled(view)
    seen = f"{escape(view.me)} {escape(view.sees)}"
    wanted = "parity" if view.mode == "parity" else f"{view.copies} copies"
    text = f"{name}  {wanted} wanted" + (f", settled step {settled.version}" if settled else "")
    return f"{text}\n{seen if view.quorum else f'[yellow]{seen}[/]'}{protection_line(view)}"


# -- this node ----------------------------------------------------------------------------------------------------


def _node(screen: Screen, sight: Sight, only: str | None) -> Exit:
    agent = agent_of(sight)
    state = agent.store.status()
    jobs = [one for one in state.jobs if only in (None, one.job) and (only or one.versions or one.clients)]
    with screen.waiting("looking at the jobs of this node"):
        rows = [_job_json(agent, one) for one in jobs]
    damages = [f"{one.what}: {one.reason}" for one in state.damages if only in (None, one.job)]
    value = {
        "agent": str(agent.place.directory),
        "arena": {name: getattr(state.arena, name) for name in ArenaStatus.__struct_fields__},
        "verifying": state.adopting,
        "jobs": rows,
        "damages": damages,
    }
    screen.result(value, lambda out: _show_node(out, agent, state, rows, damages))
    return Exit.UNAVAILABLE if any(row["unreachable"] for row in rows) else Exit.OK


def _job_json(agent: AgentNode, state: JobStatus) -> dict[str, Any]:
    survey, drains = agent.survey(state.job, fresh=True), agent.drains(state.job)
    return {
        "job": state.job,
        "epoch": state.epoch,
        "processes": state.clients,
        "steps_in_memory": state.versions,
        "newest_whole": max(whole_steps(survey), default=None),
        "settled": state.settled,
        "forgotten_in_s": state.expires_in_s,
        "drains": [drain_json(one) for one in drains],
        "pending": [drain_json(one) for one in pending(drains, survey)],
        "unreachable": {tier.value: text for tier, text in survey.unreachable.items()},
    }


def _show_node(
    out: Console, agent: AgentNode, state: StoreStatus, rows: list[dict[str, Any]], damages: list[str]
) -> None:
    arena = state.arena
    free = f", {arena.free_slots} free" if arena.free_slots else ""
    out.print(f"[bold]agent[/]   {escape(str(agent.place.directory))}")
    out.print(
        f"[bold]memory[/]  {show_size(arena.allocated_bytes)} of {show_size(arena.budget_bytes)} in "
        f"{count(arena.slots, 'slot')}{free}; {show_size(arena.sealed_bytes)} sealed"
    )
    if state.adopting:
        out.print(f"[yellow]{count(state.adopting, 'shard')} of a killed agent still to be verified[/]")
    out.print()
    if not rows:
        out.print("no jobs")
    else:
        columns = ["JOB", "EPOCH", "PROCESSES", "STEPS", "NEWEST WHOLE", "SETTLED", "DRAIN"]
        out.print(table(columns, [_cells(row) for row in rows], right=columns[1:6]))
    for row in rows:
        left = row["forgotten_in_s"]
        if left is not None:
            out.print(f"{escape(row['job'])}: no process left, its memory is given back in {show_age(left)}")
        for tier, text in row["unreachable"].items():
            out.print(f"[yellow]{escape(row['job'])}: {tier} tier not asked:[/] {escape(text)}")
        for one in row["pending"]:
            if one["error"]:
                colour = "red" if one["state"] == "failed" else "yellow"
                out.print(
                    f"[{colour}]{escape(row['job'])} step {one['step']} is not durable:[/] {escape(one['error'])}"
                )
    for text in damages[-3:]:
        out.print(f"[red]damaged:[/] {escape(text)}")


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = [row[name] for name in ("epoch", "processes", "steps_in_memory", "newest_whole", "settled")]
    return [escape(row["job"]), *("-" if one is None else str(one) for one in numbers), _drain_cell(row)]


def _drain_cell(row: dict[str, Any]) -> str:
    """What the drain does, in a word or two."""
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
