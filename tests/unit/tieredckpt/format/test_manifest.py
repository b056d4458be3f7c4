"""Manifests and indexes as bytes: valid ones round-trip, and invalid ones are damage."""

import msgspec
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from peerstore.checksums import chunk_count
from peerstore.shard_records import ShardKey
from tieredckpt.agent.durable_catalog import manifest_from_shard_files
from tieredckpt.errors import CheckpointDamagedError, FormatVersionError
from tieredckpt.format.manifest import (
    FORMAT_VERSION,
    Manifest,
    ShardIndex,
    ShardMeta,
    StateTable,
    TableTensor,
    build_manifest,
    decode_manifest,
    decode_meta,
    decode_shard_file,
    decode_table,
    encode_manifest,
    encode_meta,
    encode_shard_file,
    encode_table,
    pack_blob,
    unpack_blob,
)
from tieredckpt.format.object_keys import shard_object_key as object_name
from tieredckpt.format.shard_layout import OBJECT_ITEM, ItemEntry, TensorEntry, build_layout, encode_layout
from tieredckpt.format.slice_boxes import Box

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
names = st.from_regex(r"\A[a-z0-9-]{1,12}\Z")


@st.composite
def layouts(draw):
    count = draw(st.integers(0, 3))
    tensors = [
        TensorEntry(draw(texts), "float32", (8,), Box((0,), (n,)), 4)
        for n in draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    ]
    return build_layout(tensors, [ItemEntry(name, OBJECT_ITEM) for name in draw(st.lists(texts, max_size=2))], None)


@st.composite
def shard_files(draw):
    """Return the index, layout and table of every part of one step."""
    parts = draw(st.integers(1, 4))
    job, incarnation = draw(names), draw(names)
    step, epoch, attempt = draw(st.integers(0, 1 << 40)), draw(st.integers(1, 99)), draw(st.integers(0, 3))
    table = StateTable((TableTensor("t", "float32", (8,)),), ("o",)) if draw(st.booleans()) else None
    files = []
    for part in range(parts):
        layout = draw(layouts())
        sizes = tuple(draw(st.integers(0, 99)) for _ in layout.items)
        size, chunk = layout.size_bytes(sizes), draw(st.sampled_from([4096, 1 << 20]))
        count = chunk_count(size, chunk)
        packed = draw(st.booleans())
        key = ShardKey(job, step, epoch, incarnation, attempt, part)
        index = ShardIndex(
            key,
            parts,
            size,
            chunk,
            draw(st.binary(min_size=8 * count, max_size=8 * count)),
            ShardMeta(layout.digest, sizes, draw(st.none() | st.integers(-1, 99)), table.digest if table else ""),
            object_name(key, spread=draw(st.booleans()), compressed=packed),
            "zstd" if packed else "raw",
            (7,) * count if packed else (),
        )
        files.append((index, encode_layout(layout), encode_table(table) if table else b""))
    return files


@given(shard_files())
def test_an_index_survives_its_encoding(files):
    for index, layout, table in files:
        assert decode_shard_file(encode_shard_file(index, layout, table)) == (index, layout, table)
        assert decode_meta(encode_meta(index.meta)) == index.meta
        assert index.record.key == index.key


@given(shard_files(), st.randoms(use_true_random=False))
def test_manifest_is_rebuilt_from_shards_in_any_order(files, random):
    written = manifest_from_shard_files(files, created_ns=5, writer="w")
    data = encode_manifest(written)
    assert decode_manifest(data) == written
    read = [decode_shard_file(encode_shard_file(*file)) for file in random.sample(files, len(files))]
    assert encode_manifest(manifest_from_shard_files(read, created_ns=5, writer="w")) == data
    assert [shard.key.part for shard in written.shards] == list(range(written.parts))
    for index, layout, _ in files:
        assert encode_layout(written.layout_of(index)) == layout


@given(shard_files(), st.data())
def test_a_flipped_bit_is_damage(files, data):
    raw = bytearray(encode_manifest(manifest_from_shard_files(files, created_ns=0, writer="")))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointDamagedError):
        decode_manifest(bytes(raw))


@given(shard_files(), st.data())
def test_truncated_or_extended_bytes_are_damage(files, data):
    raw = encode_shard_file(*files[0])
    with pytest.raises(CheckpointDamagedError):
        decode_shard_file(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(CheckpointDamagedError):
        decode_shard_file(raw + b"\0")


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_damage(data):
    packed = zstandard.compress(data)
    for raw in (data, b"TCKP" + data + xxhash.xxh3_64_digest(data), b"TCKP" + packed + xxhash.xxh3_64_digest(packed)):
        for decode in (decode_manifest, decode_shard_file):
            with pytest.raises((CheckpointDamagedError, FormatVersionError)):
                decode(raw)
    for decode in (decode_meta, decode_table):
        with pytest.raises(CheckpointDamagedError):
            decode(b"\xc1" + data)


def test_the_table_has_a_name_that_its_contents_decide():
    one = StateTable((TableTensor("t", "float32", (8,)),), ("o",))
    assert decode_table(encode_table(one)) == one
    assert decode_table(encode_table(one)).digest == one.digest
    assert StateTable((TableTensor("t", "float32", (9,)),), ("o",)).digest != one.digest


# -- what does not fit together -----------------------------------------------------------------------------------


def simple(part=0, parts=2, **changes):
    layout = build_layout([TensorEntry("t", "float32", (8,), Box((0,), (8,)), 4)], [], None)
    values = {
        "key": ShardKey("j", 7, 1, "a", 0, part),
        "parts": parts,
        "size_bytes": layout.size_bytes([]),
        "chunk_bytes": 1 << 20,
        "checksums": b"12345678",
        "meta": ShardMeta(layout.digest, ()),
    }
    return ShardIndex(**{**values, **changes}), encode_layout(layout), b""


def built(*files):
    return decode_manifest(encode_manifest(manifest_from_shard_files(files, created_ns=0, writer="")))


def test_complete_manifest_is_accepted():
    assert built(simple(0), simple(1)).parts == 2


@pytest.mark.parametrize(
    "files",
    [
        lambda: [simple(0)],
        lambda: [simple(0), simple(0)],
        lambda: [simple(0), simple(1, key=ShardKey("other", 7, 1, "a", 0, 1))],
        lambda: [simple(0), simple(1, key=ShardKey("j", 8, 1, "a", 0, 1))],
        lambda: [simple(0), simple(1, key=ShardKey("j", 7, 2, "a", 0, 1))],
        lambda: [simple(0), simple(1, key=ShardKey("j", 7, 1, "b", 0, 1))],
        lambda: [simple(0), simple(1, key=ShardKey("j", 7, 1, "a", 1, 1))],
        lambda: [simple(0), simple(1, parts=3)],
        lambda: [simple(0), simple(1, object="../../etc/passwd")],
        lambda: [simple(0), simple(1, object="other/steps/000000000007/000001.0.a/000001.safetensors")],
        lambda: [simple(0), simple(1, object="j/steps/000000000007/000001.0.a/000000.safetensors")],
        lambda: [simple(0), simple(1, object="j/steps/000000000008/000001.0.a/000001.safetensors")],
        lambda: [simple(0), simple(1, object="j/steps/000000000007/000001.0.a/000001.index")],
    ],
    ids=range(13),
)
def test_shards_that_do_not_make_a_step(files):
    with pytest.raises(CheckpointDamagedError):
        built(*files())


@pytest.mark.parametrize(
    "changes",
    [
        {"size_bytes": -1},
        {"size_bytes": 1 << 62},
        {"size_bytes": 1 << 21},
        {"chunk_bytes": 0},
        {"chunk_bytes": -1},
        {"checksums": b""},
        {"checksums": b"1234567"},
        {"checksums": b"123456789"},
        {"encoding": "zstd"},
        {"encoding": "zstd", "frames": (1, 1)},
        {"encoding": "zstd", "frames": (-1,)},
        {"key": ShardKey("j", 7, 1, "a", 0, -1)},
        {"key": ShardKey("j", 7, 1, "a", 0, 2)},
        {"parts": 0},
        {"chunk_bytes": 1 << 40},
    ],
    ids=str,
)
def test_an_index_that_contradicts_itself_cannot_be_made(changes):
    with pytest.raises(ValueError):
        simple(**changes)


def raw_manifest(**changes):
    manifest = msgspec.to_builtins(
        manifest_from_shard_files([simple(0), simple(1)], created_ns=0, writer=""), builtin_types=(bytes,)
    )
    packed = zstandard.compress(
        msgspec.msgpack.encode({"format": FORMAT_VERSION, "kind": "manifest", "body": {**manifest, **changes}})
    )
    return b"TCKP" + packed + xxhash.xxh3_64_digest(packed)


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": []},
        {"layouts": {}},
        {"layouts": {simple()[0].meta.layout: encode_layout(build_layout([], [], None))}},
        {"parts": 9},
        {"parts": -1},
        {"step": "7"},
        {"job": None},
        {"tables": 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_manifest_that_contradicts_itself_is_damage(changes):
    assert decode_manifest(raw_manifest(job="j")).job == "j"
    with pytest.raises(CheckpointDamagedError):
        opened(raw_manifest(**changes))


def opened(data):
    manifest = decode_manifest(data)
    return [manifest.layout_of(shard) for shard in manifest.shards]


def test_fields_of_a_later_release_are_ignored():
    assert decode_manifest(raw_manifest(colour="red")).step == 7


def test_shard_file_with_a_foreign_layout_is_damaged():
    index, _, _ = simple()
    with pytest.raises(CheckpointDamagedError, match="not the one it is called"):
        decode_shard_file(encode_shard_file(index, encode_layout(build_layout([], [], None))))


def test_object_kinds_are_distinct():
    with pytest.raises(CheckpointDamagedError, match="it is a shard"):
        decode_manifest(encode_shard_file(*simple()))


def test_older_format_is_read_and_a_newer_one_refused():
    def of_format(number):
        packed = zstandard.compress(msgspec.msgpack.encode({"format": number, "kind": "shard", "body": None}))
        return b"TCKP" + packed + xxhash.xxh3_64_digest(packed)

    with pytest.raises(FormatVersionError, match=f"format {FORMAT_VERSION + 1}.*up to {FORMAT_VERSION}: upgrade"):
        decode_shard_file(of_format(FORMAT_VERSION + 1))
    with pytest.raises(CheckpointDamagedError):
        decode_shard_file(of_format(FORMAT_VERSION))


def test_manifest_and_build_agree():
    files = [simple(1), simple(0)]
    direct = build_manifest(
        [f[0] for f in files], {f[0].meta.layout: f[1] for f in files}, {}, created_ns=3, writer="x"
    )
    assert isinstance(direct, Manifest)
    assert direct == manifest_from_shard_files(files, created_ns=3, writer="x")


def test_decompression_bomb_is_refused_before_unpacking():
    packed = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(CheckpointDamagedError, match="are believed"):
        unpack_blob(packed)
    assert unpack_blob(pack_blob(bytes(1 << 20))) == bytes(1 << 20)
