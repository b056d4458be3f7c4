"""Contract of every transport between two ends in this process: memory, TCP, and TCP with TLS.

``severable`` is the memory transport with support for partitions, none of which occurs here.
"""

from __future__ import annotations

import array
import hashlib
import itertools
import tempfile
import threading
from pathlib import Path

import pytest

from peerstore.errors import PeerUnreachableError, ProtocolError, RequestError, ShardDamagedError
from peerstore.transport.base import MAX_MESSAGE_HEADER_BYTES, MAX_PAYLOAD_BYTES, FileSlice
from tests.support.channel_pairs import PATIENCE_S, channel_pair, nixl_missing_reason

MIB = 1 << 20
KINDS = ["memory", "severable", "tcp", "tls", *([] if nixl_missing_reason() else ["nixl"])]
MORE_THAN_BUFFERS = 64 * MIB
by_kind_of_large_messages = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly if kind == "severable" else ()) for kind in KINDS]
)
"""Without partitions, ``severable`` sends as ``memory`` does."""


def open_files():
    return [target for fd in Path("/proc/self/fd").iterdir() if (target := link(fd)).startswith(("socket:", "anon_"))]


def link(fd):
    try:
        return str(fd.readlink())
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""


@pytest.fixture(autouse=True)
def no_leaked_sockets():
    before = open_files()
    yield
    assert set(open_files()) <= set(before)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def channel_ends(kind, tmp_path):
    with channel_pair(kind, tmp_path) as made:
        yield made


@pytest.fixture
def short_timeout_ends(kind, tmp_path):
    """Connect two ends with a short timeout in the middle of a message."""
    with channel_pair(kind, tmp_path, timeout_s=0.2) as made:
        yield made


def pseudo_random_bytes(size, seed=1):
    block = hashlib.shake_128(str(seed).encode()).digest(min(size, MIB))
    return (block * (size // MIB + 1))[:size]


def receive_bytes(channel):
    """Receive the next message as bytes."""
    incoming = channel.receive(idle_s=PATIENCE_S)
    payload = bytearray(incoming.payload_bytes)
    channel.receive_into([memoryview(payload)])
    return incoming.header, bytes(payload)


@pytest.mark.skipif(bool(nixl_missing_reason()), reason=nixl_missing_reason())
def test_nixl_is_covered():
    """Skip once with the reason if NIXL is missing, instead of once for each test."""
    assert "nixl" in KINDS


# -- what is sent arrives ---------------------------------------------------------------------------------------------


HEADERS = {"none": b"", "short": b"h", "long": b"\0" * 70_000}
MESSAGES = [
    pytest.param(header, size, id=f"{name}-{size}", marks=() if (row + column) % 2 == 0 else pytest.mark.nightly)
    for row, (name, header) in enumerate(HEADERS.items())
    for column, size in enumerate([0, 1, 17, 256 << 10, 5 * MIB + 3])
]
"""Every header with every size; each header and each size runs on every push."""


@pytest.mark.parametrize(("header", "size"), MESSAGES)
def test_message_arrives_as_sent(channel_ends, header, size):
    near, far = channel_ends.connected_ends()
    data = pseudo_random_bytes(size)
    sent = channel_ends.run_in_background(near.send, header, [memoryview(data)])
    assert receive_bytes(far) == (header, data)
    sent.result(PATIENCE_S)


@by_kind_of_large_messages
def test_a_hundred_mebibytes_arrive_as_they_were_sent(channel_ends):
    near, far = channel_ends.connected_ends()
    data = pseudo_random_bytes(100 * MIB + 17)
    sent = channel_ends.run_in_background(near.send, b"large", [memoryview(data)])
    header, payload = receive_bytes(far)
    assert header == b"large"
    assert payload == data
    sent.result(PATIENCE_S)


def test_views_of_any_type_and_shape_arrive_as_their_bytes(channel_ends):
    near, far = channel_ends.connected_ends()
    data = pseudo_random_bytes(128 << 10)
    views = [
        memoryview(data[:12_000]).cast("i"),
        memoryview(data[12_000:16_384]).cast("h"),
        memoryview(data[16_384:32_768]).cast("d"),
        memoryview(data[32_768:49_152]).cast("f", (64, 64)),
        memoryview(data[49_152:]).cast("h"),
    ]
    sent = channel_ends.run_in_background(near.send, b"typed", views)
    assert receive_bytes(far) == (b"typed", data)
    sent.result(PATIENCE_S)


def test_answer_travels_back(channel_ends):
    near, far = channel_ends.connected_ends()
    near.send(b"question")
    assert receive_bytes(far) == (b"question", b"")
    far.send(b"answer", [memoryview(b"yes")])
    assert receive_bytes(near) == (b"answer", b"yes")


def test_views_may_be_many_and_of_any_size_on_both_sides(channel_ends):
    near, far = channel_ends.connected_ends()
    data = pseudo_random_bytes(3 * MIB)
    sizes = [0, 1, 3, 700, 0, 65_537] * 60 + [1] * 2500
    out, at = [], 0
    for size in sizes:
        out.append(memoryview(data)[at : at + size])
        at += size
    out.append(memoryview(data)[at:])
    sent = channel_ends.run_in_background(near.send, b"", out)
    assert far.receive(idle_s=PATIENCE_S).payload_bytes == len(data)
    target = bytearray(len(data))
    cuts = [0, 5, 5, 6, *range(100, 300_000, 97), len(data)]
    far.receive_into([memoryview(target)[a:b] for a, b in itertools.pairwise(cuts)])
    assert target == data
    sent.result(PATIENCE_S)


@pytest.mark.parametrize("size", [1000, 5 * MIB + 17])
def test_payload_is_readable_while_it_arrives(channel_ends, size):
    near, far = channel_ends.connected_ends()
    data = pseudo_random_bytes(size)
    sent = channel_ends.run_in_background(near.send, b"", [memoryview(data)])
    assert far.receive(idle_s=PATIENCE_S).payload_bytes == size
    target = bytearray(size)
    there = [0]

    def check_arrived(count):
        assert target[there[-1] : count] == data[there[-1] : count]
        there.append(count)

    far.receive_into([memoryview(target)[:700], memoryview(target)[700:]], check_arrived)
    assert there[-1] == size
    assert there == sorted(set(there))
    assert len(there) > 3 or size < MIB
    sent.result(PATIENCE_S)


def test_views_of_other_types_are_sent_as_bytes(channel_ends):
    near, far = channel_ends.connected_ends()
    numbers = array.array("d", range(1000))
    near.send(b"", [memoryview(numbers)])
    target = array.array("d", bytes(8000))
    assert far.receive(idle_s=PATIENCE_S).payload_bytes == 8000
    far.receive_into([memoryview(target)])
    assert target == numbers


def test_noncontiguous_view_is_refused_and_the_channel_stays_open(channel_ends):
    near, far = channel_ends.connected_ends()
    with pytest.raises(RequestError, match="with gaps"):
        near.send(b"", [memoryview(bytes(10))[::2]])
    near.send(b"next")
    assert receive_bytes(far) == (b"next", b"")


def test_slices_of_files_arrive_among_views(channel_ends):
    near, far = channel_ends.connected_ends()
    data = pseudo_random_bytes(9 * MIB)
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile(dir="/dev/shm") as other:
        one.write(data)
        other.write(data)
        one.flush()
        other.flush()
        payload = [
            memoryview(b"first"),
            FileSlice(one.fileno(), MIB + 1, 2 * MIB),
            FileSlice(other.fileno(), 0, 9 * MIB),
            FileSlice(other.fileno(), 7, 0),
            memoryview(b"last"),
            FileSlice(one.fileno(), 9 * MIB - 3, 3),
        ]
        sent = channel_ends.run_in_background(near.send, b"files", payload)
        assert receive_bytes(far) == (b"files", b"first" + data[MIB + 1 : 3 * MIB + 1] + data + b"last" + data[-3:])
        sent.result(PATIENCE_S)


def test_messages_keep_their_order(channel_ends):
    near, far = channel_ends.connected_ends()
    sent = channel_ends.run_in_background(
        lambda: [near.send(b"%d" % n, [memoryview(pseudo_random_bytes(n * 700, n))]) for n in range(200)]
    )
    for n in range(200):
        assert receive_bytes(far) == (b"%d" % n, pseudo_random_bytes(n * 700, n))
    sent.result(PATIENCE_S)


@by_kind_of_large_messages
def test_both_sides_send_large_messages_at_the_same_time(channel_ends):
    near, far = channel_ends.connected_ends()

    def send_all(channel, side):
        for n in range(6):
            channel.send(b"%s%d" % (side, n), [memoryview(pseudo_random_bytes(6 * MIB + n, side))])

    def receive_all(channel, side):
        for n in range(6):
            header, payload = receive_bytes(channel)
            assert header == b"%s%d" % (side, n)
            assert payload == pseudo_random_bytes(6 * MIB + n, side)

    work = [
        channel_ends.run_in_background(send_all, near, b"n"),
        channel_ends.run_in_background(send_all, far, b"f"),
        channel_ends.run_in_background(receive_all, near, b"f"),
        channel_ends.run_in_background(receive_all, far, b"n"),
    ]
    for one in work:
        one.result(60)


def test_sent_views_may_be_changed(channel_ends):
    near, far = channel_ends.connected_ends()
    scratch = bytearray(100_000)
    for n in range(20):
        scratch[:] = bytes([n]) * len(scratch)
        sent = channel_ends.run_in_background(near.send, b"", [memoryview(scratch)])
        if n % 2:  # sent completely before it is read, where buffers allow that
            sent.result(PATIENCE_S)
            scratch[:] = b"\xff" * len(scratch)
        assert receive_bytes(far)[1] == bytes([n]) * len(scratch)
        sent.result(PATIENCE_S)


def test_views_are_released(channel_ends):
    near, far = channel_ends.connected_ends()
    source, target = bytearray(pseudo_random_bytes(MIB)), bytearray(MIB)
    with memoryview(source) as out, memoryview(target) as into:
        sent = channel_ends.run_in_background(near.send, b"", [out])
        far.receive(idle_s=PATIENCE_S)
        far.receive_into([into])
        sent.result(PATIENCE_S)
    source.append(1)  # raises BufferError while a view of it exists
    target.append(1)


def test_views_are_released_after_an_error(channel_ends):
    near, far = channel_ends.connected_ends()
    near.send(b"", [memoryview(bytes(80))])
    far.receive(idle_s=PATIENCE_S)
    target = array.array("d", bytes(88))
    with memoryview(target) as view, pytest.raises(RequestError) as caught:
        far.receive_into([view])
    target.append(1)
    assert "88 bytes were given" in str(caught.value)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_header_above_the_limit_ends_the_channel(channel_ends):
    near, far = channel_ends.connected_ends()
    far.max_header_bytes = 1000
    near.send(b"x" * 1000)
    assert receive_bytes(far) == (b"x" * 1000, b"")
    near.send(b"x" * 1001)
    with pytest.raises(ProtocolError, match="header of 1001 bytes, the limit is 1000"):
        far.receive(idle_s=PATIENCE_S)
    with pytest.raises(PeerUnreachableError, match="over"):
        far.receive(idle_s=PATIENCE_S)
    with pytest.raises(PeerUnreachableError, match="over"):
        far.send(b"")


def test_a_payload_above_the_limit_ends_the_channel(channel_ends):
    near, far = channel_ends.connected_ends()
    far.max_payload_bytes = 10
    near.send(b"", [memoryview(bytes(10))])
    assert receive_bytes(far) == (b"", bytes(10))
    near.send(b"", [memoryview(bytes(5)), memoryview(bytes(6))])
    with pytest.raises(ProtocolError, match="payload of 11 bytes, the limit is 10"):
        far.receive(idle_s=PATIENCE_S)
    with pytest.raises(PeerUnreachableError, match="over"):
        far.receive(idle_s=PATIENCE_S)


def test_oversized_message_is_not_sent(channel_ends):
    near, far = channel_ends.connected_ends()
    piece = memoryview(bytes(MIB))
    with pytest.raises(ProtocolError, match="above the limit"):
        near.send(b"", [piece] * (MAX_PAYLOAD_BYTES // MIB + 1))
    with pytest.raises(ProtocolError, match="above the limit"):
        near.send(bytes(MAX_MESSAGE_HEADER_BYTES + 1))
    near.send(b"next")
    assert receive_bytes(far) == (b"next", b"")


# -- wrong calls ------------------------------------------------------------------------------------------------------


def test_payload_must_be_read_before_the_next_message(channel_ends):
    near, far = channel_ends.connected_ends()
    near.send(b"one", [memoryview(b"payload")])
    near.send(b"two")
    far.receive(idle_s=PATIENCE_S)
    with pytest.raises(RequestError, match="7 bytes"):
        far.receive(idle_s=PATIENCE_S)
    far.discard()
    assert receive_bytes(far) == (b"two", b"")


def test_unread_payload_is_skipped(channel_ends):
    near, far = channel_ends.connected_ends()
    sent = channel_ends.run_in_background(near.send, b"one", [memoryview(pseudo_random_bytes(20 * MIB))])
    far.receive(idle_s=PATIENCE_S)
    far.discard()
    far.discard()
    sent.result(PATIENCE_S)
    near.send(b"two")
    assert receive_bytes(far) == (b"two", b"")


@pytest.mark.parametrize("size", [0, 6, 8])
def test_views_have_to_be_as_large_as_the_payload(channel_ends, size):
    near, far = channel_ends.connected_ends()
    near.send(b"", [memoryview(b"payload")])
    far.receive(idle_s=PATIENCE_S)
    target = bytearray(size)
    with pytest.raises(RequestError, match=f"{size} bytes were given to fill, the payload has 7"):
        far.receive_into([memoryview(target)])
    assert target == bytes(size)
    room = bytearray(7)
    far.receive_into([memoryview(room)])
    assert room == b"payload"


def test_read_only_target_is_refused(channel_ends):
    near, far = channel_ends.connected_ends()
    near.send(b"", [memoryview(b"payload")])
    far.receive(idle_s=PATIENCE_S)
    with pytest.raises(RequestError, match="read-only"):
        far.receive_into([memoryview(bytearray(3)), memoryview(bytes(4))])
    far.discard()
    near.send(b"next")
    assert receive_bytes(far) == (b"next", b"")


# -- files that are not what they were --------------------------------------------------------------------------------


def test_short_file_is_detected_before_sending(channel_ends):
    near, far = channel_ends.connected_ends()
    with tempfile.TemporaryFile() as file:
        file.write(bytes(100))
        file.flush()
        with pytest.raises(ShardDamagedError, match="has 100 bytes, but its slice ends at byte 101"):
            near.send(b"", [FileSlice(file.fileno(), 0, 100), FileSlice(file.fileno(), 51, 50)])
        for start, size in ((-1, 5), (5, -1)):
            with pytest.raises(RequestError, match="no file has"):
                near.send(b"", [FileSlice(file.fileno(), start, size)])
    near.send(b"next")
    assert receive_bytes(far) == (b"next", b"")


def test_file_truncated_during_a_send_closes_both_ends(channel_ends):
    near, far = channel_ends.connected_ends()
    with tempfile.TemporaryFile() as file:
        file.truncate(MORE_THAN_BUFFERS)
        sent = channel_ends.run_in_background(near.send, b"cut", [FileSlice(file.fileno(), 0, MORE_THAN_BUFFERS)])
        assert far.receive(idle_s=PATIENCE_S).payload_bytes == MORE_THAN_BUFFERS
        file.truncate(1000)
        with pytest.raises(PeerUnreachableError, match="before the end of a payload"):
            far.discard()
        with pytest.raises(ShardDamagedError, match="a file ended"):
            sent.result(PATIENCE_S)
    with pytest.raises(PeerUnreachableError, match="over"):
        near.send(b"next")


# -- peers that go or say nothing -------------------------------------------------------------------------------------


def test_a_peer_that_closes_between_messages_is_no_error(channel_ends):
    near, far = channel_ends.connected_ends()
    near.send(b"bye", [memoryview(b"now")])
    near.close()
    assert receive_bytes(far) == (b"bye", b"now")
    assert far.receive(idle_s=PATIENCE_S) is None
    assert far.receive(idle_s=PATIENCE_S) is None


def test_peer_that_closes_in_mid_payload_is_unreachable(channel_ends):
    near, far = channel_ends.connected_ends()
    sent = channel_ends.run_in_background(near.send, b"", [memoryview(bytes(MORE_THAN_BUFFERS))])
    assert far.receive(idle_s=PATIENCE_S).payload_bytes == MORE_THAN_BUFFERS
    near.close()
    with pytest.raises(PeerUnreachableError, match=r"before the end of a payload|reset"):
        far.discard()
    with pytest.raises(PeerUnreachableError, match="closed on this side"):
        sent.result(PATIENCE_S)


def send_forever(channel):
    while True:
        channel.send(b"", [memoryview(bytes(MIB))])


def test_sending_to_a_closed_peer_fails_eventually(channel_ends):
    near, far = channel_ends.connected_ends()
    far.close()
    with pytest.raises(PeerUnreachableError):
        send_forever(near)


def test_silent_peer_times_out(channel_ends):
    near, _ = channel_ends.connected_ends()
    with pytest.raises(PeerUnreachableError, match="silent"):
        near.receive(idle_s=0.05)
    with pytest.raises(PeerUnreachableError, match="over"):
        near.receive()


def test_peer_that_does_not_read_times_out(short_timeout_ends):
    near, _ = short_timeout_ends.connected_ends()
    with pytest.raises(PeerUnreachableError, match=r"silent|timed out"):
        near.send(b"", [memoryview(bytes(MORE_THAN_BUFFERS))])


# -- closing ----------------------------------------------------------------------------------------------------------


def test_close_wakes_a_receiver(channel_ends):
    near, _ = channel_ends.connected_ends()
    waiting = channel_ends.run_in_background(near.receive)
    near.close()
    with pytest.raises(PeerUnreachableError, match="closed on this side"):
        waiting.result(PATIENCE_S)


def test_close_wakes_a_sender_and_a_reader(channel_ends):
    near, far = channel_ends.connected_ends()
    sent = channel_ends.run_in_background(near.send, b"", [memoryview(bytes(MORE_THAN_BUFFERS))])
    incoming = far.receive(idle_s=PATIENCE_S)
    near.close()
    with pytest.raises(PeerUnreachableError, match="closed on this side"):
        sent.result(PATIENCE_S)
    target = bytearray(incoming.payload_bytes)
    with memoryview(target) as view:
        filled = channel_ends.run_in_background(far.receive_into, [view])
        far.close()
        with pytest.raises(PeerUnreachableError):
            filled.result(PATIENCE_S)
    target.append(1)  # raises BufferError while a view of it exists


def test_second_close_has_no_effect_and_ends_the_channel(channel_ends):
    near, _ = channel_ends.connected_ends()
    closing = [channel_ends.run_in_background(near.close) for _ in range(4)]
    for one in closing:
        one.result(PATIENCE_S)
    near.close()
    for work in (near.receive, near.discard, lambda: near.send(b""), lambda: near.receive_into([])):
        with pytest.raises(PeerUnreachableError, match="closed on this side"):
            work()


# -- listeners --------------------------------------------------------------------------------------------------------


def echo(channel):
    while (incoming := channel.receive()) is not None:
        payload = bytearray(incoming.payload_bytes)
        channel.receive_into([memoryview(payload)])
        channel.send(incoming.header, [memoryview(payload)])


def assert_still_serves(line, listener):
    channel = line.connect(listener)
    channel.send(b"hello", [memoryview(b"there")])
    assert receive_bytes(channel) == (b"hello", b"there")
    channel.close()


def test_fifty_channels_at_once_do_not_mix(channel_ends):
    def authenticate_and_echo(channel):
        channel.mark_authenticated()  # a listener closes the oldest unauthenticated channels of an address
        echo(channel)

    listener, entering = channel_ends.listen(authenticate_and_echo), threading.Lock()
    together = threading.Barrier(50, timeout=PATIENCE_S)
    wrong = []

    def exchange_messages(number):
        with entering:
            channel = channel_ends.here.connect(listener.address, timeout_s=PATIENCE_S)
            channel.send(b"in")
            receive_bytes(channel)
        try:
            together.wait()
            for turn in range(4):
                channel.send(b"%d" % number, [memoryview(pseudo_random_bytes(20_000 + number, (number, turn)))])
                if receive_bytes(channel) != (b"%d" % number, pseudo_random_bytes(20_000 + number, (number, turn))):
                    wrong.append(number)
        finally:
            channel.close()

    def record_errors(number):
        try:
            exchange_messages(number)
        except Exception as error:
            wrong.append((number, error))

    threads = [threading.Thread(target=record_errors, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_failed_connection_does_not_affect_others(channel_ends):
    def serve(channel):
        if receive_bytes(channel)[0] == b"trouble":
            raise ZeroDivisionError
        channel.send(b"hello", [memoryview(b"there")])

    listener = channel_ends.listen(serve)
    for _ in range(3):
        channel = channel_ends.connect(listener)
        channel.send(b"trouble")
        assert channel.receive(idle_s=PATIENCE_S) is None
    assert_still_serves(channel_ends, listener)


def test_a_channel_is_closed_when_its_work_is_done(channel_ends):
    channel = channel_ends.connect(channel_ends.listen(lambda channel: None))
    assert channel.receive(idle_s=PATIENCE_S) is None


def test_closing_a_listener_ends_its_channels_and_waits_for_their_threads(channel_ends):
    before = set(threading.enumerate())
    ended = []

    def serve(channel):
        channel.send(b"welcome")
        try:
            channel.receive()
        finally:
            ended.append(channel)

    listener = channel_ends.listen(serve)
    channels = [channel_ends.connect(listener) for _ in range(5)]
    for channel in channels:
        assert receive_bytes(channel) == (b"welcome", b"")
    listener.close()
    assert len(ended) == 5
    assert {one for one in set(threading.enumerate()) - before if one.name.startswith("peerstore")} == set()
    for channel in channels:
        assert channel.receive(idle_s=PATIENCE_S) is None
    with pytest.raises(PeerUnreachableError):
        channel_ends.here.connect(listener.address, timeout_s=1)
    listener.close()


def test_listener_can_be_closed_from_its_handler(channel_ends):
    closed = threading.Event()

    def serve(channel):
        channel.receive()
        listener.close()
        closed.set()

    listener = channel_ends.listen(serve)
    channel_ends.connect(listener).send(b"enough")
    assert closed.wait(PATIENCE_S)


def test_an_address_can_be_listened_on_again(channel_ends):
    first = channel_ends.listen(echo)
    assert_still_serves(channel_ends, first)
    first.close()
    again = channel_ends.there.listen(first.address, echo)
    try:
        assert_still_serves(channel_ends, again)
    finally:
        again.close()


def test_closed_listener_is_unreachable(channel_ends):
    listener = channel_ends.listen(echo)
    listener.close()
    with pytest.raises(PeerUnreachableError, match="cannot be reached"):
        channel_ends.here.connect(listener.address, timeout_s=5)


def test_an_address_has_a_port(channel_ends):
    with pytest.raises(RequestError, match="address"):
        channel_ends.there.listen("nowhere", echo)


def test_channels_name_their_peer(channel_ends):
    near, far = channel_ends.connected_ends()
    assert near.peer
    assert far.peer
    assert Path(near.peer).name == near.peer
