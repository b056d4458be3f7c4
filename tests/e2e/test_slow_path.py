"""The slow test proxy shapes and breaks connections on loopback as configured."""

import contextlib
import socket
import threading
import time

import pytest

from tests.support.slow_path import SlowPath

pytestmark = pytest.mark.e2e
KIB = 1 << 10
MIB = 1 << 20


@contextlib.contextmanager
def line(**shape):
    """Yield a proxy and both ends of one connection through it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        with SlowPath(listener.getsockname(), **shape) as path, into(path) as client:
            server, _ = listener.accept()
            server.settimeout(20)
            with server:
                yield path, client, server


def into(path):
    return socket.create_connection(("127.0.0.1", path.port), timeout=20)


def received(sock, size):
    return sock.recv(size, socket.MSG_WAITALL)


def receive_to_end(sock):
    return b"".join(iter(lambda: sock.recv(64 * KIB), b""))


def until_reset(sock):
    """Return the number of bytes that arrive before a reset."""
    got = 0
    try:
        while block := sock.recv(5000):
            got += len(block)
    except ConnectionResetError:
        return got
    pytest.fail("the connection closed without a reset")


def in_background(sock, content):
    """Send while the test reads."""

    def work():
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_bytes_and_their_end_pass_both_ways():
    content = bytes(range(256)) * 16 * KIB
    with line() as (path, client, server):
        sender = in_background(client, content)
        assert receive_to_end(server) == content
        sender.join()
        server.sendall(b"the other half is still open")
        server.close()
        assert receive_to_end(client) == b"the other half is still open"
        assert (path.forth.passed_bytes, path.back.passed_bytes) == (len(content), 28)


def test_latency_applies_in_each_direction():
    with line(latency_s=0.1) as (_, client, server):
        began = time.monotonic()
        client.sendall(b"ping")
        assert received(server, 4) == b"ping"
        assert time.monotonic() - began >= 0.1
        server.sendall(b"pong")
        assert received(client, 4) == b"pong"
        assert time.monotonic() - began >= 0.2


def test_latency_does_not_limit_data_in_flight():
    """More bytes are in flight than the client's kernel buffers, and none has arrived."""
    with line(latency_s=600) as (path, client, server):
        client.sendall(bytes(14 * MIB))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(1)
        assert path.forth.passed_bytes == 0


def test_bandwidth_limits_a_single_direction():
    with line() as (path, client, server):
        path.forth.bytes_per_s = 4 * MIB
        server.sendall(b"not slowed")
        began = time.monotonic()
        sender = in_background(client, bytes(2 * MIB))
        assert received(client, 10) == b"not slowed"
        assert len(receive_to_end(server)) == 2 * MIB
        assert time.monotonic() - began >= 0.5
        sender.join()


def test_single_bit_is_flipped_once():
    with line() as (path, client, server):
        client.sendall(bytes(10))
        assert received(server, 10) == bytes(10)
        flipped = path.forth.flip_bit(at_byte=100)
        assert not flipped.is_set()
        client.sendall(bytes(300))
        assert received(server, 300) == bytes(100) + b"\1" + bytes(199)
        assert flipped.wait(10)
        server.sendall(bytes(300))
        assert received(client, 300) == bytes(300)


def test_connection_is_reset_after_the_configured_bytes():
    with line() as (path, client, server):
        happened = path.back.reset_after(1000)
        server.sendall(bytes(5000))
        assert happened.wait(10)
        assert path.back.passed_bytes == 1000
        assert until_reset(client) <= 1000
        assert until_reset(server) == 0
        with into(path) as other:
            other.sendall(b"a new one passes")


def test_data_sent_during_a_stall_arrives_after_it():
    with line() as (path, client, server):
        client.sendall(b"before")
        assert received(server, 6) == b"before"
        path.forth.stall()
        client.sendall(b"during")
        server.sendall(b"this way is open")
        assert received(client, 16) == b"this way is open"
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.recv(6)
        path.forth.resume()
        server.settimeout(20)
        assert received(server, 6) == b"during"


def test_missing_server_is_a_reset():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = listener.getsockname()
    with SlowPath(nobody) as path, pytest.raises(ConnectionResetError), into(path) as client:
        client.recv(1)


def test_closing_the_proxy_resets_open_connections():
    with line() as (path, client, server):
        client.sendall(b"x")
        assert received(server, 1) == b"x"
        path.close()
        assert until_reset(client) == until_reset(server) == 0


def test_startup_failure_is_raised():
    def refuse():
        raise PermissionError("may not enter")

    with pytest.raises(PermissionError, match="may not enter"), SlowPath(None, enter=refuse):
        pytest.fail("the proxy started")
