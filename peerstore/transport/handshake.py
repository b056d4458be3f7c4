"""Two agents prove to each other that they know a job's secret, without saying it.

::

    client                                server
      Hello(job, node, nonce)      ──>
                                   <──    Challenge(node, nonce, proof)
      Proof                        ──>
                                   <──    Welcome, or why not

A proof is HMAC-SHA256 of everything both have said and of who proves it, so that none of it can be changed, used again
on another connection, or sent back to where it came from. A job that the server does not know looks like a job whose
secret the client does not know.

This says who is there when a connection begins. It does not hide or seal what is sent afterwards: where others can
change what is on the network, use TLS as well.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from peerstore.cluster.nodes import NodeId, node_id
from peerstore.errors import InvalidNameError, PeerRefusedError, PeerUnreachableError, ProtocolError, RequestError
from peerstore.frames import decode
from peerstore.names import JobName, job_name
from peerstore.transport.seam import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Channel
from peerstore.transport.secret import MIN_BYTES

PROTOCOL = 1
MAX_GREETING_BYTES = 4 << 10
WITHIN_S = 10.0
NONCE_BYTES = 32

_PURPOSE = b"peerstore: who is there"
_MAX_TEXT = 200
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class PeerIdentity(NamedTuple):
    """Who has proven to be on the other side."""

    job: JobName
    node: NodeId
    protocol: int
    version: str


class Hello(msgspec.Struct, frozen=True):
    protocol: int
    job: str
    node: str
    nonce: bytes
    version: str = ""


class Challenge(msgspec.Struct, frozen=True):
    protocol: int
    node: str = ""
    nonce: bytes = b""
    proof: bytes = b""
    version: str = ""
    refused: str = ""


class Proof(msgspec.Struct, frozen=True):
    proof: bytes


class Welcome(msgspec.Struct, frozen=True):
    refused: str = ""


def proof(secret: bytes, role: str, hello: Hello, challenge: Challenge) -> bytes:
    """What only somebody can say who knows ``secret``, in this role, in this conversation."""
    if len(secret) < MIN_BYTES:
        raise RequestError(f"the secret of job {hello.job} has {len(secret)} bytes, at least {MIN_BYTES} are needed")
    said = (
        _PURPOSE,
        role.encode(),
        struct.pack(">QQ", hello.protocol, challenge.protocol),
        *(text.encode() for text in (hello.job, hello.node, hello.version, challenge.node, challenge.version)),
        hello.nonce,
        challenge.nonce,
    )
    return hmac.digest(secret, b"".join(struct.pack(">I", len(field)) + field for field in said), "sha256")


def greet(
    channel: Channel,
    *,
    job: str,
    me: NodeId,
    secret: bytes,
    expect: NodeId | None = None,
    version: str = "",
    within_s: float = WITHIN_S,
    clock: Callable[[], float] = time.monotonic,
    nonce: Callable[[int], bytes] = secrets.token_bytes,
) -> PeerIdentity:
    """The client's half. ``expect`` is the node that should answer: addresses change hands.

    After an error the channel is of no use any more.
    """
    talk = _Talk(channel, clock, within_s)
    hello = Hello(PROTOCOL, job_name(job), node_id(me), nonce(NONCE_BYTES), version)
    talk.say(hello)
    challenge = talk.hear(Challenge)
    if challenge.protocol != PROTOCOL:
        raise ProtocolError(f"{channel.peer} speaks protocol {challenge.protocol}, this is {PROTOCOL}")
    if challenge.refused:
        raise PeerRefusedError(f"{channel.peer} refused: {challenge.refused[:_MAX_TEXT]!r}")
    _check_nonce(channel, challenge.nonce)
    if not hmac.compare_digest(challenge.proof, proof(secret, "server", hello, challenge)):
        raise PeerRefusedError(
            f"{channel.peer} could not prove that it belongs to job {job}: it does not know the job or its secret"
        )
    found = _named(channel, challenge.node)
    if expect is not None and found != expect:
        raise PeerRefusedError(f"{channel.peer} is node {found}, not {expect}")
    talk.say(Proof(proof(secret, "client", hello, challenge)))
    welcome = talk.hear(Welcome)
    if welcome.refused:
        raise PeerRefusedError(f"{channel.peer} refused: {welcome.refused[:_MAX_TEXT]!r}")
    talk.raise_limits()
    return PeerIdentity(JobName(hello.job), found, challenge.protocol, challenge.version[:_MAX_TEXT])


def admit(
    channel: Channel,
    *,
    me: NodeId,
    secret_of: Callable[[str], bytes | None],
    version: str = "",
    clock: Callable[[], float] = time.monotonic,
    nonce: Callable[[int], bytes] = secrets.token_bytes,
) -> PeerIdentity:
    """The server's half. ``secret_of`` is asked for the job's secret; ``None`` is a job that is not known here."""
    talk = _Talk(channel, clock)
    hello = talk.hear(Hello)
    try:
        if hello.protocol != PROTOCOL:
            raise ProtocolError(f"protocol {hello.protocol} is not spoken here, this is {PROTOCOL}")
        _check_nonce(channel, hello.nonce)
        job, node = job_name(hello.job), _named(channel, hello.node)
    except RequestError as error:
        talk.say(Challenge(PROTOCOL, refused=str(error)[:_MAX_TEXT]))
        raise
    known = secret_of(job)
    secret = nonce(NONCE_BYTES) if known is None else known
    ours = Challenge(PROTOCOL, node_id(me), nonce(NONCE_BYTES), version=version)
    talk.say(msgspec.structs.replace(ours, proof=proof(secret, "server", hello, ours)))
    theirs = talk.hear(Proof)
    same = hmac.compare_digest(theirs.proof, proof(secret, "client", hello, ours))
    if not same or known is None:
        talk.say(Welcome(refused="the job or its secret is another one here"))
        raise PeerRefusedError(
            f"{channel.peer} could not prove that it belongs to job {job}"
            + (", which is not known here" if known is None else "")
        )
    channel.proven()
    talk.say(Welcome())
    talk.raise_limits()
    return PeerIdentity(job, node, hello.protocol, hello.version[:_MAX_TEXT])


class _Talk:
    """Small messages without payload, for a short time in all."""

    def __init__(self, channel: Channel, clock: Callable[[], float], within_s: float = WITHIN_S) -> None:
        self._channel = channel
        self._clock = clock
        self._within_s = within_s
        self._deadline = clock() + within_s
        self._timeout_s = channel.timeout_s
        channel.max_header_bytes = MAX_GREETING_BYTES
        channel.max_payload_bytes = 0

    def say(self, message: object) -> None:
        self._limit_time()
        self._channel.send(_encode(message))

    def hear(self, kind: type[T]) -> T:
        incoming = self._channel.receive(within_s=self._limit_time())
        if incoming is None:
            raise PeerUnreachableError(f"{self._channel.peer} closed the connection before both knew each other")
        return decode(incoming.header, kind)

    def raise_limits(self) -> None:
        self._channel.max_header_bytes = MAX_HEADER_BYTES
        self._channel.max_payload_bytes = MAX_PAYLOAD_BYTES
        self._channel.timeout_s = self._timeout_s

    def _limit_time(self) -> float:
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise PeerUnreachableError(f"{self._channel.peer} did not show within {self._within_s:g} s who it is")
        self._channel.timeout_s = min(self._timeout_s, left_s)
        return left_s


def _check_nonce(channel: Channel, nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"{channel.peer} sent a nonce of {len(nonce)} bytes, it has {NONCE_BYTES}")


def _named(channel: Channel, text: str) -> NodeId:
    try:
        return node_id(text)
    except InvalidNameError as error:
        raise ProtocolError(f"{channel.peer} gave itself a name that no node has: {error}") from error
