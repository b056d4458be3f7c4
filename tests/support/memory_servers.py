"""The server that AWS's client library is tested against, and ours, for the same requests.

Theirs is one file of their source distribution, downloaded once from the package index and then cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.sagemaker.memory_service.http_frontend import TokenCheck, serve_shards
from integration.sagemaker.memory_service.memory_service import MemoryService
from peerstore.settings import StoreSettings
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore

PACKAGE = "amzn_sagemaker_checkpointing-1.1.3"
_SHA256 = "c6e88ba0f09932b141305288530262c53914ec4fdd53c70909e469a24bda3794"
_COMPARED = ("content-type", "content-length", "shard-meta")


@dataclass(frozen=True)
class HttpResponse:
    """Parts of a response that a client sees."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(
    address: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> HttpResponse:
    """Send one request on its own connection."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        return request_on(connection, method, path, body, headers)


def request_on(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> HttpResponse:
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    data = answer.read()
    found = {name.lower(): value for name, value in answer.getheaders()}
    return HttpResponse(answer.status, {name: found[name] for name in _COMPARED if name in found}, data)


def aws_source_file(name: str) -> str:
    """Return a file of their source distribution; skip the test if the index is unreachable."""
    with tarfile.open(_source()) as archive:
        member = archive.extractfile(f"{PACKAGE}/{name}")
        assert member is not None
        return member.read().decode()


def _source() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tieredckpt-tests"
    kept = cache / f"{PACKAGE}.tar.gz"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _download(Path(folder)).rename(kept)
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == _SHA256, f"{kept} has a wrong checksum"
    return kept


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    if importlib.util.find_spec("hatchling") is not None:  # else pip downloads it to read the package's metadata
        command.append("--no-build-isolation")
    done = subprocess.run(
        [*command, PACKAGE.replace("-", "==")], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot download {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    return folder / f"{PACKAGE}.tar.gz"


_SERVE = """
import socket, sys, uvicorn
sys.path.insert(0, sys.argv[1])
from membrain_server import app
config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=600)
uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[2]))])
"""


@contextlib.contextmanager
def aws_server() -> Iterator[str]:
    """Run a new instance of their server."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        (Path(folder) / "membrain_server.py").write_text(aws_source_file("tests/local_tests/membrain_server.py"))
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        number = listener.fileno()
        process = subprocess.Popen([sys.executable, "-c", _SERVE, folder, str(number)], pass_fds=[number])
        try:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            assert request(address, "GET", "/health").status == 200  # answers once the server has started
            yield address
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def our_service(budget: str = "256MiB") -> Iterator[tuple[MemoryService, NodeStore]]:
    with contextlib.closing(NodeStore(MemfdArena(), StoreSettings(budget=budget))) as store:
        service = MemoryService(store, "n1")
        service.start(None)
        with contextlib.closing(service):
            yield service, store


@contextlib.contextmanager
def our_server(budget: str = "256MiB", access: TokenCheck | None = None) -> Iterator[str]:
    """Run our service for one node in this process."""
    with (
        our_service(budget) as (service, _),
        serve_shards(service, "127.0.0.1", 0, access or TokenCheck(), None) as address,
    ):
        yield address
