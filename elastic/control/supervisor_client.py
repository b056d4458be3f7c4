"""A rank's client of its supervisor: the ControlPlane of ``elastic run``, over one Unix socket."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from elastic.control.control_messages import (
    MAX_RANK_MESSAGE_BYTES,
    RANK_PROTOCOL,
    ExitReason,
    RankDesired,
    RankHello,
    RankPhase,
    RankRequest,
    RankStatus,
    SupervisorEndpoint,
)
from elastic.control.control_plane import (
    ControlNotice,
    Dismissed,
    LeaveStage,
    NoticeKind,
    RankAssignment,
    RankProgress,
)
from elastic.control.epoch_state import BrokenCallback, BrokenCallbacks, EpochState, stale_epoch
from elastic.control.running_clock import RunningClock
from elastic.errors import (
    ControlDeadlineError,
    ControlPlaneRefusedError,
    ControlPlaneUnavailableError,
    JobFailedError,
)
from elastic.fault_injection.fault_spec import FaultInjection
from elastic.world.world_state import ErrorPosition, SealedStep
from peerstore.errors import PeerStoreError
from peerstore.membership.topology import PeerNode
from peerstore.message_codec import decode_message, encode_message
from peerstore.transport.framing import encode_frame
from peerstore.transport.unix import UnixChannel, connect_to_agent

log = logging.getLogger(__name__)

_PROGRESS_S = 0.5
_HEARTBEAT_S = 1.0
"""Longest time in seconds between two messages. They show that the process runs."""
_ACKNOWLEDGE_S = 30.0
_MAX_GAP_S = 2.0
"""Longest time in seconds between two clock readings that counts towards timeouts.

During a longer gap this process did not run."""


class SupervisorClient:
    """Control plane of a rank under a supervisor.

    The supervisor is the parent process of the rank, and the kernel kills the rank with its parent.
    """

    def __init__(self, endpoint: SupervisorEndpoint) -> None:
        try:
            self._sock = connect_to_agent(endpoint.socket)
        except PeerStoreError as error:
            raise ControlPlaneUnavailableError(
                f"this node's supervisor does not answer on {endpoint.socket}: it has ended, or is another user's"
            ) from error
        self._clock = RunningClock(_MAX_GAP_S)
        self._changed = threading.Condition()
        self._status = RankStatus(0, RankPhase.IN_WORLD)
        self._progress: RankProgress | None = None
        self._sent_at = 0.0
        self._sent = 0
        """Number of the newest status."""
        self._started = 0
        """Number of the newest status that was sent at least in part."""
        self._unsent = b""
        """Unsent rest of that status."""
        self._desired = RankDesired()
        self._state = EpochState()
        """State of the newest assignment's epoch, with deadlines by ``time.monotonic``."""
        self._epoch = -1
        self._is_outside = True
        """Whether this process is in no world: it has no assignment, or waits for the next one."""
        self._broken_callbacks = BrokenCallbacks()
        self._on_injections: Callable[[tuple[FaultInjection, ...]], None] | None = None
        self._on_partition: Callable[[], None] | None = None
        self._lost_reason = ""
        self._closed = False
        self._channel = UnixChannel(self._sock, "the supervisor")
        self._channel.max_header_bytes, self._channel.max_payload_bytes = MAX_RANK_MESSAGE_BYTES, 0
        try:
            self._channel.send(encode_message(RankHello(RANK_PROTOCOL, endpoint.token)))
        except PeerStoreError as error:
            self._channel.close()
            raise ControlPlaneUnavailableError(f"the supervisor does not listen: {error}") from error
        self._reader = threading.Thread(target=self._read, name="elastic-plane", daemon=True)
        self._reader.start()

    # -- ControlPlane -------------------------------------------------------------------------------------------------

    @property
    def restarts_processes(self) -> bool:
        return False

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        with self._changed:
            self._is_outside = True
            if self._progress is not None:  # the world's steps are over, its sealed step remains
                self._progress = msgspec.structs.replace(self._progress, step=-1, idle=False)
            self._send_status(phase=RankPhase.READY)
            deadline = self._deadline(timeout_s)
            while True:
                self._wait(lambda: self._is_over or self._new_assignment is not None, deadline, "there was no world")
                self._check_over()
                assignment = self._new_assignment
                assert assignment is not None  # noqa: S101 - what was waited for
                self._epoch = assignment.epoch
                if self._progress is not None:
                    self._progress = msgspec.structs.replace(self._progress, has_sealed=False, base_step=None)
                if not self._is_broken:
                    self._is_outside = False
                    self._send_status(phase=RankPhase.IN_WORLD, epoch=assignment.epoch, **_NEW_WORLD)
                    return assignment
                # The world broke before this rank entered it.
                self._send_status(phase=RankPhase.READY, epoch=assignment.epoch, **_NEW_WORLD)

    def notice(self) -> ControlNotice | None:
        if self._is_outside:
            return None
        state = self._state
        if state.epoch == self._epoch and state.current_change is not None:
            return state.notice(time.monotonic())
        return self._missed_notice()

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        with self._changed:
            self._check_epoch()
            if self._status.paused is None:
                self._send_status(paused=step)
            self._wait(
                lambda: self._is_stale or self._state.target is not None,
                self._deadline(timeout_s),
                "not all others paused",
            )
            self._check_epoch()
            target = self._state.target
            assert target is not None  # noqa: S101 - what was waited for
            return target

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        with self._changed:
            self._check_epoch()
            self._send_and_wait(timeout_s, sealed=step, checkpoint=checkpoint)
            if self._desired.exit not in (
                ExitReason.STOPPED,
                ExitReason.DISMISSED,
            ):  # the job may end between this report and its acknowledgment
                self._check_epoch()

    def report_progress(self, progress: RankProgress) -> None:
        self._progress = progress

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        with self._changed:
            if self._is_outside or self._missed_notice() is not None:
                raise stale_epoch(self._epoch, f"{reason!r} was not reported")
            self._send_and_wait(None, fault=reason, final=final, position=position)

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        with self._changed:
            request = RankRequest(self._sent + 1, want, reason, deadline_s, nodes)
            self._send_and_wait(None, requests=(*self._status.requests, request))

    def on_broken(self, call: BrokenCallback) -> None:
        with self._changed:
            self._broken_callbacks.add(call, self.notice())

    def on_injections(self, call: Callable[[tuple[FaultInjection, ...]], None], cut: Callable[[], None]) -> None:
        """Run ``call`` with the faults to inject here, and ``cut`` at each injected partition of this node."""
        with self._changed:
            self._on_injections, self._on_partition = call, cut
            injections = self._desired.injections
        if injections:
            call(injections)

    @property
    def standby_nodes(self) -> tuple[PeerNode, ...]:
        """Agents of nodes outside the world that currently accept replicas of its steps."""
        return self._desired.standby

    def report_leave_stage(self, stage: LeaveStage | None) -> None:
        """Report the stage of leaving a broken world; ``None`` after the process has left it."""
        with self._changed:
            if self._status.leave_stage is not stage:
                self._send_status(leave_stage=stage)

    def request_partition(self, seconds: float) -> None:
        """Request an injected partition of this node for ``seconds``."""
        with self._changed:
            request = RankRequest(self._sent + 1, NoticeKind.RESTART, "an injected partition", partition_s=seconds)
            self._send_and_wait(None, requests=(*self._status.requests, request))

    def report_finished(self) -> None:
        with self._changed:
            self._check_epoch()
            self._send_and_wait(None, phase=RankPhase.FINISHED)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._lost_reason = self._lost_reason or "closed on this side"
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._channel.close()

    # -- sending, with the lock held ----------------------------------------------------------------------------------

    def _send_status(self, **changes: object) -> None:
        self._sent += 1
        self._sent_at = time.monotonic()
        self._status = msgspec.structs.replace(self._status, number=self._sent, progress=self._progress, **changes)
        if not self._lost_reason:
            self._flush()

    def _flush(self) -> None:
        """Send all bytes that the socket accepts without blocking.

        A stopped supervisor must not block threads that need the lock. The reader thread sends the rest later, followed
        by the newest status: each status is complete.
        """
        try:
            while self._unsent or self._started < self._sent:
                if not self._unsent:
                    self._unsent, self._started = encode_frame(encode_message(self._status)), self._sent
                sent = self._sock.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            self._connection_lost(str(error))

    def _send_and_wait(self, timeout_s: float | None, **changes: object) -> None:
        """Send changes, and wait until the supervisor has acknowledged them."""
        self._send_status(**changes)
        number = self._sent
        limit_s = _ACKNOWLEDGE_S if timeout_s is None else timeout_s
        self._wait(
            lambda: self._desired.acknowledged >= number, self._deadline(limit_s), "the supervisor did not answer"
        )

    def _deadline(self, timeout_s: float | None) -> float | None:
        return None if timeout_s is None else self._clock() + timeout_s

    def _wait(self, condition: Callable[[], bool], deadline: float | None, what: str) -> None:
        while not condition():
            if self._lost_reason:
                raise ControlPlaneUnavailableError(f"the connection to the supervisor is lost: {self._lost_reason}")
            left_s = None if deadline is None else deadline - self._clock()
            if left_s is not None and left_s <= 0:
                if self._desired.coordinator_unreachable:
                    raise ControlPlaneUnavailableError("the coordinator does not answer")
                raise ControlDeadlineError(f"{what} within the time given")
            self._changed.wait(None if left_s is None else min(left_s, _MAX_GAP_S / 2))

    # -- received state -----------------------------------------------------------------------------------------------

    @property
    def _new_assignment(self) -> RankAssignment | None:
        assignment = self._desired.assignment
        return assignment if assignment is not None and assignment.epoch > self._epoch else None

    @property
    def _is_broken(self) -> bool:
        return self._state.is_broken and self._state.epoch == self._epoch

    @property
    def _is_over(self) -> bool:
        return self._desired.exit is not None

    @property
    def _is_stale(self) -> bool:
        return self._is_outside or self._is_broken or self._is_over or self._new_assignment is not None

    def _missed_notice(self) -> ControlNotice | None:
        """Return a restart notice if a newer world or the end of the job has superseded this world."""
        if self._new_assignment is None and not self._is_over:
            return None
        return ControlNotice(self._epoch, NoticeKind.RESTART, self._desired.reason or "there is a newer world")

    def _check_over(self) -> None:
        over, reason = self._desired.exit, self._desired.reason
        if over in (ExitReason.JOB_FAILED, ExitReason.NEVER_JOINED):
            raise JobFailedError(reason)
        if over is ExitReason.REFUSED:
            raise ControlPlaneRefusedError(reason)
        if over is not None:
            raise Dismissed(reason)

    def _check_epoch(self) -> None:
        if self._is_stale:
            raise stale_epoch(self._epoch, self._state.reason or self._desired.reason or "this process is in no world")

    # -- the reader thread --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                sending = [self._sock] if self._unsent else []
                readable, writable, _ = select.select([self._sock], sending, [], _PROGRESS_S)
                if writable:
                    with self._changed:
                        self._flush()
                if not readable:
                    self._send_heartbeat()
                    continue
                incoming = self._channel.receive()
                if incoming is None:
                    raise ControlPlaneUnavailableError("the supervisor closed it")
                self._apply_desired(decode_message(incoming.header, RankDesired))
        except (OSError, ValueError, PeerStoreError, ControlPlaneUnavailableError) as error:
            with self._changed:
                self._connection_lost(str(error))

    def _send_heartbeat(self) -> None:
        if self._progress is not self._status.progress or time.monotonic() - self._sent_at >= _HEARTBEAT_S:
            with self._changed:
                self._send_status()

    def _apply_desired(self, desired: RankDesired) -> None:
        before = self._desired
        with self._changed:
            self._desired, self._state = desired, desired.epoch_state.received(time.monotonic())
            pending = tuple(request for request in self._status.requests if request.number > desired.acknowledged)
            if len(pending) != len(self._status.requests):
                self._status = msgspec.structs.replace(self._status, requests=pending)
            self._broken_callbacks.run(self.notice())
            self._changed.notify_all()
        if desired.injections != before.injections and self._on_injections is not None:
            self._on_injections(desired.injections)
        if before.acknowledged and desired.partitions > before.partitions and self._on_partition is not None:
            self._on_partition()  # a new process has no connections to lose

    def _connection_lost(self, why: str) -> None:
        self._lost_reason = self._lost_reason or why or "it ended"
        self._changed.notify_all()


_NEW_WORLD: dict[str, object] = {"paused": None, "sealed": None, "checkpoint": None, "fault": None, "final": False}
"""Status fields to reset at the start of a world."""
