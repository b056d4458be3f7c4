"""In-process restart mode: a ControlPlane that retains the process, and the ranks' rendezvous.

The agent's protocol has a barrier, a start and a fault. The ranks implement stops at a common step over the store of
their start, as under ``torchrun``.
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
from elastic.control.epoch_state import BrokenCallback, BrokenCallbacks
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
from integration.hyperpod.elastic_agent.worker_client import (
    AgentWorker,
    JobStart,
    choose_restart_mode,
    repeat_offender_labels,
)
from integration.hyperpod.job_resource import RestartMode

log = logging.getLogger(__name__)

_EXIT_WAIT_S = 10.0
_WORLD_REASON = "ElasticWorld"
"""Reason, in the job's status, of restarts that the ranks request together."""


class InProcessControlPlane:
    """Control plane of one rank under an in-process agent.

    Of ``policy`` only the limit of restarts of this process is used.
    """

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
        """Step times of the job, as measured by this process."""
        self._environ = environ
        self._policy = policy or ScalingPolicy()
        self._clock = clock
        self._changed = threading.Condition()
        self._servers = RendezvousStore()
        self._inner: StoreControlPlane | None = None
        """Control plane of the world that this rank is in or enters."""
        self._place: RankAssignment | None = None
        """The newest assignment."""
        self._inside = False
        self._seen_faults = 0
        """The agent's fault count before the newest start."""
        self._asked = False
        """Whether the agent received a restart request of this rank for the newest world."""
        self._over: Exception | None = None
        self._sealed = self._stopped = self._finished = self._closed = False
        self._starts: list[float] = []
        """Times at which faults made this process leave a world."""
        self._own_faults: list[float] = []
        self._broken_callbacks = BrokenCallbacks()
        worker.add_fault_callback(self._on_agent_fault)

    @property
    def restarts_processes(self) -> bool:
        return False

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._leave(until)
        while True:
            if self._over is not None:
                raise self._over
            start, faults = self._worker.wait_at_barrier(timeout_s=_remaining_s(until))
            self._environ.update(start.environ)
            if start.is_spare:
                log.info("this process is a spare and waits until the agent needs it")
                continue
            try:
                return self._enter(start, faults, until)
            except (StaleEpochError, ControlPlaneUnavailableError, ControlDeadlineError) as error:
                if self._worker.lost_reason:
                    raise
                log.info("start number %d came to nothing: %s", start.restart_count, error)
                self._request_restart(str(error))
                if isinstance(error, ControlDeadlineError):
                    raise

    def notice(self) -> ControlNotice | None:
        inner = self._inner
        return inner.notice() if inner is not None and self._inside else None

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        return self._current_plane().agree_on_step(step, timeout_s=timeout_s)

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        inner = self._current_plane()
        inner.report_sealed(step, checkpoint=checkpoint, timeout_s=timeout_s)
        notice = inner.notice()
        self._sealed = True
        self._stopped = notice is not None and notice.kind is NoticeKind.STOP

    def report_progress(self, progress: RankProgress) -> None:
        """Report progress to the other ranks. The agent receives checkpoints only, no steps."""
        inner = self._inner
        if inner is not None and self._inside:
            inner.report_progress(progress)

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        """Report a fault to the agent, then to the other ranks.

        The agent comes first because it stores the report. The other ranks then need not wait for the operator.
        """
        inner, place = self._current_plane(), self._place
        assert place is not None  # noqa: S101 - set by the entry into a world
        now = self._clock()
        self._own_faults.append(now)
        labels = repeat_offender_labels(self._policy, self._own_faults, now)
        if labels:
            self._worker.set_health_labels(labels)
        if final:
            self._over = JobFailedError(f"another attempt would end the same way: {reason}")
        if not self._is_revoked:
            self._report_to_agent(
                "WorkerFault", reason, choose_restart_mode(self._policy, self._starts, now, final=final)
            )
        try:
            inner.report_fault(reason)
        except (ControlPlaneUnavailableError, StaleEpochError) as error:
            log.info("the other ranks receive the fault from the agent only: %s", error)
        inner.mark_broken(f"rank {place.rank}: {reason}")

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """Request a change from the other ranks.

        The operator decides the next number of nodes: after all ranks stop, the agent receives a request for another
        start.
        """
        inner = self._inner
        if inner is None or not self._inside:
            raise ControlPlaneUnavailableError(f"{reason}: this process is in no world")
        inner.request_change(want, reason, deadline_s=deadline_s, nodes=nodes)

    def on_broken(self, call: BrokenCallback) -> None:
        with self._changed:
            self._broken_callbacks.add(call, self.notice())

    def report_finished(self) -> None:
        """Report the end of the work, and wait until all ranks have reported theirs."""
        inner = self._current_plane()
        inner.report_finished()
        inner.gather("finished")
        self._finished = True

    def close(self) -> None:
        """Close the control plane.

        After a regular end the connection to the agent stays open until the process exits: otherwise the agent counts
        the process as lost.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            inner = self._inner
        ended_well = self._finished or self._stopped
        if inner is not None:
            if ended_well:
                inner.depart(wait_s=_EXIT_WAIT_S if self._servers.is_serving else None)
            inner.close()
        self._servers.close()
        if not ended_well:
            self._worker.close()

    def _leave(self, until: float | None) -> None:
        """Leave the current world, and request a restart unless the agent already knows."""
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
            self._request_restart(f"{notice.kind.value}: {reason}" if notice is not None else reason)
        inner.close()

    def _wait_for_all_to_seal(self, inner: StoreControlPlane, until: float | None) -> None:
        """Wait until all ranks have sealed the common step.

        The operator stops all ranks once it receives the request, including ranks that have not reached the step.
        """
        notice = inner.notice()
        if notice is not None and notice.deadline_s is not None:
            deadline = time.monotonic() + notice.deadline_s
            until = deadline if until is None else min(until, deadline)
        try:
            inner.gather("sealed", timeout_s=_remaining_s(until))
        except ElasticError as error:
            log.info("not all ranks have sealed the common step: %s", error)

    def _enter(self, start: JobStart, faults: int, until: float | None) -> RankAssignment:
        min_epoch = max(start.restart_count, -1 if self._place is None else self._place.epoch + 1)
        place = _assignment(self._environ, min_epoch)
        self._seen_faults, self._asked, self._sealed = faults, False, False
        inner = meet(
            place,
            start.restart_count,
            self._servers,
            is_over=lambda: self._is_revoked,
            until=until,
            limits=self._limits,
            pace=self._pace,
            leave_s=abort_timeout_in(self._environ),
        )
        inner.on_broken(self._run_callbacks)
        with self._changed:
            self._inner = inner
        try:
            if self._is_revoked:
                raise StaleEpochError("the start was revoked")
            assignment = inner.wait_for_assignment(timeout_s=_remaining_s(until))
        except BaseException:
            inner.close()
            raise
        with self._changed:
            self._place, self._inside = assignment, True
            notice = inner.notice()
            if (
                notice is not None and notice.kind is NoticeKind.RESTART
            ):  # broken before it formed: no callback was called
                self._inside = False
                raise StaleEpochError(notice.reason)
        return assignment

    @property
    def _is_revoked(self) -> bool:
        return self._worker.fault_count > self._seen_faults or bool(self._worker.lost_reason)

    def _request_restart(self, reason: str) -> None:
        if not self._is_revoked and not self._asked:
            self._report_to_agent(_WORLD_REASON, reason, RestartMode.IN_PROCESS)

    def _report_to_agent(self, reason: str, message: str, mode: RestartMode) -> None:
        self._asked = True
        rank = int(self._environ.get("RANK", "0"))
        self._worker.report_fault(rank, mode, reason, message)

    def _current_plane(self) -> StoreControlPlane:
        inner = self._inner
        if inner is None or not self._inside:
            raise StaleEpochError("this process is in no world")
        return inner

    def _on_agent_fault(self, reason: str) -> None:
        """Mark the world as broken after the agent's fault message, or after the loss of the agent."""
        inner = self._inner
        if inner is not None:
            inner.mark_broken(reason)

    def _run_callbacks(self, notice: ControlNotice) -> None:
        """Run the callbacks, unless the world broke before this rank entered it."""
        if self._inside:
            self._broken_callbacks.run(notice)


def _assignment(environ: Mapping[str, str], epoch: int) -> RankAssignment:
    """Return the assignment.

    The agent's GROUP_WORLD_SIZE counts ranks, so it is replaced by the number of nodes.
    """
    nodes = int(environ["WORLD_SIZE"]) // int(environ.get("LOCAL_WORLD_SIZE", "1"))
    return assignment_from_environ({**environ, "GROUP_WORLD_SIZE": str(nodes)}, epoch=epoch)


def _remaining_s(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


_CONNECT_TIMEOUT_S = 2.0
_FOREIGN_STORE_TIMEOUT_S = 5.0
"""Seconds to wait for the response of a store that another process serves."""


class RendezvousStore:
    """Store that this process serves. It remains across starts with the same address."""

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
            # An earlier rank 0 may serve a store there. Keys of each start have their own prefix.
            log.info("another process serves the store at %s: %s", address, error)
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
    """Return a control plane of the ranks of one start, after the store answers.

    ``is_over`` returns whether the start was revoked. If rank 0 cannot serve a store and no store answers, raise
    :class:`ControlPlaneUnavailableError`: another start is needed, with another address.
    """
    is_first, address = place.rank == 0, parse_store_address(place.store)
    if is_first:
        servers.serve(place.store)
    foreign_deadline = time.monotonic() + _FOREIGN_STORE_TIMEOUT_S
    for pause_s in pauses_s():
        if _accepts_connections(address):
            break
        if is_over():
            raise StaleEpochError("the start was revoked")
        if until is not None and time.monotonic() > until:
            raise ControlDeadlineError(f"no store answers at {place.store}, where the first rank must serve one")
        if is_first and not servers.is_serving and time.monotonic() > foreign_deadline:
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


def _accepts_connections(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
