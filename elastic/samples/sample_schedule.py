"""Sample indices from (seed, epoch, position), and steps from a cursor. Pure.

A number is written as ``left * columns + right`` on a grid that is hardly larger than the range. Each round shifts one
of the two by a keyed hash of the other. Rounds can be inverted, so together they are a bijection of the grid (a Feistel
network). A number that lands outside the range runs through the rounds again until it is inside (cycle walking), which
is rare with this grid. Black and Rogaway, "Ciphers with arbitrary finite domains".

The order behind every saved cursor depends on each constant here: raise
``elastic.samples.sample_schedule.CURSOR_VERSION`` with any change.

Positions count over all epochs: position ``epoch * samples + k`` is the k-th sample of that epoch. Two bijections
determine an epoch's order::

    position ──window shuffle──> position in the stream of blocks ──block order──> index

``full`` is one window over everything, ``none`` has no bijection. ``blocks:N*W`` reads blocks of N adjacent samples in
random order and shuffles across W blocks at a time. It suits data that is cheap to read block by block.

With 10 samples and global batches of 4, by the treatment of an epoch's end::

    positions   0 1 2 3  4 5 6 7  8 9|0 1  2 3 4 5
    wrap        step 0   step 1   step 2   step 3         the third batch spans two epochs; no sample is skipped
    drop        step 0   step 1   -  -|step 2             the last two samples of an epoch are skipped
    short       step 0   step 1   s. 2|step 3             the last batch of an epoch has two samples
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elastic.errors import CursorError, PolicyError

MAX_SAMPLES = 1 << 60
"""Maximum number of samples: both sides of the grid must fit 31 bits."""
SMALL_PERMUTATION = 1 << 16

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)  # murmur3's
_HALF = np.uint64(32)


def hash_key(*parts: object) -> int:
    """Return 64 bits that depend on every part, for a seed, an epoch or a step."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def rounds_for(size: int) -> int:
    """Return the number of rounds.

    Smaller grids need more rounds until all permutations are equally likely: 6 for 4 samples, 14 for 6 samples.
    """
    return 16 if size < SMALL_PERMUTATION else 8


class Permutation:
    """Permutation of ``range(size)``, selected by ``key``."""

    def __init__(self, size: int, key: int) -> None:
        if not 0 < size <= MAX_SAMPLES:
            raise PolicyError(f"cannot order {size} samples: there have to be 1 to {MAX_SAMPLES}")
        self.size = size
        rows = isqrt(size - 1) + 1
        columns = -(-size // rows)
        columns += columns % 2  # if both were odd, half of all permutations could not occur
        self._rows, self._columns = np.uint64(rows), np.uint64(columns)
        self._keys = [np.uint64(hash_key("round", key, size, number)) for number in range(rounds_for(size))]

    def __call__(self, positions: I64, tweak: U64 | None = None) -> I64:
        """Return the elements at these positions. Each ``tweak`` selects another permutation of the same size."""
        return self._walk(positions, tweak, inverse=False)

    def inverse(self, elements: I64, tweak: U64 | None = None) -> I64:
        """Return the positions of these elements."""
        return self._walk(elements, tweak, inverse=True)

    def _walk(self, numbers: I64, tweak: U64 | None, *, inverse: bool) -> I64:
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.size:
            raise IndexError(f"{numbers.min()} to {numbers.max()} is not in range({self.size})")
        salt = None if tweak is None else mix64(tweak)
        found = self._rounds(numbers.astype(np.uint64), salt, inverse=inverse)
        outside = np.flatnonzero(found >= self.size)
        while outside.size:
            part = None if salt is None else salt[outside]
            found[outside] = self._rounds(found[outside], part, inverse=inverse)
            outside = outside[found[outside] >= self.size]
        return found.astype(np.int64)

    def _rounds(self, numbers: U64, salt: U64 | None, *, inverse: bool) -> U64:
        left = numbers // self._columns
        right = numbers - left * self._columns
        rounds = range(len(self._keys))
        for number in reversed(rounds) if inverse else rounds:
            moved, by, limit = (right, left, self._columns) if number % 2 else (left, right, self._rows)
            step = _below(limit, by, self._keys[number], salt)
            if inverse:
                np.subtract(limit, step, out=step)
            moved += step
            np.subtract(moved, limit, out=moved, where=moved >= limit)
        left *= self._columns
        left += right
        return left


def _below(limit: np.uint64, numbers: U64, key: np.uint64, salt: U64 | None) -> U64:
    """Return a hash of each number, uniform in ``range(limit)``."""
    hashed = numbers + key
    if salt is not None:
        hashed ^= salt
    hashed *= _FIRST
    hashed ^= hashed >> _HALF
    hashed *= _SECOND
    hashed >>= _HALF
    hashed *= limit
    hashed >>= _HALF
    return hashed


def mix64(numbers: U64) -> U64:
    """Return 64 bits per number, each of which depends on all its bits (murmur3's finalizer)."""
    mixed = (numbers + np.uint64(0x9E3779B97F4A7C15)) * _FIRST
    mixed ^= mixed >> np.uint64(33)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(33)
    return mixed


_BLOCKS = re.compile(r"blocks:([0-9]+)(?:\*([0-9]+))?", re.ASCII)


@dataclass(frozen=True)
class SampleOrder:
    """Order of a dataset's samples in every epoch."""

    samples: int
    seed: int
    shuffle: str = "full"
    """``full``, ``none``, ``blocks:N`` or ``blocks:N*W``."""

    def __post_init__(self) -> None:
        if not 0 < self.samples <= MAX_SAMPLES:
            raise PolicyError(
                f"a dataset of {self.samples} samples cannot be ordered: it has to have 1 to {MAX_SAMPLES}"
            )
        self._sizes()

    def indices(self, first: int, count: int) -> I64:
        """Return the samples at these positions, in time proportional to ``count``."""
        runs = [self._epoch(epoch, offset, size) for epoch, offset, size in self.runs(first, count)]
        return runs[0] if len(runs) == 1 else np.concatenate(runs or [np.empty(0, np.int64)])

    def epochs(self, first: int, count: int) -> I64:
        """Return the epoch of each of these positions."""
        runs = list(self.runs(first, count))
        return np.repeat(np.array([run[0] for run in runs], np.int64), [run[2] for run in runs])

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield these positions, split at epoch ends: (epoch, first position in it, count)."""
        end = first + count
        while first < end:
            epoch, offset = divmod(first, self.samples)
            size = min(end - first, self.samples - offset)
            yield epoch, offset, size
            first += size

    def _epoch(self, epoch: int, offset: int, count: int) -> I64:
        positions = np.arange(offset, offset + count, dtype=np.int64)
        if self.shuffle == "none":
            return positions
        return _shuffles(self, epoch).indices(positions)

    def _sizes(self) -> tuple[int, int]:
        """Return the size of a block and of a window. Block size 0 means one block with all samples."""
        if self.shuffle in ("full", "none"):
            return 0, self.samples
        match = _BLOCKS.fullmatch(self.shuffle)
        if not match or int(match[1]) == 0 or match[2] == "0":
            raise PolicyError(f"shuffle={self.shuffle!r}: known are full, none, blocks:N and blocks:N*W with N, W > 0")
        block = int(match[1])
        return block, min(block * int(match[2] or 1), self.samples)


class _Shuffles:
    """Permutations of one epoch, a few hundred bytes."""

    def __init__(self, order: SampleOrder, epoch: int) -> None:
        key = hash_key("order", order.seed, epoch)
        self._block, self._window = order._sizes()
        self._windows = Permutation(self._window, hash_key("window", key))
        full, rest = divmod(order.samples, self._window)
        self._full_end = full * self._window
        self._last = Permutation(rest, hash_key("last", key)) if rest else None
        if self._block:
            self._short = order.samples % self._block
            """Size of the dataset's last block; 0 if all blocks have the same size."""
            blocks = -(-order.samples // self._block)
            self._blocks = Permutation(blocks, hash_key("blocks", key))
            last = np.array([blocks - 1], np.int64)
            self._short_at = int(self._blocks.inverse(last)[0]) * self._block if self._short else order.samples

    def indices(self, positions: I64) -> I64:
        stream = self._within_windows(positions)
        return self._in_blocks(stream) if self._block else stream

    def _within_windows(self, positions: I64) -> I64:
        inside = positions[: int(np.searchsorted(positions, self._full_end))]
        windows = inside // self._window
        starts = windows * self._window
        shuffled = starts + self._windows(inside - starts, windows.astype(np.uint64))
        if self._last is None or len(inside) == len(positions):
            return shuffled
        rest = self._full_end + self._last(positions[len(inside) :] - self._full_end)
        return np.concatenate([shuffled, rest])

    def _in_blocks(self, stream: I64) -> I64:
        """Map the stream to indices. Beyond the short block, positions shift as if that block were a full one."""
        behind = stream >= self._short_at + self._short
        padded = stream + np.where(behind, self._block - self._short, 0) if self._short else stream
        at = padded // self._block
        return self._blocks(at) * self._block + (padded - at * self._block)


@functools.lru_cache(maxsize=64)
def _shuffles(order: SampleOrder, epoch: int) -> _Shuffles:
    return _Shuffles(order, epoch)


CURSOR_VERSION = 1
"""Version of the order and of the state. A cursor of another version means other samples."""
EPOCH_ENDS = ("wrap", "drop", "short")
_ORDERING = ("samples", "seed", "shuffle")
ALLOWED_CHANGES = (*_ORDERING, "epoch_end")
"""Settings that a job may change on purpose between saving a cursor and loading it."""


class DataPosition(NamedTuple):
    """Position of a job in its data."""

    step: int
    """Number of committed steps."""
    cursor: int
    """Number of positions that these steps used, over all epochs."""


START_POSITION = DataPosition(0, 0)


class BatchRange(NamedTuple):
    """Positions of one global batch."""

    first: int
    size: int
    end_cursor: int
    """Cursor after this batch."""


@dataclass(frozen=True)
class SampleSchedule:
    """Order of samples, divided into steps."""

    order: SampleOrder
    global_batch: int
    epoch_end: str = "wrap"

    def __post_init__(self) -> None:
        if self.epoch_end not in EPOCH_ENDS:
            raise PolicyError(f"epoch_end={self.epoch_end!r}: known are {', '.join(EPOCH_ENDS)}")
        if self.global_batch < 1:
            raise PolicyError(f"global_batch={self.global_batch}: a step takes at least 1 sample")
        if self.epoch_end == "drop" and self.global_batch > self.order.samples:
            raise PolicyError(
                f"epoch_end='drop' with {self.order.samples} samples and global batches of {self.global_batch} leaves"
                " every sample out: use epoch_end='wrap', or smaller batches"
            )

    def batch_at(self, cursor: int) -> BatchRange:
        """Return the batch of the step that begins at ``cursor``."""
        first = self._settled(cursor)
        size = self.global_batch
        if self.epoch_end == "short":
            size = min(size, self.order.samples - first % self.order.samples)
        return BatchRange(first, size, self._settled(first + size))

    def epoch_at(self, cursor: int) -> int:
        """Return the data epoch of the sample at ``cursor``."""
        return self._settled(cursor) // self.order.samples

    def remaining_in_epoch(self, cursor: int, epoch: int) -> tuple[int, int]:
        """Return the rest before ``epoch`` begins: steps with a whole batch, and samples of a short one."""
        left = epoch * self.order.samples - self._settled(cursor)
        if left <= 0:
            return 0, 0
        whole, rest = divmod(left, self.global_batch)
        if self.epoch_end == "wrap":
            return whole + (rest > 0), 0
        return whole, rest if self.epoch_end == "short" else 0

    def consumed_by_epoch(self, cursor: int) -> Iterator[tuple[int, int, int]]:
        """Yield the samples used up to ``cursor``, by epoch: (epoch, first position in it, count)."""
        samples = self.order.samples
        used = samples - samples % self.global_batch if self.epoch_end == "drop" else samples
        for epoch, offset, count in self.order.runs(0, cursor):
            yield epoch, offset, min(count, used)

    def to_state(self, place: DataPosition) -> dict[str, Any]:
        """Return the state of ``place`` for a checkpoint."""
        order = self.order
        return {
            "version": CURSOR_VERSION,
            **place._asdict(),
            "samples": order.samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "epoch_end": self.epoch_end,
        }

    def position_from_state(self, state: Mapping[str, Any], allow_changes: Collection[str] = ()) -> DataPosition:
        """Return the position to continue from, from the state of a checkpoint.

        After an allowed change of the order, the job continues with the first whole epoch of the new order. It repeats
        no sample within an epoch, and skips the rest of the current one.
        """
        _check_state(state)
        mine = self.to_state(START_POSITION)
        changed = [name for name in ALLOWED_CHANGES if state[name] != mine[name]]
        if wrong := [name for name in changed if name not in allow_changes]:
            what = "; ".join(f"{name} was {state[name]!r} and is {mine[name]!r}" for name in wrong)
            raise CursorError(
                f"the cursor was saved for other samples: {what}. Use what it was saved with,"
                f" or allow the change on purpose: allow_changes={tuple(wrong)!r}"
            )
        cursor = state["cursor"]
        if any(name in changed for name in _ORDERING):
            cursor = -(-cursor // state["samples"]) * self.order.samples
        return DataPosition(state["step"], self._settled(cursor))

    def _settled(self, cursor: int) -> int:
        """Return ``cursor`` past the samples that are dropped at an epoch's end."""
        left = self.order.samples - cursor % self.order.samples
        return cursor + left if self.epoch_end == "drop" and left < self.global_batch else cursor


def _check_state(state: Mapping[str, Any]) -> None:
    version = state.get("version")
    if version != CURSOR_VERSION:
        raise CursorError(
            f"the cursor is of version {version!r}, this release has {CURSOR_VERSION}: use the release it is from"
        )
    for name in ("step", "cursor", "samples", "seed"):
        value = state.get(name)
        if type(value) is not int or (value < 0 and name != "seed"):
            raise CursorError(f"not a saved cursor: {name} is {value!r}")
    if state["samples"] == 0 or not all(isinstance(state.get(name), str) for name in ("shuffle", "epoch_end")):
        raise CursorError(f"not a saved cursor: {dict(state)!r}")
