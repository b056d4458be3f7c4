"""The thread beside the one that trains: it hears what is wanted while a step runs, and passes on what signals say."""

from __future__ import annotations

import collections
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec

from elastic.control.plane import ControlPlane, Notice, Want
from elastic.errors import ElasticError
from elastic.workers.gate import Gate

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_AGAIN_S = 0.5


class Wish(msgspec.Struct, frozen=True):
    """What a signal asks the control plane for."""

    want: Want
    reason: str
    deadline_s: float | None = None


def usual_wishes(grace_s: float) -> dict[int, Wish]:
    """SIGUSR1: somebody wants another world. SIGTERM: this machine goes away, and so much time is left."""
    return {
        signal.SIGUSR1: Wish(Want.RESIZE, "SIGUSR1"),
        signal.SIGTERM: Wish(Want.RESIZE, "SIGTERM: this process is to go", grace_s),
    }


class Watch:
    """Looks at the notice of the current epoch even when no step ends, and calls ``on_broken`` when it is broken.

    ``still_broken`` is called with that epoch now and then, until it has been left: a group that was just being made
    when the world was aborted has connections that were not there to be cut.
    """

    def __init__(
        self,
        plane: ControlPlane,
        on_broken: Callable[[Notice], None],
        still_broken: Callable[[int], None] = lambda _epoch: None,
    ) -> None:
        self._plane = plane
        self._on_broken = on_broken
        self._still_broken = still_broken
        self._aborted: tuple[int, float] = (-1, 0.0)
        """Which epoch was, and when last."""
        self._gate: Gate | None = None
        self._wishes: collections.deque[Wish] = collections.deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-watch", daemon=True)
        plane.on_broken(self._broken)
        self._thread.start()

    def follow(self, gate: Gate | None) -> None:
        """From now on this is the epoch to look at."""
        self._gate = gate

    def wish(self, wish: Wish) -> None:
        """Have the control plane asked by the thread that looks: a signal handler must not wake it, only write down."""
        self._wishes.append(wish)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _broken(self, notice: Notice) -> None:
        """In a thread of the plane."""
        gate = self._gate
        if gate is not None and gate.epoch == notice.epoch:
            gate.broken(notice)
            self._on_broken(notice)
            self._aborted = (notice.epoch, time.monotonic())

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._pass_on()
            gate = self._gate
            if gate is not None:
                gate.look()
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
                self._plane.request(wish.want, wish.reason, deadline_s=wish.deadline_s)
            except ElasticError as error:
                log.warning("%s was not passed on yet: %s", wish.reason, error)
                return
            self._wishes.popleft()


@contextmanager
def signals_to(watch: Watch, wishes: Mapping[int, Wish]) -> Iterator[None]:
    """While the block runs these signals are wishes; handlers that were there before are called as well.

    Python lets only the main thread set handlers: elsewhere nothing is changed, and who runs the job is asked directly.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def received(number: int, frame: FrameType | None) -> None:
        watch.wish(wishes[number])
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
