"""Generator of the messages of hostile peers: ``python -m tests.hostile.peerstore.make_peers``.

Each file is sent to an agent's port for peers. ``stranger-`` files are sent at once, ``challenged-`` files in place of
the proof, and ``member-`` files after authentication.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from peerstore.transport.authentication import Challenge, Hello, Proof, hmac_proof
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION

FILES = Path(__file__).parent / "peers"
SECRET = b"the secret of the victim"
NONCE = bytes(range(32))
CLOSED = "closed"
"""The agent closes the connection without an answer."""
REFUSED = "refused"
"""The agent sends the reason and closes the connection."""
HELLO = {"protocol": 3, "job": "victim", "node": "n1", "nonce": NONCE, "version": "1"}


class MessageCase(NamedTuple):
    data: bytes
    answer: str
    error: str
    """Class of the error in the agent."""


def encode_message(
    header: Any,
    payload: bytes = b"",
    *,
    announced: int | None = None,
    payload_announced: int | None = None,
    magic: bytes = FRAME_MAGIC,
    version: int = FRAME_VERSION,
) -> bytes:
    body = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    sizes = (
        len(body) if announced is None else announced,
        len(payload) if payload_announced is None else payload_announced,
    )
    return FRAME_PREFIX.pack(magic, version, *sizes) + body + payload


def hello(**changes: Any) -> dict[str, Any]:
    return {**HELLO, **changes}


def nested_array(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def hostile_messages() -> dict[str, MessageCase]:
    return {**dict(_stranger_cases()), **dict(_challenged_cases()), **dict(_member_cases())}


def _stranger_cases() -> Iterator[tuple[str, MessageCase]]:
    def protocol_error(data: bytes) -> MessageCase:
        return MessageCase(data, CLOSED, "ProtocolError")

    yield "stranger-http", protocol_error(b"GET /metrics HTTP/1.1\r\nHost: node7:7070\r\n\r\n")
    yield "stranger-tls", protocol_error(bytes.fromhex("1603010200010001fc0303") + bytes(range(200)))
    yield "stranger-ssh", protocol_error(b"SSH-2.0-OpenSSH_9.6\r\n")
    yield "stranger-random", protocol_error(bytes(range(0, 256, 7)))
    yield "stranger-zeros", protocol_error(bytes(4096))
    yield "stranger-magic-wrong", protocol_error(encode_message(HELLO, magic=b"TPS"))
    yield "stranger-version-0", protocol_error(encode_message(HELLO, version=0))
    yield "stranger-version-2", protocol_error(encode_message(HELLO, version=2))
    yield "stranger-version-255", protocol_error(encode_message(HELLO, version=255))
    yield "stranger-header-4-gib", protocol_error(encode_message(HELLO, announced=0xFFFFFFFF))
    yield "stranger-header-above-its-limit", protocol_error(encode_message(hello(version="x" * 4096)))
    yield "stranger-payload-1-byte", protocol_error(encode_message(HELLO, b"x"))
    yield "stranger-payload-4-gib", protocol_error(encode_message(HELLO, payload_announced=1 << 32))
    yield "stranger-payload-16-eib", protocol_error(encode_message(HELLO, payload_announced=(1 << 64) - 1))
    yield "stranger-header-empty", protocol_error(encode_message(b""))
    yield "stranger-header-garbage", protocol_error(encode_message(b"\xc1" * 100))
    yield "stranger-header-nested", protocol_error(encode_message(nested_array(4000)))
    yield "stranger-header-nested-in-a-field", protocol_error(encode_message(b"\x81\xa3job" + nested_array(4000)))
    yield "stranger-map-of-4g", protocol_error(encode_message(b"\xdf\xff\xff\xff\xff"))
    yield "stranger-text-of-4g", protocol_error(encode_message(b"\x81\xa3job\xdb\xff\xff\xff\xff"))
    yield "stranger-nonce-of-4g", protocol_error(encode_message(b"\x81\xa5nonce\xc6\xff\xff\xff\xff"))
    yield "stranger-list", protocol_error(encode_message([1, 2, 3]))
    yield "stranger-nil", protocol_error(encode_message(None))
    yield (
        "stranger-pickle",
        protocol_error(encode_message(b"\x80\x04\x95\x1d\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93.")),
    )
    yield "stranger-job-missing", protocol_error(encode_message({"protocol": 3, "node": "n1", "nonce": NONCE}))
    yield "stranger-job-number", protocol_error(encode_message(hello(job=7)))
    yield "stranger-job-not-utf8", protocol_error(encode_message(b"\x81\xa3job\xa2\xff\xfe"))
    yield "stranger-nonce-as-text", protocol_error(encode_message(hello(nonce="n" * 31)))
    yield "stranger-protocol-as-text", protocol_error(encode_message(hello(protocol="1")))
    yield "stranger-protocol-beyond-64-bits", protocol_error(encode_message(b"\x81\xa8protocol\xcf" + b"\xff" * 8))
    yield "stranger-proof-first", protocol_error(encode_message({"proof": bytes(32)}))
    yield "stranger-trailing", protocol_error(encode_message(msgspec.msgpack.encode(HELLO) + b"\0"))
    for name, data in {
        "stranger-nothing": b"",
        "stranger-half-a-magic": FRAME_MAGIC[:2],
        "stranger-cut-prefix": encode_message(HELLO)[: FRAME_PREFIX.size - 1],
        "stranger-cut-header": encode_message(HELLO)[:-1],
        "stranger-only-a-prefix": encode_message(b"", announced=4096),
    }.items():
        yield name, MessageCase(data, CLOSED, "PeerUnreachableError")
    for name, wrong, error in (
        ("protocol-1", hello(protocol=1), "ProtocolError"),
        ("protocol-2", hello(protocol=2), "ProtocolError"),
        ("protocol-negative", hello(protocol=-1), "ProtocolError"),
        ("protocol-huge", hello(protocol=(1 << 63) - 1), "ProtocolError"),
        ("job-path", hello(job="../../etc/passwd"), "InvalidNameError"),
        ("job-absolute", hello(job="/dev/shm"), "InvalidNameError"),
        ("job-dots", hello(job=".."), "InvalidNameError"),
        ("job-with-nul", hello(job="victim\0"), "InvalidNameError"),
        ("job-empty", hello(job=""), "InvalidNameError"),
        ("job-endless", hello(job="x" * 3000), "InvalidNameError"),
        ("job-with-newline", hello(job="victim\n"), "InvalidNameError"),
        ("node-path", hello(node="../n1"), "ProtocolError"),
        ("node-empty", hello(node=""), "ProtocolError"),
        ("node-with-nul", hello(node="n1\0"), "ProtocolError"),
        ("nonce-empty", hello(nonce=b""), "ProtocolError"),
        ("nonce-short", hello(nonce=NONCE[:-1]), "ProtocolError"),
        ("nonce-long", hello(nonce=NONCE * 50), "ProtocolError"),
    ):
        yield f"stranger-{name}", MessageCase(encode_message(wrong), REFUSED, error)


def _challenged_cases() -> Iterator[tuple[str, MessageCase]]:
    recorded = hmac_proof(
        SECRET,
        "client",
        msgspec.convert(HELLO, Hello),
        Challenge(1, "n2", bytes(reversed(NONCE)), b"", "2"),
    )
    wrong = {
        "nothing": b"",
        "one-byte": b"\0",
        "zeros": bytes(32),
        "recorded": recorded,
        "hash-of-the-secret": bytes.fromhex("5e" * 32),
        "too-long": bytes(33),
        "the-nonce": NONCE,
    }
    for name, guess in wrong.items():
        yield f"challenged-proof-{name}", MessageCase(encode_message(Proof(guess)), REFUSED, "PeerRefusedError")
    yield "challenged-proof-as-text", MessageCase(encode_message({"proof": "x" * 32}), CLOSED, "ProtocolError")
    yield "challenged-no-proof", MessageCase(encode_message({}), CLOSED, "ProtocolError")
    yield "challenged-hello-again", MessageCase(encode_message(HELLO), CLOSED, "ProtocolError")
    yield (
        "challenged-nested",
        MessageCase(encode_message(b"\x81\xa5proof" + nested_array(4000)), CLOSED, "ProtocolError"),
    )
    yield (
        "challenged-proof-with-payload",
        MessageCase(encode_message(Proof(recorded), b"x" * 10), CLOSED, "ProtocolError"),
    )
    yield "challenged-proof-of-4-gib", MessageCase(encode_message(b"", announced=0xFFFFFFFF), CLOSED, "ProtocolError")
    yield "challenged-http", MessageCase(b"GET / HTTP/1.1\r\nHost: node7\r\n\r\n", CLOSED, "ProtocolError")
    yield "challenged-cut", MessageCase(encode_message(Proof(recorded))[:-1], CLOSED, "PeerUnreachableError")
    yield "challenged-goes", MessageCase(b"", CLOSED, "PeerUnreachableError")


def _member_cases() -> Iterator[tuple[str, MessageCase]]:
    wrong = {
        "http": b"GET / HTTP/1.1\r\nHost: node7\r\n\r\n",
        "header-4-gib": encode_message(b"", announced=0xFFFFFFFF),
        "header-one-byte-too-long": encode_message(b"x", announced=(64 << 20) + 1),
        "payload-one-byte-too-long": encode_message(b"x", payload_announced=(1 << 30) + 1),
        "payload-16-eib": encode_message(b"x", payload_announced=(1 << 64) - 1),
        "version-2": encode_message(b"x", version=2),
        "out-of-step": encode_message(b"fine", b"12345") + b"6" + encode_message(b"shifted by one"),
    }
    for name, data in wrong.items():
        yield f"member-{name}", MessageCase(data, CLOSED, "ProtocolError")
    cut = {
        "largest-header-announced": encode_message(b"x", announced=64 << 20),
        "largest-payload-announced": encode_message(b"x", b"y" * 1000, payload_announced=1 << 30),
        "payload-cut": encode_message(b"x", b"y" * 1000, payload_announced=1001),
        "header-cut": encode_message(b"x" * 100)[:-1],
    }
    for name, data in cut.items():
        yield f"member-{name}", MessageCase(data, CLOSED, "PeerUnreachableError")


def main() -> None:
    FILES.mkdir(exist_ok=True)
    for old in FILES.iterdir():
        old.unlink()
    for name, case in hostile_messages().items():
        (FILES / f"{name}.bytes").write_bytes(case.data)


if __name__ == "__main__":
    main()
