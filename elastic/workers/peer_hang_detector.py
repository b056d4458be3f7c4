"""Ranks detect each other's hangs through the rendezvous store, under launchers without a coordinator.

::

    every rank          writes its own key: how far it is, once a second where that has changed, and every few seconds
                        where it has not: that it can
    rank 0              reads the keys of all, a request a second, and judges
    rank r              reads the key of rank r - 1 every few seconds. Where that one falls silent it judges, too

So what a rank asks for is the same in a world of any size, and a judge that is stopped is judged by the next rank. A
judge counts only the time in which it has looked itself: one that was stopped blames nobody for it.
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
"""A rank that has nothing new says so every so many beats."""
_SILENT_BEATS = 12
"""Whom nothing was heard of for so long may be stopped; if it was the judge, there is no judge."""
_LEAP_BEATS = 5
_MOST_KEYS = 1024
"""So many keys are read at once: a store serves all ranks in one thread."""
_MOST_WORD = 100
_ALL = "the ranks"


class HeartbeatStore(Protocol):
    """Each of these is one request."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: Sequence[str]) -> Sequence[bytes]: ...


class PeerHangDetector:
    """What one rank makes of what all have written. Pure: the time is given."""

    def __init__(
        self, epoch: int, size: int, limits: HangTimeouts, pace: StepTimes, beat_s: float = HEARTBEAT_S
    ) -> None:
        self._formed = WorldSpec(epoch, (_ALL,), 0, "")
        self._limits, self._pace, self._beat_s = limits, pace, beat_s
        self._movement: HangDetector | None = None
        self._words = [b""] * size
        self._heard_at = [0.0] * size
        self._said = [(RankProgress(-1), False)] * size
        self._says: NodeStatus | None = None
        self._looked_at: float | None = None
        self._now = 0.0
        """How long this judge has looked."""

    def look(self, first: int, words: Sequence[bytes], at: float, *, stopping: bool = False) -> str | None:
        """Why the world is broken, once. ``words`` are those of the ranks from ``first`` on.

        ``stopping``: the world is to end at a common step, so that only silence counts.
        """
        if self._looked_at is not None:
            self._now += min(max(0.0, at - self._looked_at), _LEAP_BEATS * self._beat_s)
        self._looked_at = at
        for rank, word in enumerate(words, first):
            if word != self._words[rank]:
                self._words[rank], self._heard_at[rank], self._said[rank] = word, self._now, _read(word)
        before, self._says = self._says, self._report(stopping=stopping)
        if self._movement is None:
            self._movement = HangDetector(self._now, self._pace)
        self._movement.observe(before, self._says, self._now)
        if not self._movement.is_check_due(self._limits, self._now):
            return None
        return _reason(self._movement.find_hangs(self._formed, {_ALL: self._says}, self._limits, self._now))

    def _report(self, *, stopping: bool) -> NodeStatus:
        """All ranks as those of one node."""
        turns = -(-len(self._said) // _MOST_KEYS)
        since = self._now - (IDLE_HEARTBEATS + turns) * self._beat_s
        return NodeStatus(
            0,
            _ALL,
            0,
            len(self._said),
            world=self._formed,
            rank_progress=tuple(
                RankProgress(said.step, idle=said.idle or over or stopping) for said, over in self._said
            ),
            silent_s=tuple(
                0.0 if over else max(0.0, since - at) for at, (_, over) in zip(self._heard_at, self._said, strict=True)
            ),
        )


class RankHeartbeats:
    """One rank's part, beat by beat. ``keys`` are those of all ranks, ``judge`` makes one where anybody is to judge."""

    def __init__(
        self, store: HeartbeatStore, keys: Sequence[str], rank: int, judge: Callable[[], PeerHangDetector] | None
    ) -> None:
        self._store, self._keys, self._rank, self._make_judge = store, keys, rank, judge
        self._judge = judge() if judge is not None and rank == 0 else None
        self._beats = 0
        self._written: tuple[RankProgress, bool] | None = None
        self._written_beat = 0
        self._before, self._before_beat = b"", 0
        """What the rank before this one wrote last, and when that was new."""
        self._next = 0
        """From which rank on the judge reads."""

    def beat(self, progress: RankProgress, at: float, *, over: bool = False, stopping: bool = False) -> str | None:
        """To be called once a second; why the world is broken, where it is. ``over``: this rank has nothing to do."""
        self._beats += 1
        self.write(progress, over=over)
        if self._make_judge is not None and self._rank > 0 and self._beats % IDLE_HEARTBEATS == 0:
            self._follow(self._make_judge)
        if self._judge is None:
            return None
        first, self._next = self._next, self._next + _MOST_KEYS
        if self._next >= len(self._keys):
            self._next = 0
        words = self._store.multi_get(self._keys[first : first + _MOST_KEYS])
        return self._judge.look(first, words, at, stopping=stopping)

    def write(self, progress: RankProgress, *, over: bool = False) -> None:
        """Where it is new, or has not been said for long."""
        if self._written != (progress, over) or self._beats - self._written_beat >= IDLE_HEARTBEATS:
            self._store.set(self._keys[self._rank], _word(self._beats, progress, over=over))
            self._written, self._written_beat = (progress, over), self._beats

    def _follow(self, judge: Callable[[], PeerHangDetector]) -> None:
        word = self._store.get(self._keys[self._rank - 1])
        if word != self._before or _read(word)[1]:
            self._before, self._before_beat, self._judge = word, self._beats, None
        elif self._judge is None and self._beats - self._before_beat >= _SILENT_BEATS:
            self._judge, self._next = judge(), 0


FIRST_HEARTBEAT = "0 -1 0 0"
"""Of a rank that has only just come."""


def _word(beats: int, progress: RankProgress, *, over: bool) -> str:
    return f"{beats} {progress.step} {progress.idle:d} {over:d}"


def _read(word: bytes) -> tuple[RankProgress, bool]:
    """How far a rank is, and whether nothing more is to be expected of it. What is no word says nothing."""
    try:
        _, step, free, over = word[:_MOST_WORD].split()
        return RankProgress(int(step), idle=free == b"1"), over == b"1"
    except ValueError:
        return RankProgress(-1), False


def _reason(found: Sequence[HangDetected | RankLost]) -> str | None:
    """A judge's one node has a seat for each rank."""
    if not found:
        return None
    blamed = sorted(one.local_rank for one in found if one.local_rank >= 0)
    who = f"rank{'s' if len(blamed) > 1 else ''} {', '.join(map(str, blamed))}: " if blamed else ""
    return f"{who}{found[0].reason}"
