"""Generator of the hostile batches: ``python -m tests.hostile.elastic.make``.

Each file has the name of batch 7, but an invalid or wrong content. Some are damaged at random. Others are forged with
knowledge of the format, and all their digests are right.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from elastic.batch_cache.batch_format import BATCH_MAGIC, BATCH_PREFIX_BYTES, MAX_BATCH_HEADER_BYTES, padding
from elastic.batch_cache.cache import fingerprint_digest

FILES = Path(__file__).parent / "files"
FINGERPRINT = "victim"
INDEX = 7
PAYLOAD = bytes(range(48)) + bytes(16) + bytes(range(8))
"""Six int64 and eight uint8."""


def batch_header(**changes: Any) -> dict[str, Any]:
    good = {
        "fingerprint": fingerprint_digest(FINGERPRINT),
        "index": INDEX,
        "tree": ["d", ["a", "b"], [["t", 0], ["t", 1]]],
        "tensors": [["int64", [6], 0], ["uint8", [2, 4], 64]],
        "checksum": xxhash.xxh3_64_digest(PAYLOAD),
    }
    return {**good, **changes}


def batch_file(encoded: bytes, payload: bytes = PAYLOAD, *, gap: bytes = b"\0") -> bytes:
    """Build a batch file around a header, with the right digest."""
    prefix = BATCH_MAGIC + len(encoded).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(encoded).to_bytes(8, "little")
    return prefix + encoded + gap * padding(BATCH_PREFIX_BYTES + len(encoded)) + payload


def changed_batch(payload: bytes = PAYLOAD, **changes: Any) -> bytes:
    return batch_file(msgspec.msgpack.encode(batch_header(**changes)), payload)


def with_tensors(*changed: list[Any]) -> bytes:
    return changed_batch(tensors=list(changed))


def nested_tree(depth: int) -> bytes:
    """Build deeply nested lists as a tree."""
    return b"\x92\xa1l\x91" * depth + b"\x92\xa1p\xc0"


def with_tree(raw: bytes) -> bytes:
    tree = msgspec.Raw(raw)
    return batch_file(
        msgspec.msgpack.encode(batch_header(tree=tree, tensors=[], checksum=xxhash.xxh3_64_digest(b""))), b""
    )


def hostile_batches() -> dict[str, bytes]:
    good = changed_batch()
    first = ["int64", [6], 0]
    return {
        "empty": b"",
        "only-magic": BATCH_MAGIC,
        "cut-prefix": good[: BATCH_PREFIX_BYTES - 1],
        "cut-header": good[: BATCH_PREFIX_BYTES + 9],
        "cut-payload": good[:-1],
        "header-only": good[: -len(PAYLOAD)],
        "longer": good + b"\0",
        "two-in-one": good + good,
        "zeros": bytes(len(good)),
        "other-magic": b"TCBATCH2" + good[8:],
        "pickle": pickle.dumps({"a": [1, 2, 3]}),
        "header-of-4-gib": BATCH_MAGIC + b"\xff" * 4 + good[12:],
        "header-above-its-limit": BATCH_MAGIC + (MAX_BATCH_HEADER_BYTES + 1).to_bytes(4, "little") + good[12:],
        "header-digest": good[:12] + bytes([good[12] ^ 1]) + good[13:],
        "gap-filled": batch_file(msgspec.msgpack.encode(batch_header()), gap=b"x"),
        "payload-flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "padding-flipped": good[:-9] + b"\1" + good[-8:],
        "no-msgpack": batch_file(b"\xc1"),
        "nil": batch_file(b"\xc0"),
        "list": batch_file(msgspec.msgpack.encode(list(batch_header().values()))),
        "trailing": batch_file(msgspec.msgpack.encode(batch_header()) + b"\0"),
        "map-of-4g": batch_file(b"\xdf\xff\xff\xff\xff"),
        "parts-of-4g": batch_file(msgspec.msgpack.encode(batch_header(tensors=msgspec.Raw(b"\xdd\xff\xff\xff\xff")))),
        "text-of-4g": batch_file(
            msgspec.msgpack.encode(batch_header(fingerprint=msgspec.Raw(b"\xdb\xff\xff\xff\xff")))
        ),
        "unknown-field": changed_batch(code="import os"),
        "no-checksum": batch_file(msgspec.msgpack.encode({k: v for k, v in batch_header().items() if k != "checksum"})),
        "checksum-short": changed_batch(checksum=b"1234"),
        "checksum-wrong": changed_batch(checksum=bytes(8)),
        "other-fingerprint": changed_batch(fingerprint=fingerprint_digest("another")),
        "other-index": changed_batch(index=INDEX + 1),
        "index-negative": changed_batch(index=-INDEX),
        "index-huge": changed_batch(index=(1 << 64) - 1),
        "dtype-unknown": with_tensors(first, ["float1", [8], 64]),
        "dtype-quantised": with_tensors(first, ["quint8", [2, 4], 64]),
        "dtype-of-python": with_tensors(first, ["__class__", [2, 4], 64]),
        "dtype-wider": with_tensors(first, ["int16", [2, 4], 64]),
        "shape-huge": with_tensors(first, ["uint8", [1 << 61, 1 << 61], 64]),
        "shape-beyond-64-bits": with_tensors(first, ["uint8", [(1 << 64) - 1], 64]),
        "shape-negative": with_tensors(first, ["uint8", [-2, -4], 64]),
        "shape-fraction": with_tensors(first, ["uint8", [2.5, 4], 64]),
        "shape-of-65": with_tensors(first, ["uint8", [8] + [1] * 64, 64]),
        "shape-off-by-one": with_tensors(first, ["uint8", [3, 3], 64]),
        "start-negative": with_tensors(first, ["uint8", [2, 4], -64]),
        "start-beyond": with_tensors(first, ["uint8", [2, 4], 1 << 40]),
        "start-between": with_tensors(first, ["uint8", [2, 4], 60]),
        "overlap": with_tensors(first, ["uint8", [2, 4], 0]),
        "no-parts": with_tensors(),
        "tree-unknown-kind": changed_batch(tree=["x", 1]),
        "tree-nothing": changed_batch(tree=None),
        "tree-tensor-negative": changed_batch(tree=["l", [["t", 0], ["t", -1]]]),
        "tree-tensor-beyond": changed_batch(tree=["l", [["t", 0], ["t", 2]]]),
        "tree-tensor-twice": changed_batch(tree=["l", [["t", 0], ["t", 0]]]),
        "tree-tensor-missing": changed_batch(tree=["t", 0]),
        "tree-keys-short": changed_batch(tree=["d", ["a"], [["t", 0], ["t", 1]]]),
        "tree-keys-twice": changed_batch(tree=["d", ["a", "a"], [["t", 0], ["t", 1]]]),
        "tree-keys-strange": changed_batch(tree=["d", ["a", 1.5], [["t", 0], ["t", 1]]]),
        "tree-text-not-utf8": with_tree(b"\x92\xa1p\xa1\xff"),
        "tree-nested": with_tree(nested_tree(100)),
        "tree-nested-for-ever": with_tree(nested_tree(10_000)),
    }


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    for old in FILES.iterdir():
        old.unlink()
    for name, data in hostile_batches().items():
        (FILES / f"{name}.batch").write_bytes(data)
