"""Proof that each sample was used exactly once, by hash sums or by a full log.

:class:`SampleAudit` holds sums of hashes, which are small and can be added over ranks; it detects that an error exists.
:class:`SampleLog` holds all samples in a file, and identifies the error.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from elastic.samples.sample_schedule import I64, SampleSchedule, mix64

_CHUNK = 1 << 20
_MASK = (1 << 64) - 1


class SampleSum(NamedTuple):
    """Number of samples, and the sum of their hashes.

    The sum is the same for any order, and differs if a sample is missing or repeated.
    """

    samples: int = 0
    hashes: int = 0

    def combined(self, other: SampleSum) -> SampleSum:
        return SampleSum(self.samples + other.samples, (self.hashes + other.hashes) & _MASK)


def sample_sum(indices: I64) -> SampleSum:
    """Return the sum of ``indices``.

    Two different sets have the same sum with a probability of 1 in 2**64.
    """
    return SampleSum(len(indices), int(mix64(indices.astype(np.uint64)).sum()))


class SampleAudit:
    """Samples of each step that one rank, or all ranks together, used."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, SampleSum]] = {}

    def record(self, step: int, epochs: I64, indices: I64) -> None:
        """Record this rank's samples of a step. Replaces an earlier record of an undone step."""
        sums = {int(epoch): sample_sum(indices[epochs == epoch]) for epoch in np.unique(epochs)}
        self._steps[step] = sums

    def rewind(self, step: int) -> None:
        """Drop the records of ``step`` and later steps, after a rollback to ``step`` committed steps."""
        self._steps = {number: sums for number, sums in self._steps.items() if number < step}

    def merge(self, other: SampleAudit) -> None:
        """Add another rank's records of the same steps."""
        for number, sums in other._steps.items():
            _add(self._steps.setdefault(number, {}), sums)

    def verify(self, course: SampleSchedule, cursor: int) -> list[str]:
        """Return the errors in the samples of all ranks up to ``cursor``, by data epoch.

        The list is empty if each sample was used once.

        """
        found: dict[int, SampleSum] = {}
        for sums in self._steps.values():
            _add(found, sums)
        wanted = {
            epoch: _expected(course, epoch, first, count) for epoch, first, count in course.consumed_by_epoch(cursor)
        }
        problems = []
        for epoch in sorted(found.keys() | wanted.keys()):
            had, due = found.get(epoch, SampleSum()), wanted.get(epoch, SampleSum())
            if had != due:
                which = (
                    f"{had.samples} of {due.samples}"
                    if had.samples != due.samples
                    else f"{due.samples}, but not the right ones"
                )
                problems.append(f"epoch {epoch}: samples used are {which}")
        return problems

    def state(self) -> dict[str, Any]:
        """Return the records, to send them to another rank as JSON or with a checkpoint."""
        return {"steps": [[step, *_rows(sums)] for step, sums in self._steps.items()]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SampleAudit:
        made = cls()
        made._steps = {step: _sums(rows) for step, *rows in state["steps"]}
        return made


def _add(into: dict[int, SampleSum], sums: Mapping[int, SampleSum]) -> None:
    for epoch, one in sums.items():
        into[epoch] = into.get(epoch, SampleSum()).combined(one)


def _rows(sums: Mapping[int, SampleSum]) -> list[list[int]]:
    return [[epoch, one.samples, one.hashes] for epoch, one in sums.items()]


def _sums(rows: Iterable[Iterable[int]]) -> dict[int, SampleSum]:
    return {epoch: SampleSum(samples, hashes) for epoch, samples, hashes in rows}


def _expected(course: SampleSchedule, epoch: int, first: int, count: int) -> SampleSum:
    """Return the expected sum. A whole epoch has every sample, so its order is not needed."""
    samples, total = course.order.samples, SampleSum()
    for start in range(first, first + count, _CHUNK):
        size = min(_CHUNK, first + count - start)
        whole = count == samples
        indices = np.arange(start, start + size) if whole else course.order.indices(epoch * samples + start, size)
        total = total.combined(sample_sum(indices))
    return total


class SampleLog:
    """File with every sample that a process used, for tests and small jobs.

    A later world records an undone step again; only the records of its newest world count. So record a step before the
    optimizer step: then all ranks have recorded each committed step.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def record(self, world: int, step: int, epochs: I64, indices: I64) -> None:
        """Record samples. ``world`` counts the job's worlds; the architecture calls it the job's epoch."""
        line = json.dumps({"world": world, "step": step, "epochs": epochs.tolist(), "indices": indices.tolist()})
        os.write(self._file, line.encode() + b"\n")  # one write: the process may be killed at any time

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def verify_sample_logs(journals: Collection[Path], course: SampleSchedule, steps: int, cursor: int) -> list[str]:
    """Return the errors in the first ``steps`` steps of a job, according to the logs of all its processes.

    ``cursor`` is the end of these steps.
    """
    used: dict[tuple[int, int], list[int]] = defaultdict(list)
    for step, epochs, indices in _newest_records(journals, steps):
        for sample in zip(epochs, indices, strict=True):
            used[sample].append(step)
    wanted: Counter[tuple[int, int]] = Counter()
    samples = course.order.samples
    for epoch, first, count in course.consumed_by_epoch(cursor):
        wanted.update((epoch, index) for index in course.order.indices(epoch * samples + first, count).tolist())
    problems = [
        f"sample {index} of epoch {epoch} was never used" for epoch, index in sorted(wanted.keys() - used.keys())
    ]
    for (epoch, index), at in sorted(used.items()):
        if (epoch, index) not in wanted:
            problems.append(f"sample {index} of epoch {epoch} was used at step {at[0]}, and is not due yet")
        elif len(at) > 1:
            problems.append(f"sample {index} of epoch {epoch} was used {len(at)} times, at steps {sorted(at)}")
    return problems


def _newest_records(journals: Collection[Path], steps: int) -> Iterator[tuple[int, list[int], list[int]]]:
    records = [json.loads(line) for path in journals for line in _lines(path)]
    newest: dict[int, int] = {}
    for record in records:
        newest[record["step"]] = max(record["world"], newest.get(record["step"], record["world"]))
    for record in records:
        if record["step"] < steps and record["world"] == newest[record["step"]]:
            yield record["step"], record["epochs"], record["indices"]


def _lines(path: Path) -> list[bytes]:
    """Return the complete lines: a full disk may have truncated the last one."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
