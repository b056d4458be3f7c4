"""A rank's :class:`~elastic.control.plane.ControlPlane` under an agent that restarts it without ending it.

The agent knows a barrier, a start and a fault. What it does not know, a stop at a common step, the ranks agree on
among themselves: over the store of their start, as they do under ``torchrun``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping

from elastic.control.movement import HangLimits, Pace
from elastic.control.plane import Assignment, Dismissed, Notice, Progress, Want
from elastic.control.settings import hang_limits_in
from elastic.errors import ControlLostError, DeadlineError, ElasticError, GaveUpError, StaleEpochError
from elastic.workers.launched import place_in
from elastic.workers.store_plane import StorePlane
from elastic.world.policy import ScalingPolicy
from integration.hyperpod.agent.escalating import health_labels, restart_mode
from integration.hyperpod.agent.meeting import Servers, meet
from integration.hyperpod.agent.words import RestartMode
from integration.hyperpod.agent.worker import Start, Worker

log = logging.getLogger(__name__)

_FAREWELL_S = 10.0
_OURS = "ElasticWorld"
"""The reason of what is asked for by the ranks together, in the job's status."""


class AgentPlane:
    """``policy``: how often this process may be started anew before it asks for others; only that is read of it."""

    def __init__(
        self,
        worker: Worker,
        *,
        environ: MutableMapping[str, str] = os.environ,
        policy: ScalingPolicy | None = None,
        limits: HangLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._limits = hang_limits_in(environ) if limits is None else limits
        self._pace = Pace()
        """Of the job, as this process has seen it."""
        self._environ = environ
        self._policy = policy or ScalingPolicy()
        self._clock = clock
        self._changed = threading.Condition()
        self._servers = Servers()
        self._inner: StorePlane | None = None
        """Of the world that this rank is in, or on its way into."""
        self._place: Assignment | None = None
        """The newest one."""
        self._inside = False
        self._seen_faults = 0
        """The agent's, before the newest start."""
        self._asked = False
        """The agent knows from this rank that the newest world is over."""
        self._over: Exception | None = None
        self._sealed = self._stopped = self._finished = self._closed = False
        self._starts: list[float] = []
        """When faults made this process leave a world."""
        self._own_faults: list[float] = []
        self._calls: list[Callable[[Notice], None]] = []
        worker.on_fault(self._left)

    # -- ControlPlane -------------------------------------------------------------------------------------------------

    def ready(self, *, timeout_s: float | None = None) -> Assignment:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._leave(until)
        while True:
            if self._over is not None:
                raise self._over
            start, faults = self._worker.barrier(timeout_s=_left(until))
            self._environ.update(start.environ)
            if start.is_spare:
                log.info("kept as a spare; it is told when it is needed")
                continue
            try:
                return self._enter(start, faults, until)
            except (StaleEpochError, ControlLostError, DeadlineError) as error:
                if self._worker.lost:
                    raise
                log.info("start number %d came to nothing: %s", start.count, error)
                self._ask_again(str(error))
                if isinstance(error, DeadlineError):
                    raise

    def notice(self) -> Notice | None:
        inner = self._inner
        return inner.notice() if inner is not None and self._inside else None

    def pause(self, step: int, *, timeout_s: float | None = None) -> int:
        return self._here().pause(step, timeout_s=timeout_s)

    def sealed(self, step: int, *, timeout_s: float | None = None) -> None:
        inner = self._here()
        inner.sealed(step, timeout_s=timeout_s)
        notice = inner.notice()
        self._sealed = True
        self._stopped = notice is not None and notice.want is Want.STOP

    def progress(self, progress: Progress) -> None:
        """For the other ranks: the agent is told of checkpoints, not of steps."""
        inner = self._inner
        if inner is not None and self._inside:
            inner.progress(progress)

    def fault(self, reason: str, *, final: bool = False) -> None:
        """The agent first, since it forgets nothing; then the other ranks, which need not wait for the operator."""
        inner, place = self._here(), self._place
        assert place is not None  # noqa: S101 - it is in a world
        now = self._clock()
        self._own_faults.append(now)
        labels = health_labels(self._policy, self._own_faults, now)
        if labels:
            self._worker.label(labels)
        if final:
            self._over = GaveUpError(f"another attempt would end the same way: {reason}")
        if not self._is_taken_back:
            self._ask("WorkerFault", reason, restart_mode(self._policy, self._starts, now, final=final))
        try:
            inner.fault(reason)
        except (ControlLostError, StaleEpochError) as error:
            log.info("the other ranks hear of it from the agent: %s", error)
        inner.end(f"rank {place.rank}: {reason}")

    def request(self, want: Want, reason: str, *, deadline_s: float | None = None, nodes: int | None = None) -> None:
        """How many nodes there are next is up to the operator: it is asked for another start when all have stopped."""
        inner = self._inner
        if inner is None or not self._inside:
            raise ControlLostError(f"{reason}: this process is in no world")
        inner.request(want, reason, deadline_s=deadline_s, nodes=nodes)

    def on_broken(self, call: Callable[[Notice], None]) -> None:
        with self._changed:
            self._calls.append(call)
            notice = self.notice()
        if notice is not None and notice.want is Want.RESTART:
            threading.Thread(target=call, args=(notice,), name="hyperpod-broken", daemon=True).start()

    def finished(self) -> None:
        """Returns when all ranks have."""
        inner = self._here()
        inner.finished()
        inner.gather("finished")
        self._finished = True

    def close(self) -> None:
        """The connection stays as long as this process where it has ended well: else it would be taken for lost."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            inner = self._inner
        well = self._finished or self._stopped
        if inner is not None:
            if well:
                self._farewell(inner)
            inner.close()
        self._servers.close()
        if not well:
            self._worker.close()

    def _farewell(self, inner: StorePlane) -> None:
        """All ranks have ended well. Who keeps the store stays until they have all heard it."""
        try:
            inner.gather("left", wait=False)
        except ControlLostError as error:
            log.info("nobody is there to take leave of: %s", error)
            return
        if self._servers.is_kept:
            inner.has_gathered("left", timeout_s=_FAREWELL_S)

    # -- from one world to the next -----------------------------------------------------------------------------------

    def _leave(self, until: float | None) -> None:
        """This rank is in no world any more. Where the agent does not know that it is over, it is told."""
        with self._changed:
            inner, place, was_inside = self._inner, self._place, self._inside
            self._inside = False
        if inner is None or place is None:
            return
        notice = inner.notice()
        if self._finished or self._stopped:
            self._over = Dismissed("this rank has ended as it was asked to")
        elif was_inside and self._over is None:
            if self._sealed:
                self._wait_for_all_to_seal(inner, until)
            elif notice is not None and notice.want is Want.RESTART:
                self._starts.append(self._clock())
            reason = notice.reason if notice is not None else "left without being asked"
            self._ask_again(f"{notice.want.value}: {reason}" if notice is not None else reason)
        inner.close()

    def _wait_for_all_to_seal(self, inner: StorePlane, until: float | None) -> None:
        """The operator stops everybody as soon as it is asked: also who is still on the way to the common step."""
        notice = inner.notice()
        if notice is not None and notice.deadline_s is not None:
            deadline = time.monotonic() + notice.deadline_s
            until = deadline if until is None else min(until, deadline)
        try:
            inner.gather("sealed", timeout_s=_left(until))
        except ElasticError as error:
            log.info("not all ranks have sealed the common step: %s", error)

    def _enter(self, start: Start, faults: int, until: float | None) -> Assignment:
        least = max(start.count, -1 if self._place is None else self._place.epoch + 1)
        place = _place(self._environ, least)
        self._seen_faults, self._asked, self._sealed = faults, False, False
        inner = meet(
            place,
            start.count,
            self._servers,
            is_over=lambda: self._is_taken_back,
            until=until,
            limits=self._limits,
            pace=self._pace,
        )
        inner.on_broken(self._broken)
        with self._changed:
            self._inner = inner
        try:
            if self._is_taken_back:
                raise StaleEpochError("the start was taken back")
            met = inner.ready(timeout_s=_left(until))
        except BaseException:
            inner.close()
            raise
        with self._changed:
            self._place, self._inside = met, True
            notice = inner.notice()
            if notice is not None and notice.want is Want.RESTART:  # on the way in: nobody was told of it yet
                self._inside = False
                raise StaleEpochError(notice.reason)
        return met

    @property
    def _is_taken_back(self) -> bool:
        return self._worker.faults > self._seen_faults or bool(self._worker.lost)

    def _ask_again(self, reason: str) -> None:
        if not self._is_taken_back and not self._asked:
            self._ask(_OURS, reason, RestartMode.IN_PROCESS)

    def _ask(self, reason: str, message: str, mode: RestartMode) -> None:
        self._asked = True
        rank = int(self._environ.get("RANK", "0"))
        self._worker.fault(rank, mode, reason, message)

    def _here(self) -> StorePlane:
        inner = self._inner
        if inner is None or not self._inside:
            raise StaleEpochError("this process is in no world")
        return inner

    # -- in other threads ---------------------------------------------------------------------------------------------

    def _left(self, reason: str) -> None:
        """Said by the agent, or of it: it is gone."""
        inner = self._inner
        if inner is not None:
            inner.end(reason)

    def _broken(self, notice: Notice) -> None:
        """On a thread of its own: what aborts a group may wait for this very plane, and others are to be heard."""
        calls = tuple(self._calls)

        def run() -> None:
            for call in calls:
                call(notice)

        if self._inside and calls:
            threading.Thread(target=run, name="hyperpod-broken", daemon=True).start()


def _place(environ: Mapping[str, str], epoch: int) -> Assignment:
    """What the agent calls the number of groups is the number of ranks."""
    nodes = int(environ["WORLD_SIZE"]) // int(environ.get("LOCAL_WORLD_SIZE", "1"))
    return place_in({**environ, "GROUP_WORLD_SIZE": str(nodes)}, epoch=epoch)


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
