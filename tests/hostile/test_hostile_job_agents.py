"""Answers of hostile job agents, which must neither stop other jobs nor use up the operator's memory."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from integration.hyperpod.operator.elastic_agent_client import AgentReply, ElasticAgentClient
from tests.support.local_nodes import wait_until

MIB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\n"
LIMIT_S = 0.5
LONG_S = 20.0
"""Seconds that no call here may take, even on a slow machine."""


@contextlib.contextmanager
def hostile_agent(*, first: bytes = b"", again: bytes = b"", every_s: float = 0.02) -> Iterator[str]:
    """Run an agent that sends ``first``, then repeats ``again``; without both it is silent."""
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(LONG_S)
            connection.recv(1 << 16)
            connection.sendall(first)
            while again and not stop.wait(every_s):
                connection.sendall(again)
            if again or not first:
                stop.wait(LONG_S)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                thread = threading.Thread(target=serve, args=(listener.accept()[0],))
                threads.append(thread)
                thread.start()

    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(LONG_S)


def http_response(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


GOOD = http_response(b'{"status": "running"}')

SLOW = {
    "dripped status line": {"again": b"H"},
    "dripped headers": {"first": HEAD + b"A: ", "again": b"a"},
    "endless 100 Continue": {"first": b"", "again": b"HTTP/1.1 100 Continue\r\n\r\n"},
    "dripped chunks": {"first": HEAD + b"Transfer-Encoding: chunked\r\n\r\n", "again": b"1\r\n \r\n"},
    "dripped chunk length": {"first": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", "again": b"a"},
    "dripped body": {"first": HEAD + b"Content-Length: 100000\r\n\r\n", "again": b" "},
    "dripped trailers": {"first": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", "again": b"A: a\r\n"},
    "silence": {},
}


@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW)
def test_call_ends_at_its_deadline_for_any_answer(answer):
    with hostile_agent(**answer) as address, ElasticAgentClient(timeout_s=LIMIT_S) as client:
        before = time.monotonic()
        reply = client.poll_all({"a": address})["a"]
        assert time.monotonic() - before < LONG_S / 2
    assert reply.status is None
    assert address in reply.error


@pytest.mark.parametrize(
    "answer",
    [
        {"first": HEAD + b"Content-Length: 10000000\r\n\r\n" + b" " * 10_000_000},
        {"first": HEAD + b"Connection: close\r\n\r\n" + b" " * 10_000_000},
        {"first": (b"HTTP/1.1 100 Continue\r\n" + b"A: a\r\n" * 90 + b"\r\n") * 10_000},
        {"first": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1;%s\r\n \r\n" % (b"x" * 1000) * 5000},
    ],
    ids=["a long body", "a body without length", "interim answers", "chunk extensions"],
)
def test_no_answer_is_read_further_than_a_mebibyte(answer):
    with hostile_agent(**answer) as address, ElasticAgentClient(timeout_s=LONG_S) as client:
        reply = client.poll_all({"a": address})["a"]
    assert reply.status is None
    assert f"more than {MIB} bytes" in reply.error


def test_parsed_answer_is_bounded_by_its_size():
    """Worker data is forwarded unparsed, and unused fields are dropped."""
    data = b"[" + b",".join([b'{"":[]}'] * 100_000) + b"]"
    body = b'{"status": "running", "transitions": {%s}, "something": %s, "worker_data": %s}' % (
        b",".join(b'"s%d": "x"' % number for number in range(1000)),
        b"[[[[[[]]]]]]",
        data,
    )
    assert len(body) < MIB
    with hostile_agent(first=http_response(body)) as address, ElasticAgentClient(timeout_s=LONG_S) as client:
        client.poll_all({"a": address})
        tracemalloc.start()
        try:
            reply = client.poll_all({"a": address})["a"]
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert reply.status is not None
    assert reply.status.transition_times == {}
    assert len(reply.status.worker_data) == 100_000
    assert peak < 24 * MIB
    assert kept < 16 * MIB


@pytest.mark.parametrize(
    "fields",
    [
        {"progress": {f"p{number}": {"progressData": "x", "progressCount": 1} for number in range(1000)}},
        {"progress": {"p": {"progressData": "x" * 100_000, "progressCount": 1}}},
        {"progress": {"p": {"progressData": "x", "progressCount": 1 << 62}}},
        {"progress": {"p": {"progressData": "x", "progressCount": "9" * 5000}}},
        {"assigned_rank": str(1 << 62)},
    ],
    ids=["many prefixes", "a long text", "a large number", "a long number", "a large rank"],
)
def test_answer_fields_of_the_job_status_are_bounded(fields):
    first = http_response(json.dumps({"status": "running", **fields}).encode())
    with hostile_agent(first=first) as address, ElasticAgentClient(timeout_s=LONG_S) as client:
        reply = client.poll_all({"a": address})["a"]
    assert reply.status is None
    assert "is no agent" in reply.error


def test_silent_agents_of_one_job_leave_threads_for_the_next():
    with hostile_agent(first=GOOD) as good, ElasticAgentClient(timeout_s=LONG_S) as client:
        with hostile_agent() as silent:
            addresses = {str(number): silent for number in range(64)}
            many = threading.Thread(target=client.poll_all, args=(addresses,))
            many.start()
            before = time.monotonic()
            reply = client.poll_all({"a": good})["a"]
            assert reply.status is not None
            assert time.monotonic() - before < LONG_S / 2
        many.join()


def test_silent_agents_of_many_jobs_leave_the_next_job_alone():
    """A rack is lost, so hundreds of agents in a dozen jobs are silent. Other agents still answer."""
    silent: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                silent.append(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener, hostile_agent(first=GOOD) as good:
        accepting = threading.Thread(target=accept)
        accepting.start()
        addresses = {str(number): f"127.0.0.1:{listener.getsockname()[1]}" for number in range(32)}
        with ElasticAgentClient(timeout_s=10 * LONG_S) as client:
            jobs = [threading.Thread(target=client.poll_all, args=(addresses,)) for _ in range(12)]
            for job in jobs:
                job.start()
            wait_until(lambda: len(silent) >= 256, "the silent agents have requests")
            replies: dict[str, AgentReply] = {}
            other = threading.Thread(target=lambda: replies.update(client.poll_all({"a": good})))
            other.start()
            try:
                wait_until(lambda: replies, "the other job's agent answers", LONG_S)
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                accepting.join()
                for one in silent:
                    one.close()
                for job in jobs:
                    job.join()
                other.join()
            assert replies["a"].status is not None


def test_answers_of_one_job_are_bounded_in_total(monkeypatch):
    monkeypatch.setattr("integration.hyperpod.operator.elastic_agent_client._JOB_BYTES", 10 * len(GOOD))
    with hostile_agent(first=GOOD) as address, ElasticAgentClient(timeout_s=LONG_S) as client:
        replies = client.poll_all({str(number): address for number in range(100)})
    refused = [one for one in replies.values() if "together" in one.error]
    assert 0 < len(refused) < 100
    assert all(one.status is not None for one in replies.values() if one not in refused)
