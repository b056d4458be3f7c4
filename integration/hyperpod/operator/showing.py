"""A job for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from integration.hyperpod.operator.sim_place import Kept
from tieredckpt.cli.screen import table

_MARKS = {"Running": "green", "Succeeded": "green", "Failed": "red", "Stopping": "yellow"}


def show_job(out: Console, kept: Kept) -> None:
    state, policy = kept.state, kept.spec.policy
    colour = _MARKS.get(state.phase.value, "cyan")
    sizes = f"{policy.least} to {policy.max_replicas}" if kept.spec.elastic else str(policy.max_replicas)
    out.print(f"[bold]{escape(kept.spec.name)}[/]  [{colour}]{state.phase.value}[/]", end="")
    out.print(f"  {len(state.members)} of {sizes} replicas, {state.restarts} restarts")
    rows = []
    for pod in kept.seen.pods:
        answer = pod.answer
        rank = state.members.index(pod.name) if pod.name in state.members else None
        place = "spare" if pod.name in state.spares else "-" if rank is None else str(rank)
        said = "[dim]silent[/]" if answer is None else answer.state.value
        steps = "" if answer is None else ", ".join(str(one.progress_count) for one in answer.progress.values())
        note = pod.node_fault or ("leaving" if pod.leaving else "") or (answer.reason if answer is not None else "")
        rows.append([escape(pod.name), escape(pod.node), place, said, steps or "-", escape(note)])
    if rows:
        out.print(table(["pod", "node", "rank", "agent", "step", ""], rows, right=["rank", "step"]))
    for one in state.conditions:
        mark = "[green]yes[/]" if one.status else "[dim]no[/] "
        out.print(f"{mark} {one.type:<12} {escape(one.message or one.reason)}")
