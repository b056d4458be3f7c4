"""Resharding without the ranks, for any rank counts: each needed byte is read exactly once.

Worlds that no machine here has room for, through the same pure code that a load and ``elastic reshard`` use.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from elastic.reshard.offline import (
    CheckpointTensor,
    disjoint_boxes,
    plan_fsdp,
    plan_like,
    plan_whole_tensors,
    split_into_windows,
)
from elastic.reshard.state_checksum import boxes_from_runs, shard_runs
from peerstore.shard_records import ShardKey
from tests.support.example_counts import examples
from tieredckpt.agent.agent_api import StepDescription
from tieredckpt.errors import CheckpointDamagedError, MismatchError, UsageError
from tieredckpt.format.manifest import ShardIndex, ShardMeta, build_manifest
from tieredckpt.format.shard_layout import TensorEntry, build_layout, encode_layout
from tieredckpt.format.slice_boxes import Box, byte_runs, full_box, intersection, uncovered
from tieredckpt.resolve_step import Tier
from tieredckpt.restore.step_index import StepIndex

ITEMSIZE = 2
CHUNK = 1 << 20

LAYOUTS = {
    "ddp": lambda n: ((n,), [Replicate()]),
    "fsdp": lambda n: ((n,), [Shard(0)]),
    "tp": lambda n: ((n,), [Shard(1)]),
    "hsdp": lambda n: ((n // _side(n), _side(n)), [Replicate(), Shard(0)]),
    "2d": lambda n: ((n // _side(n), _side(n)), [_StridedShard(0, split_factor=_side(n)), Shard(0)]),
    "2d columns": lambda n: ((n // _side(n), _side(n)), [Shard(0), Shard(1)]),
}


def _side(world):
    """Return the largest divisor of at most 8: the number of ranks of a node."""
    return max(size for size in range(1, 9) if world % size == 0)


def boxes(layout, world, shape):
    """Return the boxes of every rank."""
    mesh, placements = LAYOUTS[layout](world)
    coordinates = itertools.product(*map(range, mesh))
    return [[there for _, there in boxes_from_runs(shard_runs("w", shape, mesh, c, placements))] for c in coordinates]


def stored(shape, pieces):
    """Return a step whose parts hold these boxes; of equal boxes the first is stored, as in DCP."""
    shards, layouts, seen = [], {}, set()
    for part, held in enumerate(pieces):
        mine = [box for box in held if box not in seen and not seen.add(box)]
        layout = build_layout([TensorEntry("w", "bfloat16", shape, box, ITEMSIZE, True) for box in mine], [], None)
        layouts[layout.digest] = encode_layout(layout)
        size = layout.size_bytes(())
        sums = bytes(8 * -(-size // CHUNK))
        key = ShardKey("job", 1, 1, "i", 0, part)
        shards.append(ShardIndex(key, len(pieces), size, CHUNK, sums, ShardMeta(layout.digest, ())))
    manifest = build_manifest(shards, layouts, {}, created_ns=0, writer="")
    return StepIndex(StepDescription(manifest, dict.fromkeys(range(len(pieces)), (Tier.MEMORY,))))


def check(step, shape, wanted):
    """Check that each wanted box is complete: every byte is written once, from stored bytes."""
    for box in wanted:
        pieces = step.pieces("w", box) if box.volume else []
        assert sum(piece.box.volume for piece in pieces) == box.volume
        assert not uncovered(box, [piece.box for piece in pieces])
        moved = 0
        for piece in pieces:
            span = step.tensor_range(piece)
            assert 0 <= span.start <= span.stop <= step.shards[piece.part].size_bytes
            moved += sum(run.size_bytes for run in byte_runs(piece.box, piece.entry.box, box, ITEMSIZE))
        assert moved == box.volume * ITEMSIZE


WORLDS = [1, 2, 7, 8, 24, 64, 96, 250, 1000, 1024]


LARGE = [
    pytest.param(before, after, marks=() if (row + column) % 2 else pytest.mark.nightly)
    for row, before in enumerate(["ddp", "fsdp", "2d", "2d columns"])
    for column, after in enumerate(["hsdp", "fsdp", "tp", "2d"])
]
"""All pairs of layouts; half of them, with each layout twice, run on every push."""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), LARGE)
def test_large_worlds_reshard_into_each_other(before, after):
    shape = (1003, 520)
    for n, m in [(1024, 7), (7, 1024), (96, 250)]:
        step = stored(shape, boxes(before, n, shape))
        held = boxes(after, m, shape)
        for rank in sorted({0, 1, m // 3, m // 2, m - 1}):
            check(step, shape, held[rank])
        times = np.zeros(shape, dtype=int)
        for box in {box for rank in held for box in rank if box.volume}:
            times[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] += 1
        assert (times == 1).all()


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_every_large_world_into_every_other():
    shape = (1003, 520)
    for n, before in itertools.product(WORLDS, LAYOUTS):
        step = stored(shape, boxes(before, n, shape))
        for m, after in itertools.product(WORLDS, LAYOUTS):
            for held in boxes(after, m, shape)[:: max(1, m // 16)]:
                check(step, shape, held)


@settings(max_examples=examples(100), derandomize=True, database=None)
@given(
    st.tuples(st.integers(0, 40), st.integers(1, 40)),
    st.integers(1, 40),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 40),
    st.sampled_from(sorted(LAYOUTS)),
)
def test_odd_sizes(shape, n, before, m, after):
    step = stored(shape, boxes(before, n, shape))
    for held in boxes(after, m, shape):
        check(step, shape, held)


# -- what `elastic reshard` cuts --------------------------------------------------------------------------------------


def form(shape, pieces=None):
    return CheckpointTensor("bfloat16", shape, ITEMSIZE, pieces or ((0, full_box(shape)),))


SHAPES = st.dictionaries(
    st.sampled_from([f"t{n}" for n in range(6)]), st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1
)


@settings(max_examples=examples(100), derandomize=True, database=None)
@given(SHAPES, st.integers(1, 12), st.sampled_from([plan_fsdp, plan_whole_tensors]))
def test_every_element_is_stored_once(shapes, ranks, how):
    cut = how({name: form(shape) for name, shape in shapes.items()}, ranks)
    assert len(cut.parts) == ranks
    slices = [piece for part in cut.parts for piece in part]
    assert len(set(slices)) == len(slices)
    for name, shape in shapes.items():
        mine = [piece.box for piece in slices if piece.name == name]
        assert mine
        assert sum(box.volume for box in mine) == math.prod(shape)
        assert not uncovered(full_box(shape), mine)


@given(st.integers(1, 50), st.integers(1, 12))
def test_ranks_get_the_rows_that_fully_shard_gives_them(rows, ranks):
    cut = plan_fsdp({"w": form((rows, 3))}, ranks)
    expected = boxes("fsdp", ranks, (rows, 3))
    assert [[piece.box for piece in part] for part in cut.parts] == [[b for b in held if b.volume] for held in expected]


def test_unsplit_tensors_are_spread_evenly():
    cut = plan_whole_tensors({f"t{n}": form((n + 1, 100)) for n in range(20)}, 4)
    loads = [sum(piece.box.volume for piece in part) for part in cut.parts]
    assert max(loads) - min(loads) <= 400


@settings(max_examples=examples(60), derandomize=True, database=None)
@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.integers(1, 9), st.sampled_from(sorted(LAYOUTS)))
def test_like_another(shape, world, layout):
    pieces = tuple((part, box) for part, held in enumerate(boxes(layout, world, shape)) for box in held)
    cut = plan_like({"w": form(shape)}, {"w": form(shape, pieces)}, world)
    found = {(part, piece.box) for part, held in enumerate(cut.parts) for piece in held}
    assert sum(box.volume for _, box in found) == math.prod(shape)
    assert not uncovered(full_box(shape), [box for _, box in found])
    assert {item for item in found if item[1].volume} <= set(pieces)


def test_like_another_of_other_tensors():
    with pytest.raises(MismatchError, match=r"1 are not in it \(w\), 1 are only in it \(v\)"):
        plan_like({"w": form((3,))}, {"v": form((3,))}, 1)
    with pytest.raises(MismatchError, match=r"w is \(3,\) here and \(4,\)"):
        plan_like({"w": form((3,))}, {"w": form((4,))}, 1)
    for ranks in (0, 1 << 17):
        with pytest.raises(UsageError):
            plan_fsdp({}, ranks)


@settings(max_examples=examples(150), derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3)), max_size=3), st.integers(1, 300))
def test_windows_are_the_box_in_order(axes, most):
    box = Box(tuple(before for _, before, _ in axes), tuple(size for size, _, _ in axes))
    shape = tuple(before + size + after for size, before, after in axes)
    found = list(split_into_windows(box, shape, ITEMSIZE, most))
    at = 0
    for window in found:
        places = list(byte_runs(window, window, box, ITEMSIZE))
        for run in sorted(places, key=lambda one: one.target):
            assert run.target == at
            at += run.size_bytes
        in_tensor = list(byte_runs(window, window, full_box(shape), ITEMSIZE))
        first, stop = min(r.target for r in in_tensor), max(r.target + r.size_bytes for r in in_tensor)
        assert window.volume == 1 or stop - first <= max(most, ITEMSIZE)
    assert at == box.volume * ITEMSIZE


def test_pieces_that_are_there_twice_count_once():
    twice = ((0, Box((0, 0), (3, 4))), (1, Box((2, 0), (3, 4))), (2, Box((0, 0), (5, 4))))
    found = disjoint_boxes("w", form((5, 4), twice))
    assert sum(box.volume for box in found) == 20
    assert not any(intersection(a, b) for a, b in itertools.combinations(found, 2))
    with pytest.raises(CheckpointDamagedError, match="nothing holds"):
        disjoint_boxes("w", form((6, 4), twice))
