"""The seam to where AWS's library left checkpoints, and which of them are whole. Pure but for the calls of a place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from typing_extensions import Buffer

from integration.sagemaker.metadata import Written
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, TierUnavailableError

log = logging.getLogger(__name__)


class Blob(Protocol):
    """What one rank wrote in one step."""

    @property
    def size_bytes(self) -> int: ...
    def read(self, extents: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Bytes ``[start, stop)`` of each extent, in order. Exactly those, or an error."""

    def close(self) -> None: ...


class Place(Protocol):
    """Where one namespace's checkpoints are.

    Promises every place makes (``tests/contract/test_written_places.py`` holds it to them):

    - ``CheckpointNotFoundError`` means absent, ``TierUnavailableError`` unknown, ``CheckpointDamagedError`` that the
      bytes are not what was written. An empty answer is an answer.
    - ``steps`` has every step of which there is anything, whole or not.
    """

    @property
    def name(self) -> str: ...
    def steps(self) -> Sequence[int]:
        """Newest first."""

    def written(self, step: int) -> Written: ...
    def size(self, step: int, rank: int) -> int:
        """How long the rank's blob is."""

    def blob(self, step: int, rank: int) -> Blob: ...
    def close(self) -> None: ...


@dataclass
class Checkpoint:
    """A whole step: everything it needs is there, and as long as it should be."""

    place: Place
    step: int
    written: Written
    passed_over: tuple[str, ...] = ()
    """Newer steps that are not whole, and why."""
    _blobs: dict[int, Blob] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.place.name} step {self.step}"

    @property
    def world(self) -> int:
        """How many ranks wrote it, as far as what they wrote says."""
        return 1 + max(self.written.sizes, default=0)

    def blob(self, rank: int) -> Blob:
        if rank not in self._blobs:
            blob = self.place.blob(self.step, rank)
            if blob.size_bytes != self.written.sizes[rank]:  # it was whole a moment ago
                blob.close()
                raise CheckpointDamagedError(_length(rank, blob.size_bytes, self.written.sizes[rank]))
            self._blobs[rank] = blob
        return self._blobs[rank]

    def let_go(self) -> None:
        """Of the blobs that were read so far."""
        for blob in self._blobs.values():
            blob.close()
        self._blobs.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()


def candidates(places: Sequence[Place], step: int | None = None) -> Generator[Checkpoint, None, None]:
    """The whole steps, newest first; where several places have one, the first of them first.

    Ends with an error that says why there is none (more): a place that could not be asked may have a newer one, so what
    comes after it is only given when the others have something.
    """
    found: list[tuple[int, Place]] = []
    unknown: list[str] = []
    for place in places:
        try:
            found += [(one, place) for one in place.steps() if step in (None, one)]
        except TierUnavailableError as error:
            log.warning("%s could not be asked: %s", place.name, error)
            unknown.append(f"{place.name}: {error}")
        except CheckpointNotFoundError:
            continue
    found.sort(key=lambda one: -one[0])
    passed: list[str] = []
    for number, place in found:
        try:
            written = place.written(number)
            _check(place, number, written)
        except (CheckpointDamagedError, CheckpointNotFoundError) as error:
            passed.append(f"step {number} in {place.name}: {error}")
            continue
        except TierUnavailableError as error:
            unknown.append(f"step {number} in {place.name}: {error}")
            continue
        yield Checkpoint(place, number, written, tuple(passed))
    where = " and ".join(place.name for place in places)
    if unknown:
        raise TierUnavailableError(f"no (other) whole step is known, but not everything could be asked: {unknown}")
    if passed:
        raise CheckpointDamagedError(f"{where}: no (other) whole step: {'; '.join(passed[:5])}")
    wanted = "" if step is None else f" {step}"
    raise CheckpointNotFoundError(f"{where}: no (other) step{wanted} that AWS's library wrote")


def newest(places: Sequence[Place], step: int | None = None) -> Checkpoint:
    """The newest whole step, or the one asked for."""
    with contextlib.closing(candidates(places, step)) as found:
        chosen = next(found)
    for reason in chosen.passed_over:
        log.warning("passed over: %s", reason)
    return chosen


def _check(place: Place, step: int, written: Written) -> None:
    """Everything a step needs is there; nothing of it is read for that."""
    for rank, size in sorted(written.sizes.items()):
        try:
            found = place.size(step, rank)
        except CheckpointNotFoundError as error:
            raise CheckpointDamagedError(f"what rank {rank} wrote is gone") from error
        if found != size:
            raise CheckpointDamagedError(_length(rank, found, size))


def _length(rank: int, found: int, expected: int) -> str:
    return f"what rank {rank} wrote has {found} bytes and should have {expected}"
