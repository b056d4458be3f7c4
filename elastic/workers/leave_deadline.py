"""The time that a process has to leave a broken world, and its end when it takes longer.

Leaving has stages: the train function returns, the survivor's state is set aside, callbacks run, groups are destroyed,
health is checked. One deadline covers all of them. Past it the process logs the stage and the stacks of all threads and
exits, so that its supervisor starts another process. A process that cannot run Python is killed by the supervisor.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from elastic.control.control_plane import ControlNotice, ControlPlane

log = logging.getLogger(__name__)

_STATUS = 1
_SHARE = 0.9
"""Share of the coordinator's time limit after which the process exits by itself."""


def exit_with_stacks() -> NoReturn:
    """End a process that hangs, with the stacks of its threads in its log. Errors and handlers could not end it."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # stderr may be replaced
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(_STATUS)


class LeaveDeadline:
    """Deadline of one process. The training thread reports stages; a notice from the plane starts it."""

    def __init__(self, plane: ControlPlane, end: Callable[[], None] = exit_with_stacks) -> None:
        self._changed = threading.Condition()
        self._end = end
        self._epoch = -1
        """The world this process is in; -1 for none."""
        self._armed = -1
        self._stage, self._since = "", 0.0
        plane.on_broken(self._broken)

    def enter(self, epoch: int) -> None:
        with self._changed:
            self._epoch = epoch
        self.at("entering the world")

    def at(self, stage: str) -> None:
        """Note the stage that begins."""
        self._stage, self._since = stage, time.monotonic()

    def left(self) -> None:
        """Cancel the deadline: the world is left."""
        with self._changed:
            self._epoch = -1
            self._changed.notify_all()

    def _broken(self, notice: ControlNotice) -> None:
        with self._changed:
            if notice.deadline_s is None or notice.epoch != self._epoch or self._armed == notice.epoch:
                return
            self._armed = notice.epoch
        within_s = _SHARE * notice.deadline_s
        threading.Thread(target=self._wait, args=(notice, within_s), name="elastic-leave", daemon=True).start()

    def _wait(self, notice: ControlNotice, within_s: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._epoch != notice.epoch, within_s):
                return
            log.error(
                "epoch %d is broken (%s), and this process did not leave it within %.1f s. It has been in this stage "
                "for %.1f s: %s. The process exits; the stacks of its threads follow",
                notice.epoch,
                notice.reason,
                within_s,
                time.monotonic() - self._since,
                self._stage,
            )
            self._end()
