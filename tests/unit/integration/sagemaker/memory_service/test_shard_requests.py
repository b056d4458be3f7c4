"""Requests parsed and validated before they are carried out: paths, ranges, bodies."""

from __future__ import annotations

import contextlib
import io
from email.message import Message
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integration.sagemaker.memory_service.http_frontend import TokenCheck, token_check
from integration.sagemaker.memory_service.shard_requests import (
    ChunkedBody,
    Get,
    Latest,
    RequestRefusedError,
    SizedBody,
    parse_range,
    parse_request,
    request_body,
)
from tests.support.example_counts import examples
from tieredckpt.agent.agent_client import agent_command
from tieredckpt.errors import SettingsError, UsageError
from tieredckpt.memory_service_options import MemoryServiceOptions
from tieredckpt.settings import load_settings, settings_from_mapping


def headers(**values: str | list[str]) -> Message:
    message = Message()
    for name, value in values.items():
        for one in [value] if isinstance(value, str) else value:
            message[name.replace("_", "-")] = one
    return message


# -- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/cp/namespaces/a%2Fb", 404),
        ("/v1/cp/namespaces/%2e%2e", 422),
        ("/v1/cp/checkpoints/a/../1", 422),
        ("/v1/cp/checkpoints/..%2f..%2fetc/0/1", 404),
        ("/v1/cp/namespaces/a\x00b", 422),
        ("/v1/cp/namespaces/" + "a" * 129, 422),
        ("/v1/cp/namespaces/%ff", 422),
        ("/v1/cp//a", 404),
        ("//v1/cp/namespaces/a", 404),
        ("http://elsewhere/v1/cp/namespaces/a", 404),
        ("/v1/cp/checkpoints/a/0/" + "9" * 4000, 422),
        ("/v1/cp/checkpoints/a/0/\u0664", 422),
    ],
)
def test_paths_that_are_tricks_lead_nowhere(path: str, status: int) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        parse_request("GET", path)
    assert refused.value.status == status


def test_a_step_may_be_0_and_a_rank_any_of_them() -> None:
    assert parse_request("GET", "/v1/cp/checkpoints/a/16/0") == Get("a", 16, 0)
    assert parse_request("GET", "/v1/cp/checkpoints/a.b_c-1/latest?limit=3&x=1") == Latest("a.b_c-1", 3)


@settings(max_examples=examples(50))
@given(method=st.sampled_from(["GET", "POST", "DELETE", "PUT"]), target=st.text(max_size=80))
def test_every_request_is_parsed_or_refused(method: str, target: str) -> None:
    for path in (target, "/v1/cp/" + target, "/v1/cp/checkpoints/" + target):
        with contextlib.suppress(RequestRefusedError):  # the only error allowed
            parse_request(method, path)


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (None, None),
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=90-999", (90, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes=5-4", None),
        ("bytes=0-1,5-6", None),
        ("bytes=-", None),
        ("lines=0-1", None),
    ],
)
def test_ranges(header: str | None, part: tuple[int, int] | None) -> None:
    assert parse_range(header, 100) == part


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_a_range_behind_the_end_is_416(header: str) -> None:
    with pytest.raises(RequestRefusedError, match="100 bytes") as refused:
        parse_range(header, 100)
    assert refused.value.status == 416


# -- bodies -----------------------------------------------------------------------------------------------------------


def read(body: SizedBody | ChunkedBody, window: int) -> bytes:
    found = b""
    while not body.at_end and not body.problem:
        view = bytearray(window)
        count = body.fill(memoryview(view))
        assert count == window or body.at_end or body.problem
        found += view[:count]
    return found


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=50), max_size=6),
    window=st.integers(1, 64),
    rest=st.binary(max_size=9),
)
def test_chunks_come_together_and_nothing_behind_them_is_taken(pieces: list[bytes], window: int, rest: bytes) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"
    file = io.BufferedReader(io.BytesIO(wire + rest))
    body = ChunkedBody(file)
    assert read(body, window) == b"".join(pieces)
    assert (body.problem, file.read()) == ("", rest)


@given(wire=st.binary(max_size=80), window=st.integers(1, 64))
def test_every_chunked_body_ends(wire: bytes, window: int) -> None:
    body = ChunkedBody(io.BufferedReader(io.BytesIO(wire)))
    read(body, window)
    assert body.at_end != bool(body.problem)


@pytest.mark.parametrize(
    "wire", [b"5\r\nabc", b"3\r\nabcX", b"-1\r\n", b"0x3\r\nabc\r\n0\r\n\r\n", b"3\nabc\n0\n\n", b""]
)
def test_incomplete_or_invalid_chunks_are_refused(wire: bytes) -> None:
    body = ChunkedBody(io.BufferedReader(io.BytesIO(wire)))
    read(body, 16)
    assert body.problem


def test_truncated_body_is_a_problem() -> None:
    body = SizedBody(io.BufferedReader(io.BytesIO(b"abc")), 5)
    assert (read(body, 16), bool(body.problem)) == (b"abc", True)


@pytest.mark.parametrize(
    "said",
    [
        {"Content_Length": ["3", "4"]},
        {"Content_Length": "+3"},
        {"Content_Length": "-3"},
        {"Content_Length": "3,3"},
        {"Content_Length": "9" * 30},
        {"Content_Length": "3", "Transfer_Encoding": "chunked"},
        {"Transfer_Encoding": "gzip, chunked"},
        {"Transfer_Encoding": ["chunked", "chunked"]},
    ],
)
def test_contradictory_headers_are_refused(said: dict[str, str | list[str]]) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        request_body(headers(**said), io.BytesIO(b"abc"))
    assert refused.value.status == 400


# -- who, and where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "may"),
    [
        ("Bearer s3cret", True),
        ("bearer  s3cret ", True),
        ("Basic YW55OnMzY3JldA==", True),
        ("Basic czNjcmV0", False),
        ("Basic \u00ff\u00ff", False),
        ("s3cret", False),
        ("Bearer", False),
        ("", False),
        (None, False),
    ],
)
def test_matching_token_is_admitted(shown: str | None, may: bool) -> None:
    if may:
        TokenCheck(b"s3cret").check(shown)
    else:
        with pytest.raises(RequestRefusedError) as refused:
            TokenCheck(b"s3cret").check(shown)
        assert refused.value.status == 401
    TokenCheck().check(shown)


def test_generated_token_is_kept_and_must_be_private(tmp_path: Path) -> None:
    token_check("token", "", tmp_path)
    path = tmp_path / "memory-service.token"
    token = path.read_text()
    token_check("token", "", tmp_path).check(f"Bearer {token}")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="remove"):
        token_check("token", "", tmp_path)
    with pytest.raises(UsageError, match="memory_service_token"):
        token_check("token", f"file:{tmp_path}/nowhere", tmp_path)


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ({"memory_service": "here"}, "neither HOST:PORT nor off"),
        ({"memory_service": "0.0.0.0:9200", "memory_service_auth": "off"}, "memory_service_auth=open"),
        ({"memory_service": ":9200", "memory_service_auth": "off"}, "memory_service_auth=open"),
        ({"memory_service": "example.com:9200", "memory_service_auth": "off"}, "memory_service_auth=open"),
        ({"memory_service": "[::1]:1", "memory_service_auth": "none"}, "agent.memory_service_auth"),
        ({"memory_service": "[::1]:1", "memory_service_token": "abcdefghijklmnopqrst"}, "file:/path"),
        ({"memory_service": "[::1]:1", "memory_service_nodes": "static:n1=h:1"}, "memory_service_secret"),
        ({"memory_service": "[::1]:1", "memory_service_copies": 4}, "agent.memory_service_copies: 4 is above 3"),
        ({"memory_service_copies": 0}, "agent.memory_service_copies: 0 is below 1"),
    ],
)
def test_settings_that_cannot_be_are_named(agent: dict[str, object], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        settings_from_mapping({"agent": agent})


def test_the_settings_reach_the_agents_command_line() -> None:
    assert "--memory-service" not in agent_command(load_settings({}))
    settings = load_settings(
        {
            "TIEREDCKPT_AGENT_MEMORY_SERVICE": "0.0.0.0:9200",
            "TIEREDCKPT_AGENT_MEMORY_SERVICE_AUTH": "open",
            "TIEREDCKPT_AGENT_MEMORY_SERVICE_NODES": "dns:agents:7070",
            "TIEREDCKPT_AGENT_MEMORY_SERVICE_SECRET": "file:/run/secret",
        }
    )
    command = agent_command(settings)
    expected = ["--memory-service", "0.0.0.0:9200", "--memory-service-auth", "open", "--memory-service-copies", "2"]
    assert command[command.index("--memory-service") :][:6] == expected
    assert settings.agent.memory_service_options == MemoryServiceOptions(
        "0.0.0.0:9200", "open", nodes="dns:agents:7070", secret="file:/run/secret"
    )
