"""Multipart uploads that survive this process: checksums, PUTs from a mapping, the journal.

::

    journal has an upload of the same bytes? ──no──> create, note id and token in the journal ──┐
            │yes                                                                                │
            └──> list its parts, reuse those with the expected bytes ───────────────────────────┴──> send the others,
                 complete, delete the journal's entry

The store may lose an upload at any moment, by a lifecycle rule or an abort. The upload then restarts. An upload is also
gone after a completion with a lost response. The token in the object's metadata identifies that case.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import secrets
import select
import ssl
import threading
from concurrent.futures import Executor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol
from urllib.parse import SplitResult, urlsplit

import msgspec
from typing_extensions import Buffer

from peerstore.message_codec import from_json
from tieredckpt.durable.object_backend import HttpStatusError, UploadGoneError, parse_error_document, parse_retry_after
from tieredckpt.durable.object_store import (
    ObjectNotFoundError,
    UploadCancelledError,
    UploadedPart,
    UploadPart,
    part_size_for,
    reusable_parts,
    split_upload,
)
from tieredckpt.errors import TieredCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tieredckpt.durable.object_backend import UploadJob
    from tieredckpt.durable.object_store import StopSignal
    from tieredckpt.durable.s3 import S3Account, S3Options

_ATTEMPTS = 3
_UPLOAD_MARK = "tieredckpt-upload"
_CHECKSUM_HEADERS = {"crc32": "x-amz-checksum-crc32", "md5": "content-md5"}
_CHECKSUM_PARAMS = {"crc32": "ChecksumCRC32", "md5": "ContentMD5"}
_HEADERS = {
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
}


class BegunUpload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Journal entry of an upload."""

    bucket: str
    key: str
    upload_id: str
    token: str
    size_bytes: int
    part_bytes: int
    identity: str


class MultipartUploader:
    """Uploads to one bucket.

    Any thread may call. All uploads share ``pool``; its size limits the parts in flight.
    """

    def __init__(self, account: S3Account, pool: Executor, options: S3Options, *, part_bytes: int) -> None:
        self._account = account
        self._pool = pool
        self._options = options
        self._part_bytes = part_bytes

    def send(self, upload: UploadJob, key: str) -> None:
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

    def _resume(self, upload: UploadJob, key: str) -> BegunUpload | None:
        entry = upload.journal.get(upload.name)
        if entry is None:
            return None
        try:
            begun = from_json(entry, BegunUpload)
        except msgspec.MsgspecError:  # of another release; abort_stale_uploads deletes that upload later
            return None
        expected = (self._account.bucket, key, upload.source.size_bytes, upload.identity)
        if (begun.bucket, begun.key, begun.size_bytes, begun.identity) == expected:
            return begun
        self._abandon(upload, begun)
        return None

    def _begin(self, upload: UploadJob, key: str) -> BegunUpload:
        token = secrets.token_hex(16)
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._options.checksum == "crc32" else {}

        def create() -> str:
            response = self._account.connection().client.create_multipart_upload(
                Bucket=self._account.bucket,
                Key=key,
                Metadata={_UPLOAD_MARK: token},
                **algorithm,
                **self._options.encryption(),
            )
            return str(response["UploadId"])

        size = upload.source.size_bytes
        begun = BegunUpload(
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

    def _finish(self, upload: UploadJob, begun: BegunUpload, *, fresh: bool) -> None:
        parts = split_upload(begun.size_bytes, begun.part_bytes)
        list_parts = partial(self._list_parts, begun)
        done = reusable_parts(
            parts,
            [] if fresh else upload.retry.run(upload.what, list_parts, absent=UploadGoneError),
            same_source=bool(begun.identity),
            checksum=partial(self._checksum, upload),
        )
        missing = [part for part in parts if part.number not in done]
        for sent in self._send_parts(upload, begun, missing):
            done[sent.number] = sent
        self._complete(upload, begun, [done[part.number] for part in parts])

    def _list_parts(self, begun: BegunUpload) -> list[UploadedPart]:
        pages = self._account.connection().client.get_paginator("list_parts")
        return [
            UploadedPart(part["PartNumber"], part["Size"], part["ETag"], part.get("ChecksumCRC32", ""))
            for page in pages.paginate(Bucket=begun.bucket, Key=begun.key, UploadId=begun.upload_id)
            for part in page.get("Parts", ())
        ]

    def _send_parts(self, upload: UploadJob, begun: BegunUpload, parts: Iterable[UploadPart]) -> list[UploadedPart]:
        """Send parts in parallel. The first part that fails after its retries stops the others."""
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
            raise error  # prefer the error that stopped the other parts
        return [future.result() for future in pending]

    def _send_part(self, upload: UploadJob, begun: BegunUpload, part: UploadPart) -> UploadedPart:
        target = {
            "Bucket": begun.bucket,
            "Key": begun.key,
            "UploadId": begun.upload_id,
            "PartNumber": part.number,
        }
        try:
            upload.stop.raise_if_set()
            with upload.source.window(part.start, part.stop) as window:
                checksum = base64_checksum(window, self._options.checksum)
                etag = self._put(upload, window, checksum, "upload_part", target)
            upload.progress(part.size_bytes)
        except BaseException:
            upload.stop.set()
            raise
        return UploadedPart(part.number, part.size_bytes, etag, checksum if self._options.checksum == "crc32" else "")

    def _complete(self, upload: UploadJob, begun: BegunUpload, parts: Iterable[UploadedPart]) -> None:
        listed = [
            {
                "PartNumber": part.number,
                "ETag": part.etag,
                **({"ChecksumCRC32": part.checksum} if part.checksum else {}),
            }
            for part in parts
        ]

        def complete() -> None:
            upload.stop.raise_if_set()
            self._account.connection().client.complete_multipart_upload(
                Bucket=begun.bucket, Key=begun.key, UploadId=begun.upload_id, MultipartUpload={"Parts": listed}
            )

        upload.retry.run(upload.what, complete, absent=UploadGoneError)

    def _completed(self, upload: UploadJob, begun: BegunUpload) -> bool:
        """Return whether the object in the store is the result of this upload."""

        def look() -> Mapping[str, str]:
            head = self._account.connection().client.head_object(Bucket=begun.bucket, Key=begun.key)
            return {name.lower(): value for name, value in head["Metadata"].items()}

        try:
            return upload.retry.run(upload.what, look, absent=ObjectNotFoundError).get(_UPLOAD_MARK) == begun.token
        except ObjectNotFoundError:
            return False

    def _abandon(self, upload: UploadJob, begun: BegunUpload) -> None:
        """Abort an upload with one attempt; abort_stale_uploads deletes any remains later."""
        with contextlib.suppress(TieredCheckpointError):
            replace(upload.retry, retry_s=0.0).run(
                upload.what,
                lambda: self._account.connection().client.abort_multipart_upload(
                    Bucket=begun.bucket, Key=begun.key, UploadId=begun.upload_id
                ),
            )
        upload.journal.remove(upload.name)

    def _send_whole(self, upload: UploadJob, key: str) -> None:
        target = {"Bucket": self._account.bucket, "Key": key, **self._options.encryption()}
        with upload.source.window(0, upload.source.size_bytes) as window:
            self._put(upload, window, base64_checksum(window, self._options.checksum), "put_object", target)
        upload.progress(upload.source.size_bytes)

    def _put(
        self, upload: UploadJob, window: memoryview, checksum: str, operation: str, target: Mapping[str, object]
    ) -> str:
        """Send a window to a signed URL, with retries; return the ETag."""
        params, headers = dict(target), {}
        if checksum:
            params[_CHECKSUM_PARAMS[self._options.checksum]] = checksum
            headers[_CHECKSUM_HEADERS[self._options.checksum]] = checksum
        headers |= {header: str(target[name]) for name, header in _HEADERS.items() if name in target}

        def attempt() -> str:
            upload.stop.raise_if_set()
            url = self._account.connection().presign(operation, params)
            with contextlib.closing(upload.pieces_of(window)) as pieces:
                response_headers = self._account.part_sender().put(url, pieces, len(window), headers, upload.stop)
            if "etag" not in response_headers:
                raise ConnectionError("an answer without ETag, which no S3 store gives")
            return response_headers["etag"]

        if "PartNumber" not in target:
            return upload.retry.run(upload.what, attempt)
        # Some servers respond with NoSuchKey to a part of an upload that no longer exists.
        return upload.retry.run(f"{upload.what}, part {target['PartNumber']}", attempt, absent=UploadGoneError)

    def _checksum(self, upload: UploadJob, part: UploadPart) -> str:
        with upload.source.window(part.start, part.stop) as window:
            return base64_checksum(window, "crc32")


_MAX_DOCUMENT_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class PartSenderSettings:
    timeout_s: float
    proxy_for: Callable[[str], str] = lambda _: ""
    """Function from a URL to the URL of its proxy; "" for none."""
    trusted: str = ""
    """File or directory of certificate authorities; "" for those of the system."""


class PartSender:
    """HTTP client that sends parts. Any thread may call; each connection serves one call at a time."""

    def __init__(self, settings: PartSenderSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._closed = False
        self._tls: ssl.SSLContext | None = None

    def put(
        self, url: str, body: Iterator[memoryview], size_bytes: int, headers: Mapping[str, str], stop: StopSignal
    ) -> Mapping[str, str]:
        """Send ``body``; return the headers by lower-case name. Raise :class:`HttpStatusError` or ``OSError``."""
        parts = urlsplit(url)
        connection = self._acquire(parts)
        try:
            with stop.shutting_down_on_stop(connection.sock):
                request = {"Content-Length": str(size_bytes), **headers}
                reply, document = _exchange(connection, self._target(parts), body, request)
        except BaseException:
            connection.close()
            raise
        if reply.will_close:
            connection.close()
        else:
            self._release(parts, connection)
        found = {name.lower(): value for name, value in reply.getheaders()}
        if not 200 <= reply.status < 300:
            code, message = parse_error_document(document.decode(errors="replace"))
            wait_s = parse_retry_after(found.get("retry-after", ""), found.get("date", ""))
            raise HttpStatusError(reply.status, code, message or reply.reason, wait_s)
        return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _target(self, parts: SplitResult) -> str:
        if parts.scheme == "http" and self._settings.proxy_for(parts.geturl()):
            return parts.geturl()
        return f"{parts.path}?{parts.query}" if parts.query else parts.path

    def _acquire(self, parts: SplitResult) -> http.client.HTTPConnection:
        key = (parts.scheme, parts.netloc)
        while True:
            with self._lock:
                idle = self._idle.get(key)
                connection = idle.pop() if idle else None
            if connection is None:
                return self._open(parts)
            if not _readable(connection):
                return connection
            connection.close()  # the server has closed it or sent unexpected data

    def _release(self, parts: SplitResult, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault((parts.scheme, parts.netloc), []).append(connection)
                return
        connection.close()

    def _open(self, parts: SplitResult) -> http.client.HTTPConnection:
        secure = parts.scheme == "https"
        host, port = parts.hostname or "", parts.port or (443 if secure else 80)
        proxy = urlsplit(self._settings.proxy_for(parts.geturl()))
        to_host, to_port = (proxy.hostname, proxy.port or 80) if proxy.hostname else (host, port)
        timeout_s = min(CONNECT_TIMEOUT_S, self._settings.timeout_s)
        connection = (
            http.client.HTTPSConnection(to_host, to_port, timeout=timeout_s, context=self._context())
            if secure
            else http.client.HTTPConnection(to_host, to_port, timeout=timeout_s)
        )
        if proxy.hostname and secure:
            connection.set_tunnel(host, port)
        try:
            connection.connect()
            connection.sock.settimeout(self._settings.timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                trusted = self._settings.trusted
                directory = bool(trusted) and Path(trusted).is_dir()
                self._tls = ssl.create_default_context(
                    cafile=trusted if trusted and not directory else None, capath=trusted if directory else None
                )
            return self._tls


def _exchange(
    connection: http.client.HTTPConnection, target: str, body: Iterator[memoryview], headers: Mapping[str, str]
) -> tuple[http.client.HTTPResponse, bytes]:
    try:
        connection.request("PUT", target, body, dict(headers))
    except (BrokenPipeError, ConnectionResetError) as broken:
        # The server rejected the request before reading all of it. Its response explains more than the broken pipe.
        return _early_response(connection, broken)
    reply = connection.getresponse()
    return reply, _read_document(reply)


def _early_response(connection: http.client.HTTPConnection, broken: OSError) -> tuple[http.client.HTTPResponse, bytes]:
    reply = http.client.HTTPResponse(connection.sock, method="PUT")
    try:
        reply.begin()
        document = _read_document(reply)
    except (OSError, http.client.HTTPException):
        reply.close()
        raise broken from None
    if 200 <= reply.status < 300:
        raise broken
    reply.will_close = True
    return reply, document


def _read_document(reply: http.client.HTTPResponse) -> bytes:
    try:
        document = reply.read(_MAX_DOCUMENT_BYTES)
        if not reply.isclosed():
            reply.will_close = True
        return document
    finally:
        reply.close()


def _readable(connection: http.client.HTTPConnection) -> bool:
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


ChecksumKind = Literal["crc32", "md5", "none"]
"""CRC-32 is fast, and S3 verifies it. Some compatible stores verify only Content-MD5."""


class _Crc32(Protocol):
    def __call__(self, data: Buffer, value: int = 0, /) -> int: ...


@cache
def _crc32() -> _Crc32:
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32
    return crc32


def base64_checksum(data: Buffer, kind: ChecksumKind) -> str:
    """Return the checksum in base64, as HTTP headers have it; "" for "none"."""
    if kind == "crc32":
        return base64.b64encode(_crc32()(data).to_bytes(4, "big")).decode()
    if kind == "md5":
        return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    return ""
