"""Detection of ranks that make no progress. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from elastic.control.control_messages import NodeStatus, WorldSpec
from elastic.world.world_state import HangDetected, RankLost

_LONGEST_FACTOR = 10.0
_MIN_LIMIT_S = 600.0
_FIRST_STEP_S = 3600.0
_BLAME_QUIET_S = 5.0
"""Seconds without a report after which a process is blamed first for a hang.

A thread of each process reports every second, unless the process is stopped or native code in it holds the GIL."""

_CHECK_S = 1.0


class StepTimes(msgspec.Struct):
    """Longest times that a job's ranks have taken so far, in any world."""

    longest_step_s: float = 0.0
    """Seconds from one step to the next."""
    longest_first_step_s: float = 0.0
    """Seconds from the start of a world to its first step."""


class HangTimeouts(msgspec.Struct, frozen=True):
    """Limits for the time without progress of any rank.

    Unset limits follow from the job's :class:`StepTimes`.
    """

    step_s: float | None = None
    """Seconds between two steps; 0 for no limit.

    ``None``: ten times the longest time so far, at least ten minutes."""
    first_s: float | None = None
    """Seconds from the start of a world to its first step, which restores and compiles; 0 for no limit.

    ``None``: ten times the longest time so far, at least ten minutes, and an hour before the job's first step."""
    silent_s: float = 60.0
    """Seconds without progress that count as a hang if a process also sends no reports."""

    def progress_timeout_s(self, pace: StepTimes, *, stepped: bool) -> float:
        limit_s, longest_s = (
            (self.step_s, pace.longest_step_s) if stepped else (self.first_s, pace.longest_first_step_s)
        )
        if limit_s is not None:
            return limit_s or float("inf")
        return max(_MIN_LIMIT_S, _LONGEST_FACTOR * longest_s) if stepped or longest_s else _FIRST_STEP_S

    def longest_s(self, pace: StepTimes) -> float | None:
        """Return the longest time in seconds without progress in a new world; ``None`` for no limit."""
        limit_s = max(self.progress_timeout_s(pace, stepped=False), self.progress_timeout_s(pace, stepped=True))
        return None if limit_s == float("inf") else limit_s

    def silence_timeout_s(self, pace: StepTimes) -> float:
        if self.step_s == 0:
            return float("inf")
        return (
            min(self.silent_s, self.step_s) if self.step_s is not None else max(self.silent_s, 2 * pace.longest_step_s)
        )


class _RankState(NamedTuple):
    """State of a rank, as its node reported it."""

    step: int
    node: str
    local_rank: int
    quiet_s: float
    free: bool


class HangDetector:
    """Hang detection in one world.

    ``began_at`` is when the world was formed; ``None`` disables detection until the first step. ``pace`` is shared by
    all worlds of the job.
    """

    def __init__(self, began_at: float | None = None, pace: StepTimes | None = None) -> None:
        self._moved_at = began_at
        self._stepped = self._reported = False
        self._next_check_at = float("-inf")
        self._pace = StepTimes() if pace is None else pace

    def observe(self, before: NodeStatus | None, status: NodeStatus, now: float) -> None:
        """Record progress between a node's two latest reports."""
        if before is None or not any(new > old for old, new in zip(_steps(before), _steps(status), strict=False)):
            return
        took_s = 0.0 if self._moved_at is None else now - self._moved_at
        if self._stepped:
            self._pace.longest_step_s = max(self._pace.longest_step_s, took_s)
        else:
            self._pace.longest_first_step_s = max(self._pace.longest_first_step_s, took_s)
        self._moved_at, self._stepped = now, True

    def is_check_due(self, limits: HangTimeouts, now: float) -> bool:
        """Return whether :meth:`find_hangs` could find a hang. This is cheap, as it does not visit all ranks.

        After a long time without progress, a check is due once a second, as nodes report no more often.
        """
        if self._moved_at is None or self._reported or now < self._next_check_at:
            return False
        idle_s = now - self._moved_at
        limit_s = min(
            limits.silence_timeout_s(self._pace), limits.progress_timeout_s(self._pace, stepped=self._stepped)
        )
        if idle_s <= limit_s:
            return False
        self._next_check_at = now + _CHECK_S
        return True

    def find_hangs(
        self, formed: WorldSpec, reports: Mapping[str, NodeStatus], limits: HangTimeouts, now: float
    ) -> list[HangDetected | RankLost]:
        """Return the hang of the world and the ranks to replace, if they are known. Report a hang once."""
        if self._moved_at is None or self._reported:
            return []
        idle_s, silent_limit_s = now - self._moved_at, limits.silence_timeout_s(self._pace)
        states = list(_rank_states(formed, reports))
        is_silent = idle_s > silent_limit_s and any(state.quiet_s > silent_limit_s for state in states)
        is_late = idle_s > limits.progress_timeout_s(self._pace, stepped=self._stepped) and not any(
            state.free for state in states
        )
        if not is_silent and not is_late:
            return []
        self._reported = True
        quiet = [state for state in states if state.quiet_s > min(_BLAME_QUIET_S, silent_limit_s)]
        blamed = quiet or _behind(states)
        description = f"no rank has got on for {idle_s:.0f} s"
        if not blamed:
            return [HangDetected(formed.epoch, description)]
        if quiet:
            description += (
                ", and its process does not answer (it is stopped, or something in it does not let Python run)"
            )
        first, *others = blamed
        lost = [
            RankLost(
                state.node,
                reports[state.node].generation,
                reports[state.node].spawn_count,
                state.local_rank,
                description,
            )
            for state in others
        ]
        return [HangDetected(formed.epoch, description, first.node, first.local_rank), *lost]


def _rank_states(formed: WorldSpec, reports: Mapping[str, NodeStatus]) -> Iterator[_RankState]:
    for node in formed.ranked_nodes:
        status = reports.get(node)
        if status is None or status.world is None or status.world.epoch != formed.epoch:
            continue
        for local_rank, progress in enumerate(status.rank_progress):
            quiet_s = status.silent_s[local_rank] if local_rank < len(status.silent_s) else 0.0
            step, free = (-1, False) if progress is None else (progress.step, progress.idle)
            yield _RankState(step, node, local_rank, quiet_s, free)


def _behind(states: list[_RankState]) -> list[_RankState]:
    """Return the one rank that is behind all others, or an empty list: the others wait for it."""
    least = min((state.step for state in states), default=-1)
    behind = [state for state in states if state.step == least]
    return behind if len(behind) == 1 < len(states) else []


def _steps(status: NodeStatus) -> list[int]:
    return [-1 if progress is None else progress.step for progress in status.rank_progress]
