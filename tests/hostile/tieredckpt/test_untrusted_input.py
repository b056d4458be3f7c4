"""Untrusted numbers, paths, names and lines in checkpoints, requests and files."""

from __future__ import annotations

import contextlib
import http.client
import io
import pickle
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import yaml
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from integration.sagemaker.memory_service.http_frontend import TokenCheck, serve_memory_service
from peerstore.errors import RequestError
from peerstore.shard_records import MAX_EPOCH_LEAD
from peerstore.transport.authentication import TlsFiles
from tests.support.memory_servers import our_server, our_service, request
from tests.support.tls import node_files
from tieredckpt.agent.agent_methods import ConfigureRequest
from tieredckpt.agent.agent_operations import agent_operations
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.agent.durable_catalog import DurableCatalog
from tieredckpt.bounded_yaml import load_yaml
from tieredckpt.cli import inspect
from tieredckpt.cli.command_output import CommandOutput, text_table
from tieredckpt.errors import CheckpointDamagedError, SettingsError, UsageError
from tieredckpt.format import object_keys
from tieredckpt.format.shard_layout import check_nested_paths
from tieredckpt.goodput.html_report import charts
from tieredckpt.http_server import is_public_hostname
from tieredckpt.memory_service_options import MemoryServiceOptions
from tieredckpt.settings import DurableSettings

# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "newest"),
    [
        ((), 0),
        ((1, 2, 5), 5),
        ((1, 2, (1 << 62) - 1), 2),
        (((1 << 62) - 1,), 0),
        ((7, 7 + MAX_EPOCH_LEAD), 7 + MAX_EPOCH_LEAD),
        ((7, 8 + MAX_EPOCH_LEAD), 7),
    ],
)
def test_newest_epoch_ignores_implausible_numbers(epochs, newest):
    assert object_keys.newest_epoch(epochs) == newest


def test_object_with_the_largest_epoch_is_ignored(tmp_path):
    """A job that resumed from the largest epoch could not begin another incarnation."""
    from tieredckpt.durable.retrying_store import open_store

    with contextlib.closing(open_store(f"file://{tmp_path}", DurableSettings())) as store:
        for epoch in (3, (1 << 62) - 1):
            store.put(object_keys.manifest_key("job", object_keys.VersionId(epoch, 10, 0, "a"), None), b"not read here")
        found = DurableCatalog(store, "job").listing()
    assert [group.epoch for group in found.manifests] == [3]


@pytest.mark.parametrize("changes", [{"part_size": "0"}, {"concurrency": 0}, {"every": 0}, {"retry_s": -1.0}])
def test_agent_refuses_impossible_settings(store, changes):
    with contextlib.closing(NodeAgentService(store)) as node:
        configure = agent_operations(node)["configure"]
        with pytest.raises(SettingsError):
            configure.answer(ConfigureRequest("job", DurableSettings(url="file:///nowhere", **changes)), None)
        assert store.blobs.list_names("job") == []


@pytest.fixture
def store():
    with our_service("8MiB") as (_, store):
        yield store


# -- indices of lists -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("a", 10**9)},
        {"a": ("a", -1)},
        {"a": ("a", 10**6), "b": ("b", 10**6)},
        {f"a.{number}": ("a", number * 1000) for number in range(100)},
    ],
)
def test_lists_longer_than_their_entries_are_damage(paths):
    with pytest.raises(CheckpointDamagedError, match="list"):
        check_nested_paths(paths)


def test_lists_as_long_as_their_entries_are_valid():
    check_nested_paths({f"a.{row}.{column}.w": ("a", row, column, "w") for row in range(30) for column in range(30)})
    check_nested_paths({"a": ("a", 0), "b": ("b", "1000000000")})


# -- copied checkpoints -----------------------------------------------------------------------------------------------


class RunsOnUnpickle:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_copying_a_malicious_checkpoint_runs_no_code(agent_dir, tmp_path):
    source, ran = tmp_path / "step-1", tmp_path / "ran"
    source.mkdir()
    (source / ".metadata").write_bytes(pickle.dumps(RunsOnUnpickle(ran)))
    with pytest.raises(UsageError, match="not what DCP writes"):
        fsspec.filesystem("tiered").put(f"{source}/.metadata", "tiered://job/step-1/.metadata")
    assert not ran.exists()


# -- terminal and HTML output -----------------------------------------------------------------------------------------

EVIL = "layer\x1b]0;owned\x07\x1b[2J\x9b31m\u202eexe.gpj\r[bold]x[/bold]"


@pytest.mark.parametrize("terminal", [True, False])
def test_terminal_control_characters_are_escaped(terminal, monkeypatch):
    screen, out = CommandOutput(), io.StringIO()
    screen.out.file = screen.err.file = out
    monkeypatch.setattr(Console, "is_terminal", property(lambda _: terminal))
    screen.out.print(escape(EVIL))
    screen.out.print(text_table(["name", "size"], [[escape(EVIL), "[bold]1[/bold]"]]))
    screen.info(EVIL)
    screen.report_error(CheckpointDamagedError(EVIL))
    text = out.getvalue()
    assert "\\x1b]0;owned" in text
    assert "[bold]x" in text
    for bad in ("\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x07", "\r"):
        assert bad not in text


def test_markup_in_a_layout_is_shown_as_text():
    tensor = {"name": "[i]w[/i]", "dtype": "[bold]F32[/]", "shape": [2], "size_bytes": 8, "sharding": "whole"}
    (row,) = inspect._rows([{**tensor, "archived": False, "pieces": [{"part": 0}]}])
    assert [Text.from_markup(cell).plain for cell in row[:2]] == ["[i]w[/i]", "[bold]F32[/]"]


def test_page_of_zero_length_steps_renders():
    step = SimpleNamespace(counts=True, start_us=5, end_us=5, samples=None, tokens=None)
    one = SimpleNamespace(tokens=None, samples=None, start_us=0, end_us=10, step_views=[step], faults=[], recoveries=[])
    assert "Throughput" in str(charts.throughput_section(one))


# -- YAML -------------------------------------------------------------------------------------------------------------


def test_nested_yaml_aliases_are_refused_early():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(yaml.YAMLError, match="aliases included"):
        load_yaml("\n".join(lines))
    merged = ["a0: &a0 {k: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12))]
    with pytest.raises(yaml.YAMLError, match="aliases included"):
        load_yaml("\n".join(merged))


def test_yaml_aliases_of_recipes_are_read():
    assert load_yaml("base: &b {x: 1}\none: *b\ntwo: {<<: *b, y: 2}") == {
        "base": {"x": 1},
        "one": {"x": 1},
        "two": {"x": 1, "y": 2},
    }


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_key_readable_by_others_is_refused(tmp_path, mode, store):
    files = node_files(tmp_path)
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    files.context(server=True)
    import os

    if os.getuid() == 0 and mode == 0o640:
        os.chown(files.key, 54321, -1)
    files.key.chmod(mode)
    with pytest.raises(RequestError, match="chmod 0400"):
        TlsFiles(*files).context(server=True)
    for made, called in ((files.certificate, "tls.crt"), (files.key, "tls.key")):
        made.rename(tmp_path / called)
    options = MemoryServiceOptions("127.0.0.1:0", tls=str(tmp_path))
    with pytest.raises(UsageError, match="chmod 0400"), serve_memory_service(store, options, "n1", tmp_path, None):
        pass


# -- requests ---------------------------------------------------------------------------------------------------------

DELETE = "/v1/cp/namespaces/a"


@pytest.fixture
def service_address():
    with our_server("8MiB") as one:
        assert request(one, "POST", f"{DELETE}?num_ranks=1").status == 200
        yield one


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "rebound.evil.example"},
        {"Host": "rebound.evil.example:8080"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[evil"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("DELETE", DELETE), ("POST", "/v1/cp/cluster/reset"), ("GET", DELETE)])
def test_web_page_requests_are_refused(service_address, headers, method, path):
    assert request(service_address, method, path, headers=headers).status in (403, 421)
    assert request(service_address, "GET", DELETE).status == 200


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:80", "[::1]:80", "localhost", "localhost:1", "node7", "node7:7070", socket.gethostname(),
     "memory.training.svc", "node7.cluster.local:80", "ip-10-0-0-1.ec2.internal", "10.1.2.3", "node7."],
)  # fmt: skip
def test_names_of_this_machine_are_served(service_address, host):
    assert not is_public_hostname(host)
    assert request(service_address, "GET", DELETE, headers={"Host": host}).status == 200


def test_any_host_name_is_served_with_a_token():
    """A web page cannot send the token, even under another host name."""
    with our_server("8MiB", TokenCheck(b"a token that is long enough")) as address:
        shown = {"Host": "memory.example.com", "Authorization": "Bearer a token that is long enough"}
        assert request(address, "GET", DELETE, headers=shown).status == 404
        assert request(address, "GET", DELETE, headers={"Host": "memory.example.com"}).status == 401


def test_status_and_metrics_are_not_for_web_pages_either(store):
    from tieredckpt.agent.agent_http import serve_metrics

    with contextlib.closing(NodeAgentService(store)) as node, serve_metrics(node, "127.0.0.1:0") as address:
        for path in ("/status", "/metrics"):
            assert request(address, "GET", path).status == 200
            assert request(address, "GET", path, headers={"Host": "rebound.evil.example"}).status == 421
            assert request(address, "GET", path, headers={"Origin": "http://evil.example"}).status == 403


@pytest.mark.parametrize(
    "wire",
    [
        b"GET /v1/cp/namespaces/a HTTP/1.1\r\nHost: a\r\nX: y\rContent-Length: 5\r\n\r\nabcde",
        b"GET /v1/cp/namespaces/a HTTP/1.1\r\nHost: a\r\nContent-Length: \x0b5\r\n\r\nabcde",
        b"GET /v1/cp/namespaces/a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        b"GET\x0b/v1/cp/namespaces/a\x0bHTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v1/cp/namespaces/a HTTP/1.1\rHost: a\r\n\r\n",
        b"GET /v1/cp/namespaces/a HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n",
    ],
)
def test_ambiguous_request_lines_are_refused(service_address, wire):
    host, _, port = service_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(wire)
        sock.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.status == 400
