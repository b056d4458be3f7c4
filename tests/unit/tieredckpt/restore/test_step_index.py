"""A stored step prepared for reading: near pieces from few shards, byte ranges and chunks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore.shard_records import ShardKey
from tieredckpt.agent.agent_api import StepDescription
from tieredckpt.agent.durable_catalog import manifest_from_shard_files
from tieredckpt.errors import CheckpointDamagedError, MismatchError
from tieredckpt.format.manifest import ShardIndex, ShardMeta
from tieredckpt.format.shard_layout import OBJECT_ITEM, ItemEntry, TensorEntry, build_layout, encode_layout
from tieredckpt.format.slice_boxes import Box
from tieredckpt.resolve_step import Tier
from tieredckpt.restore.step_index import ByteRange, StepIndex, chunk_ranges

MEMORY, DURABLE = (Tier.MEMORY,), (Tier.DURABLE,)


def stored(*shards, tiers=None):
    """Return a step made of (tensors, objects with sizes) for each part."""
    files = []
    for part, (tensors, objects) in enumerate(shards):
        layout = build_layout(tensors, [ItemEntry(name, OBJECT_ITEM) for name in objects], None)
        sizes = tuple(objects.values())
        size = layout.size_bytes(sizes)
        key = ShardKey("j", 1, 1, "a", 0, part)
        sums = b"\0" * 8 * -(-size // 4096)
        files.append(
            (
                ShardIndex(key, len(shards), size, 4096, sums, ShardMeta(layout.digest, sizes)),
                encode_layout(layout),
                b"",
            )
        )
    found = dict(enumerate(tiers)) if tiers else dict.fromkeys(range(len(shards)), MEMORY)
    return StepIndex(StepDescription(manifest_from_shard_files(files, created_ns=0, writer=""), found))


def piece(name, shape, offsets, sizes):
    return TensorEntry(name, "int16", shape, Box(offsets, sizes), 2)


@st.composite
def boxes_in(draw, shape):
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(shapes, st.data())
def test_pieces_cover_the_box_once_from_the_best_tier(shape, data):
    held = data.draw(st.lists(boxes_in(shape), min_size=1, max_size=4))
    wanted = data.draw(boxes_in(shape))
    tiers = [data.draw(st.sampled_from([MEMORY, DURABLE])) for _ in held]
    step = stored(*(([piece("t", shape, *box)], {}) for box in held), tiers=tiers)
    have, count = np.zeros(shape, bool), np.zeros(shape, int)

    def cells(box):
        return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))

    for box in held:
        have[cells(box)] = True
    if not have[cells(wanted)].all():
        with pytest.raises(CheckpointDamagedError, match="lacks"):
            step.pieces("t", wanted)
        return
    for found in step.pieces("t", wanted):
        assert found.entry.box == held[found.part]
        count[cells(found.box)] += 1
        span, full = step.tensor_range(found), step.tensor_range(found._replace(box=found.entry.box))
        assert full.start <= span.start <= span.stop <= full.stop
        assert span.stop - span.start >= found.box.volume * 2
    assert (count[cells(wanted)] == 1).all()
    assert count.sum() == wanted.volume


def test_the_nearest_copy_is_read():
    whole = piece("t", (4,), (0,), (4,))
    step = stored(([whole], {"o": 3}), ([whole], {"o": 3}), tiers=[DURABLE, MEMORY])
    assert [found.part for found in step.pieces("t", Box((0,), (4,)))] == [1]
    assert step.object_part("o", 7) == 1
    assert [step.object_part("o", rank) for rank in (0, 1)] == [0, 1]  # each rank's own object, if every rank has one


def test_missing_name_is_a_mismatch_and_another_shape_damage():
    step = stored(([piece("t", (4,), (0,), (4,))], {}), ([piece("u", (4,), (0,), (2,))], {}))
    for ask in (lambda: step.pieces("x", Box((0,), (1,))), lambda: step.object_part("x", 0)):
        with pytest.raises(MismatchError, match="has no"):
            ask()
    with pytest.raises(MismatchError, match="shape"):
        step.pieces("t", Box((0, 0), (1, 1)))
    mixed = stored(([piece("t", (4,), (0,), (4,))], {}), ([piece("t", (2, 2), (0, 0), (2, 2))], {}))
    with pytest.raises(CheckpointDamagedError, match="several shapes"):
        mixed.pieces("t", Box((0,), (3,)))


ranges = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 20)).map(lambda t: ByteRange(t[0], t[0] + t[1])))


@given(ranges, st.integers(1, 30))
def test_chunks_hold_every_range_and_nothing_that_none_touches(found, chunk_bytes):
    chunks = chunk_ranges(found, chunk_bytes)
    wanted = {byte // chunk_bytes for start, stop in found for byte in range(start, stop)}
    assert {chunk for first, stop in chunks for chunk in range(first, stop)} == wanted
    assert all(a[1] < b[0] for a, b in itertools.pairwise(chunks))
