import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from peerstore.message_codec import from_msgpack
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format.shard_layout import (
    ARCHIVE_ITEM,
    HEADER_ALIGNMENT,
    OBJECT_ITEM,
    TENSOR_ALIGNMENT,
    ItemEntry,
    TensorEntry,
    _check_arrays,
    _check_rows,
    _Columns,
    build_layout,
    decode_layout,
    encode_layout,
)
from tieredckpt.format.slice_boxes import Box

WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1, "bool": 1, "complex128": 16, "float8_e4m3fnuz": 1, "int64": 8}
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@st.composite
def entries(draw):
    dtype = draw(st.sampled_from(sorted(WIDTHS)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offsets.append(start)
        sizes.append(draw(st.integers(0, size - start)))
    box = Box(tuple(offsets), tuple(sizes))
    return TensorEntry(draw(names), dtype, shape, box, WIDTHS[dtype], draw(st.booleans()), draw(st.booleans()))


items = st.builds(lambda n: ItemEntry(n, OBJECT_ITEM), names)


def file_of(layout, item_sizes):
    return layout.header(item_sizes) + b"\0" * (layout.tensor_bytes + sum(item_sizes))


@given(st.lists(entries(), max_size=8), st.lists(st.tuples(items, st.integers(0, 300)), max_size=4))
def test_every_layout_is_a_valid_safetensors_file(tensors, tail):
    layout = build_layout(tensors, [item for item, _ in tail], None)
    sizes = [size for _, size in tail]
    data = file_of(layout, sizes)
    assert len(data) == layout.size_bytes(sizes)
    shown = dict(deserialize(data))
    assert len(shown) == len(tensors) + len(tail)
    assert sum(len(info["data"]) for info in shown.values()) == layout.tensor_bytes + sum(sizes)


@given(st.lists(entries(), max_size=12))
def test_tensors_are_contiguous_and_aligned(tensors):
    layout = build_layout(tensors, [], None)
    assert layout.header_bytes % HEADER_ALIGNMENT == 0
    at = 0
    for entry in layout.tensors:
        assert entry.start == at
        at += entry.size_bytes
        assert entry.start % entry.itemsize == 0
        if entry.size_bytes % TENSOR_ALIGNMENT == 0 and entry.size_bytes:
            assert entry.start % TENSOR_ALIGNMENT == 0


@given(st.lists(entries(), max_size=8), st.lists(items, max_size=3), st.booleans())
def test_a_layout_survives_its_encoding(tensors, tail, flattened):
    known = {e.fqn for e in [*tensors, *tail]}
    paths = {name: (name, 3) if len(name) % 2 else tuple(name.split(".")) for name in known} if flattened else None
    layout = build_layout(tensors, tail, paths)
    again = decode_layout(encode_layout(layout))
    assert again == layout
    assert again.digest == layout.digest
    assert again.names == layout.names


def test_item_sizes_may_change_without_moving_a_tensor():
    tensor = TensorEntry("w", "float32", (4, 4), Box((0, 0), (4, 4)), 4)
    layout = build_layout([tensor], [ItemEntry("rng", OBJECT_ITEM), ItemEntry("lr", OBJECT_ITEM)], None)
    first, second = layout.header([0, 10**12]), layout.header([7, 3])
    assert len(first) == len(second) == layout.header_bytes
    start = json.loads(second[8:])["w"]["data_offsets"]
    assert json.loads(first[8:])["w"]["data_offsets"] == start == [0, 64]


def test_slices_are_named_by_their_offsets_and_names_stay_unique():
    slices = [TensorEntry("w", "float32", (8,), Box((o,), (4,)), 4) for o in (0, 4)]
    stranger = TensorEntry("w@4", "float32", (1,), Box((0,), (1,)), 4)
    header = TensorEntry("__metadata__", "float32", (1,), Box((0,), (1,)), 4)
    layout = build_layout([*slices, stranger, header], [ItemEntry("w@0", OBJECT_ITEM)], None)
    assert len(set(layout.names)) == 5
    assert {"w@0", "w@4"} <= set(layout.names)
    assert "__metadata__" not in layout.names


def test_dtypes_unknown_to_safetensors_are_bytes_and_keep_their_name():
    entry = TensorEntry("c", "complex128", (3,), Box((0,), (3,)), 16)
    layout = build_layout([entry], [], None)
    assert dict(deserialize(file_of(layout, [])))["c"]["dtype"] == "U8"
    assert decode_layout(encode_layout(layout)).tensors[0].dtype == "complex128"


@pytest.mark.parametrize(
    "change",
    [
        lambda e: TensorEntry(e.fqn, e.dtype, e.shape, Box((1,), (4,)), e.itemsize),  # exceeds the shape
        lambda e: TensorEntry(e.fqn, e.dtype, e.shape, Box((-1,), (2,)), e.itemsize),
        lambda e: TensorEntry(e.fqn, e.dtype, (4, 4), e.box, e.itemsize),  # ranks differ
        lambda e: TensorEntry(e.fqn, e.dtype, e.shape, e.box, 0),
        lambda e: TensorEntry(e.fqn, e.dtype, (1 << 61,), Box((0,), (1 << 61,)), e.itemsize),
    ],
)
def test_an_impossible_entry_is_damage(change):
    good = TensorEntry("w", "float32", (4,), Box((0,), (4,)), 4)
    bad = build_layout([good], [], None)
    object.__setattr__(bad, "tensors", (change(good),))
    with pytest.raises(CheckpointDamagedError):
        decode_layout(encode_layout(bad))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_damage_not_a_crash(data):
    with pytest.raises(CheckpointDamagedError):
        decode_layout(data)


@given(st.lists(entries(), min_size=1, max_size=4), st.data())
def test_a_flipped_byte_never_gives_a_layout_of_the_same_name(tensors, data):
    layout = build_layout(tensors, [], None)
    raw = bytearray(encode_layout(layout))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        other = decode_layout(bytes(raw))
    except CheckpointDamagedError:
        return
    assert other == layout or other.digest != layout.digest


def test_archives_keep_their_tensor_and_objects_have_none():
    tensor = TensorEntry("s", "float32", (3, 3), Box((0, 0), (3, 3)), 4)
    layout = build_layout([], [ItemEntry("s", ARCHIVE_ITEM, tensor), ItemEntry("o", OBJECT_ITEM)], None)
    assert decode_layout(encode_layout(layout)).items == layout.items


def checked(check, columns):
    try:
        first_numbers, size_bytes = check(columns)
    except ValueError as error:
        return str(error)
    return [*first_numbers], size_bytes


@given(st.lists(entries(), max_size=4), st.data())
def test_layouts_are_checked_alike_with_and_without_numpy(tensors, data):
    columns = from_msgpack(encode_layout(build_layout(tensors, [], None)), _Columns)
    column = data.draw(st.sampled_from([None, "dtype_of", "itemsizes", "ranks", "numbers"]))
    if column is not None:
        raw = bytearray(getattr(columns, column))
        if raw and data.draw(st.booleans()):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif column == "numbers":
            raw += bytes(data.draw(st.integers(1, 16)))
        columns = msgspec.structs.replace(columns, **{column: bytes(raw)})
    assert checked(_check_rows, columns) == checked(_check_arrays, columns)
