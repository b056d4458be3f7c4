"""In-process restart mode: a ControlPlane that keeps the process, and the rendezvous of the ranks of one start.

The agent knows a barrier, a start and a fault. What it does not know, a stop at a common step, the ranks agree on
among themselves: over the store of their start, as they do under ``torchrun``.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping

import torch.distributed as dist

from elastic.control.control_plane import ControlNotice, Dismissed, NoticeKind, RankAssignment, RankProgress
from elastic.control.hang_detector import HangTimeouts, StepTimes
from elastic.errors import (
    ControlDeadlineError,
    ControlPlaneUnavailableError,
    ElasticError,
    JobFailedError,
    StaleEpochError,
)
from elastic.settings import abort_timeout_in, hang_limits_in
from elastic.workers.launch_environment import assignment_from_environ, connect_store, start_store_server
from elastic.workers.process_groups import parse_store_address
from elastic.workers.store_control_plane import StoreControlPlane, pauses_s
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import ErrorPosition, SealedStep
from integration.hyperpod.elastic_agent.ipc import RequestedRestart
from integration.hyperpod.elastic_agent.worker_client import (
    AgentWorker,
    JobStart,
    choose_restart_mode,
    repeat_offender_labels,
)

log = logging.getLogger(__name__)

_FAREWELL_S = 10.0
_STORE_OWNER = "ElasticWorld"
"""The reason of what is asked for by the ranks together, in the job's status."""


class InProcessControlPlane:
    """``policy``: how often this process may be started anew before it asks for others; only that is read of it."""

    def __init__(
        self,
        worker: AgentWorker,
        *,
        environ: MutableMapping[str, str] = os.environ,
        policy: ScalingPolicy | None = None,
        limits: HangTimeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._limits = hang_limits_in(environ) if limits is None else limits
        self._pace = StepTimes()
        """Of the job, as this process has seen it."""
        self._environ = environ
        self._policy = policy or ScalingPolicy()
        self._clock = clock
        self._changed = threading.Condition()
        self._servers = RendezvousStore()
        self._inner: StoreControlPlane | None = None
        """Of the world that this rank is in, or on its way into."""
        self._place: RankAssignment | None = None
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
        self._calls: list[Callable[[ControlNotice], None]] = []
        worker.add_fault_callback(self._left)

    # -- ControlPlane -------------------------------------------------------------------------------------------------

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._leave(until)
        while True:
            if self._over is not None:
                raise self._over
            start, faults = self._worker.wait_at_barrier(timeout_s=_remaining_s(until))
            self._environ.update(start.environ)
            if start.is_spare:
                log.info("kept as a spare; it is told when it is needed")
                continue
            try:
                return self._enter(start, faults, until)
            except (StaleEpochError, ControlPlaneUnavailableError, ControlDeadlineError) as error:
                if self._worker.lost_reason:
                    raise
                log.info("start number %d came to nothing: %s", start.restart_count, error)
                self._ask_again(str(error))
                if isinstance(error, ControlDeadlineError):
                    raise

    def notice(self) -> ControlNotice | None:
        inner = self._inner
        return inner.notice() if inner is not None and self._inside else None

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        return self._here().agree_on_step(step, timeout_s=timeout_s)

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        inner = self._here()
        inner.report_sealed(step, checkpoint=checkpoint, timeout_s=timeout_s)
        notice = inner.notice()
        self._sealed = True
        self._stopped = notice is not None and notice.kind is NoticeKind.STOP

    def report_progress(self, progress: RankProgress) -> None:
        """For the other ranks: the agent is told of checkpoints, not of steps."""
        inner = self._inner
        if inner is not None and self._inside:
            inner.report_progress(progress)

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        """The agent first, since it forgets nothing; then the other ranks, which need not wait for the operator."""
        inner, place = self._here(), self._place
        assert place is not None  # noqa: S101 - it is in a world
        now = self._clock()
        self._own_faults.append(now)
        labels = repeat_offender_labels(self._policy, self._own_faults, now)
        if labels:
            self._worker.set_health_labels(labels)
        if final:
            self._over = JobFailedError(f"another attempt would end the same way: {reason}")
        if not self._is_taken_back:
            self._ask("WorkerFault", reason, choose_restart_mode(self._policy, self._starts, now, final=final))
        try:
            inner.report_fault(reason)
        except (ControlPlaneUnavailableError, StaleEpochError) as error:
            log.info("the other ranks hear of it from the agent: %s", error)
        inner.mark_broken(f"rank {place.rank}: {reason}")

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """How many nodes there are next is up to the operator: it is asked for another start when all have stopped."""
        inner = self._inner
        if inner is None or not self._inside:
            raise ControlPlaneUnavailableError(f"{reason}: this process is in no world")
        inner.request_change(want, reason, deadline_s=deadline_s, nodes=nodes)

    def on_broken(self, call: Callable[[ControlNotice], None]) -> None:
        with self._changed:
            self._calls.append(call)
            notice = self.notice()
        if notice is not None and notice.kind is NoticeKind.RESTART:
            threading.Thread(target=call, args=(notice,), name="hyperpod-broken", daemon=True).start()

    def report_finished(self) -> None:
        """Returns when all ranks have."""
        inner = self._here()
        inner.report_finished()
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

    def _farewell(self, inner: StoreControlPlane) -> None:
        """All ranks have ended well. Who keeps the store stays until they have all heard it."""
        try:
            inner.gather("left", wait=False)
        except ControlPlaneUnavailableError as error:
            log.info("nobody is there to take leave of: %s", error)
            return
        if self._servers.is_serving:
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
            elif notice is not None and notice.kind is NoticeKind.RESTART:
                self._starts.append(self._clock())
            reason = notice.reason if notice is not None else "left without being asked"
            self._ask_again(f"{notice.kind.value}: {reason}" if notice is not None else reason)
        inner.close()

    def _wait_for_all_to_seal(self, inner: StoreControlPlane, until: float | None) -> None:
        """The operator stops everybody as soon as it is asked: also who is still on the way to the common step."""
        notice = inner.notice()
        if notice is not None and notice.deadline_s is not None:
            deadline = time.monotonic() + notice.deadline_s
            until = deadline if until is None else min(until, deadline)
        try:
            inner.gather("sealed", timeout_s=_remaining_s(until))
        except ElasticError as error:
            log.info("not all ranks have sealed the common step: %s", error)

    def _enter(self, start: JobStart, faults: int, until: float | None) -> RankAssignment:
        least = max(start.restart_count, -1 if self._place is None else self._place.epoch + 1)
        place = _assignment(self._environ, least)
        self._seen_faults, self._asked, self._sealed = faults, False, False
        inner = meet(
            place,
            start.restart_count,
            self._servers,
            is_over=lambda: self._is_taken_back,
            until=until,
            limits=self._limits,
            pace=self._pace,
            leave_s=abort_timeout_in(self._environ),
        )
        inner.on_broken(self._broken)
        with self._changed:
            self._inner = inner
        try:
            if self._is_taken_back:
                raise StaleEpochError("the start was taken back")
            met = inner.wait_for_assignment(timeout_s=_remaining_s(until))
        except BaseException:
            inner.close()
            raise
        with self._changed:
            self._place, self._inside = met, True
            notice = inner.notice()
            if notice is not None and notice.kind is NoticeKind.RESTART:  # on the way in: nobody was told of it yet
                self._inside = False
                raise StaleEpochError(notice.reason)
        return met

    @property
    def _is_taken_back(self) -> bool:
        return self._worker.fault_count > self._seen_faults or bool(self._worker.lost_reason)

    def _ask_again(self, reason: str) -> None:
        if not self._is_taken_back and not self._asked:
            self._ask(_STORE_OWNER, reason, RequestedRestart.IN_PROCESS)

    def _ask(self, reason: str, message: str, mode: RequestedRestart) -> None:
        self._asked = True
        rank = int(self._environ.get("RANK", "0"))
        self._worker.report_fault(rank, mode, reason, message)

    def _here(self) -> StoreControlPlane:
        inner = self._inner
        if inner is None or not self._inside:
            raise StaleEpochError("this process is in no world")
        return inner

    # -- in other threads ---------------------------------------------------------------------------------------------

    def _left(self, reason: str) -> None:
        """Said by the agent, or of it: it is gone."""
        inner = self._inner
        if inner is not None:
            inner.mark_broken(reason)

    def _broken(self, notice: ControlNotice) -> None:
        """On a thread of its own: what aborts a group may wait for this very plane, and others are to be heard."""
        calls = tuple(self._calls)

        def run() -> None:
            for call in calls:
                call(notice)

        if self._inside and calls:
            threading.Thread(target=run, name="hyperpod-broken", daemon=True).start()


def _assignment(environ: Mapping[str, str], epoch: int) -> RankAssignment:
    """What the agent calls the number of groups is the number of ranks."""
    nodes = int(environ["WORLD_SIZE"]) // int(environ.get("LOCAL_WORLD_SIZE", "1"))
    return assignment_from_environ({**environ, "GROUP_WORLD_SIZE": str(nodes)}, epoch=epoch)


def _remaining_s(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


_CONNECT_TIMEOUT_S = 2.0
_FOREIGN_STORE_TIMEOUT_S = 5.0
"""So long a store that somebody else keeps may not answer yet."""


class RendezvousStore:
    """The store that this process keeps, from one start to the next where the address is the same."""

    def __init__(self) -> None:
        self._address = ""
        self._server: dist.TCPStore | None = None

    def serve(self, address: str) -> None:
        if address == self._address:
            return
        self.close()
        host, port = parse_store_address(address)
        try:
            self._server = start_store_server(host, port)
        except RuntimeError as error:
            # A process that was the first rank before keeps one there. Every start has its own names in it.
            log.info("the store at %s is kept by somebody else: %s", address, error)
            return
        self._address = address

    @property
    def is_serving(self) -> bool:
        return self._server is not None

    def close(self) -> None:
        self._address, self._server = "", None


def meet(
    place: RankAssignment,
    count: int,
    servers: RendezvousStore,
    *,
    is_over: Callable[[], bool],
    until: float | None,
    limits: HangTimeouts,
    pace: StepTimes,
    leave_s: float,
) -> StoreControlPlane:
    """What the ranks of one start say to each other. Who cannot be reached yet is waited for.

    ``is_over`` says whether this process knows by now that it was for nothing. Where the first rank cannot keep a
    store, and nobody does, there never will be one: another start is needed, which has another address.
    """
    first, address = place.rank == 0, parse_store_address(place.store)
    if first:
        servers.serve(place.store)
    taken_until = time.monotonic() + _FOREIGN_STORE_TIMEOUT_S
    for pause_s in pauses_s():
        if _answers(address):
            break
        if is_over():
            raise StaleEpochError("the start was taken back")
        if until is not None and time.monotonic() > until:
            raise ControlDeadlineError(f"no store answers at {place.store}, where the first rank is to keep one")
        if first and not servers.is_serving and time.monotonic() > taken_until:
            raise ControlPlaneUnavailableError(f"{place.store} is taken, and no store answers there")
        time.sleep(pause_s)
    try:
        return StoreControlPlane(
            lambda: connect_store(*address),
            place,
            last=False,
            prefix=f"hyperpod/{count}/",
            limits=limits,
            pace=pace,
            leave_s=leave_s,
        )
    except RuntimeError as error:
        raise ControlPlaneUnavailableError(f"the store at {place.store} does not answer: {error}") from error


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
