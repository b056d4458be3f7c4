"""The in-process network: cuts, delays, stalls and broken connections."""

import pytest

from peerstore.errors import PeerUnreachableError
from peerstore.testing import MemoryNetwork, StepClock
from peerstore.transport.framing import FRAME_PREFIX
from tests.support.channel_pairs import PATIENCE_S, ChannelPair

KIB = 1 << 10


@pytest.fixture
def clock():
    return StepClock()


@pytest.fixture
def network(clock):
    return MemoryNetwork(clock=clock, capacity_bytes=64 * KIB)


@pytest.fixture
def line(network):
    made = ChannelPair(network.transport("n1"), network.transport("n2"), "n2:7070")
    yield made
    made.close()


def text(channel):
    return channel.receive().header


def test_cut_path_blocks_messages_and_connections(network, line, clock):
    near, far = line.connected_ends()
    listener = line.there.listen("n2:7071", lambda channel: None)
    network.cut("n1", "n2")
    near.send(b"lost in between")
    with pytest.raises(PeerUnreachableError, match="cut"):
        line.here.connect("n2:7071")
    waiting = line.run_in_background(far.receive, idle_s=10)
    clock.until_waiting()
    clock.advance(9.9)
    clock.until_waiting()
    assert not waiting.done()
    clock.advance(0.2)
    with pytest.raises(PeerUnreachableError, match="silent for 10 s"):
        waiting.result(PATIENCE_S)
    network.transport("n3").connect("n2:7071").close()
    listener.close()


def test_waiting_channel_continues_after_healing(network, line, clock):
    near, far = line.connected_ends()
    network.cut("n1", "n2")
    near.send(b"later")
    waiting = line.run_in_background(text, far)
    clock.until_waiting()
    network.heal("n1", "n2")
    assert waiting.result(PATIENCE_S) == b"later"


def test_one_way_cut_leaves_the_other_direction(network, line):
    near, far = line.connected_ends()
    network.cut("n1", "n2", both=False)
    far.send(b"still heard")
    assert text(near) == b"still heard"
    with pytest.raises(PeerUnreachableError, match="cut"):
        line.here.connect("n2:7070")


def test_close_is_not_seen_across_a_cut(network, line, clock):
    near, far = line.connected_ends()
    network.cut("n1", "n2")
    far.close()
    waiting = line.run_in_background(near.receive, idle_s=5)
    clock.until_waiting()
    assert not waiting.done()
    network.heal("n1", "n2")
    assert waiting.result(PATIENCE_S) is None


def test_sender_without_buffer_space_times_out(network, line, clock):
    near, _ = line.connected_ends()
    network.stall("n1", "n2")
    sent = line.run_in_background(near.send, b"", [memoryview(bytes(100 * KIB))])
    clock.until_waiting()
    clock.advance(29.9)
    clock.until_waiting()
    assert not sent.done()
    clock.advance(0.2)
    with pytest.raises(PeerUnreachableError, match="silent for 30 s"):
        sent.result(PATIENCE_S)


def test_silence_in_a_payload_counts_from_the_last_byte(network, line, clock):
    near, far = line.connected_ends()
    network.delay("n1", "n2", 20)
    sent = line.run_in_background(near.send, b"", [memoryview(bytes(100 * KIB))])
    clock.until_waiting()  # 64 KiB are in flight
    clock.advance(20)
    assert far.receive().payload_bytes == 100 * KIB
    taken = line.run_in_background(far.discard)
    sent.result(PATIENCE_S)
    clock.until_waiting()
    clock.advance(19)
    clock.until_waiting()
    assert not taken.done()
    clock.advance(1)
    taken.result(PATIENCE_S)


def test_a_stalled_peer_still_accepts(network, line):
    network.stall("n1", "n2")
    line.connected_ends()


def test_delayed_messages_arrive_when_their_time_has_come(network, line, clock):
    near, far = line.connected_ends()
    near.send(b"before")
    network.delay("n1", "n2", 3)
    near.send(b"after")
    assert text(far) == b"before"
    waiting = line.run_in_background(text, far)
    clock.until_waiting()
    clock.advance(2.9)
    clock.until_waiting()
    assert not waiting.done()
    clock.advance(0.2)
    assert waiting.result(PATIENCE_S) == b"after"


@pytest.mark.parametrize("size", [0, 1, FRAME_PREFIX.size, FRAME_PREFIX.size + 1, FRAME_PREFIX.size + 3 + 70])
def test_connection_breaks_after_the_configured_bytes(network, line, size):
    near, far = line.connected_ends()
    other_near, other_far = line.connected_ends()
    network.drop_after("n1", "n2", size)
    whole = size == FRAME_PREFIX.size + 3 + 70
    received = line.run_in_background(receive_all, far)
    error = line.run_in_background(near.send, b"one", [memoryview(bytes(70))]).exception(PATIENCE_S)
    assert whole if error is None else "reset" in str(error)
    with pytest.raises(PeerUnreachableError, match=r"reset|over"):
        near.send(b"two")
    with pytest.raises(PeerUnreachableError, match="reset"):
        received.result(PATIENCE_S)
    other_near.send(b"fine")
    assert text(other_far) == b"fine"


def receive_all(channel):
    while channel.receive() is not None:
        channel.discard()


def test_single_bit_of_a_payload_arrives_flipped(network, line):
    near, far = line.connected_ends()
    near.send(b"a", [memoryview(bytes(1000))])
    assert payload(far) == bytes(1000)
    network.flip_bit("n1", "n2", payload=1, byte=777, bit=3)
    near.send(b"headers do not count")
    near.send(b"b", [memoryview(bytes(1000))])
    near.send(b"c", [memoryview(bytes(500)), memoryview(bytes(500))])
    near.send(b"d", [memoryview(bytes(1000))])
    assert text(far) == b"headers do not count"
    assert payload(far) == bytes(1000)
    assert payload(far) == bytes(777) + b"\x08" + bytes(222)
    assert payload(far) == bytes(1000)


def payload(channel):
    taken = bytearray(channel.receive().payload_bytes)
    channel.receive_into([memoryview(taken)])
    return bytes(taken)


def test_killed_node_closes_its_channels_and_listeners(network, line, clock):
    near, far = line.connected_ends()
    waiting = line.run_in_background(near.receive)
    clock.until_waiting()
    network.kill_node("n2")
    with pytest.raises(PeerUnreachableError, match="n2 is gone"):
        waiting.result(PATIENCE_S)
    with pytest.raises(PeerUnreachableError, match="n2 is gone"):
        far.receive()
    with pytest.raises(PeerUnreachableError, match="no process listens"):
        line.here.connect("n2:7070")
    again = line.there.listen("n2:7070", lambda channel: channel.send(b"back"))
    assert text(line.here.connect("n2:7070")) == b"back"
    again.close()


def test_address_has_a_single_listener(network, line):
    listener = line.there.listen("n2:0", lambda channel: None)
    with pytest.raises(OSError, match="is in use already"):
        network.transport("n3").listen(listener.address, lambda channel: None)
    listener.close()


def test_wait_without_waiting_threads_times_out(clock):
    with pytest.raises(TimeoutError, match="0 of 1 threads"):
        clock.until_waiting(patience_s=0.01)
