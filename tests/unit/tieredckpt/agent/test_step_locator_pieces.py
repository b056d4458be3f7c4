"""Pieces found in columnar layouts equal the result of a linear search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tieredckpt.restore.test_step_index import DURABLE, MEMORY, boxes_in, piece, shapes, stored
from tieredckpt.agent.step_locator import PieceIndex
from tieredckpt.errors import CheckpointDamagedError, MismatchError
from tieredckpt.format.shard_layout import LayoutColumns, build_layout, encode_layout
from tieredckpt.format.slice_boxes import Box, full_box
from tieredckpt.resolve_step import Tier


def index_of(step):
    layouts = {
        shard.meta.layout: LayoutColumns(step.manifest.layouts[shard.meta.layout]) for shard in step.shards.values()
    }
    best = {}
    for part, shard in step.shards.items():
        place = (list(Tier).index(step.tier(part)), part)
        best[shard.meta.layout] = min(place, best.get(shard.meta.layout, place))
    return PieceIndex(layouts), best


@given(shapes, st.integers(1, 12), st.data())
def test_pieces_match_a_linear_search(shape, parts, data):
    held = [data.draw(boxes_in(shape)) for _ in range(parts)]
    others = [data.draw(st.booleans()) for _ in held]  # not all layouts have the same names
    shards = [
        ([piece("t", shape, *box), *([piece("u", shape, *box)] if more else [])], {})
        for box, more in zip(held, others, strict=True)
    ]
    step = stored(*shards, tiers=[data.draw(st.sampled_from([MEMORY, DURABLE])) for _ in held])
    index, best = index_of(step)
    wanted = data.draw(boxes_in(shape))
    try:
        expected = [(one.part, one.entry, one.box, one.item) for one in step.pieces("t", wanted) if one.box.volume]
    except CheckpointDamagedError:
        expected = None
    found = index.find("t", wanted, best.__getitem__)
    if expected is None:
        assert found is None
        return
    assert [(best[one.layout][1], one.entry, one.box, one.item) for one in found if one.box.volume] == expected


def test_tensors_and_objects_are_found_by_name():
    step = stored(([piece("a", (4,), (0,), (2,))], {"x": 3}), ([piece("a", (4,), (2,), (2,))], {"x": 3, "y": 1}))
    index, _ = index_of(step)
    assert [entry.fqn for entry in index.tensors()] == ["a"]
    assert {name: len(where) for name, where in index.objects.items()} == {"x": 2, "y": 1}
    with pytest.raises(KeyError):
        index.find("b", full_box((4,)), lambda _: (0, 0))


@pytest.mark.parametrize("many", [2, 20])
def test_shapes_that_differ_are_damage_and_another_rank_a_mismatch(many):
    cut = [piece("a", (many,), (part,), (1,)) for part in range(many)]
    index, best = index_of(stored(*(([one], {}) for one in cut)))
    with pytest.raises(MismatchError):
        index.find("a", full_box((many, 1)), best.__getitem__)
    strange = [*cut[:-1], piece("a", (many + 1,), (many - 1,), (1,))]
    index, best = index_of(stored(*(([one], {}) for one in strange)))
    with pytest.raises(CheckpointDamagedError):
        index.find("a", full_box((many,)), best.__getitem__)


def test_slices_of_a_tensor_within_a_shard_are_found():
    layout = build_layout([piece("a", (6,), (0,), (2,)), piece("a", (6,), (4,), (2,))], [], None)
    other = build_layout([piece("a", (6,), (2,), (2,))], [], None)
    index = PieceIndex({one.digest: LayoutColumns(encode_layout(one)) for one in (layout, other)})
    found = index.find("a", full_box((6,)), lambda digest: (0, int(digest == other.digest)))
    assert [one.box for one in found] == [Box((0,), (2,)), Box((4,), (2,)), Box((2,), (2,))]
