"""Common stop of all ranks after one step: the barrier, and the watcher of notices and signals.

A rank must not wait at a step boundary for the common target: another rank may wait in a collective of the next step.
So each rank reports how many steps it has *begun* as soon as it receives the request to stop, in a separate thread.
From then on, it begins a step only if the target is known and not reached. The target is the greatest reported number.
So every rank can finish the step that it is in, and slower ranks find all others in their collectives.
"""

from __future__ import annotations

import collections
import enum
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec

from elastic.control.control_plane import ControlNotice, ControlPlane, NoticeKind
from elastic.errors import (
    ControlDeadlineError,
    ControlPlaneRefusedError,
    ControlPlaneUnavailableError,
    ElasticError,
    StaleEpochError,
)

log = logging.getLogger(__name__)


class BoundaryDecision(enum.Enum):
    """Decision of a rank at a step boundary."""

    CONTINUE = "on"
    """Begin the next step."""
    PAUSE = "stop"
    """Seal and leave: all ranks stop here."""
    ABORT = "leave"
    """Leave at once: the world is broken."""


class StepBarrier:
    """Step boundaries of one epoch on this rank.

    The training thread calls ``pass_boundary``; other threads call ``poll`` and ``mark_broken``.
    """

    def __init__(self, plane: ControlPlane, epoch: int, *, retry_s: float = 0.2) -> None:
        self._plane = plane
        self._epoch = epoch
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._begun = 0
        self._reported: int | None = None
        """Begun steps that this rank reported after a stop request. No other begins without a target."""
        self._target: int | None = None
        self._broken: str | None = None
        self._closed = False
        self._reporter: threading.Thread | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def broken_reason(self) -> str | None:
        """Reason why the world is broken; ``None`` while it is not."""
        return self._broken

    def pass_boundary(self, completed: int) -> BoundaryDecision:
        """Return whether to begin the next step after ``completed`` steps. Waits only after a stop request."""
        self._begun = max(self._begun, completed)
        self.poll()
        with self._changed:
            self._changed.wait_for(
                lambda: self._reported is None or self._target is not None or self._broken is not None
            )
            if self._broken is not None:
                return BoundaryDecision.ABORT
            if self._target is not None and completed >= self._target:
                return BoundaryDecision.PAUSE
            self._begun = completed + 1
            return BoundaryDecision.CONTINUE

    def poll(self) -> None:
        """Read the plane's notice and act on it. Without a notice this only reads memory."""
        notice = self._plane.notice()
        if notice is None or notice.epoch != self._epoch:
            return
        if notice.kind is NoticeKind.RESTART:
            self.mark_broken(notice)
        elif self._reported is None:
            self._request_target(notice)

    def mark_broken(self, notice: ControlNotice) -> None:
        """Mark the world as broken: every current and later wait at a boundary returns ``ABORT``."""
        if notice.epoch == self._epoch:
            self._break(notice.reason)

    def wait_broken(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds until the world is broken, and return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._broken is not None, timeout_s)

    def close(self) -> None:
        """End the epoch: send no further requests for it."""
        self._closed = True
        self._break("left")
        asking = self._reporter
        if asking is not None:
            asking.join(
                2 * self._retry_s
            )  # no longer: a request to the control plane may take until its own time limit

    def _break(self, reason: str) -> None:
        with self._changed:
            if self._broken is None:
                self._broken = reason
            self._changed.notify_all()

    def _request_target(self, notice: ControlNotice) -> None:
        with self._changed:
            if self._reported is not None or self._broken is not None:
                return
            self._reported = self._begun
            log.info("%s (%s): stopping after step %d or later", notice.kind.value, notice.reason, self._reported - 1)
            self._reporter = threading.Thread(
                target=self._report_and_wait, args=(self._reported,), name="elastic-pause", daemon=True
            )
            self._reporter.start()

    def _report_and_wait(self, begun: int) -> None:
        while not self._closed:
            try:
                target = self._plane.agree_on_step(begun)
            except (StaleEpochError, ControlDeadlineError, ControlPlaneRefusedError) as error:
                self._break(str(error))
                return
            except ControlPlaneUnavailableError as error:
                log.warning("not known yet where to stop: %s", error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, self._retry_s)
                continue
            with self._changed:
                self._target = target
                self._changed.notify_all()
            return


_POLL_S = 0.05
_AGAIN_S = 0.5


class SignalRequest(msgspec.Struct, frozen=True):
    """Change that a signal requests from the control plane."""

    kind: NoticeKind
    reason: str
    deadline_s: float | None = None


def default_signal_requests(grace_s: float) -> dict[int, SignalRequest]:
    """Return the requests of SIGUSR1 (another world) and SIGTERM (this process stops in ``grace_s``)."""
    return {
        signal.SIGUSR1: SignalRequest(NoticeKind.RESIZE, "SIGUSR1"),
        signal.SIGTERM: SignalRequest(NoticeKind.RESIZE, "SIGTERM: this process ends", grace_s),
    }


class NoticeWatcher:
    """Thread that watches the notice of the current epoch, even if no step ends.

    It calls ``on_broken`` when the world is broken. Then it calls ``while_broken`` with the epoch until the world is
    left. A group that was being created during the abort had no connections to close.
    """

    def __init__(
        self,
        plane: ControlPlane,
        on_broken: Callable[[ControlNotice], None],
        while_broken: Callable[[int], None] = lambda _epoch: None,
    ) -> None:
        self._plane = plane
        self._on_broken = on_broken
        self._while_broken = while_broken
        self._aborted: tuple[int, float] = (-1, 0.0)
        """Epoch of the last abort, and its time."""
        self._barrier: StepBarrier | None = None
        self._requests: collections.deque[SignalRequest] = collections.deque()
        self._logged_error = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-watch", daemon=True)
        plane.on_broken(self._broken)
        self._thread.start()

    def watch_barrier(self, barrier: StepBarrier | None) -> None:
        """Watch the epoch of ``barrier`` from now on; ``None`` for no epoch."""
        self._barrier = barrier

    def enqueue(self, request: SignalRequest) -> None:
        """Queue ``request`` for the watching thread, which sends it.

        It takes no lock, so a signal handler may call it.
        """
        self._requests.append(request)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _broken(self, notice: ControlNotice) -> None:
        """Abort the world; called by a thread of the plane."""
        barrier = self._barrier
        if barrier is not None and barrier.epoch == notice.epoch:
            barrier.mark_broken(notice)
            self._on_broken(notice)
            self._aborted = (notice.epoch, time.monotonic())

    def _run(self) -> None:
        while not self._ended.wait(_POLL_S):
            self._send_requests()
            barrier = self._barrier
            if barrier is not None:
                barrier.poll()
                self._repeat_abort(barrier.epoch, time.monotonic())

    def _repeat_abort(self, epoch: int, now: float) -> None:
        aborted, last = self._aborted
        if aborted == epoch and now - last >= _AGAIN_S:
            self._aborted = (epoch, now)
            self._while_broken(epoch)

    def _send_requests(self) -> None:
        while self._requests:
            request = self._requests[0]
            try:
                self._plane.request_change(request.kind, request.reason, deadline_s=request.deadline_s)
            except ElasticError as error:
                if str(error) != self._logged_error:
                    self._logged_error = str(error)
                    log.warning("request (%s) failed and is repeated: %s", request.reason, error)
                return
            self._logged_error = ""
            self._requests.popleft()


@contextmanager
def forward_signals(watch: NoticeWatcher, requests: Mapping[int, SignalRequest]) -> Iterator[None]:
    """Turn these signals into requests within this block. Earlier handlers still run.

    Python lets only the main thread set handlers. In other threads this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def received(number: int, frame: FrameType | None) -> None:
        watch.enqueue(requests[number])
        earlier = before.get(number)
        if callable(earlier):
            earlier(number, frame)

    try:
        for number in requests:
            before[number] = signal.signal(number, received)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)
