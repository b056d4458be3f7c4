"""Results of a nightly run, its remaining tasks, and its report page; without I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

_FIGURES = re.compile(r"\d+ (passed|failed)[, ].* in |schedules/s|^figure: |bit for bit")
_MOST_FIGURES = 12
_TAIL_LINES = 30


class Outcome(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    UNAVAILABLE = "not available here"


class Task(msgspec.Struct, frozen=True):
    """A command of the nightly run; ``unavailable`` matches its output where a requirement is missing."""

    name: str
    command: tuple[str, ...]
    timeout_s: float = 2 * 3600.0
    unavailable: str = ""


class Result(msgspec.Struct, frozen=True):
    outcome: Outcome
    seconds: float
    figures: tuple[str, ...] = ()
    tail: str = ""
    """Last lines of the output of a failed task."""


class Record(msgspec.Struct, frozen=True):
    """The results of one revision."""

    revision: str
    began: str
    results: dict[str, Result] = {}

    def having(self, name: str, result: Result) -> Record:
        return msgspec.structs.replace(self, results={**self.results, name: result})


class FlakyTest(msgspec.Struct, frozen=True):
    """A test that failed and passed its retry, as ``make test`` records it."""

    test: str
    date: str
    revision: str
    seconds: float
    """Duration of the failed run."""
    error: str
    """First line of the error."""


def resumed(found: Record | None, revision: str, now: str) -> Record:
    """Return the stored record if its revision matches, or a new one."""
    return found if found is not None and found.revision == revision else Record(revision, now)


def remaining(tasks: Sequence[Task], record: Record) -> list[Task]:
    """Return the tasks that have not passed; the record has their last results until they run again."""
    passed = {name for name, one in record.results.items() if one.outcome is Outcome.PASSED}
    return [task for task in tasks if task.name not in passed]


def judged(task: Task, status: int | None, printed: str, seconds: float) -> Result:
    """Return the result of a task that ended; ``status`` is ``None`` after a timeout."""
    lines = printed.splitlines()
    figures = tuple(line.strip(" =").removeprefix("figure: ") for line in lines if _FIGURES.search(line))
    if task.unavailable and re.search(task.unavailable, printed):
        return Result(Outcome.UNAVAILABLE, seconds)
    if status == 0:
        return Result(Outcome.PASSED, seconds, figures[-_MOST_FIGURES:])
    end = [] if status is not None else [f"killed after {task.timeout_s:g} s"]
    return Result(Outcome.FAILED, seconds, figures[-_MOST_FIGURES:], "\n".join([*lines[-_TAIL_LINES:], *end]))


def page(tasks: Sequence[Task], record: Record, now: str, flaky: Sequence[FlakyTest] = ()) -> str:
    """Return the report in Markdown: failures, flaky tests of ``make test``, and every task's result."""
    results = {task.name: record.results.get(task.name) for task in tasks}
    outcomes = [one.outcome for one in results.values() if one is not None]
    counts = [f"{outcomes.count(outcome)} {outcome.value}" for outcome in Outcome]
    counts.append(f"{len(results) - len(outcomes)} not run yet")
    total_s = sum(one.seconds for one in results.values() if one is not None)
    lines = [
        f"# Nightly run of {record.revision}",
        "",
        f"Began {record.began}, written {now}; {lasted(total_s)} of work.",
        f"{', '.join(counts)}.",
        "",
    ]
    lines += _failures(results)
    lines += _flaky(flaky)
    lines += ["| | result | took | figures |", "|---|---|---|---|"]
    for name, one in results.items():
        if one is None:
            lines.append(f"| {name} | not run yet | | |")
        else:
            figures = "<br>".join(_cell(figure) for figure in one.figures)
            lines.append(f"| {_cell(name)} | {one.outcome.value} | {lasted(one.seconds)} | {figures} |")
    return "\n".join([*lines, ""])


def _failures(results: Mapping[str, Result | None]) -> list[str]:
    lines = []
    for name, one in results.items():
        if one is not None and one.outcome is Outcome.FAILED:
            lines += [f"## Failed: {name}", "", "```", one.tail, "```", ""]
    return lines


def _flaky(flaky: Sequence[FlakyTest]) -> list[str]:
    """One row for each test with its last failure. The test with the most failures comes first."""
    if not flaky:
        return []
    counts, last = Counter(one.test for one in flaky), {one.test: one for one in flaky}
    lines = ["## Flaky tests", "", "| test | failures | last | revision | took | error |", "|---|---|---|---|---|---|"]
    for name, count in counts.most_common():
        one = last[name]
        cells = [f"`{name}`", str(count), one.date, one.revision, f"{one.seconds:.1f} s", one.error]
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def lasted(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
