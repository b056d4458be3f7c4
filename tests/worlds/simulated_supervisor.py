"""A node of the simulated cluster: a supervisor that executes actions, and the states of its ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic.world.world_state import (
    BreakWorld,
    FormWorld,
    NodeFinished,
    NodeJoined,
    NodeReady,
    NodeSealed,
    PauseWorld,
    PromoteSpare,
    RankFault,
    RankLost,
    RejoinReport,
    ReleaseNode,
    RespawnRanks,
    RespawnStragglers,
)

if TYPE_CHECKING:
    from tests.worlds.cluster import SimulatedCluster


class Violation(Exception):
    """A broken invariant."""


class RankState(enum.Enum):
    WARMING = "warming"
    READY = "ready"
    TRAINING = "training"
    SEALED = "sealed"
    HUNG = "hung"
    DEAD = "dead"
    DONE = "done"


INSIDE = (RankState.TRAINING, RankState.SEALED, RankState.HUNG, RankState.DONE)


@dataclass(eq=False)
class SimulatedRank:
    number: int
    state: RankState = RankState.WARMING
    process: int = 0
    """Number of the rank's current process. Events scheduled for an earlier process are dropped."""


class SimulatedSupervisor:
    def __init__(self, cluster: SimulatedCluster, node: str, life: int) -> None:
        self.cluster, self.node, self.life = cluster, node, life
        self.up = True
        self.births, self.spares = cluster.nproc, cluster.spares
        self.ranks = [SimulatedRank(number) for number in range(cluster.nproc)]
        self.epoch = -1
        self.places: tuple[str, ...] = ()
        self.restarts = 0
        self.orders_until_s = 0.0
        cluster.post(NodeJoined(node, life, cluster.nproc, self.births, self.spares))
        for rank in self.ranks:
            self._warm(rank)

    # -- faults and reports -------------------------------------------------------------------------------------------

    def lose_rank(self, rank: SimulatedRank, reason: str = "exit 1") -> None:
        if rank.state is not RankState.DEAD:
            rank.state = RankState.DEAD
            rank.process += 1
            self.cluster.post(RankLost(self.node, self.life, self.births, rank.number, reason))

    def report_fault(self, rank: SimulatedRank, *, final: bool = False) -> None:
        reason = "a loss that is not finite"
        self.cluster.post(RankFault(self.node, self.life, self.epoch, rank.number, reason, final))

    def finish(self) -> None:
        if all(rank.state is RankState.TRAINING for rank in self.ranks):
            for rank in self.ranks:
                rank.state = RankState.DONE
            self.cluster.post(NodeFinished(self.node, self.life, self.epoch))

    def die(self) -> None:
        self.up = False
        for rank in self.ranks:
            rank.state, rank.process = RankState.DEAD, rank.process + 1

    def report(self) -> RejoinReport:
        lost = tuple(rank.number for rank in self.ranks if rank.state is RankState.DEAD)
        ready = all(rank.state is RankState.READY for rank in self.ranks)
        return RejoinReport(
            self.node,
            self.life,
            self.cluster.nproc,
            self.births,
            self.spares,
            self.epoch,
            self.places,
            self.restarts,
            ready,
            lost,
            all(rank.state is RankState.DONE for rank in self.ranks),
        )

    # -- actions ------------------------------------------------------------------------------------------------------

    def apply_desired(self, action: object) -> None:
        if isinstance(action, FormWorld):
            self._enter(action)
        elif isinstance(action, BreakWorld) and action.epoch == self.epoch:
            self._leave()
        elif isinstance(action, PauseWorld) and action.epoch == self.epoch:
            for rank in self.ranks:
                if rank.state is RankState.TRAINING:
                    self._run_later(rank, self.cluster.step_s(), self._standby)
        elif isinstance(action, RespawnRanks):
            for number in action.local_ranks:
                self._respawn(self.ranks[number])
        elif isinstance(action, PromoteSpare):
            self.spares -= 1
            self._respawn(self.ranks[action.local_rank], warm=True)
        elif isinstance(action, RespawnStragglers):
            for rank in self.ranks:
                if rank.state is not RankState.READY:
                    self._respawn(rank)
            self._report_ready()
        elif isinstance(action, ReleaseNode):
            self.die()
            self.cluster.released(self)

    def _enter(self, form: FormWorld) -> None:
        self.epoch, self.places, self.restarts = form.epoch, form.nodes, form.restarts
        for rank in self.ranks:
            if rank.state in INSIDE:
                raise Violation(
                    f"rank {rank.number} of {self.node} receives epoch {form.epoch} while it is in another epoch"
                )
            if rank.state is RankState.READY:
                rank.state = RankState.TRAINING
            else:
                rank.state, rank.process = RankState.DEAD, rank.process + 1
                self.cluster.post(RankLost(self.node, self.life, self.births, rank.number, "was not there"))

    def _leave(self) -> None:
        for rank in self.ranks:
            if rank.state in (RankState.TRAINING, RankState.SEALED):
                self._run_later(rank, self.cluster.leaving_s(), self._become_ready)
            elif rank.state is RankState.DONE:
                self.lose_rank(rank, "finished, but the others have not")
        self._report_ready()

    def _standby(self, rank: SimulatedRank) -> None:
        if rank.state is RankState.TRAINING:
            self.cluster.pause_rank(self, rank)

    def seal(self, *, stop: bool) -> None:
        """Seal the step at which all ranks of the epoch have paused."""
        for rank in self.ranks:
            if rank.state is not RankState.TRAINING:
                return
        for rank in self.ranks:
            rank.state = RankState.SEALED
            if not stop:
                self._run_later(rank, self.cluster.leaving_s(), self._become_ready)
        self.cluster.post(NodeSealed(self.node, self.life, self.epoch))

    # -- processes ----------------------------------------------------------------------------------------------------

    def _respawn(self, rank: SimulatedRank, *, warm: bool = False) -> None:
        self.births += 1
        self._warm(rank, self.cluster.leaving_s() if warm else None)

    def _warm(self, rank: SimulatedRank, delay_s: float | None = None) -> None:
        rank.state, rank.process = RankState.WARMING, rank.process + 1
        delay_s = self.cluster.warming_s() if delay_s is None else delay_s
        broken = self.node in self.cluster.broken
        self._run_later(rank, delay_s, self._fail if broken else self._become_ready)

    def _fail(self, rank: SimulatedRank) -> None:
        self.cluster.judge.event_happened()
        self.lose_rank(rank)

    def _become_ready(self, rank: SimulatedRank) -> None:
        if rank.state is not RankState.HUNG:
            rank.state = RankState.READY
            self._report_ready()

    def _report_ready(self) -> None:
        if all(rank.state is RankState.READY for rank in self.ranks):
            self.cluster.post(NodeReady(self.node, self.life, self.births, self.epoch, self.spares))

    def _run_later(self, rank: SimulatedRank, delay_s: float, what) -> None:
        process, epoch = rank.process, self.epoch

        def then() -> None:
            if self.up and rank.process == process and self.epoch == epoch:
                what(rank)

        self.cluster.run_after(delay_s, then)
