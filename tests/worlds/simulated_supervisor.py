"""A node of the simulated cluster: a supervisor that does what it is told, and its ranks, as states."""

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
    """Something happened that must not, whatever was done to the cluster."""


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
    """Which process sits there: what was to happen to an earlier one does not happen."""


class SimulatedSupervisor:
    def __init__(self, cluster: SimulatedCluster, node: str, life: int) -> None:
        self.cluster, self.node, self.life = cluster, node, life
        self.up = True
        self.births, self.spares = cluster.nproc, cluster.spares
        self.seats = [SimulatedRank(number) for number in range(cluster.nproc)]
        self.epoch = -1
        self.places: tuple[str, ...] = ()
        self.restarts = 0
        self.orders_until_s = 0.0
        cluster.post(NodeJoined(node, life, cluster.nproc, self.births, self.spares))
        for seat in self.seats:
            self._warm(seat)

    # -- what is done to it -------------------------------------------------------------------------------------------

    def lose_rank(self, seat: SimulatedRank, reason: str = "exit 1") -> None:
        if seat.state is not RankState.DEAD:
            seat.state = RankState.DEAD
            seat.process += 1
            self.cluster.post(RankLost(self.node, self.life, self.births, seat.number, reason))

    def report_fault(self, seat: SimulatedRank, *, final: bool = False) -> None:
        why = "a loss that is not finite"
        self.cluster.post(RankFault(self.node, self.life, self.epoch, seat.number, why, final))

    def finish(self) -> None:
        if all(seat.state is RankState.TRAINING for seat in self.seats):
            for seat in self.seats:
                seat.state = RankState.DONE
            self.cluster.post(NodeFinished(self.node, self.life, self.epoch))

    def die(self) -> None:
        self.up = False
        for seat in self.seats:
            seat.state, seat.process = RankState.DEAD, seat.process + 1

    def report(self) -> RejoinReport:
        lost = tuple(seat.number for seat in self.seats if seat.state is RankState.DEAD)
        ready = all(seat.state is RankState.READY for seat in self.seats)
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
            all(seat.state is RankState.DONE for seat in self.seats),
        )

    # -- what it is told ----------------------------------------------------------------------------------------------

    def apply_desired(self, action: object) -> None:
        if isinstance(action, FormWorld):
            self._enter(action)
        elif isinstance(action, BreakWorld) and action.epoch == self.epoch:
            self._leave()
        elif isinstance(action, PauseWorld) and action.epoch == self.epoch:
            for seat in self.seats:
                if seat.state is RankState.TRAINING:
                    self._run_later(seat, self.cluster.step_s(), self._standby)
        elif isinstance(action, RespawnRanks):
            for number in action.local_ranks:
                self._respawn(self.seats[number])
        elif isinstance(action, PromoteSpare):
            self.spares -= 1
            self._respawn(self.seats[action.local_rank], warm=True)
        elif isinstance(action, RespawnStragglers):
            for seat in self.seats:
                if seat.state is not RankState.READY:
                    self._respawn(seat)
            self._report_ready()
        elif isinstance(action, ReleaseNode):
            self.die()
            self.cluster.released(self)

    def _enter(self, form: FormWorld) -> None:
        self.epoch, self.places, self.restarts = form.epoch, form.nodes, form.restarts
        for seat in self.seats:
            if seat.state in INSIDE:
                raise Violation(
                    f"rank {seat.number} of {self.node} is told of epoch {form.epoch} and is in another one"
                )
            if seat.state is RankState.READY:
                seat.state = RankState.TRAINING
            else:
                seat.state, seat.process = RankState.DEAD, seat.process + 1
                self.cluster.post(RankLost(self.node, self.life, self.births, seat.number, "was not there"))

    def _leave(self) -> None:
        for seat in self.seats:
            if seat.state in (RankState.TRAINING, RankState.SEALED):
                self._run_later(seat, self.cluster.leaving_s(), self._become_ready)
            elif seat.state is RankState.DONE:
                self.lose_rank(seat, "finished, but the others have not")
        self._report_ready()

    def _standby(self, seat: SimulatedRank) -> None:
        if seat.state is RankState.TRAINING:
            self.cluster.stand(self, seat)

    def seal(self, *, stop: bool) -> None:
        """All ranks of the epoch stand at one step."""
        for seat in self.seats:
            if seat.state is not RankState.TRAINING:
                return
        for seat in self.seats:
            seat.state = RankState.SEALED
            if not stop:
                self._run_later(seat, self.cluster.leaving_s(), self._become_ready)
        self.cluster.post(NodeSealed(self.node, self.life, self.epoch))

    # -- processes ----------------------------------------------------------------------------------------------------

    def _respawn(self, seat: SimulatedRank, *, warm: bool = False) -> None:
        self.births += 1
        self._warm(seat, self.cluster.leaving_s() if warm else None)

    def _warm(self, seat: SimulatedRank, delay_s: float | None = None) -> None:
        seat.state, seat.process = RankState.WARMING, seat.process + 1
        delay_s = self.cluster.warming_s() if delay_s is None else delay_s
        cursed = self.node in self.cluster.cursed
        self._run_later(seat, delay_s, self._fail if cursed else self._become_ready)

    def _fail(self, seat: SimulatedRank) -> None:
        self.cluster.judge.event_happened()
        self.lose_rank(seat)

    def _become_ready(self, seat: SimulatedRank) -> None:
        if seat.state is not RankState.HUNG:
            seat.state = RankState.READY
            self._report_ready()

    def _report_ready(self) -> None:
        if all(seat.state is RankState.READY for seat in self.seats):
            self.cluster.post(NodeReady(self.node, self.life, self.births, self.epoch, self.spares))

    def _run_later(self, seat: SimulatedRank, delay_s: float, what) -> None:
        process, epoch = seat.process, self.epoch

        def then() -> None:
            if self.up and seat.process == process and self.epoch == epoch:
                what(seat)

        self.cluster.run_after(delay_s, then)
