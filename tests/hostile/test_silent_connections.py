"""Unauthenticated connections, which must cost a listener little and block no client."""

from __future__ import annotations

import contextlib
import http.client
import logging
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from elastic.control.control_messages import StatusRequest
from elastic.control.coordinator_client import call_coordinator
from elastic.coordinator.coordinator import Coordinator
from elastic.coordinator.job_snapshot import CoordinatorSettings
from elastic.world.scaling_policy import ScalingPolicy
from integration.sagemaker.memory_service.http_frontend import TokenCheck, serve_shards
from peerstore.membership.topology import NodeId
from peerstore.settings import StoreSettings
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from peerstore.transport.authentication import authenticate_client, authenticate_to_server
from peerstore.transport.tcp import ConnectionAdmission, TcpTransport
from tests.support.control_planes import SECRET
from tests.support.local_nodes import wait_until
from tests.support.memory_servers import our_service
from tests.support.tls import node_files
from tieredckpt.agent import agent_http as metrics
from tieredckpt.agent.agent_service import NodeAgentService

STRANGERS = 64
MANY = 130
TOKEN = b"a token that is long enough"


class ServedListener(NamedTuple):
    """A listener, the call of a legitimate client, and the first bytes of a request."""

    address: str
    use: Callable[[], bool]
    begin: bytes


@contextlib.contextmanager
def peer_listener(tls=None, **limits) -> Iterator[ServedListener]:
    transport = TcpTransport(timeout_s=30, tls=tls, **limits)

    def serve(channel):
        authenticate_client(channel, me=NodeId("n2"), secret_of={"job": SECRET}.get)
        while channel.receive() is not None:
            channel.send(b"yes")

    listener = transport.listen("127.0.0.1:0", serve)

    def exchange_message() -> bool:
        with contextlib.closing(transport.connect(listener.address)) as channel:
            authenticate_to_server(channel, job="job", me=NodeId("n1"), secret=SECRET)
            channel.send(b"are you there")
            answer = channel.receive(within_s=30)
            return answer is not None and answer.header == b"yes"

    with contextlib.closing(listener):
        yield ServedListener(listener.address, exchange_message, b"\x16\x03\x01" if tls else b"tPS")


@contextlib.contextmanager
def coordinator_listener(**limits) -> Iterator[ServedListener]:
    one = Coordinator(
        CoordinatorSettings("job", ScalingPolicy(max_replicas=2), 1, store="nowhere:1"), SECRET, farewell_s=1.0
    )
    thread = threading.Thread(target=one.run)
    thread.start()
    yield ServedListener(
        one.address,
        lambda: call_coordinator(one.address, StatusRequest(), job="job", secret=SECRET).job == "job",
        b"tPS",
    )
    one.request_stop()
    thread.join()


@contextlib.contextmanager
def status_listener(**limits) -> Iterator[ServedListener]:
    limits = {"within_s": limits["proof_s"]} if limits else {}
    with (
        contextlib.closing(NodeStore(MemfdArena(), StoreSettings(budget="8MiB"))) as store,
        contextlib.closing(NodeAgentService(store)) as node,
        metrics.serve_metrics(node, "127.0.0.1:0", **limits) as address,
    ):
        yield ServedListener(address, lambda: get_status(address, "/status") == 200, b"GET /status HTTP/1.1\r\nA: ")


@contextlib.contextmanager
def memory_service_listener(token=b"", **limits) -> Iterator[ServedListener]:
    limits = {"within_s": limits["proof_s"]} if limits else {}
    with (
        our_service("8MiB") as (service, _),
        serve_shards(service, "127.0.0.1", 0, TokenCheck(token), None, **limits) as address,
    ):
        shown = {"Authorization": f"Bearer {token.decode()}"} if token else {}
        yield ServedListener(
            address,
            lambda: get_status(address, "/v1/cp/namespaces/a", shown) == 404,
            b"GET /v1/cp/namespaces/a HTTP/1.1\r\nA: ",
        )


def get_status(address: str, path: str, headers: dict[str, str] | None = None) -> int:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        answer.read()
        return answer.status


LISTENERS = {
    "peers": peer_listener,
    "peers over TLS": peer_listener,
    "coordinator": coordinator_listener,
    "status": status_listener,
    "memory service": memory_service_listener,
    "memory service with a token": lambda **limits: memory_service_listener(TOKEN, **limits),
}


@pytest.fixture(params=LISTENERS)
def listener(request, tmp_path):
    """Return the function that opens the listener."""
    make = LISTENERS[request.param]
    if "TLS" in request.param:
        return lambda **limits: make(node_files(tmp_path), **limits)
    return make


@pytest.fixture
def stranger_connection():
    """Open unauthenticated connections from a chosen address of this machine."""
    with contextlib.ExitStack() as stack:

        def connect(address: str, source: str) -> socket.socket:
            host, _, port = address.rpartition(":")
            return stack.enter_context(socket.create_connection((host, int(port)), 30, source_address=(source, 0)))

        yield connect


def is_open(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if not poller.poll(0):
        return True
    try:
        return bool(sock.recv(1 << 16))
    except OSError:
        return False


@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"], ids=["from elsewhere", "from the same address"])
def test_silent_connections_are_limited_and_block_no_client(listener, stranger_connection, source):
    with listener() as served:
        assert served.use()
        before = threading.active_count()
        silent = [stranger_connection(served.address, source) for _ in range(MANY)]
        assert served.use()
        wait_until(lambda: sum(map(is_open, silent)) <= STRANGERS, "the oldest connections are closed")
        assert threading.active_count() - before <= STRANGERS + 4
        for sock in silent[-8:]:
            with contextlib.suppress(OSError):
                sock.sendall(served.begin)
        assert served.use()


def test_slow_handshake_times_out(listener, stranger_connection, request):
    if request.node.callspec.params["listener"] == "coordinator":
        pytest.skip("the coordinator uses the peers' listener, and has no timeout of its own")
    with listener(proof_s=0.5) as served:
        sock = stranger_connection(served.address, "127.0.0.2")
        stop = threading.Event()

        def send_slowly():
            with contextlib.suppress(OSError):
                for byte in served.begin + b"x" * 10_000:
                    sock.sendall(bytes([byte]))
                    if stop.wait(0.02):
                        return

        dripping = threading.Thread(target=send_slowly)
        dripping.start()
        try:
            wait_until(lambda: not is_open(sock), "the connection is closed")
        finally:
            stop.set()
            dripping.join()
        assert served.use()


def test_authenticated_peer_stays_connected_despite_unauthenticated_ones(stranger_connection):
    with peer_listener(proof_s=0.5) as served:
        transport = TcpTransport(timeout_s=30)
        with contextlib.closing(transport.connect(served.address)) as channel:
            authenticate_to_server(channel, job="job", me=NodeId("n1"), secret=SECRET)
            silent = [stranger_connection(served.address, "127.0.0.1") for _ in range(MANY)]
            wait_until(lambda: not any(map(is_open, silent)), "all silent connections are closed")
            channel.send(b"are you there")
            assert channel.receive(within_s=30).header == b"yes"


def test_client_with_the_token_stays_connected(stranger_connection):
    with (
        memory_service_listener(TOKEN, proof_s=0.5) as served,
        contextlib.closing(http.client.HTTPConnection(served.address)) as kept,
    ):
        for _ in range(2):
            kept.request("GET", "/v1/cp/namespaces/a", headers={"Authorization": f"Bearer {TOKEN.decode()}"})
            answer = kept.getresponse()
            answer.read()
            assert answer.status == 404
            silent = [stranger_connection(served.address, "127.0.0.1") for _ in range(100)]
            wait_until(lambda silent=silent: not any(map(is_open, silent)), "all silent connections are closed")


def test_log_does_not_grow_with_unauthenticated_connections(listener, stranger_connection, caplog):
    caplog.set_level(logging.INFO)
    with listener() as served:
        for _ in range(MANY):
            sock = stranger_connection(served.address, "127.0.0.2")
            with contextlib.suppress(OSError):  # the listener may have refused it
                sock.sendall(b"\0" * 64)
                sock.shutdown(socket.SHUT_WR)
        assert served.use()
    assert len(caplog.records) < 20


# -- admission --------------------------------------------------------------------------------------------------------


class AdmissionGate:
    """An admission with a manual clock and socket pairs as connections."""

    def __init__(self, stack: contextlib.ExitStack, **options: int) -> None:
        self.now = 0.0
        self.rule = ConnectionAdmission("a listener", clock=lambda: self.now, **options)
        self._stack = stack
        stack.callback(self.rule.close)

    def connect(self, host):
        near, far = (self._stack.enter_context(one) for one in socket.socketpair())
        stranger = self.rule.admit(near, host)
        near.close()
        return stranger, far


@pytest.fixture
def admission_gate():
    with contextlib.ExitStack() as stack:
        yield lambda **options: AdmissionGate(stack, **options)


def test_oldest_connection_of_an_address_is_dropped_first(admission_gate):
    one = admission_gate(strangers=10, of_one=3)
    other = one.connect("b")
    crowd = [one.connect("a") for _ in range(3)]
    one.now = 2.0
    crowd.append(one.connect("a"))
    assert [is_open(far) for _, far in crowd] == [False, True, True, True]
    assert is_open(other[1])


def test_address_with_most_connections_loses_one_when_full(admission_gate):
    one = admission_gate(strangers=10, of_one=3)
    single = one.connect("b")
    crowd = [one.connect("a") for _ in range(9)]
    newcomer = one.connect("c")
    assert [is_open(far) for _, far in crowd] == [False, *[True] * 8]
    assert is_open(single[1])
    assert is_open(newcomer[1])


def test_new_connection_gets_a_minimum_time(admission_gate):
    one = admission_gate(strangers=2, of_one=1)
    first, second = one.connect("a"), one.connect("a")
    entered = []
    waiting = threading.Thread(target=lambda: entered.append(one.connect("a")))
    waiting.start()
    first[0].mark_authenticated()
    waiting.join(30)
    assert len(entered) == 1
    assert is_open(second[1])
    assert len(one.rule) == 2


def test_unauthenticated_connection_expires_and_an_authenticated_one_stays(admission_gate):
    one = admission_gate(within_s=5)
    slow, fast = one.connect("a"), one.connect("a")
    fast[0].mark_authenticated()
    one.now = 4.9
    assert one.rule.sweep() == pytest.approx(0.1)
    one.now = 5.0
    assert one.rule.sweep() is None
    assert (is_open(slow[1]), len(one.rule)) == (False, 0)


def test_unauthenticated_connections_get_a_share_of_the_open_file_limit(admission_gate):
    one = admission_gate(limit=lambda: 80, of_one=1)
    for number in range(30):
        one.now = 2.0 * number
        one.connect(str(number))
    assert len(one.rule) == 10


def test_dropped_connections_are_logged_once_a_minute(admission_gate, caplog):
    one = admission_gate(within_s=1)
    for number in range(100):
        one.now = number * 1.0
        one.rule.sweep()
        one.connect("10.0.0.9")
    assert len(caplog.records) == 2
    assert "10.0.0.9" in caplog.text
