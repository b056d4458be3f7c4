"""A rank's client of its supervisor: the ControlPlane under ``elastic run``, over one Unix socket."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
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
from elastic.control.running_clock import RunningClock
from elastic.errors import (
    ControlDeadlineError,
    ControlPlaneRefusedError,
    ControlPlaneUnavailableError,
    JobFailedError,
    StaleEpochError,
)
from elastic.fault_injection.fault_spec import FaultInjection
from elastic.world.world_state import ErrorPosition, SealedStep
from peerstore import message_codec
from peerstore.errors import PeerStoreError
from peerstore.membership.topology import PeerNode
from peerstore.server.store_client import connect_to_agent

log = logging.getLogger(__name__)

_PROGRESS_S = 0.5
_BEAT_S = 1.0
"""So often it says something, also where there is nothing new: that it can."""
_HEARD_S = 30.0
_ABSENT_S = 2.0
"""Between two looks at the clock: this process did not run for the rest of it, and waited for nobody."""
_LENGTH = struct.Struct(">I")


class SupervisorClient:
    """The supervisor is this process's parent: when it is gone, the kernel ends this process, too."""

    def __init__(self, endpoint: SupervisorEndpoint) -> None:
        try:
            self._sock = connect_to_agent(endpoint.socket)
        except PeerStoreError as error:
            raise ControlPlaneUnavailableError(
                f"this node's supervisor does not answer on {endpoint.socket}: it has ended, or is another user's"
            ) from error
        self._clock = RunningClock(_ABSENT_S)
        self._changed = threading.Condition()
        self._says = RankStatus(0, RankPhase.IN_WORLD)
        self._progress: RankProgress | None = None
        self._said_at = 0.0
        self._sent = 0
        """Number of the newest message."""
        self._begun = 0
        """Of the newest one of which something went out."""
        self._unsent = b""
        """The rest of it."""
        self._hears = RankDesired()
        self._epoch = -1
        self._left = True
        """This process is in no world: it has not been given a place yet, or has come back."""
        self._until: float | None = None
        """The notice's deadline, on this process's clock."""
        self._calls: list[Callable[[ControlNotice], None]] = []
        self._aborted = -1
        """The newest epoch whose end was told to ``_calls``."""
        self._injecting: Callable[[tuple[FaultInjection, ...]], None] | None = None
        self._cutting: Callable[[], None] | None = None
        self._lost = ""
        self._closed = False
        self._sock.settimeout(None)
        try:
            message_codec.send_frame(self._sock, RankHello(RANK_PROTOCOL, endpoint.token))
        except OSError as error:
            self._sock.close()
            raise ControlPlaneUnavailableError(f"the supervisor does not listen: {error}") from error
        self._reader = threading.Thread(target=self._read, name="elastic-plane", daemon=True)
        self._reader.start()

    # -- ControlPlane -------------------------------------------------------------------------------------------------

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        with self._changed:
            self._left = True
            if self._progress is not None:  # of its steps; what it has sealed is still so
                self._progress = RankProgress(-1, self._progress.sealed)
            self._say(phase=RankPhase.READY)
            until = self._until_s(timeout_s)
            while True:
                self._wait(lambda: self._is_over or self._offered is not None, until, "there was no world")
                self._check_over()
                place = self._offered
                assert place is not None  # noqa: S101 - what was waited for
                self._epoch = place.epoch
                if not self._is_broken:
                    self._left = False
                    self._say(phase=RankPhase.IN_WORLD, epoch=place.epoch, **_NEW)
                    return place
                # It broke before this rank was in it.
                self._say(phase=RankPhase.READY, epoch=place.epoch, **_NEW)

    def notice(self) -> ControlNotice | None:
        if self._left:
            return None
        notice = self._hears.notice
        if notice is None or notice.epoch != self._epoch:
            return self._overtaken()
        until = self._until
        if until is None:
            return notice
        return msgspec.structs.replace(notice, deadline_s=max(0.0, until - time.monotonic()))

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        with self._changed:
            self._check_epoch()
            if self._says.paused is None:
                self._say(paused=step)
            self._wait(
                lambda: self._is_stale or self._hears.pause_target is not None,
                self._until_s(timeout_s),
                "not all others paused",
            )
            self._check_epoch()
            target = self._hears.pause_target
            assert target is not None  # noqa: S101 - what was waited for
            return target

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        with self._changed:
            self._check_epoch()
            self._tell(timeout_s, sealed=step, checkpoint=checkpoint)
            if self._hears.exit not in (
                ExitReason.STOPPED,
                ExitReason.DISMISSED,
            ):  # which may follow from this before it is heard
                self._check_epoch()

    def report_progress(self, progress: RankProgress) -> None:
        self._progress = progress

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        with self._changed:
            if self._left or self._overtaken() is not None:
                raise StaleEpochError(f"epoch {self._epoch} is of the past: {reason!r} was not heard")
            self._tell(None, fault=reason, final=final, position=position)

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """``RESIZE`` without ``nodes`` and with a deadline: this rank's machine is preempted."""
        with self._changed:
            request = RankRequest(self._sent + 1, want, reason, deadline_s, nodes)
            self._tell(None, requests=(*self._says.requests, request))

    def on_broken(self, call: Callable[[ControlNotice], None]) -> None:
        with self._changed:
            self._calls.append(call)
            notice = self.notice()
            if notice is not None and notice.kind is NoticeKind.RESTART:
                self._abort(notice, (call,))

    def on_injections(self, call: Callable[[tuple[FaultInjection, ...]], None], cut: Callable[[], None]) -> None:
        """Have ``call`` run with the faults that are to happen here, and ``cut`` each time this node is cut off."""
        with self._changed:
            self._injecting, self._cutting = call, cut
            given = self._hears.injections
        if given:
            call(given)

    @property
    def standby_nodes(self) -> tuple[PeerNode, ...]:
        """Agents of nodes outside the world that accept replicas of its steps, as of now."""
        return self._hears.standby

    def report_leave_stage(self, stage: LeaveStage | None) -> None:
        """Report the stage of leaving a broken world; ``None``: the world is left."""
        with self._changed:
            if self._says.leave_stage is not stage:
                self._say(leave_stage=stage)

    def request_partition(self, seconds: float) -> None:
        """An injected fault: have this node's lines cut for so long."""
        with self._changed:
            request = RankRequest(self._sent + 1, NoticeKind.RESTART, "an injected partition", partition_s=seconds)
            self._tell(None, requests=(*self._says.requests, request))

    def report_finished(self) -> None:
        with self._changed:
            self._check_epoch()
            self._tell(None, phase=RankPhase.FINISHED)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._lost = self._lost or "closed on this side"
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._sock.close()

    # -- saying, with the lock held -----------------------------------------------------------------------------------

    def _say(self, **changes: object) -> None:
        self._sent += 1
        self._said_at = time.monotonic()
        self._says = msgspec.structs.replace(self._says, number=self._sent, progress=self._progress, **changes)
        if not self._lost:
            self._flush()

    def _flush(self) -> None:
        """What goes out without waiting: a supervisor that is stopped keeps nobody who holds the lock. The rest goes
        once it reads again, and what is newest by then behind it: every message says everything.
        """
        try:
            while self._unsent or self._begun < self._sent:
                if not self._unsent:
                    body, self._begun = message_codec.encode_message(self._says), self._sent
                    self._unsent = _LENGTH.pack(len(body)) + body
                sent = self._sock.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(str(error))

    def _tell(self, timeout_s: float | None, **changes: object) -> None:
        """Say it, and wait until the supervisor has heard it."""
        self._say(**changes)
        number = self._sent
        limit_s = _HEARD_S if timeout_s is None else timeout_s
        self._wait(lambda: self._hears.acknowledged >= number, self._until_s(limit_s), "the supervisor did not answer")

    def _until_s(self, timeout_s: float | None) -> float | None:
        return None if timeout_s is None else self._clock() + timeout_s

    def _wait(self, happened: Callable[[], bool], until: float | None, what: str) -> None:
        while not happened():
            if self._lost:
                raise ControlPlaneUnavailableError(f"the connection to the supervisor is lost: {self._lost}")
            left_s = None if until is None else until - self._clock()
            if left_s is not None and left_s <= 0:
                if self._hears.coordinator_unreachable:
                    raise ControlPlaneUnavailableError("the coordinator does not answer")
                raise ControlDeadlineError(f"{what} within the time given")
            self._changed.wait(None if left_s is None else min(left_s, _ABSENT_S / 2))

    # -- what was heard -----------------------------------------------------------------------------------------------

    @property
    def _offered(self) -> RankAssignment | None:
        place = self._hears.assignment
        return place if place is not None and place.epoch > self._epoch else None

    @property
    def _is_broken(self) -> bool:
        notice = self._hears.notice
        return notice is not None and notice.kind is NoticeKind.RESTART and notice.epoch == self._epoch

    @property
    def _is_over(self) -> bool:
        return self._hears.exit is not None

    @property
    def _is_stale(self) -> bool:
        return self._left or self._is_broken or self._is_over or self._offered is not None

    def _overtaken(self) -> ControlNotice | None:
        """There is a newer world, or none any more, and this rank was not told that the old one ended."""
        if self._offered is None and not self._is_over:
            return None
        return ControlNotice(self._epoch, NoticeKind.RESTART, self._hears.reason or "there is a newer world")

    def _check_over(self) -> None:
        over, reason = self._hears.exit, self._hears.reason
        if over in (ExitReason.JOB_FAILED, ExitReason.NEVER_JOINED):
            raise JobFailedError(reason)
        if over is ExitReason.REFUSED:
            raise ControlPlaneRefusedError(reason)
        if over is not None:
            raise Dismissed(reason)

    def _check_epoch(self) -> None:
        if self._is_stale:
            notice = self._hears.notice
            why = notice.reason if notice is not None else self._hears.reason or "this process is in no world"
            raise StaleEpochError(f"epoch {self._epoch} is of the past: {why}")

    # -- the plane's own thread ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                sending = [self._sock] if self._unsent else []
                readable, writable, _ = select.select([self._sock], sending, [], _PROGRESS_S)
                if writable:
                    with self._changed:
                        self._flush()
                if not readable:
                    self._beat()
                    continue
                hears = message_codec.receive_frame(self._sock, RankDesired, limit_bytes=MAX_RANK_MESSAGE_BYTES)
                if hears is None:
                    raise ControlPlaneUnavailableError("the supervisor closed it")
                self._take(hears)
        except (OSError, ValueError, PeerStoreError, ControlPlaneUnavailableError) as error:
            with self._changed:
                self._lose(str(error))

    def _beat(self) -> None:
        if self._progress is not self._says.progress or time.monotonic() - self._said_at >= _BEAT_S:
            with self._changed:
                self._say()

    def _take(self, hears: RankDesired) -> None:
        before = self._hears
        with self._changed:
            limit_s = None if hears.notice is None else hears.notice.deadline_s
            self._until = None if limit_s is None else time.monotonic() + limit_s
            self._hears = hears
            kept = tuple(one for one in self._says.requests if one.number > hears.acknowledged)
            if len(kept) != len(self._says.requests):
                self._says = msgspec.structs.replace(self._says, requests=kept)
            notice = self.notice()
            if notice is not None and notice.kind is NoticeKind.RESTART and self._aborted < notice.epoch:
                self._aborted = notice.epoch
                self._abort(notice, tuple(self._calls))
            self._changed.notify_all()
        if hears.injections != before.injections and self._injecting is not None:
            self._injecting(hears.injections)
        if before.acknowledged and hears.partitions > before.partitions and self._cutting is not None:
            self._cutting()  # a process that has only just come has no connection of that time

    def _abort(self, notice: ControlNotice, calls: tuple[Callable[[ControlNotice], None], ...]) -> None:
        """On a thread of its own: what aborts a group may wait for this very plane."""

        def run() -> None:
            for call in calls:
                call(notice)

        if calls:
            threading.Thread(target=run, name="elastic-broken", daemon=True).start()

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why or "it ended"
        self._changed.notify_all()


_NEW: dict[str, object] = {"paused": None, "sealed": None, "checkpoint": None, "fault": None, "final": False}
"""What was said in a world that is left."""
