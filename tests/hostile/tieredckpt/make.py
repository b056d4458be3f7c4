"""Generator of the hostile files: ``python -m tests.hostile.tieredckpt.make``.

Each file is a manifest, a shard index or a layout that could mislead a reader. Some are damaged at random. Others are
forged with knowledge of the format, and all their digests are right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash
import zstandard

from peerstore.shard_records import ShardKey
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import ShardIndex, ShardMeta, StateTable, TableTensor, build_manifest, encode_table
from tieredckpt.format.shard_layout import OBJECT_ITEM, ItemEntry, TensorEntry, build_layout, encode_layout
from tieredckpt.format.slice_boxes import Box

FILES = Path(__file__).parent / "files"
JOB = "victim"
STEP = 2
KEY = ShardKey(JOB, STEP, 1, "abc", 0, 0)
Tree = dict[str, Any]


def good_manifest() -> Tree:
    """Return a valid manifest of one shard with two tensors and an object, as plain values."""
    tensors = [
        TensorEntry("a", "float32", (64,), Box((0,), (64,)), 4),
        TensorEntry("b", "int64", (4, 8), Box((0, 0), (4, 8)), 8),
    ]
    layout = build_layout(tensors, [ItemEntry("o", OBJECT_ITEM)], {"a": ("a",), "b": ("b",), "o": ("o",)})
    table = StateTable((TableTensor("a", "float32", (64,)), TableTensor("b", "int64", (4, 8))), ("o",))
    size = layout.size_bytes([10])
    index = ShardIndex(
        KEY,
        1,
        size,
        1 << 20,
        b"\0" * 8,
        ShardMeta(layout.digest, (10,), table=table.digest),
        object_keys.shard_object_key(KEY, spread=False, compressed=False),
    )
    manifest = build_manifest(
        [index],
        {layout.digest: encode_layout(layout)},
        {table.digest: encode_table(table)},
        created_ns=1,
        writer="hostile",
    )
    return msgspec.to_builtins(manifest, builtin_types=(bytes,))


def manifest_file(inner: bytes, *, level: int = 3) -> bytes:
    packed = zstandard.ZstdCompressor(level=level).compress(inner)
    return b"TCKP" + packed + xxhash.xxh3_64_digest(packed)


def envelope(body: Any, *, form: Any = 1, kind: Any = "manifest", **more: Any) -> bytes:
    return msgspec.msgpack.encode({"format": form, "kind": kind, "body": body, **more})


def changed_manifest(change: Callable[[Tree], None]) -> bytes:
    """Apply one change to the valid manifest, and correct every digest."""
    tree = copy.deepcopy(good_manifest())
    change(tree)
    return manifest_file(envelope(tree))


def change_shard(**changes: Any) -> Callable[[Tree], None]:
    return lambda tree: tree["shards"][0].update(changes)


def change_key(**changes: Any) -> Callable[[Tree], None]:
    return lambda tree: tree["shards"][0]["key"].update(changes)


def change_meta(**changes: Any) -> Callable[[Tree], None]:
    return lambda tree: tree["shards"][0]["meta"].update(changes)


def change_layout(change: Callable[[Tree], None]) -> Callable[[Tree], None]:
    """Return a change to a manifest that edits its layout and corrects the digest."""

    def apply(tree: Tree) -> None:
        (data,) = tree["layouts"].values()
        inner = msgspec.msgpack.decode(data)
        change(inner)
        data = msgspec.msgpack.encode(inner)
        digest = xxhash.xxh3_128_hexdigest(data)
        tree["layouts"] = {digest: data}
        tree["shards"][0]["meta"]["layout"] = digest

    return apply


def change_columns(**changes: Any) -> Callable[[Tree], None]:
    return change_layout(lambda inner: inner.update(changes))


def change_numbers(*values: int) -> Callable[[Tree], None]:
    return change_columns(numbers=b"".join(value.to_bytes(8, "little", signed=True) for value in values))


def duplicate_shards(tree: Tree) -> None:
    tree["shards"] = tree["shards"] * 2


NEST = b"\x91" * 100_000 + b"\xc0"
"""Deeply nested arrays."""


def nested_manifest() -> bytes:
    fields = envelope(None)[1:]
    return manifest_file(b"\x84" + fields + msgspec.msgpack.encode("more") + NEST)


def flipped_manifest(at: float) -> bytes:
    data = bytearray(manifest_file(envelope(good_manifest())))
    data[int(at * (len(data) - 1))] ^= 0x10
    return bytes(data)


def claimed_size(size: int) -> bytes:
    """Build an almost empty zstd frame that claims to unpack to ``size`` bytes."""
    frame = b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + size.to_bytes(8, "little") + b"\x01\x00\x00"
    return b"TCKP" + frame + xxhash.xxh3_64_digest(frame)


def unsized_frame() -> bytes:
    """Build a zstd frame without an unpacked size."""
    packer = zstandard.ZstdCompressor(write_content_size=False)
    packed = packer.compress(b"\0" * (64 << 20))
    return b"TCKP" + packed + xxhash.xxh3_64_digest(packed)


def hostile_manifests() -> dict[str, Callable[[], bytes]]:
    whole = manifest_file(envelope(good_manifest()))
    cuts = {
        "empty": 0,
        "magic": 4,
        "frame": 9,
        "half": len(whole) // 2,
        "digest": len(whole) - 3,
        "one": len(whole) - 1,
    }
    regions = {"magic": 0.0, "frame": 0.02, "body": 0.5, "end": 0.97, "digest": 1.0}
    far = 1 << 62
    return {
        **{f"cut-{name}": lambda size=size: whole[:size] for name, size in cuts.items()},
        **{f"flip-{name}": lambda at=at: flipped_manifest(at) for name, at in regions.items()},
        "longer": lambda: whole + b"\0",
        "two-in-one": lambda: whole + whole,
        "other-magic": lambda: b"PK\x03\x04" + whole[4:],
        "pickle": lambda: b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
        "bomb-claimed": lambda: claimed_size(1 << 40),
        "bomb-2-gib": lambda: claimed_size(1 << 31),
        "bomb-unsized": unsized_frame,
        "bomb-real": lambda: manifest_file(b"\0" * (128 << 20), level=19),
        "nested": nested_manifest,
        "nested-body": lambda: manifest_file(b"\x83" + envelope(None)[1:-1] + NEST),
        "future": lambda: manifest_file(envelope(good_manifest(), form=2)),
        "far-future": lambda: manifest_file(envelope({"everything": "else"}, form=1 << 40)),
        "format-text": lambda: manifest_file(envelope(good_manifest(), form="1")),
        "format-huge": lambda: manifest_file(envelope(good_manifest(), form=1.5)),
        "other-kind": lambda: manifest_file(envelope(good_manifest(), kind="index")),
        "no-map": lambda: manifest_file(msgspec.msgpack.encode([1, 2, 3])),
        "array-of-4g": lambda: manifest_file(b"\x83" + envelope(None)[1:-1] + b"\xdd\xff\xff\xff\xff"),
        "map-of-4g": lambda: manifest_file(b"\xdf\xff\xff\xff\xff"),
        "text-of-4g": lambda: manifest_file(b"\x81\xdb\xff\xff\xff\xff"),
        "name-not-utf8": lambda: manifest_file(
            envelope(good_manifest()).replace(b"\xa6victim", b"\xa6vi\xff\xfe\xfdm")
        ),
        "no-shards": lambda: changed_manifest(lambda tree: tree.update(shards=[])),
        "same-part-twice": lambda: changed_manifest(duplicate_shards),
        "parts-missing": lambda: changed_manifest(lambda t: (t.update(parts=2, tables={}), change_shard(parts=2)(t))),
        "parts-negative": lambda: changed_manifest(lambda t: (t.update(parts=-1), change_shard(parts=-1)(t))),
        "parts-huge": lambda: changed_manifest(lambda t: (t.update(parts=far, tables={}), change_shard(parts=far)(t))),
        "part-beyond": lambda: changed_manifest(change_key(part=7)),
        "part-negative": lambda: changed_manifest(change_key(part=-1)),
        "other-job": lambda: changed_manifest(change_key(job="other")),
        "other-step": lambda: changed_manifest(change_key(version=3)),
        "step-negative": lambda: changed_manifest(lambda t: (t.update(step=-1), change_key(version=-1)(t))),
        "step-beyond-64-bits": lambda: changed_manifest(lambda t: t.update(step=(1 << 64) - 1)),
        "size-negative": lambda: changed_manifest(change_shard(size_bytes=-1)),
        "size-huge": lambda: changed_manifest(change_shard(size_bytes=far)),
        "size-off-by-one": lambda: changed_manifest(
            change_shard(size_bytes=good_manifest()["shards"][0]["size_bytes"] + 1)
        ),
        "chunks-zero": lambda: changed_manifest(change_shard(chunk_bytes=0)),
        "chunks-huge": lambda: changed_manifest(change_shard(chunk_bytes=far, size_bytes=far)),
        "checksums-short": lambda: changed_manifest(change_shard(checksums=b"\0" * 7)),
        "checksums-many": lambda: changed_manifest(change_shard(checksums=b"\0" * 16)),
        "frames-negative": lambda: changed_manifest(change_shard(encoding="zstd", frames=[-(1 << 40)])),
        "encoding-unknown": lambda: changed_manifest(change_shard(encoding="pickle")),
        "object-outside": lambda: changed_manifest(change_shard(object="../../outside.safetensors")),
        "object-absolute": lambda: changed_manifest(change_shard(object="/etc/passwd")),
        "object-of-another": lambda: changed_manifest(
            change_shard(
                object=object_keys.shard_object_key(ShardKey("o", 1, 1, "a", 0, 0), spread=False, compressed=False)
            )
        ),
        "items-too-few": lambda: changed_manifest(change_meta(item_sizes=[])),
        "items-too-many": lambda: changed_manifest(change_meta(item_sizes=[10, 10])),
        "item-negative": lambda: changed_manifest(change_meta(item_sizes=[-10])),
        "item-huge": lambda: changed_manifest(change_meta(item_sizes=[far])),
        "layout-absent": lambda: changed_manifest(lambda tree: tree.update(layouts={})),
        "layout-of-another": lambda: changed_manifest(
            lambda t: t.update(layouts=dict.fromkeys(t["layouts"], encode_layout(build_layout([], [], None))))
        ),
        "layout-no-msgpack": lambda: changed_manifest(lambda t: t.update(layouts=dict.fromkeys(t["layouts"], b"\xc1"))),
        "layout-nested": lambda: changed_manifest(
            change_layout(lambda inner: inner.update(more=[[[[[[]]]]]], dtype_of=b"\xff\xff"))
        ),
        "dtype-unknown-number": lambda: changed_manifest(change_columns(dtype_of=b"\x09\x09")),
        "dtype-too-wide": lambda: changed_manifest(change_columns(itemsizes=bytes([8, 8]))),
        "dtype-too-narrow": lambda: changed_manifest(change_columns(itemsizes=bytes([1, 8]))),
        "dtype-unknown": lambda: changed_manifest(change_columns(dtypes=["float33", "int64"])),
        "columns-short": lambda: changed_manifest(change_columns(ranks=b"\x01")),
        "rank-huge": lambda: changed_manifest(change_columns(ranks=b"\xff\xff")),
        "overlap": lambda: changed_manifest(change_numbers(0, 64, 0, 64, 128, 4, 8, 0, 0, 4, 8)),
        "hole": lambda: changed_manifest(change_numbers(0, 64, 0, 64, 512, 4, 8, 0, 0, 4, 8)),
        "start-negative": lambda: changed_manifest(change_numbers(-256, 64, 0, 64, 0, 4, 8, 0, 0, 4, 8)),
        "box-outside": lambda: changed_manifest(change_numbers(0, 64, 1, 64, 256, 4, 8, 0, 0, 4, 8)),
        "box-negative": lambda: changed_manifest(change_numbers(0, 64, -1, 64, 256, 4, 8, 0, 0, 4, 8)),
        "size-of-box-negative": lambda: changed_manifest(change_numbers(0, 64, 0, -64, -256, 4, 8, 0, 0, 4, 8)),
        "shape-huge": lambda: changed_manifest(change_numbers(0, far, 0, far, far, 4, 8, 0, 0, 4, 8)),
        "item-kind-unknown": lambda: changed_manifest(
            change_columns(items=[{"fqn": "o", "kind": "pickle", "tensor": None}])
        ),
        "archive-of-nothing": lambda: changed_manifest(
            change_columns(items=[{"fqn": "o", "kind": "archive", "tensor": None}])
        ),
    }


def main() -> None:
    FILES.mkdir(exist_ok=True)
    for old in FILES.iterdir():
        old.unlink()
    for name, make in hostile_manifests().items():
        (FILES / f"{name}.manifest").write_bytes(make())


if __name__ == "__main__":
    main()
