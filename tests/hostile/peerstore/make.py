"""Generator of the hostile frames: ``python -m tests.hostile.peerstore.make``.

Each file is sent to a node agent's socket: ``greeting-`` files at once, ``request-`` files after a correct greeting.
Some are damaged at random, and others are forged with knowledge of the protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

FILES = Path(__file__).parent / "files"
CLOSED = "closed"
"""The agent closes the connection without an answer."""
KEY = {"job": "victim", "version": 1, "epoch": 1, "incarnation": "a", "attempt": 0, "part": 0}


class FrameCase(NamedTuple):
    """The bytes to send and the expected answer: the error's class, or :data:`CLOSED`."""

    data: bytes
    answer: str


def encode_frame(
    value: Any, *, announced: int | None = None, magic: bytes = b"tPS", version: int = 1, payload: int = 0
) -> bytes:
    body = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    size = len(body) if announced is None else announced
    return struct.pack(">3sBIQ", magic, version, size, payload) + body


def encode_request(op: str, body: Any) -> bytes:
    return encode_frame([op, body])


def nested_array(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def hostile_frames() -> dict[str, FrameCase]:
    return {**dict(_greeting_cases()), **dict(_frame_cases()), **dict(_body_cases())}


def _greeting_cases() -> Iterator[tuple[str, FrameCase]]:
    refused = "refused"
    yield "greeting-empty-frame", FrameCase(encode_frame(b""), refused)
    yield "greeting-http", FrameCase(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", refused)
    yield "greeting-random", FrameCase(bytes(range(0, 256, 7)), refused)
    yield "greeting-4-gib", FrameCase(encode_frame(b"x", announced=0xFFFFFFFF), refused)
    yield "greeting-above-its-limit", FrameCase(encode_frame(b"x" * 5000), refused)
    yield "greeting-of-the-future", FrameCase(encode_frame({"protocol": 99, "job": ""}), refused)
    yield "greeting-of-the-first-release", FrameCase(encode_frame({"protocol": 1, "job": ""}), refused)
    yield "greeting-of-the-far-future", FrameCase(encode_frame({"protocol": 1 << 63, "job": ""}), refused)
    yield "greeting-protocol-as-text", FrameCase(encode_frame({"protocol": "1", "job": ""}), refused)
    yield "greeting-without-protocol", FrameCase(encode_frame({"job": ""}), refused)
    yield "greeting-job-with-slash", FrameCase(encode_frame({"protocol": 3, "job": "../../etc"}), refused)
    yield "greeting-job-with-nul", FrameCase(encode_frame({"protocol": 3, "job": "a\0b"}), refused)
    yield "greeting-job-endless", FrameCase(encode_frame({"protocol": 3, "job": "x" * 4000}), refused)
    yield "greeting-nested", FrameCase(encode_frame(nested_array(4000)), refused)
    yield "greeting-cut-length", FrameCase(encode_frame(b"")[:2], CLOSED)
    yield "greeting-of-another-framing", FrameCase(encode_frame(b"", version=2), refused)
    yield "greeting-with-payload", FrameCase(encode_frame({"protocol": 3, "job": ""}, payload=1), refused)
    yield "greeting-cut-body", FrameCase(encode_frame({"protocol": 3, "job": ""})[:-3], CLOSED)


def _frame_cases() -> Iterator[tuple[str, FrameCase]]:
    yield "request-4-gib", FrameCase(encode_frame(b"x", announced=0xFFFFFFFF), "ProtocolError")
    yield "request-one-byte-too-long", FrameCase(encode_frame(b"x", announced=(64 << 20) + 1), "ProtocolError")
    yield "request-largest-announced", FrameCase(encode_frame(b"x", announced=64 << 20), CLOSED)
    yield "request-cut", FrameCase(encode_request("status", {})[:-1], CLOSED)
    yield "request-empty", FrameCase(encode_frame(b""), "ProtocolError")
    yield "request-garbage", FrameCase(encode_frame(b"\xc1" * 100), "ProtocolError")
    yield "request-nil", FrameCase(encode_frame(None), "ProtocolError")
    yield "request-map", FrameCase(encode_frame({"op": "status", "body": {}}), "ProtocolError")
    yield "request-without-body", FrameCase(encode_frame(["status"]), "ProtocolError")
    yield "request-three-fields", FrameCase(encode_frame(["status", {}, "more"]), "ProtocolError")
    yield "request-payload", FrameCase(encode_frame(["status", {}], payload=1), "ProtocolError")
    yield "request-payload-16-eib", FrameCase(encode_frame(["status", {}], payload=(1 << 64) - 1), "ProtocolError")
    yield "request-op-number", FrameCase(encode_frame([7, {}]), "ProtocolError")
    yield "request-array-of-4g", FrameCase(encode_frame(b"\xdd\xff\xff\xff\xff"), "ProtocolError")
    yield "request-text-of-4g", FrameCase(encode_frame(b"\x92\xdb\xff\xff\xff\xff"), "ProtocolError")
    yield "request-body-of-4g", FrameCase(encode_frame(b"\x92\xa6status\xc6\xff\xff\xff\xff"), "ProtocolError")
    yield "request-nested", FrameCase(encode_frame(b"\x92\xa6status" + nested_array(100_000)), "ProtocolError")
    yield "request-trailing", FrameCase(encode_frame(msgspec.msgpack.encode(["status", {}]) + b"\0"), "ProtocolError")
    yield "request-op-unknown", FrameCase(encode_request("no such thing", {}), "RequestError")
    yield "request-op-empty", FrameCase(encode_request("", {}), "RequestError")
    yield "request-op-private", FrameCase(encode_request("__class__", {}), "RequestError")
    yield "request-op-long", FrameCase(encode_request("x" * 100_000, {}), "RequestError")


def _body_cases() -> Iterator[tuple[str, FrameCase]]:
    lease = {"key": KEY, "size_bytes": 10, "parts": 1}

    def key(**changes: Any) -> dict[str, Any]:
        return {**lease, "key": {**KEY, **changes}}

    wrong = {
        "lease-nil": ("lease", None),
        "lease-list": ("lease", [1, 2, 3]),
        "lease-nothing": ("lease", {}),
        "lease-no-key": ("lease", {"size_bytes": 1, "parts": 1}),
        "lease-size-text": ("lease", {**lease, "size_bytes": "10"}),
        "lease-size-fraction": ("lease", {**lease, "size_bytes": 1.5}),
        "lease-job-number": ("lease", key(job=7)),
        "lease-job-bytes": ("lease", key(job=b"victim")),
        "lease-epoch-infinite": ("lease", key(epoch=float("inf"))),
        "inventory-list": ("list_shards", {"job": ["victim"]}),
        "verify-three-chunks": ("verify", {"key": KEY, "chunks": [1, 2, 3]}),
        "forget-map": ("delete_versions", {"job": "victim", "versions": {}}),
        "forget-short-group": ("delete_versions", {"job": "victim", "versions": [[1, 2]]}),
        "mark-group-text": ("mark_committed", {"job": "victim", "version_id": "newest"}),
        "left-out-part-negative": ("abort_part", {"job": "victim", "version_id": [1, 1, 0, "a"], "part": -1}),
        "left-out-group-short": ("abort_part", {"job": "victim", "version_id": [1, 1], "part": 0}),
        "blob-data-text": ("put_blob", {"job": "victim", "name": "a", "data": [1]}),
    }
    for name, (op, body) in wrong.items():
        yield f"request-{name}", FrameCase(encode_request(op, body), "ProtocolError")
    yield (
        "request-body-nested",
        FrameCase(encode_frame(b"\x92\xablist_shards\x81\xa3job" + nested_array(500)), "ProtocolError"),
    )
    refused = {
        "lease-size-huge": ("lease", {**key(version=2), "size_bytes": (1 << 64) - 1}, "ArenaFullError"),
        "lease-size-negative": ("lease", {**lease, "size_bytes": -1}, "RequestError"),
        "lease-parts-huge": ("lease", {**lease, "parts": 1 << 63}, "RequestError"),
        "lease-part-outside": ("lease", key(part=1), "RequestError"),
        "lease-version-huge": ("lease", key(version=(1 << 64) - 1), "ProtocolError"),
        "lease-epoch-huge": ("lease", key(epoch=1 << 62), "ProtocolError"),
        "lease-job-path": ("lease", key(job="../../tmp/x"), "InvalidNameError"),
        "lease-job-dots": ("lease", key(job=".."), "InvalidNameError"),
        "lease-incarnation-path": ("lease", key(incarnation="a/b"), "InvalidNameError"),
        "claim-epoch-huge": ("claim", {"job": "victim", "incarnation": "z", "at_least": 1 << 62}, "RequestError"),
        "claim-epoch-negative": ("claim", {"job": "victim", "incarnation": "z", "at_least": -5}, "RequestError"),
        "seal-unknown": ("seal", {"lease_id": "x", "size_bytes": 1 << 63}, "LeaseLostError"),
        "seal-path": ("seal", {"lease_id": "../../x", "size_bytes": 0}, "LeaseLostError"),
        "grow-unknown": ("grow", {"lease_id": "x", "size_bytes": 1 << 63}, "LeaseLostError"),
        "relabel-unknown": ("relabel", {"lease_id": "x", "key": KEY}, "LeaseLostError"),
        "reserve-negative": ("reserve", {"job": "victim", "part": 0, "size_bytes": -1}, "RequestError"),
        "reserve-part-huge": ("reserve", {"job": "victim", "part": 1 << 40, "size_bytes": 0}, "RequestError"),
        "reserve-job-empty": ("reserve", {"job": "", "part": 0, "size_bytes": 1}, "InvalidNameError"),
        "verify-absent": ("verify", {"key": {**KEY, "version": 9}, "chunks": [0, 1 << 62]}, "ShardNotFoundError"),
        "verify-chunks": ("verify", {"key": KEY, "chunks": [-1, 1 << 62]}, "RequestError"),
        "pin-absent": ("pin", {"key": {**KEY, "job": "nobody"}}, "ShardNotFoundError"),
        "blob-path": ("get_blob", {"job": "victim", "name": "../../../etc/passwd"}, "InvalidNameError"),
        "blob-nul": ("put_blob", {"job": "victim", "name": "a\0b", "data": b""}, "InvalidNameError"),
        "blob-of-nobody": ("get_blob", {"job": "nobody", "name": "a"}, "ShardNotFoundError"),
        "mark-of-no-job": ("mark_committed", {"job": "", "version_id": [1, 1, 0, "a"]}, "InvalidNameError"),
        "left-out-of-no-job": ("abort_part", {"job": "", "version_id": [1, 1, 0, "a"], "part": 0}, "InvalidNameError"),
    }
    for name, (op, body, error) in refused.items():
        yield f"request-{name}", FrameCase(encode_request(op, body), error)


def main() -> None:
    FILES.mkdir(exist_ok=True)
    for old in FILES.iterdir():
        old.unlink()
    for name, case in hostile_frames().items():
        (FILES / f"{name}.frame").write_bytes(case.data)


if __name__ == "__main__":
    main()
