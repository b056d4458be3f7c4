"""Messages and open files on a Unix socket: limits, ends, refusals and forks."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest

from peerstore.errors import PeerUnreachableError, ProtocolError
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION, encode_frame
from peerstore.transport.unix import UnixChannel, UnixListener

PATIENCE_S = 200.0


@contextlib.contextmanager
def connected_channels(**there):
    ends = socket.socketpair()
    channels = UnixChannel(ends[0], "there"), UnixChannel(ends[1], "here", **there)
    with contextlib.closing(channels[0]), contextlib.closing(channels[1]):
        yield channels


@contextlib.contextmanager
def raw_and_channel():
    raw, other = socket.socketpair()
    raw.settimeout(PATIENCE_S)
    with raw, contextlib.closing(UnixChannel(other, "raw")) as channel:
        yield raw, channel


def header_of(channel):
    return channel.receive(idle_s=PATIENCE_S).header


def open_files():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_a_large_message_crosses_in_pieces():
    with connected_channels() as (here, there):
        data = os.urandom(5 << 20)
        sender = threading.Thread(target=here.send, args=(data,))
        sender.start()
        assert header_of(there) == data
        sender.join()


def test_a_message_above_the_limit_is_not_sent():
    with connected_channels() as (here, there):
        here.max_header_bytes = 100
        with pytest.raises(ProtocolError, match="above the limit of 100"):
            here.send(bytes(101))
        here.close()
        assert there.receive() is None


def test_end_between_messages_is_clean_and_within_a_message_an_error():
    with raw_and_channel() as (raw, channel):
        raw.sendall(encode_frame(b"complete") + encode_frame(b"cut off")[:-3])
        raw.close()
        assert header_of(channel) == b"complete"
        with pytest.raises(PeerUnreachableError, match="ended in the middle"):
            channel.receive()


def test_a_message_that_has_begun_must_end_in_time():
    with raw_and_channel() as (raw, channel):
        raw.sendall(encode_frame(b"slow")[:-1])
        channel.timeout_s = 0.01
        with pytest.raises(PeerUnreachableError, match="silent"):
            channel.receive()


def test_an_open_file_travels_with_its_message(tmp_path):
    before = open_files()
    (tmp_path / "shard").write_bytes(b"sealed bytes")
    with connected_channels(takes_files=True) as (here, there), (tmp_path / "shard").open("rb") as file:
        here.send(b"without")
        here.send(b"with", fd=file.fileno())
        here.send(b"without again")
        assert (header_of(there), there.take_file()) == (b"without", None)
        assert header_of(there) == b"with"
        fd = there.take_file()
        assert os.pread(fd, 100, 0) == b"sealed bytes"
        os.close(fd)
        assert (header_of(there), there.take_file()) == (b"without again", None)
    assert open_files() == before


def test_files_that_nobody_takes_are_closed(tmp_path):
    before = open_files()
    for takes_files in (True, False):
        with connected_channels(takes_files=takes_files) as (here, there), (tmp_path / "file").open("wb") as file:
            for _ in range(3):
                here.send(b"with", fd=file.fileno())
                header_of(there)
    assert open_files() == before


def test_a_message_that_violates_the_protocol_gets_a_reason():
    """The reason also arrives if the other side's bytes were not all read."""
    with raw_and_channel() as (raw, channel):
        channel.describe_refusal = lambda error: str(error).encode()
        raw.sendall(FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION + 1, 4, 0) + bytes(50_000))
        with pytest.raises(ProtocolError, match="version 2"):
            channel.receive()
        channel.close()
        answer = raw.recv(1 << 16)
        assert answer[FRAME_PREFIX.size :] == b"raw sends messages of version 2, this is version 1"
        assert raw.recv(1) == b""


def test_process_of_another_user_gets_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(UnixChannel, "credentials", (1, os.getuid() + 1))
    refused = {"name": "store", "describe_refusal": lambda error: str(error).encode()}
    with contextlib.closing(UnixListener(tmp_path / "sock", lambda _: pytest.fail("served"), **refused)) as listener:
        listener.start()
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(PATIENCE_S)
            raw.connect(str(tmp_path / "sock"))
            with contextlib.closing(UnixChannel(raw.dup(), "store")) as channel:
                reason = f"user {os.getuid() + 1} may not use the store of user {os.getuid()}"
                assert header_of(channel) == reason.encode()
                assert channel.receive() is None
        assert listener.rejected == 1


def test_sending_without_blocking_reports_a_full_buffer():
    with connected_channels() as (here, there):
        assert here.try_send(b"small")
        assert header_of(there) == b"small"
        while here.try_send(bytes(100_000)):
            """Fill the buffer."""
        assert not here.try_send(bytes(100_000))


def test_closing_wakes_a_waiting_thread():
    with connected_channels() as (here, _there):
        ended = []

        def wait():
            with pytest.raises(PeerUnreachableError, match="closed on this side"):
                here.receive()
            ended.append(True)

        waiting = threading.Thread(target=wait)
        waiting.start()
        here.close()
        waiting.join(PATIENCE_S)
        assert ended


def test_a_forked_process_leaves_its_parents_connection_open():
    with connected_channels() as (here, there):
        child = os.fork()
        if not child:
            here.abandon()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        here.send(b"still there")
        assert header_of(there) == b"still there"
