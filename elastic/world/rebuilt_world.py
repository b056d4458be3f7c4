"""A world rebuilt from the reports that a restarted coordinator collected. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.world.next_world import apply_event, reconcile_world
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    BreakWorld,
    NodeFinished,
    NodeMember,
    NodeReady,
    RankLost,
    RejoinReport,
    RequestedStep,
    SealedStep,
    WorldAction,
    WorldPhase,
    WorldState,
)
from elastic.world.world_transition import WorldTransition, replace


def rebuild_world(
    reports: Iterable[RejoinReport],
    policy: ScalingPolicy,
    *,
    nproc: int,
    now_s: float,
    requested_step: RequestedStep | None = None,
    resume_from: SealedStep | None = None,
    min_next_epoch: int = 0,
) -> tuple[WorldState, tuple[WorldAction, ...]]:
    """Rebuild the world from reports. Nodes without a report count as lost and may join later.

    If all nodes of a world report it, the world continues unchanged. Planned changes start again. The next world has at
    least the number ``min_next_epoch``. Counts of node faults, and of restarts within a period, begin again at 0. The
    next world restores ``requested_step`` or ``resume_from``. ``resume_from`` is used only if the newest world is
    broken because some of its nodes have not reported.
    """
    latest: dict[str, RejoinReport] = {}
    for report in sorted(reports, key=lambda report: (report.generation, report.epoch, report.spawn_count)):
        latest[report.node] = report
    known = sorted(
        (report for report in latest.values() if report.local_ranks == nproc), key=lambda report: report.node
    )
    transition = WorldTransition(_reported_world(known, nproc, now_s, policy), policy, now_s)
    transition.update(requested_step=requested_step, min_next_epoch=min_next_epoch)
    missing = sorted(set(transition.world.ranked_nodes) - {member.node for member in transition.members_with_ranks})
    if missing:
        transition.break_world(f"the new coordinator found nobody of {', '.join(missing)} in the world")
        transition.update(resume_from=resume_from)
        if resume_from is not None:
            transition.update(requested_step=None)
    for epoch in sorted({report.epoch for report in known if not report.ready} - {-1, transition.world.epoch}):
        transition.emit(BreakWorld(epoch, "it was left behind", policy.abort_limit_s))
    for report in known:
        for local_rank in report.lost_ranks:
            apply_event(
                transition,
                RankLost(report.node, report.generation, report.spawn_count, local_rank, "reported to be lost"),
            )
        if report.finished:
            apply_event(transition, NodeFinished(report.node, report.generation, report.epoch))
        if report.ready:
            apply_event(
                transition, NodeReady(report.node, report.generation, report.spawn_count, report.epoch, report.spares)
            )
    if not transition.world.phase.is_over:
        reconcile_world(transition)
    return transition.world, tuple(transition.actions)


def _reported_world(known: list[RejoinReport], nproc: int, now_s: float, policy: ScalingPolicy) -> WorldState:
    """Return the newest world of any report as a running world."""
    newest = max((report.epoch for report in known), default=-1)
    ranked_nodes = next(
        (report.ranked_nodes for report in known if report.epoch == newest >= 0 and report.ranked_nodes), ()
    )
    inside = frozenset(ranked_nodes)
    members = {
        report.node: NodeMember(
            node=report.node,
            generation=report.generation,
            join_order=number,
            joined_s=now_s,
            epoch=report.epoch,
            has_ranks=report.epoch == newest and report.node in inside,
            spawn_count=max(report.spawn_count, nproc),
            spares=report.spares,
        )
        for number, report in enumerate(known)
    }
    due_s = now_s + policy.restart_timeout_s
    return WorldState(
        nproc=nproc,
        formed_s=now_s,
        phase=WorldPhase.RUNNING if ranked_nodes else WorldPhase.FORMING,
        epoch=newest,
        ranked_nodes=ranked_nodes,
        members={
            name: member if member.has_ranks else replace(member, ready_deadline_s=due_s)
            for name, member in members.items()
        },
        join_count=len(known),
        target_nodes=len(ranked_nodes) or policy.initial_nodes,
        restarts=max((report.restarts for report in known), default=0),
    )
