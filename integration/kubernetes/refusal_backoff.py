"""Backoff for jobs that the API server refuses; each refusal is reported once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class _Refusal:
    problem: str
    asked: tuple[Any, ...]
    pause_s: float
    again_at_s: float


class RefusalBackoff:
    """Of all jobs, by what was refused. Those of one job come one after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of: dict[tuple[str, str], dict[str, _Refusal]] = {}

    def is_due(self, job: Object, what: str) -> bool:
        """Whether to ask: always, where the job says something else than it did."""
        last = self._of.get(_key(job), {}).get(what)
        return last is None or last.asked != _said(job) or self._clock() >= last.again_at_s

    def note(self, job: Object, what: str, problem: str) -> bool:
        """It was refused; whether that is news to people."""
        of_job = self._of.setdefault(_key(job), {})
        last = of_job.get(what)
        again = last is not None and last.asked == _said(job)
        pause_s = min(_LONGEST_PAUSE_S, 2.0 * last.pause_s) if last is not None and again else _PAUSE_S
        of_job[what] = _Refusal(problem, _said(job), pause_s, self._clock() + pause_s)
        return last is None or last.problem != problem

    def forget(self, job: Object, what: str) -> None:
        """It was done."""
        self._of.get(_key(job), {}).pop(what, None)

    def forget_all(self, namespace: str, name: str) -> None:
        """There is no such job any more."""
        self._of.pop((namespace, name), None)


def _key(job: Object) -> tuple[str, str]:
    return job["metadata"]["namespace"], job["metadata"]["name"]


def _said(job: Object) -> tuple[Any, ...]:
    return job["metadata"]["uid"], job["spec"], job["metadata"].get("labels")
