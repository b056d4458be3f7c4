"""Clients that upload one large file: the agent's uploader and the fastest raw clients."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import boto3
import obstore.store
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from benchmarks.parameters import CONCURRENCY, Scene
from tests.support.s3 import ACCESS_KEY, BUCKET, REGION, SECRET_KEY
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.settings import DurableSettings

Send = Callable[[str], object]
"""Upload of the file as the named object."""
PREFIX = "bench"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


def durable_settings(scene: Scene, endpoint: str, checksum: str = "") -> DurableSettings:
    options = {"endpoint": endpoint, "region": REGION} | ({"checksum": checksum} if checksum else {})
    return DurableSettings(
        url=f"s3://{BUCKET}/{PREFIX}", part_size=str(scene.part_bytes), concurrency=CONCURRENCY, options=options
    )


def uploader(undo: ExitStack, scene: Scene, endpoint: str, source: Path, checksum: str) -> Send:
    settings = durable_settings(scene, endpoint, checksum)
    store = open_store(settings.url, settings)
    undo.callback(store.close)
    size = source.stat().st_size
    return lambda name: store.upload(name, source, size, journal=_NoJournal())


class _NoJournal:
    def get(self, name: str) -> None:
        return None

    def put(self, name: str, data: bytes) -> None:
        pass

    def remove(self, name: str) -> None:
        pass


def by_obstore(scene: Scene, endpoint: str, source: Path, **config: str) -> Send:
    store = obstore.store.S3Store(
        BUCKET,
        config={"endpoint": endpoint, "region": REGION, "unsigned_payload": True, **config},
        client_options={"allow_http": True},
    )

    def send(name: str) -> None:
        with _mapped(source) as data:
            store.put(f"{PREFIX}/{name}", data, chunk_size=scene.part_bytes, max_concurrency=CONCURRENCY)

    return send


def by_boto3(undo: ExitStack, scene: Scene, endpoint: str, source: Path) -> Send:
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        config=Config(
            s3={"payload_signing_enabled": False, "addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=2 * CONCURRENCY,
        ),
    )
    undo.callback(client.close)
    transfer = TransferConfig(
        multipart_threshold=scene.part_bytes, multipart_chunksize=scene.part_bytes, max_concurrency=CONCURRENCY
    )
    return lambda name: client.upload_file(str(source), BUCKET, f"{PREFIX}/{name}", Config=transfer)


def by_s3torchconnector(scene: Scene, endpoint: str, source: Path) -> Send:
    """Return an upload by s3torchconnector. Raise ImportError if it is not installed."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    config = S3ClientConfig(part_size=scene.part_bytes, force_path_style=True)
    client = S3Client(REGION, endpoint=endpoint, s3client_config=config)

    def send(name: str) -> None:
        with _mapped(source) as data:
            writer = client.put_object(BUCKET, f"{PREFIX}/{name}")
            for start in range(0, len(data), scene.part_bytes):
                writer.write(bytes(data[start : start + scene.part_bytes]))  # it takes bytes only
            writer.close()

    return send


@contextmanager
def _mapped(source: Path) -> Iterator[memoryview]:
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if hasattr(mmap, "MADV_POPULATE_READ"):
            mapped.madvise(mmap.MADV_POPULATE_READ)
        with memoryview(mapped) as data:
            yield data


def stored_bytes(endpoint: str, name: str) -> bytes:
    """Return the object's bytes, read with the AWS SDK alone."""
    client = boto3.client("s3", endpoint_url=endpoint, region_name=REGION)
    try:
        return client.get_object(Bucket=BUCKET, Key=f"{PREFIX}/{name}")["Body"].read()
    finally:
        client.close()
