"""Coverage compared with a mask of one cell per element."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.format.manifest import StateTable, TableTensor, missing_entries
from tieredckpt.format.shard_layout import ARCHIVE_ITEM, OBJECT_ITEM, ItemEntry, TensorEntry, build_layout
from tieredckpt.format.slice_boxes import Box, full_box


@st.composite
def boxes_in(draw, shape):
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offsets.append(start)
        sizes.append(draw(st.integers(0, size - start)))
    return Box(tuple(offsets), tuple(sizes))


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def states(draw):
    """Draw a table, and shards with pieces of its tensors and some of its objects."""
    tensors = [TableTensor(f"t{i}", "float32", draw(shapes)) for i in range(draw(st.integers(0, 3)))]
    objects = [f"o{i}" for i in range(draw(st.integers(0, 2)))]
    shards = []
    for _ in range(draw(st.integers(0, 3))):
        pieces, items = [], []
        for tensor in tensors:
            for box in draw(st.lists(boxes_in(tensor.shape) | st.just(full_box(tensor.shape)), max_size=2)):
                entry = TensorEntry(tensor.fqn, "float32", tensor.shape, box, 4)
                if draw(st.booleans()):
                    pieces.append(entry)
                else:
                    items.append(ItemEntry(tensor.fqn, ARCHIVE_ITEM, entry))
        items += [ItemEntry(name, OBJECT_ITEM) for name in objects if draw(st.booleans())]
        shards.append(build_layout(pieces, items, None))
    return StateTable(tuple(tensors), tuple(objects)), shards


def missing(table, shards):
    """Compute the same answer element by element."""
    seen = {tensor.fqn: np.zeros(tensor.shape, bool) for tensor in table.tensors}
    known = set()
    objects = set()
    for shard in shards:
        for entry in [*shard.tensors, *(item.tensor for item in shard.items if item.tensor is not None)]:
            known.add(entry.fqn)
            place = tuple(slice(o, o + n) for o, n in zip(entry.box.offsets, entry.box.sizes, strict=True))
            seen[entry.fqn][place] = True
        objects.update(item.fqn for item in shard.items if item.tensor is None)
    # a tensor without elements must be present as well: its name and shape are part of the state
    torn = [name for name, mask in seen.items() if name not in known or not mask.all()]
    return torn + [name for name in table.objects if name not in objects]


@given(states())
def test_missing_entries_match_a_mask(state):
    table, shards = state
    assert missing_entries(table, shards) == missing(table, shards)


@given(states(), st.randoms(use_true_random=False))
def test_the_order_of_shards_does_not_matter(state, random):
    table, shards = state
    mixed = random.sample(shards, len(shards))
    assert missing_entries(table, mixed) == missing_entries(table, shards) == missing_entries(table, [*shards, *mixed])


@pytest.mark.parametrize("shape", [(2, 8), (16,), (4, 4, 1), ()])
def test_a_piece_of_another_shape_covers_nothing(shape):
    table = StateTable((TableTensor("t", "float32", (4, 4)),), ())
    stranger = build_layout([TensorEntry("t", "float32", shape, full_box(shape), 4)], [], None)
    assert missing_entries(table, [stranger]) == ["t"]


def test_objects_and_tensors_are_distinct():
    table = StateTable((TableTensor("t", "float32", (1,)),), ("o",))
    mixed_up = build_layout(
        [TensorEntry("o", "float32", (1,), Box((0,), (1,)), 4)], [ItemEntry("t", OBJECT_ITEM)], None
    )
    assert missing_entries(table, [mixed_up]) == ["t", "o"]
    assert missing_entries(StateTable((), ()), []) == []
