"""Detects ranks that make no progress. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from elastic.control.control_messages import NodeStatus, WorldSpec
from elastic.world.world_state import HangDetected, RankLost

_TIMES = 10.0
_LEAST_S = 600.0
_FIRST_S = 3600.0
_QUIET_S = 5.0
"""A process that has said nothing for so long, while nobody gets on, is who to look at first: it says something every
second from a thread of its own, unless it is stopped or something in it keeps the interpreter's lock."""

_LOOK_S = 1.0


class StepTimes(msgspec.Struct):
    """The longest that a job's ranks have taken so far, in any of its worlds."""

    longest_step_s: float = 0.0
    """From one step to the next."""
    longest_first_step_s: float = 0.0
    """From a world's beginning to its first step."""


class HangTimeouts(msgspec.Struct, frozen=True):
    """How long no rank may get on. What is not given follows from what the job has taken so far."""

    step_s: float | None = None
    """Between two steps; 0: for ever. Not given: ten times the longest so far, ten minutes at least."""
    first_s: float | None = None
    """From a world's beginning to its first step, which restores and compiles; 0: for ever. Not given: ten times the
    longest so far, ten minutes at least, and an hour while there has been no first step."""
    silent_s: float = 60.0
    """The same where a process does not even run a thread that has nothing to do."""

    def progress_timeout_s(self, pace: StepTimes, *, stepped: bool) -> float:
        given, seen_s = (self.step_s, pace.longest_step_s) if stepped else (self.first_s, pace.longest_first_step_s)
        if given is not None:
            return given or float("inf")
        return max(_LEAST_S, _TIMES * seen_s) if stepped or seen_s else _FIRST_S

    def longest_s(self, pace: StepTimes) -> float | None:
        """Of a world that begins now; ``None``: for ever."""
        found = max(self.progress_timeout_s(pace, stepped=False), self.progress_timeout_s(pace, stepped=True))
        return None if found == float("inf") else found

    def silence_timeout_s(self, pace: StepTimes) -> float:
        if self.step_s == 0:
            return float("inf")
        return (
            min(self.silent_s, self.step_s) if self.step_s is not None else max(self.silent_s, 2 * pace.longest_step_s)
        )


class _Place(NamedTuple):
    """A rank, as its node says it is."""

    step: int
    node: str
    local_rank: int
    quiet_s: float
    free: bool


class HangDetector:
    """Of one world, from when it was formed. ``pace`` is the job's."""

    def __init__(self, began_at: float | None = None, pace: StepTimes | None = None) -> None:
        self._moved_at = began_at
        self._stepped = self._told = False
        self._look_at = float("-inf")
        self._pace = StepTimes() if pace is None else pace

    def observe(self, before: NodeStatus | None, status: NodeStatus, now: float) -> None:
        """A node's two latest reports."""
        if before is None or not any(new > old for old, new in zip(_steps(before), _steps(status), strict=False)):
            return
        took_s = 0.0 if self._moved_at is None else now - self._moved_at
        if self._stepped:
            self._pace.longest_step_s = max(self._pace.longest_step_s, took_s)
        else:
            self._pace.longest_first_step_s = max(self._pace.longest_first_step_s, took_s)
        self._moved_at, self._stepped = now, True

    def is_check_due(self, limits: HangTimeouts, now: float) -> bool:
        """Whether ``find_hangs`` could find something, as far as can be said without going through all ranks.

        Once nobody has got on for long, that is done once a second: nodes report no more often.
        """
        if self._moved_at is None or self._told or now < self._look_at:
            return False
        still_s = now - self._moved_at
        least_s = min(
            limits.silence_timeout_s(self._pace), limits.progress_timeout_s(self._pace, stepped=self._stepped)
        )
        if still_s <= least_s:
            return False
        self._look_at = now + _LOOK_S
        return True

    def find_hangs(
        self, formed: WorldSpec, reports: Mapping[str, NodeStatus], limits: HangTimeouts, now: float
    ) -> list[HangDetected | RankLost]:
        """That nobody gets on, once; and whose processes are to be replaced for it, where that is known."""
        if self._moved_at is None or self._told:
            return []
        still_s, silent_limit_s = now - self._moved_at, limits.silence_timeout_s(self._pace)
        places = list(_places(formed, reports))
        is_silent = still_s > silent_limit_s and any(place.quiet_s > silent_limit_s for place in places)
        is_late = still_s > limits.progress_timeout_s(self._pace, stepped=self._stepped) and not any(
            one.free for one in places
        )
        if not is_silent and not is_late:
            return []
        self._told = True
        quiet = [place for place in places if place.quiet_s > min(_QUIET_S, silent_limit_s)]
        blamed = quiet or _behind(places)
        what = f"no rank has got on for {still_s:.0f} s"
        if not blamed:
            return [HangDetected(formed.epoch, what)]
        if quiet:
            what += ", and its process does not answer (it is stopped, or something in it does not let Python run)"
        first, *others = blamed
        lost = [
            RankLost(one.node, reports[one.node].generation, reports[one.node].spawn_count, one.local_rank, what)
            for one in others
        ]
        return [HangDetected(formed.epoch, what, first.node, first.local_rank), *lost]


def _places(formed: WorldSpec, reports: Mapping[str, NodeStatus]) -> Iterator[_Place]:
    for node in formed.ranked_nodes:
        says = reports.get(node)
        if says is None or says.world is None or says.world.epoch != formed.epoch:
            continue
        for local_rank, progress in enumerate(says.rank_progress):
            quiet_s = says.silent_s[local_rank] if local_rank < len(says.silent_s) else 0.0
            step, free = (-1, False) if progress is None else (progress.step, progress.idle)
            yield _Place(step, node, local_rank, quiet_s, free)


def _behind(places: list[_Place]) -> list[_Place]:
    """Who is behind all others, where it is one: those who wait for it have come further, or as far as it."""
    least = min((place.step for place in places), default=-1)
    behind = [place for place in places if place.step == least]
    return behind if len(behind) == 1 < len(places) else []


def _steps(status: NodeStatus) -> list[int]:
    return [-1 if progress is None else progress.step for progress in status.rank_progress]
