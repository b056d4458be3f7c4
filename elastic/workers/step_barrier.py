"""How all ranks stop after the same step: the barrier, and the thread that watches notices and signals.

A rank that waited at a step boundary until it knows the common target would wait for ever for one that is inside the
next step and waits for it in a collective. Therefore each says how many steps it has *begun*, and says it as soon as
it hears that a stop is wanted, in a thread of its own. From then on it begins a step only when the target is known and
not reached. The target is the greatest number said, so everybody who is inside a step can finish it, and whoever is
behind finds all others taking part.
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
    """What a rank does at a step boundary."""

    CONTINUE = "on"
    """Begin the next step."""
    PAUSE = "stop"
    """Here is where all of them stop: seal, and leave."""
    ABORT = "leave"
    """The world is broken: leave at once."""


class StepBarrier:
    """One epoch's step boundaries, as this rank passes them.

    ``pass_boundary`` is called by the thread that trains, ``poll`` and ``mark_broken`` by others.
    """

    def __init__(self, plane: ControlPlane, epoch: int, *, retry_s: float = 0.2) -> None:
        self._plane = plane
        self._epoch = epoch
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._begun = 0
        self._asked: int | None = None
        """What was said when a stop was wanted; no step is begun from then on until the target is known."""
        self._target: int | None = None
        self._broken: str | None = None
        self._closed = False
        self._asking: threading.Thread | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def broken_reason(self) -> str | None:
        """Why the world is broken; ``None`` while it is not."""
        return self._broken

    def pass_boundary(self, completed: int) -> BoundaryDecision:
        """Having completed so many steps: whether to begin the next one. Waits only when a stop is wanted."""
        self._begun = max(self._begun, completed)
        self.poll()
        with self._changed:
            self._changed.wait_for(lambda: self._asked is None or self._target is not None or self._broken is not None)
            if self._broken is not None:
                return BoundaryDecision.ABORT
            if self._target is not None and completed >= self._target:
                return BoundaryDecision.PAUSE
            self._begun = completed + 1
            return BoundaryDecision.CONTINUE

    def poll(self) -> None:
        """Hear what is wanted by now. Costs a read of memory while nothing is."""
        notice = self._plane.notice()
        if notice is None or notice.epoch != self._epoch:
            return
        if notice.kind is NoticeKind.RESTART:
            self.mark_broken(notice)
        elif self._asked is None:
            self._stop(notice)

    def mark_broken(self, notice: ControlNotice) -> None:
        """The world is broken: whoever waits here, and whoever comes, leaves."""
        if notice.epoch == self._epoch:
            self._break(notice.reason)

    def wait_broken(self, timeout_s: float) -> bool:
        """Until the world is known to be broken, or for so long; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._broken is not None, timeout_s)

    def close(self) -> None:
        """The epoch has been left; nothing is asked in its name any more."""
        self._closed = True
        self._break("left")
        asking = self._asking
        if asking is not None:
            asking.join(2 * self._retry_s)  # no longer: a call to the control plane may take until its own time limit

    def _break(self, reason: str) -> None:
        with self._changed:
            if self._broken is None:
                self._broken = reason
            self._changed.notify_all()

    def _stop(self, notice: ControlNotice) -> None:
        with self._changed:
            if self._asked is not None or self._broken is not None:
                return
            self._asked = self._begun
            log.info("%s (%s): stopping after step %d or later", notice.kind.value, notice.reason, self._asked - 1)
            self._asking = threading.Thread(target=self._ask, args=(self._asked,), name="elastic-pause", daemon=True)
            self._asking.start()

    def _ask(self, begun: int) -> None:
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


_LOOK_S = 0.05
_AGAIN_S = 0.5


class SignalRequest(msgspec.Struct, frozen=True):
    """What a signal asks the control plane for."""

    kind: NoticeKind
    reason: str
    deadline_s: float | None = None


def default_signal_requests(grace_s: float) -> dict[int, SignalRequest]:
    """SIGUSR1: somebody wants another world. SIGTERM: this machine goes away, and so much time is left."""
    return {
        signal.SIGUSR1: SignalRequest(NoticeKind.RESIZE, "SIGUSR1"),
        signal.SIGTERM: SignalRequest(NoticeKind.RESIZE, "SIGTERM: this process is to go", grace_s),
    }


class NoticeWatcher:
    """Looks at the notice of the current epoch even when no step ends, and calls ``on_broken`` when it is broken.

    ``while_broken`` is called with that epoch now and then, until it has been left: a group that was just being made
    when the world was aborted has connections that were not there to be cut.
    """

    def __init__(
        self,
        plane: ControlPlane,
        on_broken: Callable[[ControlNotice], None],
        while_broken: Callable[[int], None] = lambda _epoch: None,
    ) -> None:
        self._plane = plane
        self._on_broken = on_broken
        self._still_broken = while_broken
        self._aborted: tuple[int, float] = (-1, 0.0)
        """Which epoch was, and when last."""
        self._gate: StepBarrier | None = None
        self._wishes: collections.deque[SignalRequest] = collections.deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-watch", daemon=True)
        plane.on_broken(self._broken)
        self._thread.start()

    def watch_barrier(self, gate: StepBarrier | None) -> None:
        """From now on this is the epoch to look at."""
        self._gate = gate

    def enqueue(self, wish: SignalRequest) -> None:
        """Have the control plane asked by the thread that looks: a signal handler must not wake it, only write down."""
        self._wishes.append(wish)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _broken(self, notice: ControlNotice) -> None:
        """In a thread of the plane."""
        gate = self._gate
        if gate is not None and gate.epoch == notice.epoch:
            gate.mark_broken(notice)
            self._on_broken(notice)
            self._aborted = (notice.epoch, time.monotonic())

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._pass_on()
            gate = self._gate
            if gate is not None:
                gate.poll()
                self._again(gate.epoch, time.monotonic())

    def _again(self, epoch: int, now: float) -> None:
        aborted, last = self._aborted
        if aborted == epoch and now - last >= _AGAIN_S:
            self._aborted = (epoch, now)
            self._still_broken(epoch)

    def _pass_on(self) -> None:
        while self._wishes:
            wish = self._wishes[0]
            try:
                self._plane.request_change(wish.kind, wish.reason, deadline_s=wish.deadline_s)
            except ElasticError as error:
                log.warning("%s was not passed on yet: %s", wish.reason, error)
                return
            self._wishes.popleft()


@contextmanager
def forward_signals(watch: NoticeWatcher, wishes: Mapping[int, SignalRequest]) -> Iterator[None]:
    """While the block runs these signals are wishes; handlers that were there before are called as well.

    Python lets only the main thread set handlers: elsewhere nothing is changed, and who runs the job is asked directly.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def received(number: int, frame: FrameType | None) -> None:
        watch.enqueue(wishes[number])
        earlier = before.get(number)
        if callable(earlier):
            earlier(number, frame)

    try:
        for number in wishes:
            before[number] = signal.signal(number, received)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)
