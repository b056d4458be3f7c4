"""Where the ranks of one epoch stop: all of them after the same number of steps, whatever each was doing when asked.

A rank that waited at a step boundary until it knows the common target would wait for ever for one that is inside the
next step and waits for it in a collective. Therefore each says how many steps it has *begun*, and says it as soon as
it hears that a stop is wanted, in a thread of its own. From then on it begins a step only when the target is known and
not reached. The target is the greatest number said, so everybody who is inside a step can finish it, and whoever is
behind finds all others taking part.
"""

from __future__ import annotations

import enum
import logging
import threading

from elastic.control.plane import ControlPlane, Notice, Want
from elastic.errors import ControlLostError, DeadlineError, RefusedError, StaleEpochError

log = logging.getLogger(__name__)


class Way(enum.Enum):
    """What a rank does at a step boundary."""

    ON = "on"
    """Begin the next step."""
    STOP = "stop"
    """Here is where all of them stop: seal, and leave."""
    LEAVE = "leave"
    """The world is broken: leave at once."""


class Gate:
    """One epoch's step boundaries, as this rank passes them.

    ``enter`` is called by the thread that trains, ``look`` and ``broken`` by others.
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
    def why_broken(self) -> str | None:
        """Why the world is broken; ``None`` while it is not."""
        return self._broken

    def enter(self, completed: int) -> Way:
        """Having completed so many steps: whether to begin the next one. Waits only when a stop is wanted."""
        self._begun = max(self._begun, completed)
        self.look()
        with self._changed:
            self._changed.wait_for(lambda: self._asked is None or self._target is not None or self._broken is not None)
            if self._broken is not None:
                return Way.LEAVE
            if self._target is not None and completed >= self._target:
                return Way.STOP
            self._begun = completed + 1
            return Way.ON

    def look(self) -> None:
        """Hear what is wanted by now. Costs a read of memory while nothing is."""
        notice = self._plane.notice()
        if notice is None or notice.epoch != self._epoch:
            return
        if notice.want is Want.RESTART:
            self.broken(notice)
        elif self._asked is None:
            self._stop(notice)

    def broken(self, notice: Notice) -> None:
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

    def _stop(self, notice: Notice) -> None:
        with self._changed:
            if self._asked is not None or self._broken is not None:
                return
            self._asked = self._begun
            log.info("%s (%s): stopping after step %d or later", notice.want.value, notice.reason, self._asked - 1)
            self._asking = threading.Thread(target=self._ask, args=(self._asked,), name="elastic-pause", daemon=True)
            self._asking.start()

    def _ask(self, begun: int) -> None:
        while not self._closed:
            try:
                target = self._plane.pause(begun)
            except (StaleEpochError, DeadlineError, RefusedError) as error:
                self._break(str(error))
                return
            except ControlLostError as error:
                log.warning("not known yet where to stop: %s", error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, self._retry_s)
                continue
            with self._changed:
                self._target = target
                self._changed.notify_all()
            return
