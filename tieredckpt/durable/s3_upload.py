"""Multipart uploads that survive this process: checksums, PUTs from a mapping, the journal.

::

    journal has an upload of the same bytes? ──no──> create, note id and token in the journal ──┐
            │yes                                                                                │
            └──> list its parts, keep those that hold what they should ─────────────────────────┴──> send the others,
                 complete, forget the journal's entry

The store may lose an upload at any moment (a lifecycle rule, an abort, or because a completion whose answer was lost
did happen). The token, in the object's metadata, tells the last case from the others, which start over.
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
_MARK = "tieredckpt-upload"
_CHECKSUM_HEADERS = {"crc32": "x-amz-checksum-crc32", "md5": "content-md5"}
_CHECKSUM_PARAMS = {"crc32": "ChecksumCRC32", "md5": "ContentMD5"}
_HEADERS = {
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
}


class BegunUpload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the journal keeps of an upload."""

    bucket: str
    key: str
    upload_id: str
    token: str
    size_bytes: int
    part_bytes: int
    identity: str


class MultipartUploader:
    """Any thread may call; all uploads share ``pool``, whose size is the number of parts in flight."""

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

    # -- steps ------------------------------------------------------------------------------------------------

    def _resume(self, upload: UploadJob, key: str) -> BegunUpload | None:
        noted = upload.journal.get(upload.name)
        if noted is None:
            return None
        try:
            begun = from_json(noted, BegunUpload)
        except msgspec.MsgspecError:  # of another release; discard_uploads finds what it stands for
            return None
        here = (self._account.bucket, key, upload.source.size_bytes, upload.identity)
        if (begun.bucket, begun.key, begun.size_bytes, begun.identity) == here:
            return begun
        self._abandon(upload, begun)
        return None

    def _begin(self, upload: UploadJob, key: str) -> BegunUpload:
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
        ask = partial(self._stored, begun)
        done = reusable_parts(
            parts,
            [] if fresh else upload.retry.run(upload.what, ask, absent=UploadGoneError),
            same_source=bool(begun.identity),
            checksum=partial(self._checksum, upload),
        )
        missing = [part for part in parts if part.number not in done]
        for sent in self._send_parts(upload, begun, missing):
            done[sent.number] = sent
        self._complete(upload, begun, [done[part.number] for part in parts])

    def _stored(self, begun: BegunUpload) -> list[UploadedPart]:
        pages = self._account.connection().client.get_paginator("list_parts")
        return [
            UploadedPart(part["PartNumber"], part["Size"], part["ETag"], part.get("ChecksumCRC32", ""))
            for page in pages.paginate(Bucket=begun.bucket, Key=begun.key, UploadId=begun.upload_id)
            for part in page.get("Parts", ())
        ]

    def _send_parts(self, upload: UploadJob, begun: BegunUpload, parts: Iterable[UploadPart]) -> list[UploadedPart]:
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
        """Whether the object is the one this upload was to make."""

        def look() -> Mapping[str, str]:
            head = self._account.connection().client.head_object(Bucket=begun.bucket, Key=begun.key)
            return {name.lower(): value for name, value in head["Metadata"].items()}

        try:
            return upload.retry.run(upload.what, look, absent=ObjectNotFoundError).get(_MARK) == begun.token
        except ObjectNotFoundError:
            return False

    def _abandon(self, upload: UploadJob, begun: BegunUpload) -> None:
        """One try: what it leaves behind is for discard_uploads."""
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

    # -- bytes ------------------------------------------------------------------------------------------------

    def _put(
        self, upload: UploadJob, window: memoryview, checksum: str, operation: str, target: Mapping[str, object]
    ) -> str:
        """Send a window with a signed URL, as often as it takes; the ETag it got."""
        params, headers = dict(target), {}
        if checksum:
            params[_CHECKSUM_PARAMS[self._options.checksum]] = checksum
            headers[_CHECKSUM_HEADERS[self._options.checksum]] = checksum
        headers |= {header: str(target[name]) for name, header in _HEADERS.items() if name in target}

        def once() -> str:
            upload.stop.raise_if_set()
            url = self._account.connection().presign(operation, params)
            with contextlib.closing(upload.pieces_of(window)) as pieces:
                answer = self._account.part_sender().put(url, pieces, len(window), headers, upload.stop)
            if "etag" not in answer:
                raise ConnectionError("an answer without ETag, which no S3 store gives")
            return answer["etag"]

        if "PartNumber" not in target:
            return upload.retry.run(upload.what, once)
        # Without its upload a part has nowhere to go, which some servers call NoSuchKey.
        return upload.retry.run(f"{upload.what}, part {target['PartNumber']}", once, absent=UploadGoneError)

    def _checksum(self, upload: UploadJob, part: UploadPart) -> str:
        with upload.source.window(part.start, part.stop) as window:
            return base64_checksum(window, "crc32")


_MAX_DOCUMENT_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class PartSenderSettings:
    timeout_s: float
    proxy_for: Callable[[str], str] = lambda _: ""
    """The proxy's URL for a URL; empty for none."""
    trusted: str = ""
    """Certificate authorities, as a file or a directory; empty: those of the system."""


class PartSender:
    """Any thread may call; a connection is used by one at a time."""

    def __init__(self, settings: PartSenderSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._closed = False
        self._tls: ssl.SSLContext | None = None

    def put(
        self, url: str, body: Iterator[memoryview], size_bytes: int, headers: Mapping[str, str], stop: StopSignal
    ) -> Mapping[str, str]:
        """Send ``body``; the answer's headers by lower-case name, or :class:`HttpStatusError`, or ``OSError``."""
        parts = urlsplit(url)
        connection = self._take(parts)
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
            self._give_back(parts, connection)
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

    def _take(self, parts: SplitResult) -> http.client.HTTPConnection:
        key = (parts.scheme, parts.netloc)
        while True:
            with self._lock:
                idle = self._idle.get(key)
                connection = idle.pop() if idle else None
            if connection is None:
                return self._open(parts)
            if not _readable(connection):
                return connection
            connection.close()  # the server has closed it, or says something nobody asked for

    def _give_back(self, parts: SplitResult, connection: http.client.HTTPConnection) -> None:
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
                where = self._settings.trusted
                directory = bool(where) and Path(where).is_dir()
                self._tls = ssl.create_default_context(
                    cafile=where if where and not directory else None, capath=where if directory else None
                )
            return self._tls


def _exchange(
    connection: http.client.HTTPConnection, target: str, body: Iterator[memoryview], headers: Mapping[str, str]
) -> tuple[http.client.HTTPResponse, bytes]:
    try:
        connection.request("PUT", target, body, dict(headers))
    except (BrokenPipeError, ConnectionResetError) as broken:
        # A server that says no before it has read everything: its answer says more than the broken pipe.
        return _early_answer(connection, broken)
    reply = connection.getresponse()
    return reply, _document(reply)


def _early_answer(connection: http.client.HTTPConnection, broken: OSError) -> tuple[http.client.HTTPResponse, bytes]:
    reply = http.client.HTTPResponse(connection.sock, method="PUT")
    try:
        reply.begin()
        document = _document(reply)
    except (OSError, http.client.HTTPException):
        reply.close()
        raise broken from None
    if 200 <= reply.status < 300:
        raise broken
    reply.will_close = True
    return reply, document


def _document(reply: http.client.HTTPResponse) -> bytes:
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
"""CRC-32 is fast and S3 checks it; some stores that speak like S3 check nothing but Content-MD5."""


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
    """In base64, as the headers have it."""
    if kind == "crc32":
        return base64.b64encode(_crc32()(data).to_bytes(4, "big")).decode()
    if kind == "md5":
        return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    return ""
