"""Writes the hostile batches: ``python -m tests.hostile.elastic.make``.

Each is a file that lies where batch 7 should and is no batch, or a wrong one: damaged by chance, or made by somebody
who knows the format, with every digest right.
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


def header(**changes: Any) -> dict[str, Any]:
    good = {
        "fingerprint": fingerprint_digest(FINGERPRINT),
        "index": INDEX,
        "tree": ["d", ["a", "b"], [["t", 0], ["t", 1]]],
        "tensors": [["int64", [6], 0], ["uint8", [2, 4], 64]],
        "checksum": xxhash.xxh3_64_digest(PAYLOAD),
    }
    return {**good, **changes}


def sealed(encoded: bytes, payload: bytes = PAYLOAD, *, gap: bytes = b"\0") -> bytes:
    """A file around any header, its digest right."""
    prefix = BATCH_MAGIC + len(encoded).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(encoded).to_bytes(8, "little")
    return prefix + encoded + gap * padding(BATCH_PREFIX_BYTES + len(encoded)) + payload


def batch(payload: bytes = PAYLOAD, **changes: Any) -> bytes:
    return sealed(msgspec.msgpack.encode(header(**changes)), payload)


def parts(*changed: list[Any]) -> bytes:
    return batch(tensors=list(changed))


def nested(depth: int) -> bytes:
    """A list in a list in a list, as a tree."""
    return b"\x92\xa1l\x91" * depth + b"\x92\xa1p\xc0"


def with_tree(raw: bytes) -> bytes:
    tree = msgspec.Raw(raw)
    return sealed(msgspec.msgpack.encode(header(tree=tree, tensors=[], checksum=xxhash.xxh3_64_digest(b""))), b"")


def cases() -> dict[str, bytes]:
    good = batch()
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
        "gap-filled": sealed(msgspec.msgpack.encode(header()), gap=b"x"),
        "payload-flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "padding-flipped": good[:-9] + b"\1" + good[-8:],
        "no-msgpack": sealed(b"\xc1"),
        "nil": sealed(b"\xc0"),
        "list": sealed(msgspec.msgpack.encode(list(header().values()))),
        "trailing": sealed(msgspec.msgpack.encode(header()) + b"\0"),
        "map-of-4g": sealed(b"\xdf\xff\xff\xff\xff"),
        "parts-of-4g": sealed(msgspec.msgpack.encode(header(tensors=msgspec.Raw(b"\xdd\xff\xff\xff\xff")))),
        "text-of-4g": sealed(msgspec.msgpack.encode(header(fingerprint=msgspec.Raw(b"\xdb\xff\xff\xff\xff")))),
        "unknown-field": batch(code="import os"),
        "no-checksum": sealed(msgspec.msgpack.encode({k: v for k, v in header().items() if k != "checksum"})),
        "checksum-short": batch(checksum=b"1234"),
        "checksum-wrong": batch(checksum=bytes(8)),
        "other-fingerprint": batch(fingerprint=fingerprint_digest("another")),
        "other-index": batch(index=INDEX + 1),
        "index-negative": batch(index=-INDEX),
        "index-huge": batch(index=(1 << 64) - 1),
        "dtype-unknown": parts(first, ["float1", [8], 64]),
        "dtype-quantised": parts(first, ["quint8", [2, 4], 64]),
        "dtype-of-python": parts(first, ["__class__", [2, 4], 64]),
        "dtype-wider": parts(first, ["int16", [2, 4], 64]),
        "shape-huge": parts(first, ["uint8", [1 << 61, 1 << 61], 64]),
        "shape-beyond-64-bits": parts(first, ["uint8", [(1 << 64) - 1], 64]),
        "shape-negative": parts(first, ["uint8", [-2, -4], 64]),
        "shape-fraction": parts(first, ["uint8", [2.5, 4], 64]),
        "shape-of-65": parts(first, ["uint8", [8] + [1] * 64, 64]),
        "shape-off-by-one": parts(first, ["uint8", [3, 3], 64]),
        "start-negative": parts(first, ["uint8", [2, 4], -64]),
        "start-beyond": parts(first, ["uint8", [2, 4], 1 << 40]),
        "start-between": parts(first, ["uint8", [2, 4], 60]),
        "overlap": parts(first, ["uint8", [2, 4], 0]),
        "no-parts": parts(),
        "tree-unknown-kind": batch(tree=["x", 1]),
        "tree-nothing": batch(tree=None),
        "tree-tensor-negative": batch(tree=["l", [["t", 0], ["t", -1]]]),
        "tree-tensor-beyond": batch(tree=["l", [["t", 0], ["t", 2]]]),
        "tree-tensor-twice": batch(tree=["l", [["t", 0], ["t", 0]]]),
        "tree-tensor-missing": batch(tree=["t", 0]),
        "tree-keys-short": batch(tree=["d", ["a"], [["t", 0], ["t", 1]]]),
        "tree-keys-twice": batch(tree=["d", ["a", "a"], [["t", 0], ["t", 1]]]),
        "tree-keys-strange": batch(tree=["d", ["a", 1.5], [["t", 0], ["t", 1]]]),
        "tree-text-not-utf8": with_tree(b"\x92\xa1p\xa1\xff"),
        "tree-nested": with_tree(nested(100)),
        "tree-nested-for-ever": with_tree(nested(10_000)),
    }


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    for old in FILES.iterdir():
        old.unlink()
    for name, data in cases().items():
        (FILES / f"{name}.batch").write_bytes(data)
