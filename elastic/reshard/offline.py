"""From one checkpoint to another: read and added up, written, read again and compared, and only then there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from elastic.reshard.checksum import OBJECT, Checksum
from elastic.reshard.cutting import Cut
from elastic.reshard.forms import Advance, Source, checksum_of
from tieredckpt.errors import SaveFailedError, TieredCheckpointError

Stage = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows how far a stage of so many bytes is."""


class Target(Protocol):
    """A checkpoint that is to be.

    - What ``written`` yields is what a reader would get, out of what was written.
    - The checkpoint is there when its block has ended well, and at no time before; otherwise nothing of it is.
    """

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    def written(self, source: Source, cut: Cut, advance: Advance) -> AbstractContextManager[Source]: ...


@dataclass(frozen=True)
class Resharded:
    """What was done."""

    parts: int
    tensors: int
    objects: int
    size_bytes: int
    """Of the tensors."""
    checksum: int
    """Of the tensors, the same on both sides."""


def reshard(source: Source, target: Target, cut: Cut, stage: Stage) -> Resharded:
    """Write ``source`` anew as ``cut`` says. Both sides are read in their own pieces, so that no mistake is on both."""
    total = sum(form.size_bytes for form in source.tensors.values())
    with stage(f"reading {source.name}", total) as advance:
        before = checksum_of(source, advance)
    with stage(f"writing {target.name}", 2 * total) as advance, target.written(source, cut, advance) as written:
        _compare(before, written, advance)
    tensors = sum(entry.dtype != OBJECT for entry in before.entries.values())
    return Resharded(len(cut.parts), tensors, len(before.entries) - tensors, total, before.of_tensors.value)


def _compare(before: Checksum, written: Source, advance: Advance) -> None:
    try:
        checksum_of(written, advance).must_equal(before)
    except TieredCheckpointError as error:
        raise SaveFailedError(f"{written.name} did not become what was read, so it was not kept: {error}") from error
