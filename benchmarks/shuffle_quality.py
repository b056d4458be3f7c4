"""Statistics of the shuffle compared with numpy's, quoted in docs/explanation/samples.md.

A **z** statistic is normal with mean 0 and deviation 1 for a perfect shuffle. A value beyond 4 shows a defect.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from elastic.samples.sample_schedule import I64, SampleOrder

Shuffle = Callable[[int, int], I64]
"""A function of a size and a seed that returns a permutation."""


def our_shuffle(size: int, seed: int) -> I64:
    return SampleOrder(size, seed).indices(0, size)


def numpy_shuffle(size: int, seed: int) -> I64:
    return np.random.default_rng(seed).permutation(size)


def all_permutations(shuffle: Shuffle, size: int, seeds: int) -> float:
    """Return the z of a chi-square test: are all permutations of a small range equally frequent?"""
    seen = Counter(tuple(shuffle(size, seed).tolist()) for seed in range(seeds))
    cells = math.factorial(size)
    return _z_of_cells(np.array([*seen.values(), *[0] * (cells - len(seen))]), cells - 1)


def positions(shuffle: Shuffle, size: int, seeds: int) -> float:
    """Return the z of a chi-square test: is each sample equally frequent at each position?"""
    seen = np.zeros((size, size), np.int64)
    for seed in range(seeds):
        seen[np.arange(size), shuffle(size, seed)] += 1
    return _z_of_cells(seen.ravel(), (size - 1) ** 2)


def serial(shuffle: Shuffle, size: int, seed: int) -> float:
    """Return the z of the correlation of each sample with the next one."""
    order = shuffle(size, seed)
    return _z_of_correlation(order[:-1], order[1:])


def next_epoch(size: int, seed: int) -> float:
    """Return the z of the correlation of an epoch's order with the next one's."""
    order = SampleOrder(size, seed)
    return _z_of_correlation(order.indices(0, size), order.indices(size, size))


def fixed_points(shuffle: Shuffle, size: int, seeds: int) -> float:
    """Return the mean number of samples that keep their position; 1 by chance, for any size."""
    places = np.arange(size)
    return float(np.mean([np.sum(shuffle(size, seed) == places) for seed in range(seeds)]))


def neighbours(shuffle: Shuffle, size: int, seeds: int) -> float:
    """Return the mean number of adjacent pairs that stay adjacent; 2 (n - 1) / n by chance."""
    return float(np.mean([np.sum(np.abs(np.diff(shuffle(size, seed))) == 1) for seed in range(seeds)]))


class ShuffleSpread(NamedTuple):
    """Remains of the dataset's own order."""

    moved: float
    """Mean distance of a sample from its position, as a share of the dataset; a third by chance."""
    beside: float
    """Most samples of one hundredth of the dataset in any run of 256 consecutive samples."""


def shuffle_spread(shuffle: str, samples: int, seed: int) -> ShuffleSpread:
    order = SampleOrder(samples, seed, shuffle).indices(0, samples)
    moved = float(np.mean(np.abs(order - np.arange(samples)))) / samples
    rows = (order[: samples // 256 * 256] * 100 // samples).reshape(-1, 256)
    return ShuffleSpread(moved, float(max(np.bincount(row).max() for row in rows)))


def _z_of_cells(seen: I64, freedom: int) -> float:
    expected = seen.sum() / len(seen)
    return float((((seen - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def _z_of_correlation(one: I64, other: I64) -> float:
    return float(np.corrcoef(one, other)[0, 1] * math.sqrt(len(one)))


def _rows(seeds: int) -> Iterator[tuple[str, float, float, str]]:
    for size in (3, 4, 5):
        runs = seeds * math.factorial(size) // 10
        what = f"all permutations of {size} samples, {runs:,} seeds"
        yield what, all_permutations(our_shuffle, size, runs), all_permutations(numpy_shuffle, size, runs), "z"
    for size in (10, 64):
        what = f"sample and position, {size} samples, {10 * seeds:,} seeds"
        yield what, positions(our_shuffle, size, 10 * seeds), positions(numpy_shuffle, size, 10 * seeds), "z"
    for size in (1000, 100_000, 1_000_000):
        yield (
            f"a sample and the next, {size:,} samples",
            serial(our_shuffle, size, 1),
            serial(numpy_shuffle, size, 1),
            "z",
        )
    for size in (1000, 100_000):
        yield f"an epoch and the next, {size:,} samples", next_epoch(size, 1), math.nan, "z"
    for size in (64, 1000, 100_000):
        runs = max(10, min(seeds, 10_000_000 // size))
        yield (
            f"samples in their own position, {size:,} samples",
            fixed_points(our_shuffle, size, runs),
            fixed_points(numpy_shuffle, size, runs),
            "1",
        )
        yield (
            f"pairs that stay adjacent, {size:,} samples",
            neighbours(our_shuffle, size, runs),
            neighbours(numpy_shuffle, size, runs),
            "2",
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shuffle_quality", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=500, help="number of seeds; more seeds give finer statistics (default: 500)"
    )
    seeds = parser.parse_args(arguments).seeds
    print("| | ours | numpy | by chance |\n|---|---|---|---|")
    for what, our, numpy, chance in _rows(seeds):
        other = "-" if math.isnan(numpy) else f"{numpy:.2f}"
        print(f"| {what} | {our:.2f} | {other} | {'0 ± 1' if chance == 'z' else chance} |")
    print("\n| 1,000,000 samples | moved | of 256 in a row from one hundredth of the data, at most |\n|---|---|---|")
    for shuffle in ("full", "blocks:1000*100", "blocks:1000*10", "blocks:1000", "none"):
        found = shuffle_spread(shuffle, 1_000_000, 1)
        print(f"| `{shuffle}` | {found.moved:.3f} | {found.beside:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
