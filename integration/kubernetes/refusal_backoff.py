"""Backoff for jobs that the API server refuses; each refusal is reported once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]
_MIN_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0


@dataclass(frozen=True)
class _Refusal:
    problem: str
    content: tuple[Any, ...]
    pause_s: float
    retry_at_s: float


class RefusalBackoff:
    """Refusals by job and kind. Calls for one job must not overlap."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refusals: dict[tuple[str, str], dict[str, _Refusal]] = {}

    def is_due(self, job: Object, what: str) -> bool:
        """Return whether to retry: after the pause, or if the job has changed."""
        last = self._refusals.get(_key(job), {}).get(what)
        return last is None or last.content != _job_content(job) or self._clock() >= last.retry_at_s

    def note(self, job: Object, what: str, problem: str) -> bool:
        """Record a refusal. Return whether the problem is new."""
        of_job = self._refusals.setdefault(_key(job), {})
        last = of_job.get(what)
        unchanged = last is not None and last.content == _job_content(job)
        pause_s = min(_MAX_PAUSE_S, 2.0 * last.pause_s) if last is not None and unchanged else _MIN_PAUSE_S
        of_job[what] = _Refusal(problem, _job_content(job), pause_s, self._clock() + pause_s)
        return last is None or last.problem != problem

    def forget(self, job: Object, what: str) -> None:
        """Remove the record after a success."""
        self._refusals.get(_key(job), {}).pop(what, None)

    def forget_all(self, namespace: str, name: str) -> None:
        """Remove all records of a deleted job."""
        self._refusals.pop((namespace, name), None)


def _key(job: Object) -> tuple[str, str]:
    return job["metadata"]["namespace"], job["metadata"]["name"]


def _job_content(job: Object) -> tuple[Any, ...]:
    return job["metadata"]["uid"], job["spec"], job["metadata"].get("labels")
