"""The agent's options for the memory service: validation before it listens, and HTTPS."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.sagemaker.memory_service.http_frontend import serve_memory_service
from peerstore.settings import StoreSettings
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from tests.support.memory_servers import request_on
from tests.support.tls import Authority
from tieredckpt.errors import UsageError
from tieredckpt.memory_service_options import MemoryServiceOptions

HERE = "127.0.0.1:0"


@pytest.fixture
def store() -> Iterator[NodeStore]:
    with contextlib.closing(NodeStore(MemfdArena(), StoreSettings(budget="64MiB"))) as made:
        yield made


@pytest.fixture
def certificates(tmp_path: Path) -> tuple[Authority, Path]:
    """A certificate authority and a directory with the server's certificate and key."""
    authority, folder = Authority(tmp_path), tmp_path / "server"
    folder.mkdir()
    for found, name in zip(authority.issue("server"), ("tls.crt", "tls.key"), strict=True):
        shutil.copy(found, folder / name)
    return authority, folder


def talk(address: str, context: ssl.SSLContext) -> None:
    """Put a shard of several records and pieces, then get all of it and parts of it."""
    body = bytes(range(251)) * 40_000
    with contextlib.closing(http.client.HTTPSConnection(address, timeout=60, context=context)) as connection:
        assert request_on(connection, "POST", "/v1/cp/namespaces/a?num_ranks=1").status == 200
        assert request_on(connection, "POST", "/v1/cp/checkpoints/a/0/1", body).status == 200
        assert request_on(connection, "GET", "/v1/cp/checkpoints/a/0/1").body == body
        part = request_on(connection, "GET", "/v1/cp/checkpoints/a/0/1", headers={"Range": "bytes=9000000-9500000"})
        assert part.body == body[9_000_000:9_500_001]


def test_over_tls(store: NodeStore, certificates: tuple[Authority, Path], tmp_path: Path) -> None:
    authority, folder = certificates
    options = MemoryServiceOptions(HERE, "off", tls=str(folder))
    with serve_memory_service(store, options, "n1", tmp_path, None):
        address = (tmp_path / "memory-service").read_text()
        talk(address, ssl.create_default_context(cafile=str(authority.trusted)))
        with (
            contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as plain,
            pytest.raises((http.client.HTTPException, ConnectionError)),
        ):
            request_on(plain, "GET", "/health")


def test_clients_show_certificates(store: NodeStore, certificates: tuple[Authority, Path], tmp_path: Path) -> None:
    authority, folder = certificates
    shutil.copy(authority.trusted, folder / "ca.crt")
    options = MemoryServiceOptions(HERE, "off", tls=str(folder))
    with serve_memory_service(store, options, "n1", tmp_path, None):
        address = (tmp_path / "memory-service").read_text()
        context = ssl.create_default_context(cafile=str(authority.trusted))
        with (
            contextlib.closing(http.client.HTTPSConnection(address, timeout=60, context=context)) as stranger,
            pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)),
        ):
            request_on(stranger, "GET", "/health")
        context.load_cert_chain(*authority.issue("client"))
        talk(address, context)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (MemoryServiceOptions("0.0.0.0:0", "off"), "memory_service_auth=open"),
        (MemoryServiceOptions("nowhere", "off"), "neither HOST:PORT nor off"),
        (MemoryServiceOptions("192.0.2.1:1", "open"), "cannot be served"),
        (MemoryServiceOptions(HERE, tls="/nowhere"), "memory_service_tls"),
        (MemoryServiceOptions(HERE, token="file:/nowhere"), "memory_service_token"),
        (MemoryServiceOptions(HERE, nodes="static:n1=h:1", secret="file:/nowhere"), "memory_service_secret"),
    ],
)
def test_invalid_options_fail_at_startup(
    store: NodeStore, tmp_path: Path, options: MemoryServiceOptions, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem), serve_memory_service(store, options, "n1", tmp_path, None):
        pass


def test_unreachable_peers_are_refused(store: NodeStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("x" * 32)
    options = MemoryServiceOptions(HERE, nodes="static:n1=h:1", secret=f"file:{secret}")
    with (
        pytest.raises(UsageError, match=r"agent.peers is off"),
        serve_memory_service(store, options, "n1", tmp_path, None),
    ):
        pass
