"""The world as its supervisors know it, for a coordinator that has forgotten it."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.world.actions import Action, Break
from elastic.world.events import NodeFinished, NodeReady, NodeReport, RankLost
from elastic.world.happenings import happen
from elastic.world.members import Member, Phase, World
from elastic.world.policy import ScalingPolicy
from elastic.world.settling import settle
from elastic.world.turn import Turn, replace


def rebuilt(
    reports: Iterable[NodeReport], policy: ScalingPolicy, *, nproc: int, now_s: float
) -> tuple[World, tuple[Action, ...]]:
    """Who has not reported by now counts as lost; who reports later joins. What was underway is begun again.

    A world that all its nodes report to be in goes on as if nothing had happened. An epoch that nobody who lives has
    heard of is given again: nobody is in it. Offences and the limits of restarts within a period begin anew.
    """
    latest: dict[str, NodeReport] = {}
    for report in sorted(reports, key=lambda report: (report.life, report.epoch, report.births)):
        latest[report.node] = report
    known = sorted((report for report in latest.values() if report.seats == nproc), key=lambda report: report.node)
    turn = Turn(_as_reported(known, nproc, now_s, policy), policy, now_s)
    missing = sorted(set(turn.world.places) - {member.node for member in turn.placed})
    if missing:
        turn.fault(f"the new coordinator found nobody of {', '.join(missing)} in the world")
    for epoch in sorted({report.epoch for report in known if not report.ready} - {-1, turn.world.epoch}):
        turn.do(Break(epoch, "it was left behind", policy.leave_s))
    for report in known:
        for local_rank in report.lost:
            happen(turn, RankLost(report.node, report.life, report.births, local_rank, "reported to be lost"))
        if report.finished:
            happen(turn, NodeFinished(report.node, report.life, report.epoch))
        if report.ready:
            happen(turn, NodeReady(report.node, report.life, report.births, report.epoch, report.spares))
    if not turn.world.phase.over:
        settle(turn)
    return turn.world, tuple(turn.actions)


def _as_reported(known: list[NodeReport], nproc: int, now_s: float, policy: ScalingPolicy) -> World:
    """The newest world any of them was told of, as if it was running."""
    newest = max((report.epoch for report in known), default=-1)
    places = next((report.places for report in known if report.epoch == newest >= 0 and report.places), ())
    inside = frozenset(places)
    members = {
        report.node: Member(
            node=report.node,
            life=report.life,
            joined=number,
            joined_s=now_s,
            epoch=report.epoch,
            placed=report.epoch == newest and report.node in inside,
            births=max(report.births, nproc),
            spares=report.spares,
        )
        for number, report in enumerate(known)
    }
    due_s = now_s + policy.restart_timeout_s
    return World(
        nproc=nproc,
        began_s=now_s,
        phase=Phase.RUNNING if places else Phase.FORMING,
        epoch=newest,
        places=places,
        members={name: member if member.placed else replace(member, due_s=due_s) for name, member in members.items()},
        joins=len(known),
        goal=len(places) or policy.wanted,
        restarts=max((report.restarts for report in known), default=0),
    )
