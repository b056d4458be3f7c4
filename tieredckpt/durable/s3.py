"""S3 and what speaks like it: small requests through obstore, listings and control calls through the AWS SDK."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer

from peerstore.units import parse_size
from tieredckpt.durable.account import Account, S3Options
from tieredckpt.durable.multipart import Uploader
from tieredckpt.durable.object_names import join
from tieredckpt.durable.store import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tieredckpt.durable.backend import Upload
    from tieredckpt.settings import DurableSettings


class S3Backend:
    resumes = True
    pages = True

    def __init__(self, url: str, bucket: str, root: str, settings: DurableSettings) -> None:
        options = S3Options.parse(settings.options)
        self.url = url
        self._root = root
        self._account = Account(bucket, root, options, timeout_s=settings.timeout_s)
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="tieredckpt-part")
        self._uploader = Uploader(self._account, self._pool, options, part_bytes=parse_size(settings.part_size))
        self._sdk_reads_ranges = False

    def renew(self) -> bool:
        return self._account.renew()

    def put(self, name: str, data: bytes, *, create_only: bool) -> None:
        self._account.connection().objects.put(name, data, create_only=create_only)

    def exists(self, name: str) -> bool:
        return self._account.connection().objects.exists(name)

    def get(self, name: str) -> bytes:
        return self._account.connection().objects.get(name)

    def get_range(self, name: str, start: int, stop: int) -> Buffer:
        if not self._sdk_reads_ranges:
            try:
                return self._account.connection().objects.get_range(name, start, stop)
            except Exception as error:
                # Some servers send the right bytes of a range under status 200, which obstore rejects.
                if "non-partial response" not in str(error):
                    raise
                self._sdk_reads_ranges = True
        return self._range_by_sdk(name, start, stop)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Not by obstore, which cannot list a bucket that holds a name it finds invalid."""
        for page in self._pages("list_objects_v2", prefix):
            for each in page.get("Contents", ()):
                yield ObjectInfo(self._name(each["Key"]), each["Size"], each["LastModified"].timestamp())

    def delete(self, names: Sequence[str]) -> None:
        self._account.connection().objects.delete(names)

    def upload(self, upload: Upload) -> None:
        self._uploader.send(upload, join(self._root, upload.name))

    def discard_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int:
        found = [
            each
            for page in self._upload_pages(prefix)
            for each in page.get("Uploads", ())
            if self._name(each["Key"]) not in keep
            and each["Initiated"] <= _moment(page) - timedelta(seconds=older_than_s)
        ]
        return sum(self._abort(each["Key"], each["UploadId"]) for each in found)

    def close(self) -> None:
        self._pool.shutdown()
        self._account.close()

    def _name(self, key: str) -> str:
        return key[len(self._root) + 1 :] if self._root else key

    def _pages(self, operation: str, prefix: str) -> Iterator[dict[str, Any]]:
        paginator = self._account.connection().client.get_paginator(operation)
        yield from paginator.paginate(Bucket=self._account.bucket, Prefix=join(self._root, prefix))

    def _upload_pages(self, prefix: str) -> Iterable[dict[str, Any]]:
        try:
            return tuple(self._pages("list_multipart_uploads", prefix))
        except self._account.connection().client.exceptions.NoSuchUpload:  # how rclone says that there are none
            return ()

    def _abort(self, key: str, upload_id: str) -> bool:
        client = self._account.connection().client
        try:
            client.abort_multipart_upload(Bucket=self._account.bucket, Key=key, UploadId=upload_id)
        except client.exceptions.NoSuchUpload:
            return False
        return True

    def _range_by_sdk(self, name: str, start: int, stop: int) -> bytes:
        answer = self._account.connection().client.get_object(
            Bucket=self._account.bucket, Key=join(self._root, name), Range=f"bytes={start}-{stop - 1}"
        )
        with answer["Body"] as body:
            given = str(answer.get("ContentRange", "no range"))
            if not given.startswith(f"bytes {start}-"):
                raise ConnectionError(f"asked for bytes {start}-{stop - 1}, the answer has {given}")
            return bytes(body.read())


def _moment(page: dict[str, Any]) -> datetime:
    """Now by the store's clock, which also set the times in the listing; the header leaves out fractions."""
    try:
        return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"]) + timedelta(seconds=1)
    except (KeyError, ValueError):
        return datetime.now(timezone.utc)
