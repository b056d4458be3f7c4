"""TCP's own behavior: sockets, interfaces, certificates, and peers that send invalid bytes."""

import contextlib
import os
import queue
import socket
import threading

import pytest

from peerstore.errors import PeerRefusedError, PeerUnreachableError, ProtocolError, RequestError
from peerstore.transport import framing
from peerstore.transport.base import FileSlice
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX
from peerstore.transport.tcp import TcpTransport
from peerstore.transport.tls import TlsStream
from tests.support.channel_pairs import PATIENCE_S, ChannelPair
from tests.support.tls import Authority, node_files


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


def prefix(header, payload, *, magic=FRAME_MAGIC, version=1):
    return FRAME_PREFIX.pack(magic, version, header, payload)


@pytest.fixture
def raw(opened):
    """One end of a socket, and the channel at the other end."""

    def connect(timeout_s=PATIENCE_S):
        line = opened(ChannelPair(TcpTransport(timeout_s=timeout_s), TcpTransport(timeout_s=timeout_s), "127.0.0.1:0"))
        arrived, done = queue.Queue(), threading.Event()
        listener = line.listen(lambda channel: (arrived.put(channel), done.wait()))
        host, _, port = listener.address.rpartition(":")
        sock = opened(socket.create_connection((host, int(port))))
        line._stack.callback(done.set)
        return sock, arrived.get(timeout=PATIENCE_S)

    return connect


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (prefix(5, 0, magic=b"HTT") + b"hello", "something else than a message"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", "something else than a message: b'GET /metrics HTT'"),
        (prefix(5, 0, version=2) + b"hello", "messages of version 2, this is version 1"),
        (prefix(0xFFFFFFFF, 0), "header of 4294967295 bytes, the limit is 67108864"),
        (prefix(0, 1 << 63), "payload of 9223372036854775808 bytes, the limit is 1073741824"),
    ],
)
def test_unknown_bytes_close_the_channel(raw, data, message):
    sock, channel = raw()
    sock.sendall(data)
    with pytest.raises(ProtocolError, match=message):
        channel.receive(idle_s=PATIENCE_S)
    with pytest.raises(PeerUnreachableError, match="over"):
        channel.receive()


@pytest.mark.parametrize("data", [b"t", prefix(5, 0)[:-1], prefix(5, 0), prefix(5, 0) + b"hell"])
def test_endless_header_times_out(raw, data):
    sock, channel = raw(timeout_s=0.05)
    sock.sendall(data)
    with pytest.raises(PeerUnreachableError, match=r"silent|too long"):
        channel.receive(idle_s=PATIENCE_S)


@pytest.mark.parametrize("data", [b"t", prefix(5, 0), prefix(5, 0) + b"hell"])
def test_truncated_header_differs_from_a_clean_close(raw, data):
    sock, channel = raw()
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerUnreachableError, match="in the middle of a header"):
        channel.receive(idle_s=PATIENCE_S)


def test_a_header_that_drips_has_to_be_complete_in_time_all_the_same(raw):
    """Every byte is progress, but the complete message takes too long."""
    sock, channel = raw(timeout_s=0.3)
    stop = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            sock.sendall(prefix(1 << 20, 0))
            while not stop.wait(0.02):
                sock.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(PeerUnreachableError, match=r"too long|silent"):
        channel.receive(idle_s=PATIENCE_S)
    stop.set()
    thread.join()


def test_stalled_payload_times_out(raw):
    sock, channel = raw(timeout_s=0.05)
    sock.sendall(prefix(0, 100) + bytes(99))
    assert channel.receive(idle_s=PATIENCE_S).payload_bytes == 100
    target = bytearray(100)
    with pytest.raises(PeerUnreachableError, match=r"silent for 0\.05 s"):
        channel.receive_into([memoryview(target)])


def test_connection_reset_is_an_unreachable_peer(raw):
    sock, channel = raw()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    with pytest.raises(PeerUnreachableError, match="reset"):
        channel.receive(idle_s=PATIENCE_S)


def test_files_without_kernel_sendfile_are_read(raw, monkeypatch):
    sock, channel = raw()

    def unwilling(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(framing.os, "sendfile", unwilling)
    fd = os.memfd_create("unwilling")
    os.write(fd, bytes(range(256)) * 4000)
    channel.send(b"", [FileSlice(fd, 10, 1_000_000)])
    got = bytearray()
    while len(got) < FRAME_PREFIX.size + 1_000_000:
        got += sock.recv(1 << 20)
    assert got == prefix(0, 1_000_000) + (bytes(range(256)) * 4000)[10:1_000_010]
    os.close(fd)


def test_sockets_use_nodelay_keepalive_and_a_user_timeout(opened):
    transport = TcpTransport(timeout_s=7)
    listener = opened(transport.listen("127.0.0.1:0", lambda channel: channel.receive()))
    sock = opened(transport.connect(listener.address))._stream._sock
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


def hello(channel):
    channel.send(channel.peer.encode())


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_addresses_of_either_family_and_names(opened, address):
    if "::1" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    transport = TcpTransport()
    listener = opened(transport.listen(address, hello))
    assert listener.address.rpartition(":")[0] == address.rpartition(":")[0]
    assert opened(transport.connect(listener.address)).receive().header


@pytest.mark.parametrize("address", [":0", "0.0.0.0:0", "[::]:0"])
def test_wildcard_listener_reports_a_reachable_address(opened, address):
    transport = TcpTransport()
    listener = opened(transport.listen(address, hello))
    host = listener.address.rpartition(":")[0]
    assert host not in {"", "0.0.0.0", "[::]"}
    assert opened(transport.connect(listener.address)).receive().header


def test_connections_are_bound_to_the_interface(opened):
    listener = opened(TcpTransport(interface="lo").listen(":0", hello))
    assert listener.address.startswith("127.0.0.1:")
    bound = opened(TcpTransport(interface="127.0.0.2").connect(listener.address))
    assert bound.receive().header.startswith(b"127.0.0.2:")


def test_missing_interface_is_refused_at_once():
    with pytest.raises(RequestError, match="no interface 'eth77'"):
        TcpTransport(interface="eth77")


def test_interface_without_a_route_is_reported(opened):
    listener = opened(TcpTransport().listen("127.0.0.1:0", hello))
    with pytest.raises(PeerUnreachableError, match="has no IPv4 address"):
        TcpTransport(interface="fd00::1").connect(listener.address)


def test_unresponsive_peer_times_out(opened):
    """The backlog is full: the kernel accepts no more connections and sends no reply."""
    full = opened(socket.socket())
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    host, port = full.getsockname()
    with contextlib.ExitStack() as crowd, pytest.raises(PeerUnreachableError, match="cannot be reached"):
        fill(crowd, f"{host}:{port}")


def fill(crowd, address):
    while True:
        crowd.enter_context(contextlib.closing(TcpTransport().connect(address, timeout_s=0.2)))


def test_more_connections_than_allowed_are_turned_away_until_others_end(opened):
    transport = TcpTransport(most=3)
    arrived = queue.Queue()

    def serve(channel):
        channel.send(b"in")
        channel.receive()
        arrived.put(None)

    listener = opened(transport.listen("127.0.0.1:0", serve))
    inside = [opened(transport.connect(listener.address)) for _ in range(3)]
    assert [channel.receive().header for channel in inside] == [b"in"] * 3
    turned_away = opened(transport.connect(listener.address))
    assert turned_away.receive(idle_s=PATIENCE_S) is None
    inside[0].close()
    arrived.get(timeout=PATIENCE_S)
    while (answer := opened(transport.connect(listener.address)).receive(idle_s=PATIENCE_S)) is None:
        """Its thread is still on its way out."""
    assert answer.header == b"in"


# -- TLS --------------------------------------------------------------------------------------------------------------


def meet(opened, server, client):
    """Connect the client to the server and return the server's first message."""
    listener = opened(TcpTransport(tls=server).listen("127.0.0.1:0", hello))
    channel = opened(TcpTransport(tls=client).connect(listener.address, timeout_s=PATIENCE_S))
    return channel.receive(idle_s=PATIENCE_S)


def test_nodes_of_the_same_authority_connect(opened, tmp_path):
    authority = Authority(tmp_path)
    one, two = (
        node_files(tmp_path / "x")._replace(certificate=certificate, key=key, authority=authority.trusted)
        for certificate, key in (authority.issue("one"), authority.issue("two"))
    )
    assert meet(opened, one, two).header


def test_a_node_of_another_authority_is_refused_by_the_server(opened, tmp_path):
    ours, theirs = node_files(tmp_path / "ours"), node_files(tmp_path / "theirs")
    trusting = theirs._replace(authority=ours.authority)
    with pytest.raises(PeerRefusedError, match="same authority"):
        meet(opened, ours, trusting)


def test_refused_node_learns_the_reason_while_sending(opened, tmp_path):
    ours, theirs = node_files(tmp_path / "ours"), node_files(tmp_path / "theirs")
    listener = opened(TcpTransport(tls=ours).listen("127.0.0.1:0", hello))
    channel = opened(TcpTransport(tls=theirs._replace(authority=ours.authority)).connect(listener.address))
    channel.send(b"x" * (200 << 10))
    with pytest.raises(PeerRefusedError, match="same authority"):
        channel.receive(idle_s=PATIENCE_S)


def test_a_server_of_another_authority_is_refused_by_the_client(opened, tmp_path):
    ours, theirs = node_files(tmp_path / "ours"), node_files(tmp_path / "theirs")
    with pytest.raises(PeerRefusedError, match="not accepted here"):
        meet(opened, theirs, ours)


def test_certificate_names_are_checked_only_when_enabled(opened, tmp_path):
    moved = node_files(tmp_path / "moved", address="10.9.9.9")
    assert meet(opened, moved, moved).header
    with pytest.raises(PeerRefusedError, match=r"not accepted here.*127\.0\.0\.1"):
        meet(opened, moved, moved._replace(check_names=True))
    proper = node_files(tmp_path / "proper", check_names=True)
    assert meet(opened, proper, proper).header


def test_client_without_tls_is_refused_and_the_listener_continues(opened, tmp_path):
    tls = node_files(tmp_path / "tls")
    listener = opened(TcpTransport(tls=tls).listen("127.0.0.1:0", hello))
    plain = opened(TcpTransport().connect(listener.address))
    plain.send(b"x" * 100)
    with pytest.raises((ProtocolError, PeerUnreachableError)):
        raise_if_closed(plain.receive(idle_s=PATIENCE_S))
    assert opened(TcpTransport(tls=tls).connect(listener.address)).receive().header


def raise_if_closed(incoming):
    if incoming is None:
        raise PeerUnreachableError


def test_a_server_without_tls_is_found_out(opened, tmp_path):
    listener = opened(TcpTransport().listen("127.0.0.1:0", lambda channel: channel.receive()))
    with pytest.raises((PeerUnreachableError, PeerRefusedError)):
        TcpTransport(tls=node_files(tmp_path / "tls")).connect(listener.address, timeout_s=PATIENCE_S)


def test_silent_tls_clients_block_no_other_client(opened, tmp_path):
    tls = node_files(tmp_path / "tls")
    listener = opened(TcpTransport(tls=tls).listen("127.0.0.1:0", hello))
    host, _, port = listener.address.rpartition(":")
    for _ in range(5):
        opened(socket.create_connection((host, int(port))))
    assert opened(TcpTransport(tls=tls).connect(listener.address)).receive().header


def test_invalid_tls_files_are_refused_at_once(tmp_path):
    tls = node_files(tmp_path / "tls")
    with pytest.raises(RequestError, match=r"absent.* cannot be used"):
        TcpTransport(tls=tls._replace(key=tmp_path / "absent"))
    with pytest.raises(RequestError, match="cannot be used"):
        TcpTransport(tls=tls._replace(authority=tls.key))


def test_certificates_can_be_renewed_under_a_running_listener(opened, tmp_path):
    tls = node_files(tmp_path / "tls")
    transport = TcpTransport(tls=tls)
    listener = opened(transport.listen("127.0.0.1:0", hello))
    assert opened(transport.connect(listener.address)).receive().header
    node_files(tmp_path / "tls")
    assert opened(transport.connect(listener.address)).receive().header


def test_only_tls_1_3_is_used(opened, tmp_path):
    tls = node_files(tmp_path / "tls")
    listener = opened(TcpTransport(tls=tls).listen("127.0.0.1:0", hello))
    channel = opened(TcpTransport(tls=tls).connect(listener.address))
    assert isinstance(channel._stream, TlsStream)
    assert channel._stream._sock.version() == "TLSv1.3"
