"""One transition of a world: node selection, restart budgets, breaking and forming. Pure.

A :class:`WorldTransition` is mutable, but only one decision uses it. Its results are values.
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
    SealedStep,
    StopJob,
    WorldAction,
    WorldPhase,
    WorldState,
)

replace = msgspec.structs.replace

REPORT_S = 2.0
"""Seconds after the deadline in which supervisors end and report the processes of a broken world."""


class WorldTransition:
    """Changes of a world and the actions of one decision."""

    def __init__(self, world: WorldState, policy: ScalingPolicy, now_s: float) -> None:
        self.world = replace(world, members=dict(world.members))
        self.policy = policy
        self.now_s = now_s
        self.actions: list[WorldAction] = []

    def emit(self, action: WorldAction) -> None:
        self.actions.append(action)

    def update(self, **fields: Any) -> None:
        self.world = replace(self.world, **fields)

    def update_member(self, member: NodeMember, **fields: Any) -> NodeMember:
        member = replace(member, **fields)
        self.world.members[member.node] = member
        return member

    def member_of_generation(self, node: str, generation: int) -> NodeMember | None:
        """Return the member if it has this generation, otherwise ``None``."""
        member = self.world.members.get(node)
        return member if member is not None and member.generation == generation else None

    def remove_member(self, member: NodeMember, generation: int | None = None) -> None:
        del self.world.members[member.node]
        self.mark_departed(member.node, max(member.generation, generation or member.generation))

    def mark_departed(self, node: str, generation: int) -> None:
        self.world = self.world.with_departed(node, generation)

    def release_node(
        self, member: NodeMember, reason: str, *, force: bool = False, sealed_step: SealedStep | None = None
    ) -> None:
        self.emit(ReleaseNode(member.node, member.generation, reason, force, sealed_step))
        self.remove_member(member)

    @property
    def members_with_ranks(self) -> list[NodeMember]:
        return [member for member in self.world.members.values() if member.has_ranks]

    @property
    def max_nodes(self) -> int:
        return max_world_nodes(self.world, self.policy)

    @property
    def growth_allowed_s(self) -> float:
        """Time from which the world may grow or replace a repeat offender; infinite if it may not.

        May be in the past.
        """
        if self.world.growth_possible_since_s is None:
            return math.inf
        put_off_s = self.policy.graceful_shutdown_timeout_s * (2 ** min(self.world.failed_pauses, 16) - 1)
        collected_s = self.world.growth_possible_since_s + self.policy.scaling_timeout_s + put_off_s
        if self.world.shrunk_s is None:
            return collected_s
        return max(collected_s, self.world.shrunk_s + self.policy.scale_up_snooze_s)

    def avoided(self) -> frozenset[str]:
        return avoided_nodes(self.world, self.policy, self.now_s)

    def lose_node(
        self, member: NodeMember, reason: str, *, blame: bool = True, force: bool = False, generation: int | None = None
    ) -> None:
        """Remove a lost member. With ``force``, also release the node, which may still be alive."""
        if force:
            self.emit(ReleaseNode(member.node, member.generation, reason, force))
        self.remove_member(member, generation)
        blame = blame and not member.is_draining
        if not member.has_ranks or (member.node in self.world.finished_nodes and self.world.phase.is_running):
            return
        if not self.world.phase.is_running:
            if self.world.after_fault and not member.is_draining:
                self.update(replacement_deadline_s=self.now_s + self.policy.faulty_scale_down_timeout_s)
            if blame:
                self.record_node_fault(member.node)
        elif not (member.sealed and (member.is_draining or self.world.stopping)):
            self.break_world(f"{member.node} was lost: {reason}", member.node if blame else "")

    def break_world(
        self, reason: str, node: str = "", spawn_count: int = 0, *, counted: bool = True, leave_s: float | None = None
    ) -> None:
        """Break the world: its ranks leave it without a common step.

        ``leave_s`` is the number of seconds that they have, by default ``policy.abort_limit_s``.
        """
        if not self.world.phase.is_running:
            return
        leave_s = self.policy.abort_limit_s if leave_s is None else leave_s
        self.emit(BreakWorld(self.world.epoch, reason, leave_s))
        if self.world.stopping:
            self.stop_job(f"{self.world.reason}; not all was saved: {reason}")
            return
        self.update(
            phase=WorldPhase.FORMING,
            after_fault=counted,
            reason=reason,
            spawn_attempts=1,
            repeated_error=None,
            finished_nodes=frozenset(),
            pause_deadline_s=None,
            sealed_nodes=0,
            sealed_step=None,
            resume_from=None,
            replacement_deadline_s=self.now_s + self.policy.faulty_scale_down_timeout_s,
        )
        for member in self.members_with_ranks:
            due_s = None if member.ready else self.now_s + leave_s + REPORT_S
            self.update_member(member, ready_deadline_s=due_s, sealed=False)
        if counted:
            self.count_restart(reason, node, spawn_count)

    def count_restart(self, reason: str, node: str = "", spawn_count: int = 0) -> None:
        """Count a restart. Above the limits, restart all processes or fail the job.

        Restarts that have not led to a new world count until one forms.
        """
        policy, now_s = self.policy, self.now_s
        since_s = min(self.world.formed_s, now_s - policy.eval_period_s)
        self.update(
            restarts=self.world.restarts + 1,
            faults_s=(*(at_s for at_s in self.world.faults_s if at_s > since_s), now_s),
            full_restarts_s=tuple(at_s for at_s in self.world.full_restarts_s if at_s > since_s),
        )
        self.record_node_fault(node)
        allowed = policy.num_restart_before_full_job_restart
        escalates = allowed is not None and len(self.world.faults_s) > allowed
        if escalates:
            self.update(faults_s=(), full_restarts_s=(*self.world.full_restarts_s, now_s))
        limits = exceeded_restart_limit(self.world, policy)
        if limits:
            self.fail_job(reason, f"{count_with_noun(self.world.restarts, 'fault')}; {limits}")
        elif escalates:
            for member in list(self.world.members.values()):
                if member.has_ranks or self.world.epoch < 0:
                    known = max(self.spawn_count_of(member), spawn_count if member.node == node else 0)
                    self.replace_ranks(member, tuple(range(self.world.nproc)), known, full_restart=True)

    def record_node_fault(self, node: str) -> None:
        if node:
            recent = recent_faults(self.world.node_faults, self.policy, self.now_s)
            self.update(node_faults=(*recent, NodeFault(node, self.now_s)))

    @staticmethod
    def spawn_count_of(member: NodeMember) -> int:
        """Return the highest number of processes that the node is known to have started."""
        return max((replacement.spawn_count for replacement in member.pending_replacements), default=member.spawn_count)

    def replace_ranks(
        self, member: NodeMember, local_ranks: tuple[int, ...], spawn_count: int, *, full_restart: bool = False
    ) -> NodeMember:
        """Replace these local ranks; ``spawn_count`` is the node's count when they were lost.

        A spare is used if the node has one, unless all processes restart (``full_restart``).
        """
        spare = member.spares > 0 and not full_restart
        if spare:
            self.emit(PromoteSpare(member.node, member.generation, *local_ranks))
        else:
            self.emit(RespawnRanks(member.node, member.generation, local_ranks))
        self.update(has_respawned=True)
        return self.update_member(
            member,
            pending_replacements=(
                *member.pending_replacements,
                *(PendingReplacement(local_rank, spawn_count, spare, full_restart) for local_rank in local_ranks),
            ),
            spares=member.spares - spare,
            ready=False,
            ready_deadline_s=self.now_s + self.policy.restart_timeout_s,
        )

    def form_world(self, chosen: list[NodeMember]) -> None:
        old, nodes = self.world, keep_node_ranks(chosen, self.world.ranked_nodes)
        epoch = max(old.epoch + 1, old.min_next_epoch)
        how = self._formation_kind(chosen)
        for member in list(self.world.members.values()):
            if member.is_draining:
                self.release_node(member, "preempted")
            else:
                self.update_member(member, has_ranks=False, sealed=False)
        for member in chosen:
            since = member.first_epoch if member.epoch == old.epoch >= 0 else epoch
            self.update_member(
                member,
                has_ranks=True,
                epoch=epoch,
                first_epoch=since,
                ready=False,
                sealed=False,
                respawn_requested=False,
                ready_deadline_s=None,
            )
        shrunk = old.after_fault and len(nodes) < old.size
        self.update(
            phase=WorldPhase.RUNNING,
            epoch=epoch,
            ranked_nodes=nodes,
            finished_nodes=frozenset(),
            formed_s=self.now_s,
            target_nodes=len(nodes),
            after_fault=False,
            replacement_deadline_s=None,
            pause_deadline_s=None,
            sealed_nodes=0,
            sealed_step=None,
            resume_from=None,
            growth_possible_since_s=None,
            shrunk_s=self.now_s if shrunk else old.shrunk_s,
            spawn_attempts=0,
            has_respawned=False,
        )
        self.emit(
            FormWorld(
                *(self.world.epoch, nodes, old.nproc, how, old.restarts, old.reason, old.resume_from),
                requested_step=old.requested_step,
            )
        )

    def _formation_kind(self, chosen: list[NodeMember]) -> FormationKind:
        before, now = self.world.size, len(chosen)
        if self.world.epoch < 0:
            return FormationKind.START
        if now != before:
            return FormationKind.GROW if now > before else FormationKind.SHRINK
        if not all(member.has_ranks for member in chosen):
            return FormationKind.REPLACE
        return FormationKind.RESPAWN if self.world.has_respawned else FormationKind.RESTART

    def stop_job(self, reason: str, sealed_step: SealedStep | None = None) -> None:
        self._end(WorldPhase.STOPPED, reason)
        self.emit(StopJob(reason, sealed_step))

    def fail_job(self, reason: str, attempts: str, *, never_joined: bool = False) -> None:
        self._end(WorldPhase.FAILED, reason)
        self.emit(FailJob(reason, attempts, never_joined))

    def _end(self, phase: WorldPhase, reason: str) -> None:
        self.update(
            phase=phase, reason=reason, replacement_deadline_s=None, pause_deadline_s=None, growth_possible_since_s=None
        )


def max_world_nodes(world: WorldState, policy: ScalingPolicy) -> int:
    """Return the largest size within the policy and the requested limit."""
    return policy.largest_size_within(policy.max_replicas if world.max_nodes is None else world.max_nodes)


def available_members(world: WorldState) -> list[NodeMember]:
    """Return the members that can be in the next world: all that are not draining."""
    return [member for member in world.members.values() if not member.is_draining]


def members_by_preference(members: Iterable[NodeMember], world: WorldState, avoid: Collection[str]) -> list[NodeMember]:
    """Sort members by preference for the next world.

    Members outside ``avoid`` precede others, and members with ranks precede those without. Then the lower rank or the
    earlier join comes first.
    """
    position = {node: number for number, node in enumerate(world.ranked_nodes)}

    def order(member: NodeMember) -> tuple[bool, bool, int]:
        number = position[member.node] if member.has_ranks else member.join_order
        return member.node in avoid, not member.has_ranks, number

    return sorted(members, key=order)


def keep_node_ranks(chosen: Sequence[NodeMember], ranked_nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes in rank order: known nodes hold their position, new nodes fill gaps, then follow."""
    nodes = [member.node for member in chosen]
    staying = set(nodes).intersection(ranked_nodes)
    new = iter([node for node in nodes if node not in staying])
    filled = (node if node in staying else next(new, None) for node in ranked_nodes)
    return (*(node for node in filled if node is not None), *new)


def state_holders(world: WorldState) -> list[NodeMember]:
    """Return the members through which the next world finds the job's state in memory.

    They were in the newest world of any member, or in an older one together with such a member. A node that was in no
    world knows no node with state: a world of such nodes alone would lose the state.
    """
    available = available_members(world)
    newest = max((member.epoch for member in available), default=-1)
    oldest_common = min((member.first_epoch for member in available if member.epoch == newest), default=-1)
    return [member for member in available if member.epoch >= max(oldest_common, 0)]


def recent_faults(faults: tuple[NodeFault, ...], policy: ScalingPolicy, now_s: float) -> tuple[NodeFault, ...]:
    return tuple(fault for fault in faults if now_s < fault.at_s + policy.eval_period_s)


def avoided_nodes(world: WorldState, policy: ScalingPolicy, now_s: float) -> frozenset[str]:
    """Return the nodes that have no rank while others are available: those with the most recent faults."""
    if not world.node_faults:
        return frozenset()
    counts = Counter(fault.node for fault in recent_faults(world.node_faults, policy, now_s))
    latest = {fault.node: fault.at_s for fault in world.node_faults}
    worst = sorted(
        (node for node, count in counts.items() if count >= policy.repeat_offender_faults),
        key=lambda node: (-counts[node], -latest[node], node),
    )
    return frozenset(worst[: policy.max_num_repeat_offenders_to_avoid])


def exceeded_restart_limit(world: WorldState, policy: ScalingPolicy) -> str:
    """Return a description of the restart limit that was exceeded; "" for none."""
    most, full = policy.job_max_retry_count, policy.max_full_job_restarts
    if most is not None and world.restarts > most:
        return f"at most {count_with_noun(most, 'restart')} allowed (job_max_retry_count)"
    if full is not None and len(world.full_restarts_s) > full:
        return (
            f"at most {count_with_noun(full, 'restart')} of all processes allowed within {policy.eval_period_s:g} s "
            "(max_full_job_restarts, eval_period_s)"
        )
    return ""


def count_with_noun(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
