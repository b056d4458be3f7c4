"""NIXL's own behavior: permission for offers, buffer ownership, and invalid pieces."""

import contextlib
import threading
import time

import msgspec
import pytest

from peerstore.errors import PeerUnreachableError, ProtocolError, RequestError
from peerstore.testing import MemoryNetwork
from peerstore.transport import nixl
from peerstore.transport.authentication import authenticate_client, authenticate_to_server
from peerstore.transport.nixl import NixlTransport, PayloadOffer, PayloadPiece, RegisteredMemory
from tests.support.channel_pairs import PATIENCE_S, ChannelPair, nixl_channel_pair, nixl_missing_reason

if nixl_missing_reason():
    pytest.skip(nixl_missing_reason(), allow_module_level=True)

MIB = 1 << 20
SECRET = b"the secret of the job"
encode = msgspec.msgpack.encode


def test_missing_backend_is_refused_with_alternatives():
    with pytest.raises(RequestError, match=r"NIXL cannot use 'NOSUCH' here .* it comes with .*UCX"):
        NixlTransport(backend="NOSUCH").listen("127.0.0.1:0", lambda channel: None)


@pytest.fixture
def line():
    with nixl_channel_pair(PATIENCE_S) as made, contextlib.closing(made):
        yield made


@pytest.fixture
def memory():
    """The buffers of a node without peers."""
    made = RegisteredMemory("UCX", {}, buffer_bytes=MIB, buffers=3, timeout_s=PATIENCE_S)
    yield made
    made.close()


def free(memory):
    with memory._lock:
        memory._collect()
        return len(memory._free)


def take_all(channel):
    incoming = channel.receive(idle_s=PATIENCE_S)
    payload = bytearray(incoming.payload_bytes)
    channel.receive_into([memoryview(payload)])
    return bytes(payload)


def test_large_payloads_do_not_pass_through_the_carrier(line):
    near, far = line.connected_ends()
    carried = []
    real = near._carrier.send
    near._carrier.send = lambda header, payload=(): carried.append(sum(map(len, payload))) or real(header, payload)
    data = bytes(range(256)) * (5 * MIB // 256) + b"the rest"
    sent = line.run_in_background(near.send, b"", [memoryview(data)])
    assert take_all(far) == data
    sent.result(PATIENCE_S)
    assert sum(carried) == 0
    near.send(b"", [memoryview(b"small")])
    assert take_all(far) == b"small"
    assert sum(carried) == 5


def test_buffers_return_after_they_were_read(line):
    near, far = line.connected_ends()
    for _ in range(3):
        sent = line.run_in_background(near.send, b"", [memoryview(bytes(20 * MIB))])
        take_all(far)
        sent.result(PATIENCE_S)
        sent = line.run_in_background(near.send, b"", [memoryview(bytes(20 * MIB))])
        far.receive(idle_s=PATIENCE_S)
        far.discard()
        sent.result(PATIENCE_S)
    assert (free_in_the_end(line.here._memory), free_in_the_end(line.there._memory)) == (6, 8)


def free_in_the_end(memory):
    """Wait for free buffers: the confirmation of a read follows its bytes."""
    while (count := free(memory)) not in (6, 8):
        time.sleep(0.001)
    return count


def test_sent_payload_is_readable_after_its_sender_closed(line):
    near, far = line.connected_ends()
    data = bytes(range(256)) * (3 * MIB // 256)
    near.send(b"", [memoryview(data)])
    near.close()
    assert take_all(far) == data
    assert far.receive(idle_s=PATIENCE_S) is None


def test_abandoned_buffers_are_reused_after_a_delay(line, monkeypatch):
    near, far = line.connected_ends()
    near.send(b"", [memoryview(bytes(3 * MIB))])
    far.close()
    near.close()
    memory = line.here._memory
    assert free(memory) == 3
    now = nixl.time.monotonic()
    monkeypatch.setattr(nixl.time, "monotonic", lambda: now + 2 * PATIENCE_S - 5)
    assert free(memory) == 3
    monkeypatch.setattr(nixl.time, "monotonic", lambda: now + 2 * PATIENCE_S + 5)
    assert free(memory) == 6


def test_unauthenticated_peer_may_offer_no_payload(line):
    near, far = line.connected_ends()
    server = line.run_in_background(authenticate_client, far, me="n2", secret_of={"job": SECRET}.get)
    near.send(b"", [memoryview(bytes(MIB))])
    with pytest.raises(ProtocolError, match="the limit is"):
        server.result(PATIENCE_S)


def test_authenticated_peers_may_offer_payloads(line):
    near, far = line.connected_ends()
    server = line.run_in_background(authenticate_client, far, me="n2", secret_of={"job": SECRET}.get)
    authenticate_to_server(near, job="job", me="n1", secret=SECRET)
    server.result(PATIENCE_S)
    sent = line.run_in_background(near.send, b"", [memoryview(b"x" * MIB)])
    assert take_all(far) == b"x" * MIB
    sent.result(PATIENCE_S)


def envelope(kind, body=b"", header_bytes=0):
    return nixl._ENVELOPE.pack(kind, header_bytes) + body


@pytest.fixture
def raw(memory):
    """A carrier's end in the test, and the channel at the other end."""
    network = MemoryNetwork()
    line = ChannelPair(network.transport("n1"), NixlTransport.__new__(NixlTransport), "n2:0")
    line.there._carrier, line.there._registered, line.there._least_bytes = network.transport("n2"), memory, 1000
    line.there._lock = threading.Lock()
    yield line.connected_ends()
    line.close()


@pytest.mark.parametrize(
    ("header", "payload", "match"),
    [
        (b"", b"", "without an envelope"),
        (b"\0\0\0\0", b"", "without an envelope"),
        (envelope(4), b"", "of kind 4"),
        (envelope(2, encode(PayloadPiece(1, 1, 1))), b"", "did not offer"),
        (envelope(1, b"\xc1"), b"", "not a PayloadOffer"),
        (envelope(1, encode(PayloadOffer(0, b""))), b"", "payload of 0 bytes"),
        (envelope(1, encode(PayloadOffer((1 << 30) + 1, b""))), b"", "the limit is 1073741824"),
        (envelope(1, encode(PayloadOffer(-1, b""))), b"", "payload of -1 bytes"),
        (envelope(1, encode(PayloadOffer(5, b""))), b"extra", "where none belong"),
        (envelope(0, b"", 0xFFFFFFFF), b"", "header of 4294967295 bytes"),
        (envelope(0, b"", 1), b"", "cut short"),
    ],
)
def test_messages_that_make_no_sense_end_the_channel(raw, header, payload, match):
    near, far = raw
    near.send(header, [memoryview(payload)])
    with pytest.raises(ProtocolError, match=match):
        far.receive(idle_s=PATIENCE_S)
    with pytest.raises(PeerUnreachableError, match="over"):
        far.receive()


@pytest.mark.parametrize("introduction", [b"x", b"nixl" * 100, bytes(500)])
def test_invalid_introduction_closes_the_channel(raw, introduction):
    near, far = raw
    near.send(envelope(1, encode(PayloadOffer(5000, introduction))))
    with pytest.raises(PeerUnreachableError, match="does not know how to reach it"):
        far.receive(idle_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("piece", "error", "match"),
    [
        (envelope(0), ProtocolError, "something else"),
        (envelope(2, encode(PayloadPiece(4096, 0, 1))), ProtocolError, "something else"),
        (envelope(2, encode(PayloadPiece(4096, 5001, 1))), ProtocolError, "something else"),
        (envelope(2, encode(PayloadPiece(4096, 5000, 1))), PeerUnreachableError, "NIXL could not read"),
        (envelope(2, encode(["x", 1, 1])), ProtocolError, "not a PayloadPiece"),
    ],
    ids=["message", "empty", "too-much", "elsewhere", "text"],
)
def test_pieces_that_were_not_offered_end_the_channel_and_cost_no_buffer(raw, memory, piece, error, match):
    other = RegisteredMemory("UCX", {}, buffer_bytes=MIB, buffers=1, timeout_s=PATIENCE_S)
    near, far = raw
    near.send(envelope(1, encode(PayloadOffer(5000, other.agent_metadata))))
    assert far.receive(idle_s=PATIENCE_S).payload_bytes == 5000
    near.send(piece)
    target = bytearray(5000)
    with pytest.raises(error, match=match):
        far.receive_into([memoryview(target)])
    assert target == bytes(5000)
    assert free(memory) == 3
    other.close()


def test_a_reader_with_smaller_buffers_reads_in_steps(raw, memory):
    other = RegisteredMemory("UCX", {}, buffer_bytes=4 * MIB, buffers=1, timeout_s=PATIENCE_S)
    near, far = raw
    data = bytes(range(256)) * (3 * MIB // 256) + b"end"
    buffer = other.take(lambda: None)
    buffer.view[: len(data)] = data
    ticket = other.publish(buffer)
    near.send(envelope(1, b"head" + encode(PayloadOffer(len(data), other.agent_metadata)), 4))
    near.send(envelope(2, encode(PayloadPiece(buffer.address, len(data), ticket))))
    assert far.receive(idle_s=PATIENCE_S).header == b"head"
    target = bytearray(len(data))
    far.receive_into([memoryview(target)])
    assert target == data
    while other.unread_tickets([ticket]):
        time.sleep(0.001)
    other.close()


def test_buffer_wait_ends_when_the_channel_is_closed(memory):
    for _ in range(3):
        memory.take(lambda: None)
    asked = []

    def check():
        asked.append(None)
        if len(asked) == 3:
            raise PeerUnreachableError("closed")

    with pytest.raises(PeerUnreachableError, match="closed"):
        memory.take(check)
