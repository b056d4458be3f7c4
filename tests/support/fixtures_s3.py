"""Fixtures for S3 servers, their clients' environment, and the fault proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import ACCESS_KEY, SECRET_KEY, S3Server, moto_server, rclone_server
from tieredckpt.durable.retrying_store import RetryingStore, open_store
from tieredckpt.settings import DurableSettings

pytest.register_assert_rewrite(
    "tests.support.object_store_contract", "tests.support.upload_contract", "tests.support.fault_contract"
)


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the machine's AWS configuration and set test credentials."""
    nowhere = tmp_path_factory.getbasetemp() / "no-such-aws-config"
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(nowhere))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nowhere))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with rclone_server(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture
def rclone_proxy(rclone: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(rclone.port) as proxy:
        yield proxy


@pytest.fixture
def credentials_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that writes the shared credentials file; an empty secret is the valid one."""
    path = tmp_path / "credentials"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))

    def write(secret: str) -> None:
        path.write_text(
            f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret or SECRET_KEY}\n"
        )

    write("")
    return write


@pytest.fixture
def open_durable() -> Iterator[Callable[[str, DurableSettings], RetryingStore]]:
    """Return ``open_store``; close every opened store when the test ends."""
    opened: list[RetryingStore] = []

    def open_and_record(url: str, settings: DurableSettings) -> RetryingStore:
        opened.append(open_store(url, settings))
        return opened[-1]

    yield open_and_record
    for store in opened:
        store.close()
