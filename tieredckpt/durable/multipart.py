"""Files to S3 in parts that survive this process.

::

    journal has an upload of the same bytes? ──no──> create, note id and token in the journal ──┐
            │yes                                                                                │
            └──> list its parts, keep those that hold what they should ─────────────────────────┴──> send the others,
                 complete, forget the journal's entry

The store may lose an upload at any moment (a lifecycle rule, an abort, or because a completion whose answer was lost
did happen). The token, in the object's metadata, tells the last case from the others, which start over.
"""

from __future__ import annotations

import contextlib
import secrets
from concurrent.futures import Executor, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from peerstore.decode import from_json
from tieredckpt.durable.digest import digest
from tieredckpt.durable.parts import Part, StoredPart, cut, part_size_for, reusable
from tieredckpt.durable.retry import UploadGoneError
from tieredckpt.durable.store import ObjectNotFoundError, UploadCancelledError
from tieredckpt.errors import TieredCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tieredckpt.durable.account import Account, S3Options
    from tieredckpt.durable.backend import Upload

_ATTEMPTS = 3
_MARK = "tieredckpt-upload"
_CHECKSUM_HEADERS = {"crc32": "x-amz-checksum-crc32", "md5": "content-md5"}
_CHECKSUM_PARAMS = {"crc32": "ChecksumCRC32", "md5": "ContentMD5"}
_HEADERS = {
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
}


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the journal keeps of an upload."""

    bucket: str
    key: str
    upload_id: str
    token: str
    size_bytes: int
    part_bytes: int
    identity: str


class Uploader:
    """Any thread may call; all uploads share ``pool``, whose size is the number of parts in flight."""

    def __init__(self, account: Account, pool: Executor, options: S3Options, *, part_bytes: int) -> None:
        self._account = account
        self._pool = pool
        self._options = options
        self._part_bytes = part_bytes

    def send(self, upload: Upload, key: str) -> None:
        if upload.source.size_bytes <= part_size_for(0, self._part_bytes):
            self._send_whole(upload, key)
            return
        for attempt in range(_ATTEMPTS):
            begun = self._resume(upload, key)
            fresh = begun is None
            if begun is None:
                begun = self._begin(upload, key)
            try:
                self._finish(upload, begun, fresh=fresh)
                break
            except UploadGoneError:
                if self._completed(upload, begun):
                    break
                self._abandon(upload, begun)
                if attempt == _ATTEMPTS - 1:
                    raise
        upload.journal.remove(upload.name)

    # -- steps ------------------------------------------------------------------------------------------------

    def _resume(self, upload: Upload, key: str) -> Begun | None:
        noted = upload.journal.get(upload.name)
        if noted is None:
            return None
        try:
            begun = from_json(noted, Begun)
        except msgspec.MsgspecError:  # of another release; discard_uploads finds what it stands for
            return None
        here = (self._account.bucket, key, upload.source.size_bytes, upload.identity)
        if (begun.bucket, begun.key, begun.size_bytes, begun.identity) == here:
            return begun
        self._abandon(upload, begun)
        return None

    def _begin(self, upload: Upload, key: str) -> Begun:
        token = secrets.token_hex(16)
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._options.checksum == "crc32" else {}

        def create() -> str:
            answer = self._account.connection().client.create_multipart_upload(
                Bucket=self._account.bucket,
                Key=key,
                Metadata={_MARK: token},
                **algorithm,
                **self._options.encryption(),
            )
            return str(answer["UploadId"])

        size = upload.source.size_bytes
        begun = Begun(
            bucket=self._account.bucket,
            key=key,
            upload_id=upload.retry.run(upload.what, create),
            token=token,
            size_bytes=size,
            part_bytes=part_size_for(size, self._part_bytes),
            identity=upload.identity,
        )
        upload.journal.put(upload.name, msgspec.json.encode(begun))
        return begun

    def _finish(self, upload: Upload, begun: Begun, *, fresh: bool) -> None:
        parts = cut(begun.size_bytes, begun.part_bytes)
        ask = partial(self._stored, begun)
        done = reusable(
            parts,
            [] if fresh else upload.retry.run(upload.what, ask, absent=UploadGoneError),
            same_source=bool(begun.identity),
            checksum=partial(self._checksum, upload),
        )
        missing = [part for part in parts if part.number not in done]
        for sent in self._send_parts(upload, begun, missing):
            done[sent.number] = sent
        self._complete(upload, begun, [done[part.number] for part in parts])

    def _stored(self, begun: Begun) -> list[StoredPart]:
        pages = self._account.connection().client.get_paginator("list_parts")
        return [
            StoredPart(part["PartNumber"], part["Size"], part["ETag"], part.get("ChecksumCRC32", ""))
            for page in pages.paginate(Bucket=begun.bucket, Key=begun.key, UploadId=begun.upload_id)
            for part in page.get("Parts", ())
        ]

    def _send_parts(self, upload: Upload, begun: Begun, parts: Iterable[Part]) -> list[StoredPart]:
        """The first part that fails for good ends the others."""
        stop = upload.stop.child()
        upload = replace(upload, stop=stop, retry=replace(upload.retry, sleep=stop.wait))
        pending = [self._pool.submit(self._send_part, upload, begun, part) for part in parts]
        try:
            wait(pending)
        finally:
            stop.set()
            wait(pending)
        errors = [error for future in pending if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, UploadCancelledError)):
            raise error  # what made the others stop, if there is such a thing
        return [future.result() for future in pending]

    def _send_part(self, upload: Upload, begun: Begun, part: Part) -> StoredPart:
        target = {
            "Bucket": begun.bucket,
            "Key": begun.key,
            "UploadId": begun.upload_id,
            "PartNumber": part.number,
        }
        try:
            upload.stop.check()
            with upload.source.window(part.start, part.stop) as window:
                checksum = digest(window, self._options.checksum)
                etag = self._put(upload, window, checksum, "upload_part", target)
            upload.progress(part.size_bytes)
        except BaseException:
            upload.stop.set()
            raise
        return StoredPart(part.number, part.size_bytes, etag, checksum if self._options.checksum == "crc32" else "")

    def _complete(self, upload: Upload, begun: Begun, parts: Iterable[StoredPart]) -> None:
        listed = [
            {
                "PartNumber": part.number,
                "ETag": part.etag,
                **({"ChecksumCRC32": part.checksum} if part.checksum else {}),
            }
            for part in parts
        ]

        def complete() -> None:
            upload.stop.check()
            self._account.connection().client.complete_multipart_upload(
                Bucket=begun.bucket, Key=begun.key, UploadId=begun.upload_id, MultipartUpload={"Parts": listed}
            )

        upload.retry.run(upload.what, complete, absent=UploadGoneError)

    def _completed(self, upload: Upload, begun: Begun) -> bool:
        """Whether the object is the one this upload was to make."""

        def look() -> Mapping[str, str]:
            head = self._account.connection().client.head_object(Bucket=begun.bucket, Key=begun.key)
            return {name.lower(): value for name, value in head["Metadata"].items()}

        try:
            return upload.retry.run(upload.what, look, absent=ObjectNotFoundError).get(_MARK) == begun.token
        except ObjectNotFoundError:
            return False

    def _abandon(self, upload: Upload, begun: Begun) -> None:
        """One try: what it leaves behind is for discard_uploads."""
        with contextlib.suppress(TieredCheckpointError):
            replace(upload.retry, retry_s=0.0).run(
                upload.what,
                lambda: self._account.connection().client.abort_multipart_upload(
                    Bucket=begun.bucket, Key=begun.key, UploadId=begun.upload_id
                ),
            )
        upload.journal.remove(upload.name)

    def _send_whole(self, upload: Upload, key: str) -> None:
        target = {"Bucket": self._account.bucket, "Key": key, **self._options.encryption()}
        with upload.source.window(0, upload.source.size_bytes) as window:
            self._put(upload, window, digest(window, self._options.checksum), "put_object", target)
        upload.progress(upload.source.size_bytes)

    # -- bytes ------------------------------------------------------------------------------------------------

    def _put(
        self, upload: Upload, window: memoryview, checksum: str, operation: str, target: Mapping[str, object]
    ) -> str:
        """Send a window with a signed URL, as often as it takes; the ETag it got."""
        params, headers = dict(target), {}
        if checksum:
            params[_CHECKSUM_PARAMS[self._options.checksum]] = checksum
            headers[_CHECKSUM_HEADERS[self._options.checksum]] = checksum
        headers |= {header: str(target[name]) for name, header in _HEADERS.items() if name in target}

        def once() -> str:
            upload.stop.check()
            url = self._account.connection().presign(operation, params)
            with contextlib.closing(upload.pieces_of(window)) as pieces:
                answer = self._account.wire().put(url, pieces, len(window), headers, upload.stop)
            if "etag" not in answer:
                raise ConnectionError("an answer without ETag, which no S3 store gives")
            return answer["etag"]

        if "PartNumber" not in target:
            return upload.retry.run(upload.what, once)
        # Without its upload a part has nowhere to go, which some servers call NoSuchKey.
        return upload.retry.run(f"{upload.what}, part {target['PartNumber']}", once, absent=UploadGoneError)

    def _checksum(self, upload: Upload, part: Part) -> str:
        with upload.source.window(part.start, part.stop) as window:
            return digest(window, "crc32")
