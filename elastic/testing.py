"""An in-memory coordinator and control plane, for tests and for scripts without processes.

::

    coordinator = InMemoryCoordinator(2)
    threads = [Thread(target=train, args=(plane,)) for plane in coordinator.planes]     # each one is a ControlPlane
    coordinator.resize(3, "one more node")
    Thread(target=train, args=(coordinator.add_rank(),)).start()
    coordinator.lose_rank(coordinator.planes[1])

Every plane is one rank on a separate node. The coordinator starts and ends no processes. It forms a world as soon as
enough planes wait in ``wait_for_assignment``. Planes of the last world come first and keep their ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from elastic.control.control_plane import ControlNotice, Dismissed, NoticeKind, RankAssignment, RankProgress
from elastic.control.epoch_state import (
    BrokenCallback,
    BrokenCallbacks,
    EpochState,
    common_checkpoint,
    stale_epoch,
)
from elastic.control.leader_election import LEASE_DURATION_S, LeaderRecord
from elastic.errors import ControlDeadlineError, JobFailedError, PolicyError
from elastic.world.world_state import ErrorPosition, SealedStep


class MemoryLeadership:
    """Leader record of one job in memory, for candidates in one process."""

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
        """Do nothing: no resource is open."""


class InMemoryCoordinator:
    """Coordinator of one job. A world has ``size`` ranks; other planes wait as spares or are dismissed."""

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
        """Why the job failed, or ""."""
        self._keep_spares = keep_spares
        self._store, self._stores = store, stores
        self._clock = clock
        self._changed = threading.Condition()
        self._state = EpochState()
        self._stopped = False
        self.planes = [InMemoryControlPlane(self) for _ in range(size + spares)]

    # -- actions ------------------------------------------------------------------------------------------------------

    def add_rank(self) -> InMemoryControlPlane:
        """Add a plane that does not wait for an assignment yet, and return it."""
        with self._changed:
            plane = InMemoryControlPlane(self)
            self.planes.append(plane)
            return plane

    def resize(self, size: int, reason: str = "resized", *, deadline_s: float | None = None) -> None:
        """Set the size of the next world, and stop the ranks of this one at a common step."""
        if size < 1:
            raise PolicyError(f"size={size}: a world has at least one rank")
        with self._changed:
            self.size = size
            self._set_notice(NoticeKind.RESIZE, reason, deadline_s)

    def stop(self, reason: str = "stopped", *, deadline_s: float | None = None) -> None:
        """Stop the ranks at a common step. ``wait_for_assignment`` dismisses all ranks from now on."""
        with self._changed:
            self._stopped = True
            self._set_notice(NoticeKind.STOP, reason, deadline_s)

    def restart(self, reason: str = "restarted") -> None:
        """Break the world without a fault of a rank."""
        with self._changed:
            self._break(reason)

    def lose_rank(self, seat: InMemoryControlPlane, reason: str = "") -> None:
        """Treat the process of ``seat`` as lost, and discard its later calls."""
        with self._changed:
            self._lose(seat, reason or f"rank {seat.rank} was lost")

    def fail(self, reason: str) -> None:
        with self._changed:
            self.failure = reason
            self._break(reason)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[InMemoryControlPlane]:
        """Planes of the current world by rank, including planes that are lost or have left it."""
        return sorted((one for one in self.planes if one.epoch == self.epoch >= 0), key=lambda one: one.rank)

    @property
    def succeeded(self) -> bool:
        """Whether every rank of the world has finished."""
        members = self.members
        return bool(members) and all(one.is_finished for one in members)

    def wait_for(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``happened``, checked at every change. Return False after ``timeout_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(happened, timeout_s)

    # -- internal, with the lock held ---------------------------------------------------------------------------------

    def _set_notice(self, want: NoticeKind, reason: str, deadline_s: float | None) -> None:
        self._state = self._state.change(want, reason, None if deadline_s is None else self._clock() + deadline_s)
        self._form()
        self._changed.notify_all()

    def _break(self, reason: str) -> None:
        if not self._state.is_broken and self._inside():
            self.restarts += 1
            self._state = self._state.change(NoticeKind.RESTART, reason)
            for plane in self.members:
                if plane.is_alive:
                    plane.notify_broken()
        self._form()
        self._changed.notify_all()

    def _lose(self, plane: InMemoryControlPlane, reason: str) -> None:
        was_inside = plane in self._inside()
        plane.is_alive = False
        if was_inside:
            self._break(reason)
        self._form()
        self._changed.notify_all()

    def _inside(self) -> list[InMemoryControlPlane]:
        """Members that have not left the world of this epoch."""
        return [one for one in self.members if one.is_alive and not one.is_waiting and not one.is_finished]

    def _form(self) -> None:
        """Form the next world if all ranks have left this one and enough planes wait."""
        if self.failure or self._stopped or self.succeeded or self._inside():
            return
        waiting = [one for one in self.planes if one.is_waiting and one.is_alive]
        if len(waiting) < self.size:
            return
        waiting.sort(key=lambda one: (one.epoch < 0 or one.is_draining, one.rank))
        chosen, others = waiting[: self.size], waiting[self.size :]
        sealed, reason = self._sealed_by_all(), self._state.reason
        self.epoch += 1
        self._state = EpochState(self.epoch)
        for rank, plane in enumerate(_in_rank_order(chosen)):
            assignment = RankAssignment(self.epoch, rank, self.size, 0, 1, rank, self.size, self._store, self.restarts)
            plane.assign(msgspec.structs.replace(assignment, reason=reason, stores=self._stores, resume_from=sealed))
        for plane in others:
            plane.is_dismissed = plane.is_draining or not self._keep_spares
        self._changed.notify_all()

    def _sealed_by_all(self) -> SealedStep | None:
        """Return the step that all ranks of the last world sealed, if it ended in order."""
        change = self._state.current_change
        if change is None or change.kind is not NoticeKind.RESIZE:
            return None
        return common_checkpoint(plane.checkpoint for plane in self.members)

    @property
    def _deadline(self) -> float | None:
        change = self._state.current_change
        return None if change is None else change.until

    def _report_paused(self) -> None:
        """Set the target once all unfinished ranks have reported a step."""
        self._state = self._state.agree(plane.paused_step for plane in self.members if not plane.is_finished)
        self._changed.notify_all()

    def _expire(self) -> None:
        """After the deadline, lose the ranks that have not stopped, but not those that waited for them."""
        pause = self._state.pause
        if pause is not None and self._deadline is not None and self._clock() >= self._deadline:
            self._state = msgspec.structs.replace(self._state, pause=msgspec.structs.replace(pause, until=None))
            silent = [one for one in self._inside() if one.paused_step is None]
            for plane in silent or [one for one in self._inside() if one.sealed_step is None]:
                self._lose(plane, f"rank {plane.rank} did not stop in time")

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
    """Control plane of one rank. Tests may read its public attributes."""

    def __init__(self, plane: InMemoryCoordinator) -> None:
        self.assignment: RankAssignment | None = None
        self.is_alive = True
        self.is_waiting = False
        self.is_dismissed = False
        self.is_draining = False
        """Whether its machine is preempted, so that other planes are assigned first."""
        self.is_finished = False
        self.paused_step: int | None = None
        self.sealed_step: int | None = None
        self.checkpoint: SealedStep | None = None
        """Step that contains the sealed state, as this rank reported it."""
        self.last_progress: RankProgress | None = None
        self.faults: list[str] = []
        self._coordinator = plane
        self._broken_callbacks = BrokenCallbacks()

    @property
    def epoch(self) -> int:
        return -1 if self.assignment is None else self.assignment.epoch

    @property
    def rank(self) -> int:
        return -1 if self.assignment is None else self.assignment.rank

    # -- ControlPlane -------------------------------------------------------------------------------------------------

    @property
    def restarts_processes(self) -> bool:
        return False

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        coordinator, before = self._coordinator, self.epoch
        with coordinator._changed:
            if not self._is_outside and not self.is_finished and self.sealed_step is None:
                coordinator._break(f"rank {self.rank} left its world without a reported fault")
            self.is_waiting = True
            try:
                coordinator._form()
                coordinator._changed.notify_all()
                coordinator._wait(lambda: self.epoch > before or self._is_over, timeout_s, "there was no world")
            finally:
                self.is_waiting = False
            if self.epoch > before and self.assignment is not None:
                return self.assignment
            if coordinator.failure:
                raise JobFailedError(coordinator.failure)
            raise Dismissed(coordinator._state.reason or "this process is not needed any more")

    def notice(self) -> ControlNotice | None:
        coordinator = self._coordinator
        if coordinator._state.current_change is None or self._is_outside:
            return None
        with coordinator._changed:
            coordinator._expire()
            return self._notice()

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        coordinator = self._coordinator
        with coordinator._changed:
            self._check_epoch()
            if self.paused_step is None:
                self.paused_step = step
            coordinator._report_paused()
            coordinator._wait(
                lambda: self._is_stale or coordinator._state.target is not None, timeout_s, "not all others paused"
            )
            self._check_epoch()
            target = coordinator._state.target
            assert target is not None  # noqa: S101 - what was waited for
            return target

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        with self._coordinator._changed:
            self._check_epoch()
            self.sealed_step, self.checkpoint = step, checkpoint
            self._coordinator._changed.notify_all()

    def report_progress(self, progress: RankProgress) -> None:
        self.last_progress = progress

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        with self._coordinator._changed:
            if not self.is_alive or self._is_outside:
                raise stale_epoch(self.epoch, f"{reason!r} was not reported")
            self.faults.append(reason)
            if final:
                self._coordinator.failure = f"the job failed: rank {self.rank}: {reason}"
            self._coordinator._break(f"rank {self.rank}: {reason}")

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        coordinator = self._coordinator
        if want is NoticeKind.RESTART:
            coordinator.restart(reason)
        elif want is NoticeKind.STOP:
            coordinator.stop(reason, deadline_s=deadline_s)
        elif nodes is not None:
            coordinator.resize(nodes, reason, deadline_s=deadline_s)
        else:
            with coordinator._changed:
                size = coordinator.size
                if deadline_s is not None:
                    self.is_draining = True
                    others = [one for one in coordinator.planes if one.is_alive and not one.is_draining]
                    size = max(1, min(size, len(others)))
                coordinator.resize(size, reason, deadline_s=deadline_s)

    def on_broken(self, call: BrokenCallback) -> None:
        with self._coordinator._changed:
            self._broken_callbacks.add(call, self._notice())

    def report_finished(self) -> None:
        with self._coordinator._changed:
            self._check_epoch()
            self.is_finished = True
            self._coordinator._report_paused()
            self._coordinator._form()
            self._coordinator._changed.notify_all()

    def close(self) -> None:
        with self._coordinator._changed:
            if self.is_alive and not self._is_outside and not self.is_finished and not self._has_stopped:
                self._coordinator._lose(self, f"rank {self.rank} ended")
            self.is_alive = False
            self._coordinator._form()
            self._coordinator._changed.notify_all()

    # -- internal -----------------------------------------------------------------------------------------------------

    def assign(self, assignment: RankAssignment) -> None:
        self.assignment = assignment
        self.is_waiting = self.is_finished = False
        self.paused_step = self.sealed_step = self.checkpoint = None

    def notify_broken(self) -> None:
        """Run the callbacks of this rank, which is in the broken world."""
        self._broken_callbacks.run(self._coordinator._state.notice(self._coordinator._clock()))

    def _notice(self) -> ControlNotice | None:
        return None if self._is_outside else self._coordinator._state.notice(self._coordinator._clock())

    @property
    def _is_outside(self) -> bool:
        """Whether this rank is in no world, or in an earlier one."""
        return self.is_waiting or self.epoch < 0 or self.epoch != self._coordinator.epoch

    @property
    def _is_stale(self) -> bool:
        return not self.is_alive or self._is_outside or self._coordinator._state.is_broken

    @property
    def _is_over(self) -> bool:
        coordinator = self._coordinator
        return (
            bool(coordinator.failure)
            or coordinator._stopped
            or coordinator.succeeded
            or self.is_dismissed
            or not self.is_alive
        )

    @property
    def _has_stopped(self) -> bool:
        state = self._coordinator._state
        return state.pause is not None and not state.is_broken and self.sealed_step is not None

    def _check_epoch(self) -> None:
        if self._is_stale:
            raise stale_epoch(self.epoch, self._coordinator._state.reason or "a newer one exists")


def _in_rank_order(chosen: list[InMemoryControlPlane]) -> list[InMemoryControlPlane]:
    """Return the planes in the order of their new ranks. A plane keeps a rank that still exists."""
    by_rank: dict[int, InMemoryControlPlane] = {}
    others = []
    for plane in chosen:
        if 0 <= plane.rank < len(chosen) and plane.rank not in by_rank:
            by_rank[plane.rank] = plane
        else:
            others.append(plane)
    free = iter(others)
    return [by_rank[rank] if rank in by_rank else next(free) for rank in range(len(chosen))]
