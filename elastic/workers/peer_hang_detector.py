"""Hang detection between ranks through the rendezvous store, for launchers without a coordinator.

::

    every rank          writes its progress to its own key: once a second if it changed, and every few seconds otherwise
    rank 0              reads the keys of all ranks, one request a second, and judges
    rank r              reads the key of rank r - 1 every few seconds. If that key stops changing, rank r judges too

So the number of requests of a rank does not depend on the world size, and the next rank judges a stopped judge. A judge
counts only the time in which it reads keys itself. After a pause of its own it reports no rank for that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from elastic.control.control_messages import NodeStatus, WorldSpec
from elastic.control.control_plane import RankProgress
from elastic.control.hang_detector import HangDetector, HangTimeouts, StepTimes
from elastic.world.world_state import HangDetected, RankLost

HEARTBEAT_S = 1.0
IDLE_HEARTBEATS = 5
"""Heartbeats after which a rank without progress writes its key again."""
_SILENT_BEATS = 12
"""Heartbeats without a change after which the previous rank may be stopped.

If it was the judge, no judge is left.
"""
_LEAP_BEATS = 5
_MAX_KEYS = 1024
"""Keys per read: the store serves all ranks in one thread."""
_MAX_RECORD_BYTES = 100
_ALL = "the ranks"


class HeartbeatStore(Protocol):
    """Store client of the heartbeats. Each method is one request."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: Sequence[str]) -> Sequence[bytes]: ...


class PeerHangDetector:
    """Judgment of one rank over the records of all ranks. Pure: the caller passes the time."""

    def __init__(
        self, epoch: int, size: int, limits: HangTimeouts, pace: StepTimes, beat_s: float = HEARTBEAT_S
    ) -> None:
        self._world = WorldSpec(epoch, (_ALL,), 0, "")
        self._limits, self._pace, self._beat_s = limits, pace, beat_s
        self._movement: HangDetector | None = None
        self._records = [b""] * size
        self._changed_at = [0.0] * size
        self._reported = [(RankProgress(-1), False)] * size
        self._status: NodeStatus | None = None
        self._read_at: float | None = None
        self._now = 0.0
        """Seconds in which this judge has read keys."""

    def look(self, first: int, words: Sequence[bytes], at: float, *, stopping: bool = False) -> str | None:
        """Return the reason if the world is broken; ``None`` if it is not.

        ``words`` are the records of rank ``first`` and the following ranks.

        ``at`` is the current time in seconds. With ``stopping``, the world stops at a common step, so only silence
        counts.
        """
        if self._read_at is not None:
            self._now += min(max(0.0, at - self._read_at), _LEAP_BEATS * self._beat_s)
        self._read_at = at
        for rank, word in enumerate(words, first):
            if word != self._records[rank]:
                self._records[rank], self._changed_at[rank], self._reported[rank] = word, self._now, _decode(word)
        before, self._status = self._status, self._report(stopping=stopping)
        if self._movement is None:
            self._movement = HangDetector(self._now, self._pace)
        self._movement.observe(before, self._status, self._now)
        if not self._movement.is_check_due(self._limits, self._now):
            return None
        return _reason(self._movement.find_hangs(self._world, {_ALL: self._status}, self._limits, self._now))

    def _report(self, *, stopping: bool) -> NodeStatus:
        """Return the status of all ranks as the status of one node."""
        reads = -(-len(self._reported) // _MAX_KEYS)
        since = self._now - (IDLE_HEARTBEATS + reads) * self._beat_s
        return NodeStatus(
            0,
            _ALL,
            0,
            len(self._reported),
            world=self._world,
            rank_progress=tuple(
                RankProgress(progress.step, idle=progress.idle or over or stopping) for progress, over in self._reported
            ),
            silent_s=tuple(
                0.0 if over else max(0.0, since - at)
                for at, (_, over) in zip(self._changed_at, self._reported, strict=True)
            ),
        )


class RankHeartbeats:
    """Heartbeats of one rank.

    ``keys`` are those of all ranks; ``judge`` creates a judge, ``None`` to disable judging.
    """

    def __init__(
        self, store: HeartbeatStore, keys: Sequence[str], rank: int, judge: Callable[[], PeerHangDetector] | None
    ) -> None:
        self._store, self._keys, self._rank, self._make_judge = store, keys, rank, judge
        self._judge = judge() if judge is not None and rank == 0 else None
        self._beats = 0
        self._written: tuple[RankProgress, bool] | None = None
        self._written_beat = 0
        self._previous, self._previous_beat = b"", 0
        """Last record of the previous rank, and the heartbeat at which it changed."""
        self._next = 0
        """First rank of the judge's next read."""

    def beat(self, progress: RankProgress, at: float, *, over: bool = False, stopping: bool = False) -> str | None:
        """Write this rank's key, and return the reason if the world is broken.

        Call it once a second.

        ``over``: this rank has finished its part.
        """
        self._beats += 1
        self.write(progress, over=over)
        if self._make_judge is not None and self._rank > 0 and self._beats % IDLE_HEARTBEATS == 0:
            self._watch_previous(self._make_judge)
        if self._judge is None:
            return None
        first, self._next = self._next, self._next + _MAX_KEYS
        if self._next >= len(self._keys):
            self._next = 0
        words = self._store.multi_get(self._keys[first : first + _MAX_KEYS])
        return self._judge.look(first, words, at, stopping=stopping)

    def write(self, progress: RankProgress, *, over: bool = False) -> None:
        """Write this rank's key if its progress changed or the last write is old."""
        if self._written != (progress, over) or self._beats - self._written_beat >= IDLE_HEARTBEATS:
            self._store.set(self._keys[self._rank], _encode(self._beats, progress, over=over))
            self._written, self._written_beat = (progress, over), self._beats

    def _watch_previous(self, judge: Callable[[], PeerHangDetector]) -> None:
        word = self._store.get(self._keys[self._rank - 1])
        if word != self._previous or _decode(word)[1]:
            self._previous, self._previous_beat, self._judge = word, self._beats, None
        elif self._judge is None and self._beats - self._previous_beat >= _SILENT_BEATS:
            self._judge, self._next = judge(), 0


FIRST_HEARTBEAT = "0 -1 0 0"
"""Record of a rank that has just joined."""


def _encode(beats: int, progress: RankProgress, *, over: bool) -> str:
    return f"{beats} {progress.step} {progress.idle:d} {over:d}"


def _decode(word: bytes) -> tuple[RankProgress, bool]:
    """Return a rank's progress and whether it has finished. An invalid record means unknown progress."""
    try:
        _, step, free, over = word[:_MAX_RECORD_BYTES].split()
        return RankProgress(int(step), idle=free == b"1"), over == b"1"
    except ValueError:
        return RankProgress(-1), False


def _reason(found: Sequence[HangDetected | RankLost]) -> str | None:
    """Return the reason for a broken world, or ``None``.

    The judge's one node has a local rank for each rank.
    """
    if not found:
        return None
    blamed = sorted(one.local_rank for one in found if one.local_rank >= 0)
    prefix = f"rank{'s' if len(blamed) > 1 else ''} {', '.join(map(str, blamed))}: " if blamed else ""
    return f"{prefix}{found[0].reason}"
