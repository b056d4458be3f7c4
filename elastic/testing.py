"""An in-memory coordinator and control plane, for tests and for scripts without processes.

::

    plane = InMemoryCoordinator(2)
    threads = [Thread(target=train, args=(seat,)) for seat in plane.seats]     # each seat is a ControlPlane
    plane.resize(3, "one more came")
    Thread(target=train, args=(plane.join(),)).start()
    plane.lose(plane.seats[1])

Every seat is a rank on a node of its own. The plane starts and ends nothing: who waits in ``ready`` gets a place as
soon as there are enough, in the order in which seats were made, and those that had a place keep theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from elastic.control.control_plane import ControlNotice, Dismissed, NoticeKind, RankAssignment, RankProgress
from elastic.control.leader_election import LEASE_DURATION_S, LeaderRecord
from elastic.errors import ControlDeadlineError, JobFailedError, PolicyError, StaleEpochError
from elastic.world.world_state import ErrorPosition, SealedStep

BrokenCallback = Callable[[ControlNotice], None]


class MemoryLeadership:
    """The record of who leads a job, for candidates in one process."""

    def __init__(self, duration_s: float = LEASE_DURATION_S) -> None:
        self.duration_s = duration_s
        self.record: LeaderRecord | None = None
        self._writes = 0
        self._lock = threading.Lock()

    def read(self) -> LeaderRecord | None:
        return self.record

    def write(self, record: LeaderRecord, over: LeaderRecord | None) -> LeaderRecord | None:
        with self._lock:
            if (self.record and self.record.version) != (over and over.version):
                return None
            self._writes += 1
            self.record = msgspec.structs.replace(record, version=str(self._writes))
            return self.record

    def close(self) -> None:
        """Nothing is held."""


class InMemoryCoordinator:
    """The job of some seats. ``size`` ranks make a world; seats beyond it wait as spares, or are dismissed."""

    def __init__(
        self,
        size: int,
        *,
        spares: int = 0,
        keep_spares: bool = True,
        store: str = "memory:0",
        stores: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if size < 1:
            raise PolicyError(f"size={size}: a world has at least one rank")
        self.size = size
        self.epoch = -1
        self.restarts = 0
        self.failure = ""
        """Why there will be no further world; "" while there may be."""
        self._keep_spares = keep_spares
        self._store, self._stores = store, stores
        self._clock = clock
        self._changed = threading.Condition()
        self._want: NoticeKind | None = None
        self._reason = ""
        self._deadline: float | None = None
        self._stopped = False
        self.planes = [InMemoryControlPlane(self) for _ in range(size + spares)]

    # -- what a test does, or a policy would --------------------------------------------------------------------------

    def add_rank(self) -> InMemoryControlPlane:
        """One more process, that has not yet said that it is ready."""
        with self._changed:
            seat = InMemoryControlPlane(self)
            self.planes.append(seat)
            return seat

    def resize(self, size: int, reason: str = "resized", *, deadline_s: float | None = None) -> None:
        """The next world has ``size`` ranks; those of this one are told to stop at a common step."""
        if size < 1:
            raise PolicyError(f"size={size}: a world has at least one rank")
        with self._changed:
            self.size = size
            self._tell(NoticeKind.RESIZE, reason, deadline_s)

    def stop(self, reason: str = "stopped", *, deadline_s: float | None = None) -> None:
        """There is no next world; ``ready`` dismisses everybody from now on."""
        with self._changed:
            self._stopped = True
            self._tell(NoticeKind.STOP, reason, deadline_s)

    def restart(self, reason: str = "restarted") -> None:
        """The world is broken without anybody's fault."""
        with self._changed:
            self._break(reason)

    def lose_rank(self, seat: InMemoryControlPlane, reason: str = "") -> None:
        """The seat's process is gone: nothing it says counts any more."""
        with self._changed:
            self._lose(seat, reason or f"rank {seat.rank} was lost")

    def fail(self, reason: str) -> None:
        with self._changed:
            self.failure = reason
            self._break(reason)

    # -- what a test sees ---------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[InMemoryControlPlane]:
        """The seats of the world of this epoch by rank, also those that were lost or have left."""
        return sorted((one for one in self.planes if one.epoch == self.epoch >= 0), key=lambda one: one.rank)

    @property
    def succeeded(self) -> bool:
        """Whether every rank of the world said that it has finished."""
        members = self.members
        return bool(members) and all(one.is_finished for one in members)

    def wait_for(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """Until ``happened``, which is looked at whenever something changes; whether it did."""
        with self._changed:
            return self._changed.wait_for(happened, timeout_s)

    # -- inside, with the lock held -----------------------------------------------------------------------------------

    def _tell(self, want: NoticeKind, reason: str, deadline_s: float | None) -> None:
        """A broken world stays broken; of two deadlines the earlier one holds."""
        if self._want is not NoticeKind.RESTART:
            self._want, self._reason = want, reason
            if deadline_s is not None:
                until = self._clock() + deadline_s
                self._deadline = until if self._deadline is None else min(self._deadline, until)
        self._form()
        self._changed.notify_all()

    def _break(self, reason: str) -> None:
        if self._want is not NoticeKind.RESTART and self._inside():
            self.restarts += 1
            self._want, self._reason, self._deadline = NoticeKind.RESTART, reason, None
            notice = ControlNotice(self.epoch, NoticeKind.RESTART, reason)
            for seat in self.members:
                if seat.is_alive:
                    seat.notify_broken(notice)
        self._form()
        self._changed.notify_all()

    def _lose(self, seat: InMemoryControlPlane, reason: str) -> None:
        was_inside = seat in self._inside()
        seat.is_alive = False
        if was_inside:
            self._break(reason)
        self._form()
        self._changed.notify_all()

    def _inside(self) -> list[InMemoryControlPlane]:
        """Members that have not left the world of this epoch."""
        return [one for one in self.members if one.is_alive and not one.is_waiting and not one.is_finished]

    def _form(self) -> None:
        """The next world, when nobody is in this one any more and there are enough for it."""
        if self.failure or self._stopped or self.succeeded or self._inside():
            return
        waiting = [one for one in self.planes if one.is_waiting and one.is_alive]
        if len(waiting) < self.size:
            return
        waiting.sort(key=lambda one: (one.epoch < 0 or one.is_draining, one.rank))
        chosen, beyond = waiting[: self.size], waiting[self.size :]
        sealed = self._sealed_by_all()
        self.epoch += 1
        for rank, seat in enumerate(_kept(chosen)):
            place = RankAssignment(self.epoch, rank, self.size, 0, 1, rank, self.size, self._store, self.restarts)
            seat.assign(msgspec.structs.replace(place, reason=self._reason, stores=self._stores, resume_from=sealed))
        for seat in beyond:
            seat.is_dismissed = seat.is_draining or not self._keep_spares
        self._want, self._reason, self._deadline = None, "", None
        self._changed.notify_all()

    def _sealed_by_all(self) -> SealedStep | None:
        """What all ranks of the last world sealed, where it ended in order."""
        named = {seat.checkpoint for seat in self.members}
        return named.pop() if self._want is NoticeKind.RESIZE and len(named) == 1 else None

    def _notice(self) -> ControlNotice | None:
        if self._want is None:
            return None
        left = None if self._deadline is None else max(0.0, self._deadline - self._clock())
        return ControlNotice(self.epoch, self._want, self._reason, left)

    def _expire(self) -> None:
        """Who has not stopped by the deadline is lost; not those who only waited for it."""
        if self._deadline is not None and self._clock() >= self._deadline:
            self._deadline = None
            silent = [one for one in self._inside() if one.paused_step is None]
            for seat in silent or [one for one in self._inside() if one.sealed_step is None]:
                self._lose(seat, f"rank {seat.rank} did not stop in time")

    def _wait(self, happened: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        until = None if timeout_s is None else self._clock() + timeout_s
        while True:
            self._expire()
            if happened():
                return
            limits = [limit - self._clock() for limit in (until, self._deadline) if limit is not None]
            if until is not None and self._clock() >= until:
                raise ControlDeadlineError(f"{what} within {timeout_s:g} s")
            self._changed.wait(max(0.0, min(limits)) if limits else None)


class InMemoryControlPlane:
    """One rank's :class:`~elastic.control.control_plane.ControlPlane`. Its public attributes are for tests to look
    at.
    """

    def __init__(self, plane: InMemoryCoordinator) -> None:
        self.assignment: RankAssignment | None = None
        self.is_alive = True
        self.is_waiting = False
        self.is_dismissed = False
        self.is_draining = False
        """Its machine was preempted: others go first where there is a place."""
        self.is_finished = False
        self.paused_step: int | None = None
        self.sealed_step: int | None = None
        self.checkpoint: SealedStep | None = None
        """Where the sealed state is, as this rank said."""
        self.last_progress: RankProgress | None = None
        self.faults: list[str] = []
        self._plane = plane
        self._calls: list[BrokenCallback] = []

    @property
    def epoch(self) -> int:
        return -1 if self.assignment is None else self.assignment.epoch

    @property
    def rank(self) -> int:
        return -1 if self.assignment is None else self.assignment.rank

    # -- ControlPlane -------------------------------------------------------------------------------------------------

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        plane, before = self._plane, self.epoch
        with plane._changed:
            if not self._is_out and not self.is_finished and self.sealed_step is None:
                plane._break(f"rank {self.rank} came back without being asked")
            self.is_waiting = True
            try:
                plane._form()
                plane._changed.notify_all()
                plane._wait(lambda: self.epoch > before or self._is_over, timeout_s, "there was no world")
            finally:
                self.is_waiting = False
            if self.epoch > before and self.assignment is not None:
                return self.assignment
            if plane.failure:
                raise JobFailedError(plane.failure)
            raise Dismissed(plane._reason or "this process is not needed any more")

    def notice(self) -> ControlNotice | None:
        plane = self._plane
        if plane._want is None or self._is_out:
            return None
        with plane._changed:
            plane._expire()
            return None if self._is_out else plane._notice()

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        plane = self._plane
        with plane._changed:
            self._check()
            if self.paused_step is None:
                self.paused_step = step
            plane._changed.notify_all()
            plane._wait(lambda: self._is_stale or self._target() is not None, timeout_s, "not all others paused")
            self._check()
            target = self._target()
            assert target is not None  # noqa: S101 - what was waited for
            return target

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        with self._plane._changed:
            self._check()
            self.sealed_step, self.checkpoint = step, checkpoint
            self._plane._changed.notify_all()

    def report_progress(self, progress: RankProgress) -> None:
        self.last_progress = progress

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        with self._plane._changed:
            if not self.is_alive or self._is_out:
                raise StaleEpochError(f"epoch {self.epoch} is of the past: {reason!r} was not heard")
            self.faults.append(reason)
            if final:
                self._plane.failure = f"the job failed: rank {self.rank}: {reason}"
            self._plane._break(f"rank {self.rank}: {reason}")

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """``RESIZE`` without ``nodes`` and with a deadline: this seat's machine is preempted."""
        plane = self._plane
        if want is NoticeKind.RESTART:
            plane.restart(reason)
        elif want is NoticeKind.STOP:
            plane.stop(reason, deadline_s=deadline_s)
        elif nodes is not None:
            plane.resize(nodes, reason, deadline_s=deadline_s)
        else:
            with plane._changed:
                size = plane.size
                if deadline_s is not None:
                    self.is_draining = True
                    others = [one for one in plane.planes if one.is_alive and not one.is_draining]
                    size = max(1, min(size, len(others)))
                plane.resize(size, reason, deadline_s=deadline_s)

    def on_broken(self, call: BrokenCallback) -> None:
        with self._plane._changed:
            self._calls.append(call)
            notice = self._plane._notice()
            if notice is not None and notice.kind is NoticeKind.RESTART and not self._is_out:
                self.notify_broken(notice, call)

    def report_finished(self) -> None:
        with self._plane._changed:
            self._check()
            self.is_finished = True
            self._plane._form()
            self._plane._changed.notify_all()

    def close(self) -> None:
        with self._plane._changed:
            if self.is_alive and not self._is_out and not self.is_finished and not self._may_go:
                self._plane._lose(self, f"rank {self.rank} ended")
            self.is_alive = False
            self._plane._form()
            self._plane._changed.notify_all()

    # -- inside -------------------------------------------------------------------------------------------------------

    def assign(self, assignment: RankAssignment) -> None:
        self.assignment = assignment
        self.is_waiting = self.is_finished = False
        self.paused_step = self.sealed_step = self.checkpoint = None

    def notify_broken(self, notice: ControlNotice, *calls: BrokenCallback) -> None:
        def run() -> None:
            for call in calls or tuple(self._calls):
                call(notice)

        if self._calls:
            threading.Thread(target=run, name="elastic-broken", daemon=True).start()

    @property
    def _is_out(self) -> bool:
        """It is in no world, or in one of the past."""
        return self.is_waiting or self.epoch < 0 or self.epoch != self._plane.epoch

    @property
    def _is_stale(self) -> bool:
        return not self.is_alive or self._is_out or self._plane._want is NoticeKind.RESTART

    @property
    def _is_over(self) -> bool:
        plane = self._plane
        return bool(plane.failure) or plane._stopped or plane.succeeded or self.is_dismissed or not self.is_alive

    @property
    def _may_go(self) -> bool:
        return self._plane._want in (NoticeKind.RESIZE, NoticeKind.STOP) and self.sealed_step is not None

    def _check(self) -> None:
        if self._is_stale:
            raise StaleEpochError(f"epoch {self.epoch} is of the past: {self._plane._reason or 'a newer one is there'}")

    def _target(self) -> int | None:
        """The greatest step said, once all have said one."""
        said = [one.paused_step for one in self._plane.members if not one.is_finished]
        return None if None in said else max(step for step in said if step is not None)


def _kept(chosen: list[InMemoryControlPlane]) -> list[InMemoryControlPlane]:
    """Seats in order of their new ranks: who had a rank that there still is keeps it."""
    places: dict[int, InMemoryControlPlane] = {}
    others = []
    for seat in chosen:
        if 0 <= seat.rank < len(chosen) and seat.rank not in places:
            places[seat.rank] = seat
        else:
            others.append(seat)
    free = iter(others)
    return [places[rank] if rank in places else next(free) for rank in range(len(chosen))]
