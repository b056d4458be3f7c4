"""Truncated, oversized and malicious requests to the memory service, which must lose and leak nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from integration.sagemaker.memory_service.http_frontend import MemoryServiceMetrics, TokenCheck, serve_shards
from integration.sagemaker.memory_service.memory_service import MemoryService
from peerstore.store.node_store import NodeStore
from tests.support.memory_servers import our_service, request, request_on
from tests.support.stores import pinned_file

MIB = 1 << 20


class ServedNamespace:
    """A memory service with a namespace of one rank."""

    def __init__(self, address: str, service: MemoryService, store: NodeStore) -> None:
        self.address = address
        self.service = service
        self.store = store
        assert request(address, "POST", "/v1/cp/namespaces/a?num_ranks=1").status == 200

    def send_raw(self, wire: bytes, *, end: bool = True) -> bytes:
        """Send bytes on a new connection, and return everything received until it closes."""
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(wire)
            if end:
                connection.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(1 << 16):
                    found += data
            return found

    def damage_shard(self, step: int, *, at: int) -> None:
        key = next(fact.key for fact in self.service.holdings.local_facts() if fact.key.version == step)
        pin = self.store.pin(key)
        with pinned_file(pin).open("r+b") as file:
            file.seek(at)
            file.write(b"changed")
        self.store.unpin(pin.id)

    def lease_count(self) -> int:
        return self.store.status().arena.leases


@pytest.fixture
def served_namespace(request: pytest.FixtureRequest) -> Iterator[ServedNamespace]:
    with (
        our_service(getattr(request, "param", "8MiB")) as (service, store),
        serve_shards(service, "127.0.0.1", 0, TokenCheck(), None) as address,
    ):
        yield ServedNamespace(address, service, store)


PUT = "/v1/cp/checkpoints/a/0/{}"


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 100\r\n\r\npart",
        b"Content-Length: 3000000\r\n\r\n" + b"x" * 2_000_000,
        b"Transfer-Encoding: chunked\r\n\r\n5\r\ntor",
        b"Transfer-Encoding: chunked\r\n\r\n1e8480\r\n" + b"x" * 1_500_000,
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    ],
)
def test_truncated_body_keeps_the_old_shard_and_leaks_no_lease(served_namespace: ServedNamespace, rest: bytes) -> None:
    request(served_namespace.address, "POST", PUT.format(5), b"before")
    answer = served_namespace.send_raw(b"POST /v1/cp/checkpoints/a/0/5 HTTP/1.1\r\nHost: a\r\n" + rest)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert served_namespace.lease_count() == 0
    assert request(served_namespace.address, "GET", PUT.format(5)).body == b"before"


@pytest.mark.parametrize(
    "wire",
    [
        b"POST /v1/cp/checkpoints/a/0/5 HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde",
        b"POST /v1/cp/checkpoints/a/0/5 HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/cp/checkpoints/a/0/5 HTTP/1.1\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/cp/checkpoints/a/0/5 HTTP/1.1\r\nContent-Length: 1\r\nShard-Meta: a\r\n b: c\r\n\r\nx",
        b"POST /v1/cp/checkpoints/a/0/5 HTTP/1.1\r\nContent-Length: 1\r\nShard-Meta: " + b"m" * 20_000 + b"\r\n\r\nx",
    ],
)
def test_ambiguous_headers_are_refused(served_namespace: ServedNamespace, wire: bytes) -> None:
    """A proxy could parse these headers differently, which would allow request smuggling."""
    assert served_namespace.send_raw(wire).startswith(b"HTTP/1.1 400 ")
    assert request(served_namespace.address, "GET", PUT.format(5)).status == 404


@pytest.mark.parametrize(
    "wire", [b"", b"\r\n", b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 70_000]
)
def test_non_http_closes_only_its_connection(served_namespace: ServedNamespace, wire: bytes) -> None:
    served_namespace.send_raw(wire)
    assert request(served_namespace.address, "GET", "/health").status == 200


def test_shard_above_the_budget_is_413_before_a_lease(served_namespace: ServedNamespace) -> None:
    wire = b"POST /v1/cp/checkpoints/a/0/5 HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"
    answer = served_namespace.send_raw(wire)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"its budget is 8.0 MiB (--budget)" in answer
    assert (served_namespace.lease_count(), served_namespace.store.status().arena.slots) == (0, 0)


def test_refusal_reaches_a_client_that_sends_its_entire_body(served_namespace: ServedNamespace) -> None:
    answer = request(served_namespace.address, "POST", PUT.format(5), b"x" * (9 * MIB))
    assert answer.status == 413
    assert "does not fit" in answer.json["detail"]


def test_full_budget_is_507_with_advice(served_namespace: ServedNamespace) -> None:
    request(served_namespace.address, "POST", "/v1/cp/namespaces/b?num_ranks=2")
    for rank in (0, 1):
        assert (
            request(served_namespace.address, "POST", f"/v1/cp/checkpoints/b/{rank}/1", os.urandom(3 * MIB)).status
            == 200
        )
    answer = request(served_namespace.address, "POST", PUT.format(5), os.urandom(3 * MIB))
    assert answer.status == 507
    assert "6.0 MiB hold shards that are kept. Raise --budget" in answer.json["detail"]
    with contextlib.closing(http.client.HTTPConnection(served_namespace.address, timeout=60)) as connection:
        connection.request("POST", PUT.format(5), iter([os.urandom(MIB)] * 3), encode_chunked=True)
        assert connection.getresponse().status == 507
    assert served_namespace.lease_count() == 0
    assert request(served_namespace.address, "DELETE", "/v1/cp/namespaces/b").status == 200
    assert request(served_namespace.address, "POST", PUT.format(5), os.urandom(3 * MIB)).status == 200


def test_shard_received_during_its_namespace_deletion_is_discarded(served_namespace: ServedNamespace) -> None:
    host, _, port = served_namespace.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/cp/checkpoints/a/0/5 HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        assert request(served_namespace.address, "DELETE", "/v1/cp/namespaces/a").status == 200
        connection.sendall(b"body")
        assert connection.recv(1000).startswith(b"HTTP/1.1 404 ")
    request(served_namespace.address, "POST", "/v1/cp/namespaces/a?num_ranks=1")
    assert request(served_namespace.address, "GET", PUT.format(5)).status == 404
    assert (served_namespace.lease_count(), served_namespace.service.holdings.local_facts()) == (0, [])


def test_unwanted_body_is_refused_before_it_is_sent(served_namespace: ServedNamespace) -> None:
    wire = b"POST /v1/cp/checkpoints/nowhere/0/5 HTTP/1.1\r\nContent-Length: 400000\r\nExpect: 100-continue\r\n\r\n"
    assert served_namespace.send_raw(wire).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("served_namespace", ["64MiB"], indirect=True)
def test_damage_found_during_a_response_closes_it(served_namespace: ServedNamespace) -> None:
    """No other node has a copy, so the response must not appear complete."""
    request(served_namespace.address, "POST", PUT.format(5), os.urandom(20 * MIB))
    served_namespace.damage_shard(5, at=19 * MIB)
    with pytest.raises(http.client.IncompleteRead):
        request(served_namespace.address, "GET", PUT.format(5))
    assert request(served_namespace.address, "GET", PUT.format(5)).status == 404


def test_damaged_shard_is_not_served_and_its_step_not_listed(served_namespace: ServedNamespace) -> None:
    for step in (5, 6):
        request(served_namespace.address, "POST", PUT.format(step), os.urandom(MIB // 2))
    served_namespace.damage_shard(6, at=1000)
    assert request(served_namespace.address, "GET", PUT.format(6)).status == 404
    assert request(served_namespace.address, "GET", "/v1/cp/checkpoints/a/latest").json == [5]
    assert served_namespace.store.status().damage_reports


def test_shard_read_completes_during_its_deletion(served_namespace: ServedNamespace) -> None:
    body = os.urandom(3 * MIB)
    request(served_namespace.address, "POST", PUT.format(5), body)
    with contextlib.closing(http.client.HTTPConnection(served_namespace.address, timeout=60)) as connection:
        connection.request("GET", PUT.format(5))
        answer = connection.getresponse()
        found = answer.read(1000)
        assert request(served_namespace.address, "DELETE", PUT.format(5)).status == 200
        assert request(served_namespace.address, "POST", PUT.format(6), os.urandom(3 * MIB)).status == 200
        assert found + answer.read() == body


def test_range_request_returns_part_of_a_shard(served_namespace: ServedNamespace) -> None:
    body = os.urandom(2 * MIB + 17)
    request(served_namespace.address, "POST", PUT.format(5), body, {"Shard-Meta": "{}"})
    with contextlib.closing(http.client.HTTPConnection(served_namespace.address, timeout=60)) as connection:
        answer = request_on(connection, "GET", PUT.format(5), headers={"Range": "bytes=1000000-2000000"})
        assert (answer.status, answer.body, answer.headers["shard-meta"]) == (206, body[1_000_000:2_000_001], "{}")
        assert request_on(connection, "GET", PUT.format(5), headers={"Range": "bytes=9999999-"}).status == 416


def test_last_of_many_concurrent_puts_wins(served_namespace: ServedNamespace) -> None:
    bodies = [os.urandom(50_000) for _ in range(8)]
    threads = [
        threading.Thread(target=request, args=(served_namespace.address, "POST", PUT.format(5), body))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert request(served_namespace.address, "GET", PUT.format(5)).body in bodies
    request(served_namespace.address, "POST", PUT.format(5), b"the last")
    assert request(served_namespace.address, "GET", PUT.format(5)).body == b"the last"
    assert len(served_namespace.service.holdings.local_facts()) == 1


def test_service_metrics_are_exported(served_namespace: ServedNamespace) -> None:
    request(served_namespace.address, "POST", PUT.format(5), b"four")
    request(served_namespace.address, "GET", PUT.format(5))
    request(served_namespace.address, "GET", PUT.format(6))
    reporting = MemoryServiceMetrics(served_namespace.service, served_namespace.address)
    registry = CollectorRegistry()
    registry.register(reporting)
    text = generate_latest(registry).decode()
    for line in (
        'tieredckpt_memory_service_requests_total{kind="Get"} 2.0',
        "tieredckpt_memory_service_put_bytes_total 4.0",
        "tieredckpt_memory_service_get_bytes_total 4.0",
        "tieredckpt_memory_service_refused_total 1.0",
        "tieredckpt_memory_service_namespaces 1.0",
        "tieredckpt_memory_service_shard_bytes 4.0",
    ):
        assert line in text
    found = reporting.status()["namespaces"]["a"]
    assert (found["whole_steps"], found["steps"], found["size_bytes"]) == ([5], [5], 4)
