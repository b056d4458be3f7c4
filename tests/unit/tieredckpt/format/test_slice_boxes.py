import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format.slice_boxes import (
    Box,
    byte_runs,
    full_box,
    intersection,
    relative_box,
    subtract_box,
    uncovered,
)


@st.composite
def boxes_in(draw, shape):
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offsets.append(start)
        sizes.append(draw(st.integers(0, size - start)))
    return Box(tuple(offsets), tuple(sizes))


shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


def cells(box):
    grid = np.indices(box.sizes).reshape(len(box.sizes), -1).T if box.sizes else [()]
    return {tuple(int(a) + b for a, b in zip(cell, box.offsets, strict=True)) for cell in grid}


@given(shapes.flatmap(lambda s: st.tuples(boxes_in(s), boxes_in(s))))
def test_intersection_and_difference_partition_a_box(pair):
    a, b = pair
    common = intersection(a, b)
    shared = cells(common) if common else set()
    assert shared == cells(a) & cells(b)
    rest = [cells(r) for r in subtract_box(a, b)]
    assert sum(map(len, rest)) == len(set().union(*rest)) if rest else True
    assert set().union(*rest, set()) == cells(a) - cells(b)


@given(shapes.flatmap(lambda s: st.tuples(st.just(s), st.lists(boxes_in(s), max_size=5))))
def test_uncovered_cells_match_a_cell_set(case):
    shape, covers = case
    missing = uncovered(full_box(shape), covers)
    expected = cells(full_box(shape)) - set().union(*(cells(c) for c in covers), set())
    assert set().union(*(cells(m) for m in missing), set()) == expected


@given(shapes.flatmap(lambda s: st.tuples(st.just(s), boxes_in(s), boxes_in(s))), st.sampled_from([1, 2, 4, 8]))
def test_runs_move_exactly_the_bytes_of_the_common_box(case, itemsize):
    shape, stored, wanted = case
    box = intersection(stored, wanted)
    if box is None:
        return
    rng = np.random.default_rng(0)
    full = rng.integers(0, 255, size=(*shape, itemsize), dtype=np.uint8)

    def cut(b):
        return np.ascontiguousarray(full[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes, strict=True))])

    source, target = cut(stored).reshape(-1), np.zeros_like(cut(wanted).reshape(-1))
    expected = np.zeros_like(cut(wanted))
    inside = relative_box(box, wanted)
    expected[tuple(slice(o, o + n) for o, n in zip(inside.offsets, inside.sizes, strict=True))] = cut(box)
    moved = 0
    for run in byte_runs(box, stored, wanted, itemsize):
        target[run.target : run.target + run.size_bytes] = source[run.source : run.source + run.size_bytes]
        moved += run.size_bytes
    assert moved == box.volume * itemsize
    assert np.array_equal(target, expected.reshape(-1))


def test_boxes_crossing_in_many_axes_are_damage_without_many_splits():
    axes = 18
    slabs = [
        Box(tuple(int(axis == n) for n in range(axes)), tuple(1 if axis == n else 3 for n in range(axes)))
        for axis in range(axes)
    ]
    with pytest.raises(CheckpointDamagedError, match="split"):
        uncovered(full_box((3,) * axes), slabs)
