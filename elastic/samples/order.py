"""In which order samples come: a function of (seed, data epoch, position), the same for any rank of any world. Pure.

Positions count over all epochs: position ``epoch * samples + k`` is the k-th sample of that epoch. Two bijections make
an epoch's order::

    position ──window shuffle──> place in the stream of blocks ──block order──> index

``full`` is one window over everything, ``none`` neither. ``blocks:N*W`` reads blocks of N neighbouring samples in a
random order and shuffles across W blocks at a time, for data that is cheap to read block by block.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from elastic.errors import PolicyError
from elastic.samples.permutation import I64, MAX_SIZE, Permutation, key_of

_BLOCKS = re.compile(r"blocks:([0-9]+)(?:\*([0-9]+))?", re.ASCII)


@dataclass(frozen=True)
class Order:
    """The order of so many samples in every epoch."""

    samples: int
    seed: int
    shuffle: str = "full"
    """``full``, ``none``, ``blocks:N`` or ``blocks:N*W``."""

    def __post_init__(self) -> None:
        if not 0 < self.samples <= MAX_SIZE:
            raise PolicyError(f"a dataset of {self.samples} samples cannot be ordered: it has to have 1 to {MAX_SIZE}")
        self._sizes()

    def indices(self, first: int, count: int) -> I64:
        """Which samples are at these positions; the cost is in ``count`` alone."""
        runs = [self._epoch(epoch, offset, size) for epoch, offset, size in self.runs(first, count)]
        return runs[0] if len(runs) == 1 else np.concatenate(runs or [np.empty(0, np.int64)])

    def epochs(self, first: int, count: int) -> I64:
        """Which epoch each of these positions is in."""
        runs = list(self.runs(first, count))
        return np.repeat(np.array([run[0] for run in runs], np.int64), [run[2] for run in runs])

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """These positions, cut where epochs end: (epoch, first in it, how many)."""
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
        """Of a block, and of a window; 0 for one block of everything."""
        if self.shuffle in ("full", "none"):
            return 0, self.samples
        match = _BLOCKS.fullmatch(self.shuffle)
        if not match or int(match[1]) == 0 or match[2] == "0":
            raise PolicyError(f"shuffle={self.shuffle!r}: known are full, none, blocks:N and blocks:N*W with N, W > 0")
        block = int(match[1])
        return block, min(block * int(match[2] or 1), self.samples)


class _Shuffles:
    """What one epoch needs of permutations; a few hundred bytes."""

    def __init__(self, order: Order, epoch: int) -> None:
        key = key_of("order", order.seed, epoch)
        self._block, self._window = order._sizes()
        self._windows = Permutation(self._window, key_of("window", key))
        full, rest = divmod(order.samples, self._window)
        self._full_end = full * self._window
        self._last = Permutation(rest, key_of("last", key)) if rest else None
        if self._block:
            self._short = order.samples % self._block
            """The last block of the dataset has so many samples, if not all blocks are alike."""
            blocks = -(-order.samples // self._block)
            self._blocks = Permutation(blocks, key_of("blocks", key))
            last = np.array([blocks - 1], np.int64)
            self._short_at = int(self._blocks.position_of(last)[0]) * self._block if self._short else order.samples

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
        """The stream has the short block somewhere; what is behind it is as if it had been a whole one."""
        behind = stream >= self._short_at + self._short
        padded = stream + np.where(behind, self._block - self._short, 0) if self._short else stream
        at = padded // self._block
        return self._blocks(at) * self._block + (padded - at * self._block)


@functools.lru_cache(maxsize=64)
def _shuffles(order: Order, epoch: int) -> _Shuffles:
    return _Shuffles(order, epoch)
