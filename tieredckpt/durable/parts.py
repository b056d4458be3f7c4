"""How a file is cut into the parts of a multipart upload, and which of them are there already: pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerstore.units import show_size
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20
MAX_PART_BYTES = 5 << 30
_ROUND_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    number: int
    """From 1."""
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class StoredPart:
    """What the store says about a part it has."""

    number: int
    size_bytes: int
    etag: str
    checksum: str = ""
    """As this package computes it; empty where the store keeps none."""


def part_size_for(size_bytes: int, wanted_bytes: int) -> int:
    """``wanted_bytes``, or as much more as it takes to stay within the number of parts S3 allows."""
    if size_bytes > MAX_PARTS * MAX_PART_BYTES:
        raise UsageError(f"{show_size(size_bytes)} is more than one object can hold: save on more ranks")
    least = -(-size_bytes // MAX_PARTS)
    rounded = -(-least // _ROUND_BYTES) * _ROUND_BYTES
    return min(MAX_PART_BYTES, max(MIN_PART_BYTES, wanted_bytes, rounded))


def cut(size_bytes: int, part_bytes: int) -> list[Part]:
    """Parts of ``part_bytes`` each; the last one is what is left."""
    starts = range(0, size_bytes, part_bytes)
    return [Part(i, start, min(start + part_bytes, size_bytes)) for i, start in enumerate(starts, 1)]


def reusable(
    parts: Iterable[Part],
    stored: Iterable[StoredPart],
    *,
    same_source: bool,
    checksum: Callable[[Part], str],
) -> dict[int, StoredPart]:
    """The parts that need not be sent again, by number.

    Where the store kept a checksum it decides. Where it kept none, the size does, and only if the caller vouches that
    the source is the one the parts came from.
    """
    there = {part.number: part for part in stored}
    kept = {}
    for part in parts:
        found = there.get(part.number)
        if found is None or found.size_bytes != part.size_bytes or not found.etag:
            continue
        if found.checksum == checksum(part) if found.checksum else same_source:
            kept[part.number] = found
    return kept
