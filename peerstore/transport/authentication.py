"""A job's secret, TLS files, and the greeting that opens every connection.

::

    client                                server
      Hello(job, node, nonce)      ──>
                                   <──    Challenge(node, nonce, proof)         between nodes
      Proof                        ──>                                          between nodes
                                   <──    Welcome, or the reason for a refusal

On a Unix socket the kernel names both users, so the server answers the Hello with the Welcome. Between nodes, each side
proves that it knows the job's secret. A proof is HMAC-SHA256 of all fields of both sides and of the prover's role. It
cannot be changed, used on another connection, or sent back to its sender. A job that the server does not know looks
like a job with another secret.

The handshake authenticates both sides of a new connection. It does not encrypt or protect the later bytes: use TLS as
well where an attacker can change network traffic.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from peerstore.errors import InvalidNameError, PeerRefusedError, PeerUnreachableError, ProtocolError, RequestError
from peerstore.membership.topology import NodeId, validate_node_id
from peerstore.message_codec import decode_message
from peerstore.shard_records import JobName, validate_job_name
from peerstore.transport.base import MAX_MESSAGE_HEADER_BYTES, MAX_PAYLOAD_BYTES, MessageChannel

if TYPE_CHECKING:
    import ssl  # imported where it is used: most agents do not need it, and it costs 10 ms

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4 << 10
_FILE = "file:"
_HOW_TO_CREATE = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"


def generate_secret() -> bytes:
    """Return a new random secret; printable."""
    return secrets.token_urlsafe(32).encode()


def read_secret(given: str | Path) -> bytes:
    """Return the secret ``given``, or read it from a :class:`~pathlib.Path` or ``file:/path/to/it``."""
    if isinstance(given, Path):
        return _validate_secret(_read_secret_file(given), f"the secret in {given}")
    if given.startswith(_FILE):
        return read_secret(Path(given[len(_FILE) :]).expanduser())
    if "/" in given and os.path.exists(given):  # noqa: PTH110 - a Path raises for a secret too long to be one
        raise RequestError(f"the secret given is the name of a file: write file:{given} to use what is in it")
    return _validate_secret(given.encode(), "the secret given")


def _validate_secret(raw: bytes, what: str) -> bytes:
    secret = raw.strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise RequestError(f"{what} has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed: {_HOW_TO_CREATE}")
    if len(secret) > MAX_SECRET_BYTES:
        raise RequestError(f"{what} has more than {MAX_SECRET_BYTES} bytes: {_HOW_TO_CREATE}")
    return secret


def _read_secret_file(path: Path) -> bytes:
    """Read a secret; symbolic links are followed, because Kubernetes mounts secrets as such links."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RequestError(f"the secret cannot be read from {path}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise RequestError(f"the secret cannot be read from {path}: it is not a file")
        if problem := exposed_permissions(found):
            raise RequestError(
                f"the secret in {path} {problem}: chmod 0400 it, or for a Kubernetes secret set the volume's "
                "defaultMode to 0400 (0440 with an fsGroup)"
            )
        return os.read(fd, MAX_SECRET_BYTES + 64)
    finally:
        os.close(fd)


def exposed_permissions(found: os.stat_result) -> str:
    """Return why other users may read or write the file, or "".

    Group access is allowed on a file of root, which is Kubernetes' fsGroup.
    """
    mode, owner, me = found.st_mode, found.st_uid, os.getuid()
    if owner not in (me, 0):
        return f"belongs to user {owner}, not to user {me} or root"
    allowed = 0o740 if owner == 0 else 0o700
    if stat.S_IMODE(mode) & 0o777 & ~allowed:
        return f"may be read or written by others than its owner (mode {stat.S_IMODE(mode):04o})"
    return ""


class TlsFiles(NamedTuple):
    """PEM files: this node's certificate and key, and the authority of all nodes' certificates.

    Both sides show a certificate, so it must be valid for clients and servers. Names in certificates are compared only
    with ``check_names``: nodes' addresses change, and the job's secret proves the node's identity. The authority should
    therefore sign for these agents only. The files are read for every connection, so that certificates can be renewed
    while the agent runs.
    """

    certificate: Path
    key: Path
    authority: Path
    check_names: bool = False

    def context(self, *, server: bool) -> ssl.SSLContext:
        import ssl

        check_private_key(self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.check_names and not server
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # every connection authenticates
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise RequestError(
                f"certificate {self.certificate}, key {self.key} and authority {self.authority} cannot be used: {error}"
            ) from error
        return context


def check_private_key(path: Path) -> None:
    """Raise :class:`RequestError` if users other than this user and root can read the key."""
    try:
        problem = exposed_permissions(path.stat())
    except OSError as error:
        raise RequestError(f"key {path} cannot be used: {error.strerror}") from error
    if problem:
        raise RequestError(
            f"key {path} {problem}: chmod 0400 it, or for a Kubernetes secret set the volume's defaultMode to 0400 "
            "(0440 with an fsGroup). Replace the key if other users have accounts on this machine"
        )


HANDSHAKE_VERSION = 3
MAX_HANDSHAKE_BYTES = 4 << 10
HANDSHAKE_TIMEOUT_S = 10.0
NONCE_BYTES = 32

_PURPOSE = b"peerstore: who is there"
_MAX_TEXT = 200
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class PeerIdentity(NamedTuple):
    """The authenticated peer of a connection."""

    job: JobName
    node: NodeId
    protocol: int
    version: str


class Hello(msgspec.Struct, frozen=True):
    protocol: int
    job: str
    """The client's job; "" for a local process without one."""
    node: str = ""
    nonce: bytes = b""
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
    """Reason for a refusal."""
    protocol: int = HANDSHAKE_VERSION
    version: str = ""
    """Release of the server."""
    arena_id: str = ""
    """Changes when the contents of the server's arena are lost; for local processes."""
    start_id: str = ""
    """Changes when the server's process restarts; for local processes."""


def hmac_proof(secret: bytes, role: str, hello: Hello, challenge: Challenge) -> bytes:
    """Return the proof that a side in this role of this handshake knows ``secret``."""
    if len(secret) < MIN_SECRET_BYTES:
        raise RequestError(
            f"the secret of job {hello.job} has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed"
        )
    fields = (
        _PURPOSE,
        role.encode(),
        struct.pack(">QQ", hello.protocol, challenge.protocol),
        *(text.encode() for text in (hello.job, hello.node, hello.version, challenge.node, challenge.version)),
        hello.nonce,
        challenge.nonce,
    )
    return hmac.digest(secret, b"".join(struct.pack(">I", len(field)) + field for field in fields), "sha256")


def authenticate_to_server(
    channel: MessageChannel,
    *,
    job: str,
    me: NodeId,
    secret: bytes,
    expect: NodeId | None = None,
    version: str = "",
    within_s: float = HANDSHAKE_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    nonce: Callable[[int], bytes] = secrets.token_bytes,
) -> PeerIdentity:
    """Perform the client's half of the handshake and return the server's identity.

    ``expect`` is the node that should answer, because addresses are reused. After an error the channel is unusable.
    """
    messages = _HandshakeMessages(channel, clock, within_s)
    hello = Hello(HANDSHAKE_VERSION, validate_job_name(job), validate_node_id(me), nonce(NONCE_BYTES), version)
    messages.send(hello)
    challenge = messages.receive(Challenge)
    if challenge.protocol != HANDSHAKE_VERSION:
        raise ProtocolError(f"{channel.peer} speaks protocol {challenge.protocol}, this is {HANDSHAKE_VERSION}")
    if challenge.refused:
        raise PeerRefusedError(f"{channel.peer} refused: {challenge.refused[:_MAX_TEXT]!r}")
    _check_nonce(channel, challenge.nonce)
    if not hmac.compare_digest(challenge.proof, hmac_proof(secret, "server", hello, challenge)):
        raise PeerRefusedError(
            f"{channel.peer} could not prove that it belongs to job {job}: it does not know the job or its secret"
        )
    found = _validate_peer_name(channel, challenge.node)
    if expect is not None and found != expect:
        raise PeerRefusedError(f"{channel.peer} is node {found}, not {expect}")
    messages.send(Proof(hmac_proof(secret, "client", hello, challenge)))
    welcome = messages.receive(Welcome)
    if welcome.refused:
        raise PeerRefusedError(f"{channel.peer} refused: {welcome.refused[:_MAX_TEXT]!r}")
    messages.raise_limits()
    return PeerIdentity(JobName(hello.job), found, challenge.protocol, challenge.version[:_MAX_TEXT])


def authenticate_client(
    channel: MessageChannel,
    *,
    me: NodeId,
    secret_of: Callable[[str], bytes | None],
    version: str = "",
    clock: Callable[[], float] = time.monotonic,
    nonce: Callable[[int], bytes] = secrets.token_bytes,
) -> PeerIdentity:
    """Perform the server's half of the handshake and return the client's identity.

    ``secret_of`` returns the job's secret, or ``None`` for an unknown job.
    """
    messages = _HandshakeMessages(channel, clock)
    hello = messages.receive(Hello)
    try:
        if hello.protocol != HANDSHAKE_VERSION:
            raise ProtocolError(f"protocol {hello.protocol} is not spoken here, this is {HANDSHAKE_VERSION}")
        _check_nonce(channel, hello.nonce)
        job, node = validate_job_name(hello.job), _validate_peer_name(channel, hello.node)
    except RequestError as error:
        messages.send(Challenge(HANDSHAKE_VERSION, refused=str(error)[:_MAX_TEXT]))
        raise
    known = secret_of(job)
    secret = nonce(NONCE_BYTES) if known is None else known
    ours = Challenge(HANDSHAKE_VERSION, validate_node_id(me), nonce(NONCE_BYTES), version=version)
    messages.send(msgspec.structs.replace(ours, proof=hmac_proof(secret, "server", hello, ours)))
    theirs = messages.receive(Proof)
    same = hmac.compare_digest(theirs.proof, hmac_proof(secret, "client", hello, ours))
    if not same or known is None:
        messages.send(Welcome(refused="the job or its secret is another one here"))
        raise PeerRefusedError(
            f"{channel.peer} could not prove that it belongs to job {job}"
            + (", which is not known here" if known is None else "")
        )
    channel.mark_authenticated()
    messages.send(Welcome())
    messages.raise_limits()
    return PeerIdentity(job, node, hello.protocol, hello.version[:_MAX_TEXT])


def greet_agent(channel: MessageChannel, job: str, *, within_s: float = HANDSHAKE_TIMEOUT_S) -> Welcome:
    """Perform the client's half of the greeting on a Unix socket; ``job`` is "" for a process without one."""
    messages = _HandshakeMessages(channel, time.monotonic, within_s)
    channel.send(encode_hello(job))
    welcome = messages.receive(Welcome)
    if welcome.protocol != HANDSHAKE_VERSION:
        raise ProtocolError(
            f"the agent speaks protocol {welcome.protocol} (version {welcome.version or 'unknown'}), "
            f"this client {HANDSHAKE_VERSION}: use the same release for both"
        )
    if welcome.refused:
        raise RequestError(f"the agent refused this process: {welcome.refused}")
    messages.raise_limits()
    return welcome


def welcome_process(channel: MessageChannel, welcome: Welcome) -> str | None:
    """Perform the server's half and return the client's job.

    Return ``None`` if the client disconnected before its greeting.
    """
    messages = _HandshakeMessages(channel, time.monotonic)
    try:
        hello = messages.receive_or_end(Hello)
        if hello is None:
            return None
        if hello.protocol != HANDSHAKE_VERSION:
            raise ProtocolError(f"client speaks protocol {hello.protocol}, this is {HANDSHAKE_VERSION}")
        job = validate_job_name(hello.job) if hello.job else ""
    except RequestError as error:
        channel.send(encode_refusal(error))
        raise
    messages.send(welcome)
    messages.raise_limits()
    return job


def encode_hello(job: str) -> bytes:
    """Return the greeting of a local process; ``job`` may be ""."""
    return _encode(Hello(HANDSHAKE_VERSION, job))


def encode_refusal(error: RequestError) -> bytes:
    return _encode(Welcome(refused=str(error)[:_MAX_TEXT]))


class _HandshakeMessages:
    """Exchange of small messages without payload, within one deadline."""

    def __init__(
        self, channel: MessageChannel, clock: Callable[[], float], within_s: float = HANDSHAKE_TIMEOUT_S
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._within_s = within_s
        self._deadline = clock() + within_s
        self._timeout_s = channel.timeout_s
        channel.max_header_bytes = MAX_HANDSHAKE_BYTES
        channel.max_payload_bytes = 0

    def send(self, message: object) -> None:
        self._limit_time()
        self._channel.send(_encode(message))

    def receive(self, kind: type[T]) -> T:
        message = self.receive_or_end(kind)
        if message is None:
            raise PeerUnreachableError(f"{self._channel.peer} closed the connection before both knew each other")
        return message

    def receive_or_end(self, kind: type[T]) -> T | None:
        incoming = self._channel.receive(within_s=self._limit_time())
        return None if incoming is None else decode_message(incoming.header, kind)

    def raise_limits(self) -> None:
        self._channel.max_header_bytes = MAX_MESSAGE_HEADER_BYTES
        self._channel.max_payload_bytes = MAX_PAYLOAD_BYTES
        self._channel.timeout_s = self._timeout_s

    def _limit_time(self) -> float:
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise PeerUnreachableError(f"{self._channel.peer} did not show within {self._within_s:g} s who it is")
        self._channel.timeout_s = min(self._timeout_s, left_s)
        return left_s


def _check_nonce(channel: MessageChannel, nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"{channel.peer} sent a nonce of {len(nonce)} bytes, it has {NONCE_BYTES}")


def _validate_peer_name(channel: MessageChannel, text: str) -> NodeId:
    try:
        return validate_node_id(text)
    except InvalidNameError as error:
        raise ProtocolError(f"{channel.peer} gave itself a name that no node has: {error}") from error
