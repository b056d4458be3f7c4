"""A permutation of ``range(size)`` that is computed, not stored: any element of it costs the same, whatever the size.

A number is written as ``left * columns + right`` on a grid that is hardly larger than the range. Each round moves one
of the two by a keyed hash of the other, which can be undone, so that all rounds together are a bijection of the grid
(a Feistel network). Where a number lands outside the range it goes round again until it is inside (cycle walking);
with a grid this tight that is rare. Black and Rogaway, "Ciphers with arbitrary finite domains".

The order behind every saved cursor hangs on each constant here; whoever changes one raises
``elastic.samples.course.VERSION``.
"""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from elastic.errors import PolicyError

MAX_SIZE = 1 << 60
"""Both sides of the grid have to fit 31 bits."""
SMALL = 1 << 16

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)  # murmur3's
_HALF = np.uint64(32)


def key_of(*parts: object) -> int:
    """64 bits that depend on every part; what a seed, an epoch or a step is turned into."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def rounds_for(size: int) -> int:
    """The smaller the grid, the more rounds until all permutations are equally likely: 4 samples need 6, 6 need 14."""
    return 16 if size < SMALL else 8


class Permutation:
    """One of the permutations of ``range(size)``, chosen by ``key``."""

    def __init__(self, size: int, key: int) -> None:
        if not 0 < size <= MAX_SIZE:
            raise PolicyError(f"cannot order {size} samples: there have to be 1 to {MAX_SIZE}")
        self.size = size
        rows = isqrt(size - 1) + 1
        columns = -(-size // rows)
        columns += columns % 2  # with both odd, half of all permutations could not come up
        self._rows, self._columns = np.uint64(rows), np.uint64(columns)
        self._keys = [np.uint64(key_of("round", key, size, number)) for number in range(rounds_for(size))]

    def __call__(self, positions: I64, tweak: U64 | None = None) -> I64:
        """What is at these positions. Each ``tweak`` makes another permutation of the same size."""
        return self._walk(positions, tweak, inverse=False)

    def position_of(self, elements: I64, tweak: U64 | None = None) -> I64:
        """Where these are."""
        return self._walk(elements, tweak, inverse=True)

    def _walk(self, numbers: I64, tweak: U64 | None, *, inverse: bool) -> I64:
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.size:
            raise IndexError(f"{numbers.min()} to {numbers.max()} is not in range({self.size})")
        salt = None if tweak is None else mixed(tweak)
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
    """A hash of each number, evenly in ``range(limit)``."""
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


def mixed(numbers: U64) -> U64:
    """64 bits for each number, all of them depending on all of it (murmur3's last steps)."""
    mixed = (numbers + np.uint64(0x9E3779B97F4A7C15)) * _FIRST
    mixed ^= mixed >> np.uint64(33)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(33)
    return mixed
