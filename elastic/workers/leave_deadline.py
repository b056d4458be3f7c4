"""Deadline of a process for leaving a broken world.

One deadline covers all stages of leaving (:class:`~elastic.control.control_plane.LeaveStage`). Past it the process logs
the stage and the stacks of all threads and exits, so that another process replaces it. If native code holds the
interpreter's lock, no Python thread can act on the deadline. Then the supervisor sends a signal, whose handler in C
writes the stacks. Without a supervisor a timer in C does the same, if the lock was free when the world broke.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from elastic.control.child_processes import LEAVE_STATUS, STACKS_SIGNAL
from elastic.control.control_plane import ControlNotice, ControlPlane, LeaveStage
from elastic.control.supervisor_client import SupervisorClient

log = logging.getLogger(__name__)

_SHARE = 0.9
"""Share of the time limit after which the process exits without a signal."""
_STDERR = 2
"""Descriptor that the supervisor reads. ``sys.stderr`` may be replaced."""


def exit_with_stacks() -> NoReturn:
    """Write the stacks of all threads to stderr and exit at once.

    Errors and handlers cannot end a process that hangs.
    """
    with contextlib.suppress(ValueError, OSError, AttributeError):  # stderr may be replaced
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(LEAVE_STATUS)


@contextlib.contextmanager
def stacks_on_signal() -> Iterator[None]:
    """Write the stacks of all threads when the supervisor ends the process within this block."""
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(STACKS_SIGNAL)


class LeaveDeadline:
    """Deadline of one process for leaving a broken world.

    The training thread reports stages; a notice from the plane starts the deadline.
    """

    def __init__(
        self, plane: ControlPlane, end: Callable[[], None] = exit_with_stacks, *, native_timer: bool = True
    ) -> None:
        """Register with ``plane``.

        ``native_timer``: without a supervisor, also end the process by a timer in C.
        """
        self._changed = threading.Condition()
        self._end = end
        self._supervisor = plane if isinstance(plane, SupervisorClient) else None
        self._native_timer = native_timer and self._supervisor is None
        self._epoch = -1
        """Epoch of the world of this process; -1 for none."""
        self._armed = -1
        self._stage, self._since = LeaveStage.ENTER, 0.0
        self._aborting = ""
        """The running step of the abort; "" for none."""
        plane.on_broken(self._start_deadline)

    def enter(self, epoch: int) -> None:
        with self._changed:
            self._epoch = epoch
        self.at(LeaveStage.ENTER)

    def at(self, stage: LeaveStage) -> None:
        """Record the stage that begins."""
        with self._changed:
            self._stage, self._since = stage, time.monotonic()
            if self._armed == self._epoch >= 0:
                self._report(stage)

    @contextlib.contextmanager
    def aborting(self, step: str) -> Iterator[None]:
        """Record a step of the abort, which runs in another thread than the stages."""
        self._aborting = step
        try:
            yield
        finally:
            self._aborting = ""

    def left(self) -> None:
        """Cancel the deadline: the world is left."""
        with self._changed:
            if self._armed == self._epoch >= 0:
                self._report(None)
                if self._native_timer:
                    faulthandler.cancel_dump_traceback_later()
            self._epoch = -1
            self._changed.notify_all()

    def _report(self, stage: LeaveStage | None) -> None:
        if self._supervisor is not None:
            self._supervisor.report_leave_stage(stage)

    def _start_deadline(self, notice: ControlNotice) -> None:
        with self._changed:
            if notice.deadline_s is None or notice.epoch != self._epoch or self._armed == notice.epoch:
                return
            self._armed = notice.epoch
            self._report(self._stage)
            if self._native_timer and notice.deadline_s > 0:
                faulthandler.dump_traceback_later(notice.deadline_s, exit=True, file=_STDERR)
        within_s = _SHARE * notice.deadline_s
        threading.Thread(target=self._wait, args=(notice, within_s), name="elastic-leave", daemon=True).start()

    def _wait(self, notice: ControlNotice, within_s: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._epoch != notice.epoch, within_s):
                return
            log.error(
                "world %d is broken (%s), and this process did not leave it within %.1f s. It has been in this stage "
                "for %.1f s: %s%s. The process exits; the stacks of its threads follow",
                notice.epoch,
                notice.reason,
                within_s,
                time.monotonic() - self._since,
                self._stage.value,
                f" (the abort step {self._aborting!r} has not returned)" if self._aborting else "",
            )
            self._end()
