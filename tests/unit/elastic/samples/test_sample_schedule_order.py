import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import shuffle_quality
from elastic.errors import PolicyError
from elastic.samples.sample_schedule import MAX_SAMPLES, SMALL_PERMUTATION, Permutation, SampleOrder, mix64
from tests.support.example_counts import examples

sizes = st.integers(1, 400) | st.sampled_from([1, 2, 3, 4, 9, 25, 1023, 1024, 1025])
huge = st.integers(1, MAX_SAMPLES) | st.sampled_from(
    [SMALL_PERMUTATION - 1, SMALL_PERMUTATION, SMALL_PERMUTATION + 1, 10**12, MAX_SAMPLES]
)
keys = st.integers(0, 2**64 - 1)
blocks = st.builds("blocks:{}*{}".format, st.integers(1, 70), st.integers(1, 9))
shuffles = st.sampled_from(["full", "none", "blocks:1", "blocks:7"]) | blocks


@given(sizes, keys)
def test_permutation_contains_every_number_once(size, key):
    found = Permutation(size, key)(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


@given(huge, keys, st.lists(st.integers(0, MAX_SAMPLES), min_size=1, max_size=20), st.integers(0, 9))
def test_permutation_of_a_huge_range_is_invertible(size, key, numbers, tweak):
    shuffle = Permutation(size, key)
    positions = np.array([number % size for number in numbers])
    tweaks = np.full(len(positions), tweak, np.uint64)
    found = shuffle(positions, tweaks)
    assert (found >= 0).all()
    assert (found < size).all()
    assert (shuffle.inverse(found, tweaks) == positions).all()


def test_tweaks_make_other_permutations():
    shuffle, positions = Permutation(1000, 7), np.arange(1000)
    one, other = (shuffle(positions, np.full(1000, tweak, np.uint64)) for tweak in (1, 2))
    assert np.sum(one == other) < 10
    mine = shuffle(positions, positions.astype(np.uint64) % np.uint64(2) + np.uint64(1))
    assert (mine == np.where(positions % 2, other, one)).all()


@pytest.mark.parametrize("position", [-1, 10, 2**62])
def test_index_outside_the_range_is_refused(position):
    with pytest.raises(IndexError, match="not in range"):
        Permutation(10, 1)(np.array([position]))


@given(sizes, st.integers(), shuffles, st.integers(0, 5))
def test_an_epoch_has_every_sample_once(samples, seed, shuffle, epoch):
    found = SampleOrder(samples, seed, shuffle).indices(epoch * samples, samples)
    assert sorted(found.tolist()) == list(range(samples))


@settings(max_examples=examples(50))
@given(sizes, st.integers(), shuffles, st.integers(0, 2000), st.lists(st.integers(0, 200), max_size=5))
def test_order_is_independent_of_the_request_size(samples, seed, shuffle, first, counts):
    order = SampleOrder(samples, seed, shuffle)
    pieces, start = [], first
    for count in counts:
        pieces += order.indices(start, count).tolist()
        start += count
    assert order.indices(first, sum(counts)).tolist() == pieces
    epochs = [position // samples for position in range(first, start)]
    assert order.epochs(first, sum(counts)).tolist() == epochs


def test_order_matches_saved_cursors():
    assert SampleOrder(10, 0).indices(0, 20).tolist() == FULL
    assert SampleOrder(25, -3, "blocks:4*2").indices(25, 25).tolist() == BLOCKS
    assert SampleOrder(10**12, 2**70).indices(10**15 + 5, 4).tolist() == HUGE
    assert mix64(np.array([0, 1, 2**63], np.uint64)).tolist() == MIXED


FULL = [9, 2, 7, 4, 3, 1, 5, 6, 8, 0, 0, 8, 6, 5, 9, 1, 2, 7, 3, 4]
BLOCKS = [12, 15, 13, 24, 16, 18, 17, 14, 8, 19, 0, 11, 2, 1, 9, 10, 20, 23, 6, 22, 4, 21, 5, 3, 7]
HUGE = [745380339762, 322439108502, 514771785221, 142051375347]
MIXED = [2051318353015434255, 3291086709706160758, 1573519988548538770]


@pytest.mark.parametrize("other", [SampleOrder(1000, 2), SampleOrder(1000, 1, "blocks:10*10"), SampleOrder(1001, 1)])
def test_seed_shuffle_and_size_make_other_orders(other):
    mine = SampleOrder(1000, 1).indices(0, 1000)
    assert np.sum(mine == other.indices(0, 1000)) < 20


def test_each_epoch_has_its_own_order():
    order = SampleOrder(1000, 1)
    assert np.sum(order.indices(0, 1000) == order.indices(1000, 1000)) < 20


def test_a_large_dataset_takes_no_memory():
    tracemalloc.start()
    try:
        found = SampleOrder(10**12, 1, "blocks:100000*8").indices(3 * 10**12 + 7, 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(found.tolist())) == 1000
    assert peak < 1 << 20


@given(st.integers(2, 3000), st.integers(0, 9), st.integers(1, 100), st.integers(1, 6))
def test_a_window_is_read_from_neighbouring_blocks(samples, seed, block, window):
    order = SampleOrder(samples, seed, f"blocks:{block}*{window}").indices(0, samples)
    for start in range(0, samples, block * window):
        touched = set((order[start : start + block * window] // block).tolist())
        assert len(touched) <= window + 2  # the short block makes windows begin within one


@pytest.mark.parametrize(
    "shuffle", ["", "Full", "blocks", "blocks:0", "blocks:4*0", "blocks:-1", "blocks:4*", "window:3"]
)
def test_unknown_shuffles_are_refused(shuffle):
    with pytest.raises(PolicyError, match="known are full, none"):
        SampleOrder(10, 1, shuffle)


@pytest.mark.parametrize("samples", [0, -1, MAX_SAMPLES + 1])
def test_impossible_sizes_are_refused(samples):
    with pytest.raises(PolicyError, match=str(samples)):
        SampleOrder(samples, 1)


def test_planning_does_not_import_torch():
    code = (
        "import sys, elastic.samples; elastic.samples.SampleOrder(10, 1).indices(0, 9); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


# The bounds hold for numpy's shuffle too; the seeds are fixed, so that what passes once does so always.
both = pytest.mark.parametrize("shuffle", [shuffle_quality.our_shuffle, shuffle_quality.numpy_shuffle])


@both
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_permutations_of_few_samples_come_up_equally_often(shuffle, size):
    assert abs(shuffle_quality.all_permutations(shuffle, size, 60 * math.factorial(size))) < 4


@both
@pytest.mark.parametrize("size", [5, 64])
def test_each_sample_is_equally_likely_at_every_position(shuffle, size):
    assert abs(shuffle_quality.positions(shuffle, size, 1000)) < 4


@both
@pytest.mark.parametrize("size", [1000, 100_000])
def test_adjacent_samples_are_uncorrelated(shuffle, size):
    assert abs(shuffle_quality.serial(shuffle, size, 3)) < 4


@both
def test_few_samples_keep_their_position_or_successor(shuffle):
    assert 0.7 < shuffle_quality.fixed_points(shuffle, 1000, 200) < 1.3
    assert 1.6 < shuffle_quality.neighbours(shuffle, 1000, 200) < 2.4


def test_an_epoch_has_nothing_to_do_with_the_next():
    assert all(abs(shuffle_quality.next_epoch(size, 5)) < 4 for size in (1000, 100_000))


def test_quality_measures_detect_a_bad_shuffle():
    def rotated(size, seed):
        return np.roll(np.arange(size), seed)

    assert shuffle_quality.all_permutations(rotated, 4, 1000) > 40
    assert shuffle_quality.serial(rotated, 1000, 3) > 20
    assert shuffle_quality.neighbours(rotated, 1000, 10) > 900
    assert shuffle_quality.fixed_points(rotated, 1000, 10) == 100
    assert shuffle_quality.positions(lambda size, seed: np.arange(size), 10, 100) > 40
    assert shuffle_quality.shuffle_spread("none", 100_000, 1).beside == 256


def test_windows_mix_more_the_more_blocks_they_have():
    full, wide, narrow = (
        shuffle_quality.shuffle_spread(shuffle, 100_000, 1) for shuffle in ("full", "blocks:1000*50", "blocks:1000*2")
    )
    assert 0.3 < full.moved < 0.36
    assert full.beside < wide.beside < narrow.beside < 256
