"""Contract of every object store."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.support.object_store_contract import ObjectStoreContract, Opener
from tests.support.s3 import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, S3Server
from tieredckpt.durable.object_backend import RetryPolicy
from tieredckpt.durable.object_store import StoreCapabilities
from tieredckpt.durable.obstore_backend import ObstoreBackend
from tieredckpt.durable.retrying_store import RetryingStore, open_store
from tieredckpt.durable.s3 import S3Account, S3Options
from tieredckpt.settings import DurableSettings


class PlainFileSystem(LocalFileSystem):
    """A file system that this package does not know: local files under another scheme."""

    protocol = "plainfs"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("plainfs://"))


class Kind(NamedTuple):
    opener: Callable[[pytest.FixtureRequest, Path], Opener]
    conditional_put: bool
    resumable_upload: bool


def opener_for_url(url: str, settings: DurableSettings) -> Opener:
    return lambda bandwidth: open_store(url, settings, bandwidth=bandwidth)


def file_opener(request: pytest.FixtureRequest, place: Path) -> Opener:
    return opener_for_url(f"file://{place}/new/place", DurableSettings(part_size="5MiB"))


def memory_opener(request: pytest.FixtureRequest, place: Path) -> Opener:
    """Two stores on ``memory://`` share nothing, so the second is the first at another speed."""
    first = open_store("memory://", DurableSettings(part_size="5MiB"))
    return lambda bandwidth: RetryingStore(
        first._backend, retry=RetryPolicy(1.0), bandwidth=bandwidth, fetch_bytes=5 << 20, fetch_threads=4
    )


def plain_file_system_opener(request: pytest.FixtureRequest, place: Path) -> Opener:
    fsspec.register_implementation("plainfs", PlainFileSystem, clobber=True)
    return opener_for_url(f"plainfs://{place}/root", DurableSettings(part_size="5MiB"))


def s3fs_opener(request: pytest.FixtureRequest, place: Path) -> Opener:
    server: S3Server = request.getfixturevalue("moto")
    options = {"endpoint_url": server.endpoint, "key": ACCESS_KEY, "secret": SECRET_KEY}
    return opener_for_url(f"s3a://{BUCKET}/{secrets.token_hex(4)}", DurableSettings(part_size="5MiB", options=options))


def obstore_opener(request: pytest.FixtureRequest, place: Path) -> Opener:
    """Open the backend of gs:// and az:// on the local S3 server."""
    server: S3Server = request.getfixturevalue("moto")
    root = secrets.token_hex(4)
    account = S3Account(BUCKET, root, S3Options(endpoint=server.endpoint, region=REGION), timeout_s=10.0)
    request.addfinalizer(account.close)
    store = account.connection().objects._store
    backend = ObstoreBackend(f"s3://{BUCKET}/{root}", store, store, part_bytes=5 << 20, concurrency=4)
    return lambda bandwidth: RetryingStore(
        backend, retry=RetryPolicy(5.0), bandwidth=bandwidth, fetch_bytes=5 << 20, fetch_threads=4
    )


def s3_opener(server_name: str) -> Callable[[pytest.FixtureRequest, Path], Opener]:
    def opener(request: pytest.FixtureRequest, place: Path) -> Opener:
        server: S3Server = request.getfixturevalue(server_name)
        return opener_for_url(f"s3://{BUCKET}/{secrets.token_hex(4)}", server.settings())

    return opener


KINDS = {
    "file": Kind(file_opener, conditional_put=True, resumable_upload=False),
    "memory": Kind(memory_opener, conditional_put=True, resumable_upload=False),
    "fsspec-local": Kind(plain_file_system_opener, conditional_put=False, resumable_upload=False),
    "fsspec-s3fs": Kind(s3fs_opener, conditional_put=False, resumable_upload=False),
    "obstore-moto": Kind(obstore_opener, conditional_put=True, resumable_upload=False),
    "s3-moto": Kind(s3_opener("moto"), conditional_put=True, resumable_upload=True),
    "s3-rclone": Kind(s3_opener("rclone"), conditional_put=False, resumable_upload=True),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def opener(kind: Kind, request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return kind.opener(request, tmp_path)


class TestObjectStore(ObjectStoreContract):
    @pytest.mark.parametrize(
        "kind",
        [
            pytest.param(kind, id=name, marks=pytest.mark.nightly if name == "s3-moto" else ())
            for name, kind in KINDS.items()
        ],
    )
    def test_list_has_more_than_one_page(self, store: RetryingStore):
        """In a push, each client lists the pages of one S3 server."""
        super().test_list_has_more_than_one_page(store)

    def test_capabilities_match_the_observed_behavior(self, store: RetryingStore, kind: Kind):
        assert store.capabilities() == StoreCapabilities(kind.conditional_put, kind.resumable_upload)
