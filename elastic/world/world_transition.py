"""One transition of a world: node selection, restart budgets, breaking and forming. Pure.

Only the decision that made a turn sees it; what comes out of it is values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    BreakWorld,
    FailJob,
    FormationKind,
    FormWorld,
    NodeFault,
    NodeMember,
    PendingReplacement,
    PromoteSpare,
    ReleaseNode,
    RespawnRanks,
    StopJob,
    WorldAction,
    WorldPhase,
    WorldState,
)

replace = msgspec.structs.replace


class WorldTransition:
    """What every step of a decision can do."""

    def __init__(self, world: WorldState, policy: ScalingPolicy, now_s: float) -> None:
        self.world = replace(world, members=dict(world.members), gone=dict(world.gone))
        self.policy = policy
        self.now_s = now_s
        self.actions: list[WorldAction] = []

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def do(self, action: WorldAction) -> None:
        self.actions.append(action)

    def set(self, **fields: Any) -> None:
        self.world = replace(self.world, **fields)

    def put(self, member: NodeMember, **fields: Any) -> NodeMember:
        member = replace(member, **fields)
        self.world.members[member.node] = member
        return member

    def known(self, node: str, life: int) -> NodeMember | None:
        """The member this is about; what is about another life of the node is about nobody."""
        member = self.world.members.get(node)
        return member if member is not None and member.life == life else None

    def drop(self, member: NodeMember, life: int | None = None) -> None:
        del self.world.members[member.node]
        self.world.gone[member.node] = max(member.life, life or member.life)

    def release(self, member: NodeMember, reason: str, *, cut: bool = False) -> None:
        self.do(ReleaseNode(member.node, member.life, reason, cut))
        self.drop(member)

    @property
    def placed(self) -> list[NodeMember]:
        return [member for member in self.world.members.values() if member.placed]

    @property
    def limit(self) -> int:
        return max_world_nodes(self.world, self.policy)

    @property
    def may_grow_s(self) -> float:
        """From when on the world may become larger, or better; in the past, or infinitely far away, maybe."""
        if self.world.more_since_s is None:
            return math.inf
        put_off_s = self.policy.graceful_shutdown_timeout_s * (2 ** min(self.world.failed, 16) - 1)
        collected_s = self.world.more_since_s + self.policy.scaling_timeout_s + put_off_s
        if self.world.shrunk_s is None:
            return collected_s
        return max(collected_s, self.world.shrunk_s + self.policy.scale_up_snooze_s)

    def avoided(self) -> frozenset[str]:
        return avoided_nodes(self.world, self.policy, self.now_s)

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def lose(
        self, member: NodeMember, reason: str, *, blame: bool = True, cut: bool = False, life: int | None = None
    ) -> None:
        """A node is no more, or is not waited for any longer (``cut``)."""
        if cut:
            self.do(ReleaseNode(member.node, member.life, reason, cut))
        self.drop(member, life)
        blame = blame and not member.leaving
        if not member.placed or (member.node in self.world.done and self.world.phase.alive):
            return
        if not self.world.phase.alive:
            if self.world.faulty and not member.leaving:
                self.set(wait_until_s=self.now_s + self.policy.faulty_scale_down_timeout_s)
            if blame:
                self.blame(member.node)
        elif not (member.sealed and (member.leaving or self.world.stopping)):
            self.fault(f"{member.node} was lost: {reason}", member.node if blame else "")

    def fault(
        self, reason: str, node: str = "", births: int = 0, *, counted: bool = True, leave_s: float | None = None
    ) -> None:
        """The world is broken: nothing can be agreed on any more, its ranks come back one by one.

        ``leave_s`` is the time they have for that, ``policy.leave_s`` by default.
        """
        if not self.world.phase.alive:
            return
        leave_s = self.policy.leave_s if leave_s is None else leave_s
        self.do(BreakWorld(self.world.epoch, reason, leave_s))
        if self.world.stopping:
            self.stop(f"{self.world.reason}; not all was saved: {reason}")
            return
        self.set(
            phase=WorldPhase.FORMING,
            faulty=counted,
            reason=reason,
            tries=1,
            done=frozenset(),
            pause_until_s=None,
            wait_until_s=self.now_s + self.policy.faulty_scale_down_timeout_s,
        )
        for member in self.placed:
            due_s = None if member.ready else self.now_s + leave_s
            self.put(member, due_s=due_s, sealed=False)
        if counted:
            self.count(reason, node, births)

    def count(self, reason: str, node: str = "", births: int = 0) -> None:
        """One restart more; when there were too many, all processes are started anew, and in the end none.

        Restarts that have not led to a new world count for as long as there is none.
        """
        policy, now_s = self.policy, self.now_s
        since_s = min(self.world.began_s, now_s - policy.eval_period_s)
        self.set(
            restarts=self.world.restarts + 1,
            faults_s=(*(at_s for at_s in self.world.faults_s if at_s > since_s), now_s),
            full_restarts_s=tuple(at_s for at_s in self.world.full_restarts_s if at_s > since_s),
        )
        self.blame(node)
        allowed = policy.num_restart_before_full_job_restart
        escalates = allowed is not None and len(self.world.faults_s) > allowed
        if escalates:
            self.set(faults_s=(), full_restarts_s=(*self.world.full_restarts_s, now_s))
        limits = exceeded_restart_limit(self.world, policy)
        if limits:
            self.give_up(f"gave up after {limits}; the last fault: {reason}")
        elif escalates:
            for member in list(self.world.members.values()):
                if member.placed or self.world.epoch < 0:
                    known = max(self.births_of(member), births if member.node == node else 0)
                    self.replace_ranks(member, tuple(range(self.world.nproc)), known, whole=True)

    def blame(self, node: str) -> None:
        if node:
            kept = recent_faults(self.world.offences, self.policy, self.now_s)
            self.set(offences=(*kept, NodeFault(node, self.now_s)))

    # -- processes ----------------------------------------------------------------------------------------------------

    @staticmethod
    def births_of(member: NodeMember) -> int:
        """How many processes a node has started, as far as is known here."""
        return max((owed.births for owed in member.owed), default=member.births)

    def replace_ranks(
        self, member: NodeMember, local_ranks: tuple[int, ...], births: int, *, whole: bool = False
    ) -> NodeMember:
        """Others in the place of these processes, lost when there had been so many of the node's."""
        spare = member.spares > 0 and not whole
        if spare:
            self.do(PromoteSpare(member.node, member.life, *local_ranks))
        else:
            self.do(RespawnRanks(member.node, member.life, local_ranks))
        self.set(respawned=True)
        return self.put(
            member,
            owed=(*member.owed, *(PendingReplacement(local_rank, births, spare, whole) for local_rank in local_ranks)),
            spares=member.spares - spare,
            ready=False,
            due_s=self.now_s + self.policy.restart_timeout_s,
        )

    # -- the next world, or none --------------------------------------------------------------------------------------

    def form(self, chosen: list[NodeMember]) -> None:
        old, nodes = self.world, keep_node_ranks(chosen, self.world.places)
        how = self._how(chosen)
        for member in list(self.world.members.values()):
            if member.leaving:
                self.release(member, "asked back")
            else:
                self.put(member, placed=False, sealed=False)
        for member in chosen:
            since = member.since if member.epoch == old.epoch >= 0 else old.epoch + 1
            self.put(
                member,
                placed=True,
                epoch=old.epoch + 1,
                since=since,
                ready=False,
                sealed=False,
                prodded=False,
                due_s=None,
            )
        shrunk = old.faulty and len(nodes) < old.size
        self.set(
            phase=WorldPhase.RUNNING,
            epoch=old.epoch + 1,
            places=nodes,
            done=frozenset(),
            began_s=self.now_s,
            goal=len(nodes),
            faulty=False,
            wait_until_s=None,
            pause_until_s=None,
            more_since_s=None,
            shrunk_s=self.now_s if shrunk else old.shrunk_s,
            tries=0,
            respawned=False,
        )
        self.do(FormWorld(self.world.epoch, nodes, old.nproc, how, old.restarts, old.reason))

    def _how(self, chosen: list[NodeMember]) -> FormationKind:
        before, now = self.world.size, len(chosen)
        if self.world.epoch < 0:
            return FormationKind.START
        if now != before:
            return FormationKind.GROW if now > before else FormationKind.SHRINK
        if not all(member.placed for member in chosen):
            return FormationKind.REPLACE
        return FormationKind.RESPAWN if self.world.respawned else FormationKind.RESTART

    def stop(self, reason: str) -> None:
        self._end(WorldPhase.STOPPED, reason)
        self.do(StopJob(reason))

    def give_up(self, reason: str) -> None:
        reason += "; started again, the job resumes from its newest whole step"
        self._end(WorldPhase.GAVE_UP, reason)
        self.do(FailJob(reason))

    def _end(self, phase: WorldPhase, reason: str) -> None:
        self.set(phase=phase, reason=reason, wait_until_s=None, pause_until_s=None, more_since_s=None)


def max_world_nodes(world: WorldState, policy: ScalingPolicy) -> int:
    """The greatest size that is wanted."""
    return policy.at_most(policy.max_replicas if world.cap is None else world.cap)


def available_members(world: WorldState) -> list[NodeMember]:
    """Who could be in the next world, as far as one knows."""
    return [member for member in world.members.values() if not member.leaving]


def members_by_preference(members: Iterable[NodeMember], world: WorldState, avoid: Collection[str]) -> list[NodeMember]:
    """Whom to take first: no offenders, who has a rank already, the lower ranks, who came first."""
    position = {node: number for number, node in enumerate(world.places)}

    def order(member: NodeMember) -> tuple[bool, bool, int]:
        number = position[member.node] if member.placed else member.joined
        return member.node in avoid, not member.placed, number

    return sorted(members, key=order)


def keep_node_ranks(chosen: Sequence[NodeMember], places: Sequence[str]) -> tuple[str, ...]:
    """Who stays, or comes back, keeps its seat; who is new takes the seat of one who went, or the end."""
    nodes = [member.node for member in chosen]
    staying = set(nodes).intersection(places)
    new = iter([node for node in nodes if node not in staying])
    filled = (place if place in staying else next(new, None) for place in places)
    return (*(node for node in filled if node is not None), *new)


def state_holders(world: WorldState) -> list[NodeMember]:
    """Who was in the newest world that anybody here was in, or in an older one with somebody who was.

    What the job has in memory is found through them. A node that was in none knows of no other that keeps anything: a
    world of such nodes alone would begin anew.
    """
    here = available_members(world)
    newest = max((member.epoch for member in here), default=-1)
    met = min((member.since for member in here if member.epoch == newest), default=-1)
    return [member for member in here if member.epoch >= max(met, 0)]


def recent_faults(offences: tuple[NodeFault, ...], policy: ScalingPolicy, now_s: float) -> tuple[NodeFault, ...]:
    return tuple(offence for offence in offences if now_s < offence.at_s + policy.eval_period_s)


def avoided_nodes(world: WorldState, policy: ScalingPolicy, now_s: float) -> frozenset[str]:
    """Nodes that get no rank as long as others can be had: the worst of them, and those somebody outside has named."""
    if not world.offences:
        return world.marked
    counts = Counter(offence.node for offence in recent_faults(world.offences, policy, now_s))
    latest = {offence.node: offence.at_s for offence in world.offences}
    worst = sorted(
        (node for node, count in counts.items() if count >= policy.repeat_offender_faults and node not in world.marked),
        key=lambda node: (-counts[node], -latest[node], node),
    )
    return world.marked.union(worst[: policy.max_num_repeat_offenders_to_avoid])


def exceeded_restart_limit(world: WorldState, policy: ScalingPolicy) -> str:
    """Which limit the restarts so far are beyond, in words; "" for none. Counts are those of the period."""
    most, full = policy.job_max_retry_count, policy.max_full_job_restarts
    if most is not None and world.restarts > most:
        return f"{most} restarts in all (job_max_retry_count)"
    if full is not None and len(world.full_restarts_s) > full:
        each = policy.num_restart_before_full_job_restart
        return (
            f"{full} restarts of all processes (max_full_job_restarts), each after {each} other restarts "
            f"(num_restart_before_full_job_restart), within {policy.eval_period_s:g} s (eval_period_s)"
        )
    return ""
