"""Contract of ``/v1/cp``, for our server and for the one that AWS's library is tested against."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator

import pytest

from tests.support.memory_servers import aws_server, our_server, request, request_on

META = '{"checksum": "q6c1\\u00e4 ==", "algorithm":  "xxh3_128"}'
"""Metadata with two blanks and an escape, which a server must not parse and reserialize."""


@pytest.fixture(scope="module", params=["theirs", "ours"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    with aws_server() if request.param == "theirs" else our_server() as address:
        yield address


@pytest.fixture(autouse=True)
def empty_server(server: str) -> None:
    assert request(server, "POST", "/v1/cp/cluster/reset").json == {"status": "reset"}


def create_namespace(server: str, name: str = "job-1", num_ranks: int = 2, retained: int = 3) -> None:
    made = request(server, "POST", f"/v1/cp/namespaces/{name}?num_ranks={num_ranks}&steps_retained={retained}")
    assert made.status == 200


def put_shard(server: str, rank: int, step: int, body: bytes = b"x", name: str = "job-1") -> None:
    assert request(server, "POST", f"/v1/cp/checkpoints/{name}/{rank}/{step}", body).json == {"status": "ok"}


def get_status(server: str, rank: int, step: int, name: str = "job-1") -> int:
    return request(server, "GET", f"/v1/cp/checkpoints/{name}/{rank}/{step}").status


def latest_steps(server: str, limit: int | None = None) -> list[int]:
    query = "" if limit is None else f"?limit={limit}"
    return request(server, "GET", f"/v1/cp/checkpoints/job-1/latest{query}").json


def test_server_is_healthy(server: str) -> None:
    answer = request(server, "GET", "/health")
    assert (answer.status, answer.body) == (200, b'{"status":"healthy"}')


def test_a_namespace_is_made_once_shown_and_deleted(server: str) -> None:
    path = "/v1/cp/namespaces/job-1"
    assert request(server, "GET", path).status == 404
    made = request(server, "POST", f"{path}?num_ranks=9&steps_retained=3")
    assert (made.status, made.body) == (200, b'{"status":"created"}')
    assert request(server, "POST", f"{path}?num_ranks=9&steps_retained=3").status == 409
    assert request(server, "GET", path).body == b'{"num_ranks":9,"steps_to_retain_per_rank":3}'
    assert request(server, "DELETE", path).body == b'{"status":"deleted"}'
    assert request(server, "DELETE", path).json == {"detail": "Namespace 'job-1' not found"}
    assert request(server, "GET", path).json == {"detail": "Namespace 'job-1' not found"}


def test_three_steps_are_retained_by_default(server: str) -> None:
    request(server, "POST", "/v1/cp/namespaces/job-1?num_ranks=2")
    assert request(server, "GET", "/v1/cp/namespaces/job-1").json == {"num_ranks": 2, "steps_to_retain_per_rank": 3}


@pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 20_000], ids=["empty", "small", "large"])
def test_shard_round_trips_with_its_header(server: str, body: bytes) -> None:
    create_namespace(server)
    path = "/v1/cp/checkpoints/job-1/0/240"
    assert request(server, "POST", path, body, {"Shard-Meta": META}).body == b'{"status":"ok"}'
    answer = request(server, "GET", path)
    assert (answer.status, answer.body) == (200, body)
    assert answer.headers == {
        "content-type": "application/octet-stream",
        "content-length": str(len(body)),
        "shard-meta": META,
    }


def test_shard_without_a_header_returns_none(server: str) -> None:
    create_namespace(server)
    put_shard(server, 0, 0)
    assert "shard-meta" not in request(server, "GET", "/v1/cp/checkpoints/job-1/0/0").headers


def test_repeated_put_replaces_the_shard(server: str) -> None:
    create_namespace(server)
    put_shard(server, 0, 5, b"before")
    put_shard(server, 0, 5, b"after")
    assert request(server, "GET", "/v1/cp/checkpoints/job-1/0/5").body == b"after"


def test_chunked_body_is_accepted(server: str) -> None:
    create_namespace(server)
    pieces = [b"a" * 1_000_000, b"b", b"c" * 3_000_000]
    with contextlib.closing(http.client.HTTPConnection(server, timeout=60)) as connection:
        connection.request("POST", "/v1/cp/checkpoints/job-1/1/5", iter(pieces), encode_chunked=True)
        assert connection.getresponse().read() == b'{"status":"ok"}'
        assert request_on(connection, "GET", "/v1/cp/checkpoints/job-1/1/5").body == b"".join(pieces)


def test_missing_shard_is_404(server: str) -> None:
    assert request(server, "POST", "/v1/cp/checkpoints/nowhere/0/1", b"x").json == {
        "detail": "Namespace 'nowhere' not found"
    }
    for path in ("/v1/cp/checkpoints/nowhere/0/1", "/v1/cp/checkpoints/nowhere/latest"):
        assert request(server, "GET", path).json == {"detail": "Not found"}
    create_namespace(server)
    put_shard(server, 0, 1)
    for path in ("/v1/cp/checkpoints/job-1/0/2", "/v1/cp/checkpoints/job-1/7/1"):
        assert (request(server, "GET", path).status, request(server, "DELETE", path).status) == (404, 404)
    for path in ("/v1/cp", "/", "/v1/cp/namespaces", "/v1/cp/checkpoints/job-1/0/1/2", "/v1/kv/a/b"):
        assert (request(server, "GET", path).status, request(server, "GET", path).json) == (
            404,
            {"detail": "Not Found"},
        )


def test_another_method_is_405(server: str) -> None:
    for method, path in (("PUT", "/v1/cp/namespaces/a"), ("GET", "/v1/cp/cluster/reset"), ("POST", "/health")):
        assert request(server, method, path).json == {"detail": "Method Not Allowed"}
        assert request(server, method, path).status == 405


@pytest.mark.parametrize(
    ("method", "path", "where"),
    [
        ("POST", "/v1/cp/namespaces/job-1", [["query", "num_ranks"]]),
        ("POST", "/v1/cp/namespaces/job-1?num_ranks=two", [["query", "num_ranks"]]),
        ("POST", "/v1/cp/namespaces/job-1?steps_retained=x", [["query", "num_ranks"], ["query", "steps_retained"]]),
        ("POST", "/v1/cp/checkpoints/job-1/a/b", [["path", "rank"], ["path", "step"]]),
        ("GET", "/v1/cp/checkpoints/job-1/0/last", [["path", "step"]]),
        ("DELETE", "/v1/cp/checkpoints/job-1/x/1", [["path", "rank"]]),
        ("GET", "/v1/cp/checkpoints/job-1/latest?limit=", [["query", "limit"]]),
    ],
)
def test_non_numeric_parameter_is_422_and_named(server: str, method: str, path: str, where: list[list[str]]) -> None:
    answer = request(server, method, path)
    assert answer.status == 422
    assert [one["loc"] for one in answer.json["detail"]] == where


def test_deleted_shard_is_gone(server: str) -> None:
    create_namespace(server)
    put_shard(server, 0, 1)
    put_shard(server, 1, 1)
    assert request(server, "DELETE", "/v1/cp/checkpoints/job-1/0/1").body == b'{"status":"deleted"}'
    assert (get_status(server, 0, 1), get_status(server, 1, 1)) == (404, 200)
    put_shard(server, 0, 1, b"again")
    assert get_status(server, 0, 1) == 200


def test_recreated_namespace_is_empty(server: str) -> None:
    create_namespace(server)
    put_shard(server, 0, 1)
    request(server, "DELETE", "/v1/cp/namespaces/job-1")
    create_namespace(server)
    assert (get_status(server, 0, 1), latest_steps(server)) == (404, [])


def test_latest_complete_steps_come_first(server: str) -> None:
    create_namespace(server, retained=9)
    for step in (0, 30, 20, 100):
        put_shard(server, 0, step)
        put_shard(server, 1, step)
    assert latest_steps(server) == [100, 30, 20, 0]
    assert (latest_steps(server, 2), latest_steps(server, 0), latest_steps(server, -1)) == (
        [100, 30],
        [],
        [100, 30, 20],
    )


@pytest.mark.parametrize("retained", [2, 3, 5])
def test_requested_number_of_steps_is_retained(server: str, retained: int) -> None:
    create_namespace(server, retained=retained)
    for step in range(0, 80, 10):
        put_shard(server, 0, step)
        put_shard(server, 1, step)
        kept = list(range(step, -1, -10))[:retained]
        assert latest_steps(server, 99) == kept
        assert [at for at in range(0, 80, 10) if get_status(server, 0, at) == 200] == sorted(kept)


def test_namespaces_are_independent(server: str) -> None:
    create_namespace(server)
    create_namespace(server, "job-2")
    put_shard(server, 0, 1, b"one")
    put_shard(server, 0, 1, b"two", "job-2")
    assert request(server, "GET", "/v1/cp/checkpoints/job-1/0/1").body == b"one"
    assert request(server, "GET", "/v1/cp/checkpoints/job-2/0/1").body == b"two"
    request(server, "DELETE", "/v1/cp/namespaces/job-2")
    assert get_status(server, 0, 1) == 200
    assert get_status(server, 0, 1, "job-2") == 404


def test_connection_survives_refusals(server: str) -> None:
    create_namespace(server)
    with contextlib.closing(http.client.HTTPConnection(server, timeout=60)) as connection:
        connection.connect()
        first = connection.sock
        for _ in range(3):
            assert request_on(connection, "GET", "/v1/cp/checkpoints/job-1/1/1").status == 404
            assert request_on(connection, "POST", "/v1/cp/checkpoints/job-1/0/x").status == 422
            assert request_on(connection, "POST", "/v1/cp/checkpoints/job-1/0/1", b"x").status == 200
            assert request_on(connection, "GET", "/v1/cp/checkpoints/job-1/0/1").status == 200
        assert connection.sock is first
