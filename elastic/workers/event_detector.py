"""``elastic_event_detected``: one call per step, for loops that are not written for ``elastic.run``.

``True`` means: save now and exit with status 0, because the world changes. A call needs no collective. All ranks get
their ``True`` at the same step, even where one received its signal much earlier than another.
"""

from __future__ import annotations

import atexit
import logging
import signal
import threading
from contextlib import ExitStack

from elastic.control.control_plane import ControlPlane, NoticeKind
from elastic.errors import ElasticError
from elastic.settings import has_hang_limit
from elastic.workers.step_barrier import (
    BoundaryDecision,
    NoticeWatcher,
    SignalRequest,
    StepBarrier,
    default_signal_requests,
    forward_signals,
)
from elastic.workers.train_loop import current_world
from elastic.workers.world_handle import rank_progress

log = logging.getLogger(__name__)

_GRACE_S = 25.0


class EventDetector:
    """This process's answer, step by step, in a world that ends with the process."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._calls = 0
        self._detected = False
        self._is_late_told = has_hang_limit()
        self._undo = ExitStack()
        self._signals: set[int] = set()
        self._undo.callback(plane.close)
        place = plane.wait_for_assignment()
        self._gate = StepBarrier(plane, place.epoch)
        self._undo.callback(self._gate.close)
        self._watch = NoticeWatcher(plane, lambda _notice: None)
        self._undo.callback(self._watch.close)
        self._watch.watch_barrier(self._gate)
        self.add_signal(signal.SIGTERM)

    def add_signal(self, number: int) -> None:
        """Have this signal, at any rank, mean the event at all of them."""
        if number not in self._signals and threading.current_thread() is threading.main_thread():
            self._signals.add(number)
            wish = default_signal_requests(_GRACE_S).get(number, SignalRequest(NoticeKind.RESIZE, f"signal {number}"))
            self._undo.enter_context(forward_signals(self._watch, {number: wish}))

    def is_detected(self) -> bool:
        """Having come to the next step: whether it is not to be begun."""
        if self._detected:
            return True
        # It cannot say that it evaluates: how long a step may take is asked of it only where somebody has said so.
        self._plane.report_progress(rank_progress(self._calls or -1, idle=not self._is_late_told))
        way = self._gate.pass_boundary(self._calls)
        if way is BoundaryDecision.CONTINUE:
            self._calls += 1
            return False
        if way is BoundaryDecision.ABORT:  # no common step any more: what the others get is their own matter
            log.warning("the world is broken: %s", self._gate.broken_reason)
            self._plane.report_progress(rank_progress(self._calls or -1, idle=True))  # out of it, and may save
        self._detected = True
        return True

    def close(self) -> None:
        if self._detected:
            try:
                self._plane.report_sealed(self._calls)
            except ElasticError as error:
                log.debug("nobody heard that this rank has stopped: %s", error)
        self._undo.close()


_detectors: list[EventDetector] = []
_lock = threading.Lock()


def elastic_event_detected(sig: int = signal.SIGUSR1) -> bool:
    """Called by all ranks once a step, at its beginning: whether the world is to change, so save and exit.

    The first call of a process waits for that of all others, and begins to listen for ``sig`` and SIGTERM (what
    handled them before is called as well). Inside :func:`elastic.run` it answers for the world that is trained in.
    """
    world = current_world()
    if world is not None:
        return world.event_detected()
    with _lock:
        if not _detectors:
            from elastic.workers.launch_environment import detect_control_plane

            _detectors.append(EventDetector(detect_control_plane()))
            atexit.register(close_detectors)
    _detectors[0].add_signal(sig)
    return _detectors[0].is_detected()


def close_detectors() -> None:
    """Give signals back and let go of whoever runs the job; the next call begins anew."""
    with _lock:
        while _detectors:
            _detectors.pop().close()
