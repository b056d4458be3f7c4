"""A rank's injector: knows what is still to happen to it, and lets it happen where the training comes by."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from elastic.inject import deeds
from elastic.inject.plan import Injection, Kind, Phase, Place
from elastic.inject.record import Injected, Record, told

log = logging.getLogger(__name__)


class InWorld(Protocol):
    """As much of a world as is asked for here."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def restarts(self) -> int: ...
    @property
    def step(self) -> int: ...


class Injector:
    """``cut`` asks the supervisor to cut this node off for so many seconds; ``tell`` hears what is about to happen."""

    def __init__(
        self,
        plan: Iterable[Injection],
        record: Record,
        node: str,
        *,
        cut: Callable[[float], None],
        tell: Callable[[Injected], None] = lambda _: None,
    ) -> None:
        self._record, self._node, self._cut, self._tell = record, node, cut, tell
        self._began = record.began()
        self._world: InWorld | None = None
        self._waiting: list[Injection] = []
        self._known: set[str] = set()
        self._slow: tuple[Injection, int] | None = None
        """What makes steps slow, and the first step that it does not."""
        self._slowed = -1
        self.add(plan)

    def add(self, plan: Iterable[Injection]) -> None:
        """Also of what is known already, or over."""
        for one in plan:
            if one.name not in self._known:
                self._known.add(one.name)
                if not self._record.is_done(one.name):
                    self._waiting = [*self._waiting, one]  # another thread may be looking through the old one

    def enter(self, world: InWorld) -> None:
        """A world is entered; its ranks have not met."""
        self._world = world
        if world.restarts > 0:
            self.reach(Phase.RECOVERY)

    def resume(self, world: InWorld) -> None:
        """A world that was entered before there was anything to inject."""
        self._world = world

    def leave(self) -> None:
        self._world = None

    def reach(self, phase: Phase) -> Kind | None:
        """Have happen what is to happen here. Comes back only from what leaves the process as it is.

        ``NAN`` is for the caller, who has the numbers.
        """
        if not self._waiting and self._slow is None:
            return None
        world = self._world
        if world is None:
            return None
        self._drag(phase, world.step)
        for one in self._waiting:
            if one.when is phase and self._is_due(one, world):
                self._waiting = [other for other in self._waiting if other is not one]
                if self._claims(one, phase, world):
                    return self._carry_out(one, world)
        return None

    def expects(self, phase: Phase) -> bool:
        """Whether anything is still to happen in such a phase."""
        return any(one.when is phase for one in self._waiting)

    def _is_due(self, one: Injection, world: InWorld) -> bool:
        if not one.is_at(Place(world.rank, self._node, world.local_rank)):
            return False
        if one.step is not None and world.step < one.step:
            return False
        if one.after_s is not None and time.time() < self._began + one.after_s:
            return False
        return one.then is None or self._record.is_done(one.then)

    def _claims(self, one: Injection, phase: Phase, world: InWorld) -> bool:
        place = Place(world.rank, self._node, world.local_rank)
        happens = told(one, place, phase=phase, step=world.step, epoch=world.epoch)
        if not self._record.claim(happens):
            return False
        log.warning("injected at step %d, rank %d: %s", world.step, world.rank, one)
        self._tell(happens)
        return True

    def _carry_out(self, one: Injection, world: InWorld) -> Kind | None:
        if one.kind is Kind.SLOW:
            self._slow = one, world.step + one.repeats
        elif one.kind is Kind.PARTITION:
            self._cut(one.lasts_s)
        elif one.kind is not Kind.NAN:
            deeds.IN_PROCESS[one.kind]()
        return one.kind

    def _drag(self, phase: Phase, step: int) -> None:
        if self._slow is None or phase is not Phase.FORWARD:
            return
        one, end = self._slow
        if step >= end:
            self._slow = None
        elif step != self._slowed:
            self._slowed = step
            time.sleep(one.lasts_s)
