"""S3 settings (certificates, proxies, endpoints) and modules that load only when needed."""

from __future__ import annotations

import random
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.faults import DropResponse, ReplyWithStatus
from tests.support.journals import DictJournal
from tests.support.ports import free_port
from tests.support.s3 import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, S3Server
from tests.support.tls import server_context
from tieredckpt.durable.object_store import ObjectExistsError
from tieredckpt.durable.retrying_store import RetryingStore, open_store
from tieredckpt.errors import DurableRefusedError, TierUnavailableError, UsageError
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.e2e
SIZE = 11 << 20

Opener = Callable[..., RetryingStore]


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(4)}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(random.Random(11).randbytes(SIZE))
    return path


@pytest.fixture
def secure(rclone: S3Server, tmp_path: Path) -> Iterator[tuple[FaultProxy, Path]]:
    context, trusted = server_context(tmp_path)
    with FaultProxy(rclone.port, tls=context) as proxy:
        yield proxy, trusted


def goes_both_ways(store: RetryingStore, source: Path) -> None:
    store.upload("large", source, SIZE, journal=DictJournal())
    store.put("small", b"1")
    assert store.get("large") == source.read_bytes()
    assert [info.name for info in store.list("")] == ["large", "small"]


def test_https_accepts_a_configured_authority(
    secure, rclone: S3Server, url: str, source: Path, open_durable: Opener, monkeypatch: pytest.MonkeyPatch
):
    proxy, trusted = secure
    monkeypatch.setenv("AWS_CA_BUNDLE", str(trusted))
    goes_both_ways(open_durable(url, rclone.settings(endpoint=proxy.endpoint)), source)
    assert proxy.parts_sent() == [1, 2, 3]


def test_https_with_an_unknown_authority_is_refused(
    secure, rclone: S3Server, url: str, source: Path, open_durable: Opener
):
    store = open_durable(url, rclone.settings(endpoint=secure[0].endpoint))
    for size in (SIZE, 1):
        with pytest.raises(DurableRefusedError, match="CERTIFICATE_VERIFY_FAILED"):
            store.upload("x", source, size, journal=DictJournal())


def test_http_through_a_proxy(
    rclone: S3Server,
    rclone_proxy: FaultProxy,
    url: str,
    source: Path,
    open_durable: Opener,
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", rclone_proxy.endpoint)
    goes_both_ways(open_durable(url, rclone.settings()), source)
    assert rclone_proxy.parts_sent() == [1, 2, 3]


def test_https_through_a_proxy(
    secure, rclone: S3Server, url: str, source: Path, open_durable: Opener, monkeypatch: pytest.MonkeyPatch
):
    behind, trusted = secure
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(trusted))
    with FaultProxy(behind.port) as proxy:
        monkeypatch.setenv("https_proxy", proxy.endpoint)
        goes_both_ways(open_durable(url, rclone.settings(endpoint=behind.endpoint)), source)
        assert proxy.requests("CONNECT")
        assert behind.parts_sent() == [1, 2, 3]


def test_settings_come_from_the_aws_configuration(
    rclone: S3Server, url: str, source: Path, open_durable: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A profile sets region, endpoint and credentials; durable's endpoint overrides the environment's."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text(
        f"[profile lab]\nregion = {REGION}\nendpoint_url = {rclone.endpoint}\n"
        f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    settings = DurableSettings(part_size="5MiB", retry_s=1.0)
    goes_both_ways(open_durable(url, replace(settings, options={"profile": "lab"})), source)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    open_durable(url, settings).put("again", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TierUnavailableError):
        open_durable(url, settings).put("again", b"1")
    goes_both_ways(open_durable(url + "-2", replace(settings, options={"endpoint": rclone.endpoint})), source)


def test_missing_credentials_are_refused(
    rclone: S3Server, url: str, open_durable: Opener, monkeypatch: pytest.MonkeyPatch
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(DurableRefusedError, match="credentials"):
        open_durable(url, rclone.settings()).put("x", b"")


def test_missing_profile_is_refused(rclone: S3Server, url: str, open_durable: Opener):
    with pytest.raises(DurableRefusedError, match="lab"):
        open_durable(url, rclone.settings(options={"profile": "lab"})).put("x", b"")


def test_create_with_a_lost_response_is_recognized(moto: S3Server, url: str, open_durable: Opener):
    with FaultProxy(moto.port) as proxy:
        store = open_durable(url, moto.settings(endpoint=proxy.endpoint))
        assert store.capabilities().conditional_put
        proxy.add_rule("PUT", "/mine$").fail(DropResponse())
        store.put("mine", b"mine", create_only=True)
        assert len(proxy.requests("PUT", "/mine$")) == 2
        store.put("theirs", b"theirs")
        proxy.add_rule("PUT", "/theirs$").fail(ReplyWithStatus(500))
        with pytest.raises(ObjectExistsError):
            store.put("theirs", b"mine", create_only=True)
        assert store.get("theirs") == b"theirs"
        store.close()


def test_every_part_has_a_checksum(moto: S3Server, url: str, source: Path, open_durable: Opener):
    with FaultProxy(moto.port) as proxy:
        store = open_durable(url, moto.settings(endpoint=proxy.endpoint))
        store.upload("x", source, SIZE, journal=DictJournal())
        store.upload("small", source, 10, journal=DictJournal())
        sent = [*proxy.requests("PUT", query="partNumber="), *proxy.requests("PUT", "small")]
        assert [bool(each.headers.get("x-amz-checksum-crc32")) for each in sent] == [True] * 4
        store.close()
    with moto.client() as client:
        head = client.head_object(Bucket=BUCKET, Key=f"{url.rpartition('/')[2]}/x", ChecksumMode="ENABLED")
    assert head["ChecksumCRC32"]


def test_encryption_is_requested(moto: S3Server, url: str, source: Path, open_durable: Opener):
    options = {"server_side_encryption": "AES256"}
    store = open_durable(url, moto.settings(options=options))
    store.upload("large", source, SIZE, journal=DictJournal())
    store.upload("small", source, 10, journal=DictJournal())
    store.put("tiny", b"1")
    with moto.client() as client:
        for name in ("large", "small", "tiny"):
            head = client.head_object(Bucket=BUCKET, Key=f"{url.rpartition('/')[2]}/{name}")
            assert head["ServerSideEncryption"] == "AES256"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"end_point": "x"}, "end_point.*known are endpoint, region"), ({"checksum": "sha1"}, "crc32, md5, none")],
)
def test_unknown_options_are_errors(options: dict[str, str], message: str):
    with pytest.raises(UsageError, match=message):
        open_store(f"s3://{BUCKET}", DurableSettings(options=options))


def test_heavy_libraries_are_not_imported_before_use():
    heavy = {"boto3", "botocore", "obstore", "fsspec", "urllib3", "torch"}
    code = (
        "import sys; from tieredckpt.durable.retrying_store import open_store; "
        "from tieredckpt.settings import DurableSettings; "
        f"open_store('s3://{BUCKET}/x', DurableSettings()); "
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
