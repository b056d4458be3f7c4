"""Random request streams, compared with the server that AWS's library is tested against."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.example_counts import examples
from tests.support.memory_servers import HttpResponse, aws_server, our_server, request_on

NAMES = ["a", "job-1"]
RANKS = [0, 1, 2, 16]
STEPS = [0, 7, 8, 9, 500]
DIFFERENCES = {
    "latest lists whole steps": "theirs lists every step of which anything is there, and a reader takes the newest",
    "a step that failed counts out no whole one": "theirs keeps each rank's highest steps, whatever they lack",
    "what was just put is kept": "theirs deletes the lowest step, also when that is the one just put",
    "numbers are digits": "theirs takes ' 1', '1_0' and '1.0' too, ours says 422",
    "numbers below 0, no ranks, no steps to keep": "theirs takes them, ours says 422",
    "ranks from 2^20, steps from 2^62": "theirs takes them, ours says 422",
    "names of 1 to 128 letters, digits, '.', '_', '-'": "theirs takes any without a slash, ours says 422",
    "a path that ends with a slash": "theirs redirects, ours says 404",
    "accept-ranges, and 206 to Range": "theirs has no ranges",
    "413, 507, 503, 401": "theirs has neither a budget, other nodes nor a token",
}
"""All differences. The random streams can reach only the first two."""


@dataclass(frozen=True)
class SentRequest:
    method: str
    path: str
    body: bytes | None = None
    meta: str | None = None


numbers = st.sampled_from(["0", "1", "2", "16", "x", "", "007"])
names = st.sampled_from([*NAMES, "nowhere"])
shards = st.builds(
    "/v1/cp/checkpoints/{}/{}/{}".format, names, st.sampled_from([*RANKS, "r"]), st.sampled_from([*STEPS, "s"])
)
metas = st.none() | st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=60)
requests = st.one_of(
    st.builds(SentRequest, st.sampled_from(["GET", "DELETE", "PUT"]), st.builds("/v1/cp/namespaces/{}".format, names)),
    st.builds(
        SentRequest,
        st.just("POST"),
        st.builds("/v1/cp/namespaces/{}?num_ranks={}&steps_retained=50".format, names, st.sampled_from("123x")),
    ),
    st.builds(SentRequest, st.just("POST"), st.just("/v1/cp/namespaces/a?steps_retained=4")),
    st.builds(SentRequest, st.just("POST"), shards, st.binary(max_size=40), metas),
    st.builds(SentRequest, st.just("POST"), shards, st.binary(max_size=40), metas),
    st.builds(SentRequest, st.just("POST"), shards, st.binary(max_size=40), metas),
    st.builds(SentRequest, st.sampled_from(["GET", "GET", "DELETE", "PATCH"]), shards),
    st.builds(SentRequest, st.just("GET"), st.builds("/v1/cp/checkpoints/{}/latest?limit={}".format, names, numbers)),
    st.builds(SentRequest, st.just("GET"), st.builds("/v1/cp/checkpoints/{}/latest".format, names)),
    st.builds(SentRequest, st.sampled_from(["POST", "POST", "GET"]), st.just("/v1/cp/cluster/reset")),
)
streams = st.lists(requests, max_size=30).map(
    lambda stream: [
        *(SentRequest("POST", f"/v1/cp/namespaces/{name}?num_ranks=2&steps_retained=50") for name in NAMES),
        *stream,
    ]
)


@pytest.fixture(scope="module")
def both_connections() -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPConnection]]:
    with aws_server() as one, our_server() as other:
        connections = http.client.HTTPConnection(one, timeout=60), http.client.HTTPConnection(other, timeout=60)
        with contextlib.closing(connections[0]), contextlib.closing(connections[1]):
            for connection in connections:
                assert send(connection, SentRequest("GET", "/health")).status == 200  # opens the persistent connection
            yield connections


def send(connection: http.client.HTTPConnection, sent: SentRequest) -> HttpResponse:
    headers = {} if sent.meta is None else {"Shard-Meta": sent.meta}
    answer = request_on(connection, sent.method, sent.path, sent.body, headers)
    if answer.headers.get("content-type") != "application/json":
        return answer
    return HttpResponse(answer.status, {"content-type": "application/json"}, json.dumps(answer.json).encode())


def complete_steps(connection: http.client.HTTPConnection, name: str, listed: list[int]) -> list[int]:
    """Return the steps of which their server has all ranks."""
    ranks = send(connection, SentRequest("GET", f"/v1/cp/namespaces/{name}")).json["num_ranks"]
    shards = {step: [f"/v1/cp/checkpoints/{name}/{rank}/{step}" for rank in range(ranks)] for step in listed}
    return [
        step for step in listed if all(send(connection, SentRequest("GET", one)).status == 200 for one in shards[step])
    ]


def expected_response(connection: http.client.HTTPConnection, sent: SentRequest, answer: HttpResponse) -> HttpResponse:
    """Return the response that ours must give where the servers differ."""
    path, _, query = sent.path.partition("?")
    if not path.endswith("/latest") or answer.status != 200:
        return answer
    name = path.split("/")[-2]
    listed = send(connection, SentRequest("GET", f"{path}?limit=1000")).json
    limit = int(query.partition("=")[2] or 5)
    return HttpResponse(200, answer.headers, json.dumps(complete_steps(connection, name, listed)[:limit]).encode())


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(stream=streams)
def test_both_servers_answer_the_same(both_connections: tuple[Any, Any], stream: list[SentRequest]) -> None:
    for connection in both_connections:
        send(connection, SentRequest("POST", "/v1/cp/cluster/reset"))
    for sent in stream:
        answer = expected_response(both_connections[0], sent, send(both_connections[0], sent))
        assert send(both_connections[1], sent) == answer, sent


@pytest.mark.nightly
@settings(max_examples=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stream=streams)
def test_both_servers_answer_the_same_over_many_requests(
    both_connections: tuple[Any, Any], stream: list[SentRequest]
) -> None:
    for connection in both_connections:
        send(connection, SentRequest("POST", "/v1/cp/cluster/reset"))
    for sent in stream:
        answer = expected_response(both_connections[0], sent, send(both_connections[0], sent))
        assert send(both_connections[1], sent) == answer, sent


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    retained=st.integers(2, 4),
    ranks=st.integers(1, 3),
    gaps=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    order=st.randoms(use_true_random=False),
)
def test_both_servers_list_and_retain_the_same_complete_saves(
    both_connections: tuple[Any, Any], retained: int, ranks: int, gaps: list[int], order: Any
) -> None:
    """The ranks of a step save in any order, the plan last, as the library does: no response differs."""
    paths = ["/v1/cp/checkpoints/a/latest?limit=3", "/v1/cp/checkpoints/a/latest"]
    for connection in both_connections:
        send(connection, SentRequest("POST", "/v1/cp/cluster/reset"))
        send(connection, SentRequest("POST", f"/v1/cp/namespaces/a?num_ranks={ranks + 1}&steps_retained={retained}"))
    steps = [sum(gaps[: at + 1]) for at in range(len(gaps))]
    for step in steps:
        for rank in [*order.sample(range(ranks), ranks), ranks]:
            sent = SentRequest("POST", f"/v1/cp/checkpoints/a/{rank}/{step}", b"%d" % step)
            assert send(both_connections[0], sent) == send(both_connections[1], sent)
        shards = [f"/v1/cp/checkpoints/a/{rank}/{at}" for rank in range(ranks + 1) for at in steps]
        for path in [*paths, *shards]:
            assert send(both_connections[0], SentRequest("GET", path)) == send(
                both_connections[1], SentRequest("GET", path)
            ), path


WHERE_THEY_DIFFER = [
    ("numbers are digits", "POST", "/v1/cp/checkpoints/a/1_0/1", 200, 422),
    ("numbers are digits", "POST", "/v1/cp/checkpoints/a/0/1.0", 200, 422),
    ("numbers below 0, no ranks, no steps to keep", "POST", "/v1/cp/checkpoints/a/-1/1", 200, 422),
    ("numbers below 0, no ranks, no steps to keep", "POST", "/v1/cp/namespaces/b?num_ranks=0", 200, 422),
    ("ranks from 2^20, steps from 2^62", "POST", f"/v1/cp/checkpoints/a/0/{1 << 62}", 200, 422),
    ("ranks from 2^20, steps from 2^62", "POST", f"/v1/cp/checkpoints/a/{1 << 20}/0", 200, 422),
    ("names of 1 to 128 letters, digits, '.', '_', '-'", "POST", "/v1/cp/namespaces/b%20c?num_ranks=1", 200, 422),
    ("names of 1 to 128 letters, digits, '.', '_', '-'", "POST", "/v1/cp/namespaces/..?num_ranks=1", 200, 422),
    ("a path that ends with a slash", "GET", "/v1/cp/namespaces/a/", 307, 404),
]


@pytest.mark.parametrize(("difference", "method", "path", "status", "our_status"), WHERE_THEY_DIFFER)
def test_known_differences_between_the_servers(
    both_connections: tuple[Any, Any], difference: str, method: str, path: str, status: int, our_status: int
) -> None:
    assert difference in DIFFERENCES
    for connection in both_connections:
        send(connection, SentRequest("POST", "/v1/cp/cluster/reset"))
        send(connection, SentRequest("POST", "/v1/cp/namespaces/a?num_ranks=1"))
    found = [send(connection, SentRequest(method, path, b"x")).status for connection in both_connections]
    assert found == [status, our_status]


def test_failed_saves_evict_the_last_good_step_only_on_the_aws_server(both_connections: tuple[Any, Any]) -> None:
    """After four saves of rank 0 alone, AWS's server has evicted its shard of the complete step."""
    for connection in both_connections:
        send(connection, SentRequest("POST", "/v1/cp/cluster/reset"))
        send(connection, SentRequest("POST", "/v1/cp/namespaces/a?num_ranks=3&steps_retained=3"))
        for rank in range(3):
            send(connection, SentRequest("POST", f"/v1/cp/checkpoints/a/{rank}/100", b"good"))
        for step in (110, 120, 130, 140):
            send(connection, SentRequest("POST", f"/v1/cp/checkpoints/a/0/{step}", b"of a save that failed"))
    found = [
        [send(connection, SentRequest("GET", f"/v1/cp/checkpoints/a/{rank}/100")).status for rank in range(3)]
        for connection in both_connections
    ]
    assert found == [[404, 200, 200], [200, 200, 200]]
    listed = [
        send(connection, SentRequest("GET", "/v1/cp/checkpoints/a/latest?limit=3")).json
        for connection in both_connections
    ]
    assert listed == [[140, 130, 120], [100]]
    kept = [
        at
        for at in (110, 120, 130, 140)
        if send(both_connections[1], SentRequest("GET", f"/v1/cp/checkpoints/a/0/{at}")).status == 200
    ]
    assert kept == [130, 140]


def test_rewind_to_an_older_step_keeps_later_puts(both_connections: tuple[Any, Any]) -> None:
    for connection in both_connections:
        send(connection, SentRequest("POST", "/v1/cp/cluster/reset"))
        send(connection, SentRequest("POST", "/v1/cp/namespaces/a?num_ranks=1&steps_retained=3"))
        for step in (10, 20, 30, 5):
            send(connection, SentRequest("POST", f"/v1/cp/checkpoints/a/0/{step}", b"x"))
    statuses = [
        send(connection, SentRequest("GET", "/v1/cp/checkpoints/a/0/5")).status for connection in both_connections
    ]
    assert statuses == [404, 200]
