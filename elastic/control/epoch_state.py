"""The state of an epoch: the change that its ranks must make, and their common last step.

:class:`EpochState` is pure. Every control plane, supervisor and coordinator has one. They differ only in how changes
and reports reach them::

                   change(RESIZE | STOP)           agree: all ranks reported a step
    no change ────────────────────────> pausing ───────────────────────────────────> pausing with a target
        │                                  │                                             │
        └───────── change(RESTART) ────────┴──────────────> broken <─────────────────────┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import msgspec

from elastic.control.control_plane import ControlNotice, NoticeKind
from elastic.errors import StaleEpochError
from elastic.world.world_state import SealedStep
from peerstore.shard_records import NonNegativeIntOrMinusOne


class EpochChange(msgspec.Struct, frozen=True):
    """Change that the ranks of an epoch must make, with its deadline on the clock of its holder."""

    kind: NoticeKind
    reason: str
    until: float | None = None
    """Time by which the ranks must have made the change; ``None`` for no limit."""


class EpochState(msgspec.Struct, frozen=True):
    """Change, pause and target of one epoch."""

    epoch: int = -1
    """Number of the epoch; -1 before the first one."""
    broken: EpochChange | None = None
    """Why the epoch is broken, or ``None`` if it is not."""
    pause: EpochChange | None = None
    """The newest planned change, or ``None``; a fault does not remove it."""
    target: int | None = None
    """Step after which all ranks stop; ``None`` until all have reported one."""

    @property
    def is_broken(self) -> bool:
        return self.broken is not None

    @property
    def is_stopping(self) -> bool:
        """Whether the job ends after the pause."""
        return self.pause is not None and self.pause.kind is NoticeKind.STOP

    @property
    def current_change(self) -> EpochChange | None:
        """The change that applies: a broken epoch makes no planned change."""
        return self.broken or self.pause

    @property
    def reason(self) -> str:
        """Why the ranks must make the change, "" without one."""
        return "" if self.current_change is None else self.current_change.reason

    def notice(self, now: float) -> ControlNotice | None:
        """Return the change as its ranks receive it, or ``None``."""
        change = self.current_change
        if change is None:
            return None
        left_s = None if change.until is None else max(0.0, change.until - now)
        return ControlNotice(self.epoch, change.kind, change.reason, left_s)

    def change(self, kind: NoticeKind, reason: str, until: float | None = None) -> EpochState:
        """Return the state after a change.

        A broken epoch keeps its first fault. A later pause replaces an earlier one, but of their deadlines the earlier
        one holds, and steps that ranks have reported remain.
        """
        if self.broken is not None:
            return self
        if kind is NoticeKind.RESTART:
            return msgspec.structs.replace(self, broken=EpochChange(kind, reason, until))
        earlier = None if self.pause is None else self.pause.until
        until = min((limit for limit in (earlier, until) if limit is not None), default=None)
        return msgspec.structs.replace(self, pause=EpochChange(kind, reason, until))

    def agree(self, steps: Iterable[int | None]) -> EpochState:
        """Return the state after the ranks' reports. The first target remains."""
        if self.target is not None or self.is_broken:
            return self
        return msgspec.structs.replace(self, target=common_step(steps))

    def without_pause(self) -> EpochState:
        """Return the state after the pause has ended."""
        return msgspec.structs.replace(self, pause=None, target=None)


class ChangeMessage(msgspec.Struct, frozen=True):
    """:class:`EpochChange` as a message, with seconds left in place of a time."""

    kind: NoticeKind
    reason: str
    within_s: float | None = None

    @classmethod
    def of(cls, change: EpochChange | None, now: float) -> ChangeMessage | None:
        if change is None:
            return None
        return cls(change.kind, change.reason, None if change.until is None else max(0.0, change.until - now))

    def received(self, now: float) -> EpochChange:
        """Return the change on the clock of a receiver at ``now``."""
        return EpochChange(self.kind, self.reason, None if self.within_s is None else now + self.within_s)

    def without_time(self) -> ChangeMessage:
        return self if self.within_s is None else msgspec.structs.replace(self, within_s=0.0)


class EpochMessage(msgspec.Struct, frozen=True):
    """:class:`EpochState` as a message: between coordinator, supervisors and ranks, in both directions."""

    epoch: NonNegativeIntOrMinusOne = -1
    broken: ChangeMessage | None = None
    pause: ChangeMessage | None = None
    target: NonNegativeIntOrMinusOne | None = None

    @classmethod
    def of(cls, state: EpochState, now: float) -> EpochMessage:
        return cls(state.epoch, ChangeMessage.of(state.broken, now), ChangeMessage.of(state.pause, now), state.target)

    def received(self, now: float) -> EpochState:
        """Return the state on the clock of a receiver at ``now``."""
        broken, pause = (None if change is None else change.received(now) for change in (self.broken, self.pause))
        return EpochState(self.epoch, broken, pause, self.target)

    def without_times(self) -> EpochMessage:
        """Return the message without values that change with time, for comparison."""
        broken, pause = (None if change is None else change.without_time() for change in (self.broken, self.pause))
        return EpochMessage(self.epoch, broken, pause, self.target)


def common_step(steps: Iterable[int | None]) -> int | None:
    """Return the greatest step once all have reported one, or ``None``.

    ``steps`` has the report of each rank, or of each group of ranks.
    """
    reported = list(steps)
    known = [step for step in reported if step is not None]
    return max(known) if known and len(known) == len(reported) else None


def common_checkpoint(checkpoints: Iterable[SealedStep | None]) -> SealedStep | None:
    """Return the checkpoint that all have reported, or ``None`` if they differ."""
    distinct = set(checkpoints)
    return distinct.pop() if len(distinct) == 1 else None


def stale_epoch(epoch: int, reason: str) -> StaleEpochError:
    """Return the error of a call for an epoch that has ended."""
    return StaleEpochError(f"world {epoch} has ended: {reason}")


BrokenCallback = Callable[[ControlNotice], None]


class BrokenCallbacks:
    """Callbacks for broken epochs. Each runs once per epoch, on a separate thread.

    A callback that aborts a process group may wait for the control plane, which must remain responsive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[BrokenCallback] = []
        self._broken_epoch: int | None = None
        """Newest epoch for which the callbacks have run."""

    def add(self, call: BrokenCallback, notice: ControlNotice | None) -> None:
        """Add a callback. ``notice`` is the current one: the callback runs at once if the epoch is broken."""
        with self._lock:
            self._calls.append(call)
            missed = notice if self._has_run_for(notice) else None
        if missed is None:
            self.run(notice)
        else:
            _start((call,), missed)

    def run(self, notice: ControlNotice | None) -> None:
        """Run the callbacks if ``notice`` says that an epoch is broken and they have not run for it."""
        with self._lock:
            if notice is None or notice.kind is not NoticeKind.RESTART or self._has_run_for(notice):
                return
            self._broken_epoch, calls = notice.epoch, tuple(self._calls)
        _start(calls, notice)

    def _has_run_for(self, notice: ControlNotice | None) -> bool:
        return notice is not None and notice.epoch == self._broken_epoch


def _start(calls: tuple[BrokenCallback, ...], notice: ControlNotice) -> None:
    def run() -> None:
        for call in calls:
            call(notice)

    if calls:
        threading.Thread(target=run, name="elastic-broken", daemon=True).start()
