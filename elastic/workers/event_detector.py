"""``elastic_event_detected``: one call per step, for training loops that do not use ``elastic.run``.

``True`` means: save now and exit with status 0, because the world changes. A call needs no collective. All ranks return
``True`` at the same step, even if their signals arrive at different times.
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
    """Event detection of this process, in a world that ends with the process."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._calls = 0
        self._detected = False
        self._has_hang_limit = has_hang_limit()
        self._cleanup = ExitStack()
        self._signals: set[int] = set()
        self._cleanup.callback(plane.close)
        assignment = plane.wait_for_assignment()
        self._barrier = StepBarrier(plane, assignment.epoch)
        self._cleanup.callback(self._barrier.close)
        self._watch = NoticeWatcher(plane, lambda _notice: None)
        self._cleanup.callback(self._watch.close)
        self._watch.watch_barrier(self._barrier)
        self.add_signal(signal.SIGTERM)

    def add_signal(self, number: int) -> None:
        """Report an event at all ranks when this rank receives signal ``number``.

        Does nothing outside the main thread.
        """
        if number not in self._signals and threading.current_thread() is threading.main_thread():
            self._signals.add(number)
            request = default_signal_requests(_GRACE_S).get(
                number, SignalRequest(NoticeKind.RESIZE, f"signal {number}")
            )
            self._cleanup.enter_context(forward_signals(self._watch, {number: request}))

    def is_detected(self) -> bool:
        """Return whether the event was detected, so that this rank must not begin the next step."""
        if self._detected:
            return True
        # A script cannot announce its evaluations. Limit the time of a step only if the user has set a limit.
        self._plane.report_progress(rank_progress(self._calls or -1, idle=not self._has_hang_limit))
        decision = self._barrier.pass_boundary(self._calls)
        if decision is BoundaryDecision.CONTINUE:
            self._calls += 1
            return False
        if decision is BoundaryDecision.ABORT:  # without a common step, each rank saves separately
            log.warning("the world is broken: %s", self._barrier.broken_reason)
            self._plane.report_progress(rank_progress(self._calls or -1, idle=True))  # left the world, and may save
        self._detected = True
        return True

    def close(self) -> None:
        if self._detected:
            try:
                self._plane.report_sealed(self._calls)
            except ElasticError as error:
                log.debug("cannot report that this rank has stopped: %s", error)
        self._cleanup.close()


_detectors: list[EventDetector] = []
_lock = threading.Lock()


def elastic_event_detected(sig: int = signal.SIGUSR1) -> bool:
    """Return whether the world is about to change, so that the script has to save and exit.

    All ranks call it once per step, at the beginning of the step. The first call waits until every rank has called it,
    and installs handlers for ``sig`` and SIGTERM; earlier handlers still run. Inside :func:`elastic.run` it reports the
    change of the current world.
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
    """Restore the signal handlers and close the control plane; the next call of the API starts again."""
    with _lock:
        while _detectors:
            _detectors.pop().close()
