"""Malformed messages of peers: the listener closes that connection, logs the reason and serves others."""

import contextlib
import queue
import socket
import threading
import time
import tracemalloc

import msgspec
import pytest

from peerstore.errors import PeerRefusedError, PeerUnreachableError
from peerstore.transport import authentication
from peerstore.transport.authentication import (
    Challenge,
    Hello,
    Proof,
    Welcome,
    authenticate_client,
    authenticate_to_server,
    hmac_proof,
)
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION
from peerstore.transport.tcp import TcpTransport
from tests.hostile.peerstore.make_peers import CLOSED, FILES, HELLO, REFUSED, SECRET, encode_message, hostile_messages

HOSTILE = sorted(FILES.iterdir())
PATIENCE_S = 200.0
MIB = 1 << 20


class PeerListener:
    """A listener for peers of the job ``victim`` that answers each message with the size of its payload."""

    def __init__(self):
        self.met, self.ended = queue.Queue(), queue.Queue()
        self.transport = TcpTransport(timeout_s=PATIENCE_S)
        self.listener = self.transport.listen("127.0.0.1:0", self._serve)

    def _serve(self, channel):
        self.met.put(channel.peer)
        try:
            authenticate_client(channel, me="n2", secret_of={"victim": SECRET}.get)
            while (incoming := channel.receive(idle_s=PATIENCE_S)) is not None:
                channel.discard()
                channel.send(b"%d" % incoming.payload_bytes)
        except Exception as error:
            self.ended.put(error)
            raise

    def assert_still_serves(self):
        channel = self.transport.connect(self.listener.address)
        authenticate_to_server(channel, job="victim", me="n1", secret=SECRET, expect="n2")
        channel.send(b"", [memoryview(bytes(MIB))])
        assert channel.receive(idle_s=PATIENCE_S).header == b"%d" % MIB
        channel.close()

    def wait_disconnected(self):
        """Wait until all connections have ended, and clear their records."""
        deadline = time.monotonic() + PATIENCE_S
        while self.listener._serving._channels and time.monotonic() < deadline:
            time.sleep(0.001)
        self.met, self.ended = queue.Queue(), queue.Queue()

    def connect_raw(self):
        host, _, port = self.listener.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def agent():
    one = PeerListener()
    yield one
    one.listener.close()


@pytest.fixture
def raw_connection(agent):
    """Open raw connections to the agent: unauthenticated, challenged or authenticated."""
    with contextlib.ExitStack() as stack:

        def connect(stage="stranger"):
            sock = stack.enter_context(agent.connect_raw())
            if stage != "stranger":
                sock.sendall(encode_message(HELLO))
                challenge = read_message(sock, Challenge)
            if stage == "member":
                sock.sendall(
                    encode_message(Proof(hmac_proof(SECRET, "client", msgspec.convert(HELLO, Hello), challenge)))
                )
                assert read_message(sock, Welcome) == Welcome()
            return sock

        yield connect
    agent.wait_disconnected()


def read_message(sock, kind):
    magic, version, header, payload = FRAME_PREFIX.unpack(receive_exactly(sock, FRAME_PREFIX.size))
    assert (magic, version, payload) == (FRAME_MAGIC, FRAME_VERSION, 0)
    return msgspec.msgpack.decode(receive_exactly(sock, header), type=kind)


def receive_exactly(sock, size):
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        assert piece
        data += piece
    return data


def is_closed(sock):
    """Return whether the other side has closed or reset the connection."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            """An answer to what was still a message."""
    return True


def test_stored_cases_match_the_generator_script():
    assert {path.stem: path.read_bytes() for path in HOSTILE} == {
        name: case.data for name, case in hostile_messages().items()
    }


@pytest.mark.parametrize("file", HOSTILE, ids=lambda path: path.stem)
def test_hostile_bytes_end_only_their_connection_and_leak_nothing(agent, raw_connection, file):
    expected = hostile_messages()[file.stem]
    sock = raw_connection(file.stem.partition("-")[0])
    tracemalloc.start()
    try:
        sock.sendall(file.read_bytes())
        with contextlib.suppress(OSError):  # it may be closed already
            sock.shutdown(socket.SHUT_WR)
        if expected.answer == REFUSED:
            assert read_message(sock, Challenge if file.stem.startswith("stranger") else Welcome).refused
        else:
            assert expected.answer == CLOSED
        assert is_closed(sock)
        error = agent.ended.get(timeout=PATIENCE_S)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    assert type(error).__name__ == expected.error
    assert len(str(error)) < 3500
    agent.assert_still_serves()
    assert agent.ended.empty()


def test_recorded_handshake_is_refused(agent, raw_connection):
    sock = raw_connection("challenged")
    first = raw_connection()
    first.sendall(encode_message(HELLO))
    message = encode_message(
        Proof(hmac_proof(SECRET, "client", msgspec.convert(HELLO, Hello), read_message(first, Challenge)))
    )
    first.sendall(message)
    assert read_message(first, Welcome) == Welcome()
    sock.sendall(message)
    assert read_message(sock, Welcome).refused
    assert is_closed(sock)
    assert isinstance(agent.ended.get(timeout=PATIENCE_S), PeerRefusedError)
    agent.assert_still_serves()


def test_reflected_proof_is_refused(agent, raw_connection):
    sock = raw_connection()
    sock.sendall(encode_message(HELLO))
    sock.sendall(encode_message(Proof(read_message(sock, Challenge).proof)))
    assert read_message(sock, Welcome).refused
    assert is_closed(sock)
    assert isinstance(agent.ended.get(timeout=PATIENCE_S), PeerRefusedError)


def test_challenge_relayed_from_another_connection_is_refused(agent, raw_connection):
    """The agent is made to prove itself on one connection, to answer its challenge on another."""
    one, other = raw_connection(), raw_connection()
    one.sendall(encode_message(HELLO))
    challenge = read_message(one, Challenge)
    other.sendall(encode_message({**HELLO, "nonce": challenge.nonce}))
    one.sendall(encode_message(Proof(read_message(other, Challenge).proof)))
    assert read_message(one, Welcome).refused
    assert isinstance(agent.ended.get(timeout=PATIENCE_S), PeerRefusedError)


def test_unknown_job_and_wrong_secret_get_the_same_reply(raw_connection):
    answers = []
    for job in ("victim", "nobody"):
        sock = raw_connection()
        sock.sendall(encode_message({**HELLO, "job": job}))
        challenge = read_message(sock, Challenge)
        sock.sendall(encode_message(Proof(bytes(32))))
        welcome = read_message(sock, Welcome)
        assert is_closed(sock)
        shape = msgspec.structs.replace(challenge, nonce=bytes(len(challenge.nonce)), proof=bytes(len(challenge.proof)))
        answers.append((shape, welcome))
    assert answers[0] == answers[1]


def test_handshake_sent_byte_by_byte_times_out(agent, raw_connection, monkeypatch):
    monkeypatch.setattr(authentication, "HANDSHAKE_TIMEOUT_S", 0.3)
    sock = raw_connection()
    stop = threading.Event()

    def send_slowly():
        with contextlib.suppress(OSError):
            sock.sendall(encode_message(b"", announced=4000))
            while not stop.wait(0.02):
                sock.sendall(b"x")

    thread = threading.Thread(target=send_slowly)
    thread.start()
    assert isinstance(agent.ended.get(timeout=PATIENCE_S), PeerUnreachableError)
    stop.set()
    thread.join()
    agent.assert_still_serves()


def test_many_silent_peers_block_no_other_peer(agent, raw_connection, monkeypatch):
    monkeypatch.setattr(authentication, "HANDSHAKE_TIMEOUT_S", 1.0)
    agent.wait_disconnected()
    crowd = [raw_connection() for _ in range(200)]
    for number, sock in enumerate(crowd):
        sock.sendall((b"", FRAME_MAGIC, encode_message(b"", announced=4000))[number % 3])
    for _ in crowd:
        agent.met.get(timeout=PATIENCE_S)
    monkeypatch.undo()
    agent.assert_still_serves()
    for sock in crowd:
        assert is_closed(sock)
    for _ in crowd:
        assert isinstance(agent.ended.get(timeout=PATIENCE_S), PeerUnreachableError)


def test_member_that_never_reads_does_not_stop_the_others(agent, raw_connection):
    deaf = raw_connection("member")
    deaf.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while True:
            deaf.sendall(encode_message(b"x") * 1000)
    agent.assert_still_serves()


def test_concurrent_misbehaving_peers_do_not_stop_the_agent(agent):
    """Threads throw every file at the agent in their own order; a proper peer works all the time."""
    threads = [threading.Thread(target=send_all_hostile, args=(agent, step)) for step in (1, 3, 7)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        agent.assert_still_serves()
    for thread in threads:
        thread.join()
    agent.assert_still_serves()
    agent.wait_disconnected()


def send_all_hostile(agent, step):
    for number in range(len(HOSTILE)):
        with agent.connect_raw() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(HOSTILE[number * step % len(HOSTILE)].read_bytes())
