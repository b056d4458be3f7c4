"""One decision while it is being made: the world as it is by now, and what has been ordered so far.

Only the decision that made a turn sees it; what comes out of it is values.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from elastic.world import choosing
from elastic.world.actions import Action, Break, Form, GiveUp, How, PromoteSpare, Release, Respawn, Stop
from elastic.world.members import Member, Offence, Owed, Phase, World
from elastic.world.offences import avoided, exhausted, remembered
from elastic.world.policy import ScalingPolicy

replace = msgspec.structs.replace


class Turn:
    """What every step of a decision can do."""

    def __init__(self, world: World, policy: ScalingPolicy, now_s: float) -> None:
        self.world = replace(world, members=dict(world.members), gone=dict(world.gone))
        self.policy = policy
        self.now_s = now_s
        self.actions: list[Action] = []

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def set(self, **fields: Any) -> None:
        self.world = replace(self.world, **fields)

    def put(self, member: Member, **fields: Any) -> Member:
        member = replace(member, **fields)
        self.world.members[member.node] = member
        return member

    def known(self, node: str, life: int) -> Member | None:
        """The member this is about; what is about another life of the node is about nobody."""
        member = self.world.members.get(node)
        return member if member is not None and member.life == life else None

    def drop(self, member: Member, life: int | None = None) -> None:
        del self.world.members[member.node]
        self.world.gone[member.node] = max(member.life, life or member.life)

    def release(self, member: Member, reason: str, *, cut: bool = False) -> None:
        self.do(Release(member.node, member.life, reason, cut))
        self.drop(member)

    @property
    def placed(self) -> list[Member]:
        return [member for member in self.world.members.values() if member.placed]

    @property
    def limit(self) -> int:
        return choosing.limit(self.world, self.policy)

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
        return avoided(self.world, self.policy, self.now_s)

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def lose(
        self, member: Member, reason: str, *, blame: bool = True, cut: bool = False, life: int | None = None
    ) -> None:
        """A node is no more, or is not waited for any longer (``cut``)."""
        if cut:
            self.do(Release(member.node, member.life, reason, cut))
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
        self.do(Break(self.world.epoch, reason, leave_s))
        if self.world.stopping:
            self.stop(f"{self.world.reason}; not all was saved: {reason}")
            return
        self.set(
            phase=Phase.FORMING,
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
        limits = exhausted(self.world, policy)
        if limits:
            self.give_up(f"gave up after {limits}; the last fault: {reason}")
        elif escalates:
            for member in list(self.world.members.values()):
                if member.placed or self.world.epoch < 0:
                    known = max(self.births_of(member), births if member.node == node else 0)
                    self.replace_ranks(member, tuple(range(self.world.nproc)), known, whole=True)

    def blame(self, node: str) -> None:
        if node:
            kept = remembered(self.world.offences, self.policy, self.now_s)
            self.set(offences=(*kept, Offence(node, self.now_s)))

    # -- processes ----------------------------------------------------------------------------------------------------

    @staticmethod
    def births_of(member: Member) -> int:
        """How many processes a node has started, as far as is known here."""
        return max((owed.births for owed in member.owed), default=member.births)

    def replace_ranks(
        self, member: Member, local_ranks: tuple[int, ...], births: int, *, whole: bool = False
    ) -> Member:
        """Others in the place of these processes, lost when there had been so many of the node's."""
        spare = member.spares > 0 and not whole
        if spare:
            self.do(PromoteSpare(member.node, member.life, *local_ranks))
        else:
            self.do(Respawn(member.node, member.life, local_ranks))
        self.set(respawned=True)
        return self.put(
            member,
            owed=(*member.owed, *(Owed(local_rank, births, spare, whole) for local_rank in local_ranks)),
            spares=member.spares - spare,
            ready=False,
            due_s=self.now_s + self.policy.restart_timeout_s,
        )

    # -- the next world, or none --------------------------------------------------------------------------------------

    def form(self, chosen: list[Member]) -> None:
        old, nodes = self.world, choosing.arranged(chosen, self.world.places)
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
            phase=Phase.RUNNING,
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
        self.do(Form(self.world.epoch, nodes, old.nproc, how, old.restarts, old.reason))

    def _how(self, chosen: list[Member]) -> How:
        before, now = self.world.size, len(chosen)
        if self.world.epoch < 0:
            return How.START
        if now != before:
            return How.GROW if now > before else How.SHRINK
        if not all(member.placed for member in chosen):
            return How.REPLACE
        return How.RESPAWN if self.world.respawned else How.RESTART

    def stop(self, reason: str) -> None:
        self._end(Phase.STOPPED, reason)
        self.do(Stop(reason))

    def give_up(self, reason: str) -> None:
        reason += "; started again, the job resumes from its newest whole step"
        self._end(Phase.GAVE_UP, reason)
        self.do(GiveUp(reason))

    def _end(self, phase: Phase, reason: str) -> None:
        self.set(phase=phase, reason=reason, wait_until_s=None, pause_until_s=None, more_since_s=None)
