"""Backend, one attempt at one request, the meaning of its errors, and the retry loop around it.

:class:`~tieredckpt.durable.retrying_store.RetryingStore` makes an ``ObjectStore`` of it.
"""

from __future__ import annotations

import errno
import logging
import random
import re
import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from typing_extensions import Buffer

from peerstore.sizes_and_durations import show_seconds
from tieredckpt.durable.object_store import ObjectExistsError
from tieredckpt.errors import (
    CheckpointDamagedError,
    DurableRefusedError,
    StoreBusyError,
    TieredCheckpointError,
    TierUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from peerstore.rate_limiter import RateLimiter
    from tieredckpt.durable.object_store import ObjectInfo, ProgressCallback, StopSignal, UploadJournal, UploadSource

_log = logging.getLogger(__name__)


_WINDOW_BYTES = 32 << 20


@dataclass(frozen=True)
class UploadJob:
    """Everything one upload needs; ``retry`` sleeps with ``stop``."""

    name: str
    what: str
    """Begins error messages."""
    source: UploadSource
    identity: str
    journal: UploadJournal
    progress: ProgressCallback
    stop: StopSignal
    retry: RetryPolicy
    bandwidth: RateLimiter

    def pieces(self) -> Generator[memoryview, None, None]:
        """The whole source, no faster than the limit allows, until told to stop; each piece is valid until the next."""
        for start in range(0, self.source.size_bytes, _WINDOW_BYTES):
            with self.source.window(start, min(start + _WINDOW_BYTES, self.source.size_bytes)) as window:
                yield from self.pieces_of(window)

    def pieces_of(self, view: memoryview) -> Generator[memoryview, None, None]:
        """The same for a part of it."""
        step = self.bandwidth.slice_bytes
        for start in range(0, len(view), step):
            self.stop.raise_if_set()
            with view[start : start + step] as piece:
                self.bandwidth.acquire(len(piece), self.stop.wait)
                yield piece


class ObjectBackend(Protocol):
    """Any thread may call any method. Names were checked by the caller."""

    @property
    def url(self) -> str: ...
    @property
    def resumes_uploads(self) -> bool:
        """Whether an interrupted upload leaves something to go on with."""

    @property
    def lists_in_pages(self) -> bool:
        """Whether listings come in pages, so that a long silence means that it is away."""

    def refresh_credentials(self) -> bool:
        """Look for other credentials after a refusal; whether there are any."""

    def check_root(self) -> None:
        """Raise if a directory cannot be created. Other stores are not asked."""

    def put(self, name: str, data: bytes, *, create_only: bool) -> None:
        """All or nothing. Where the store cannot enforce ``create_only``, it is ignored."""

    def exists(self, name: str) -> bool: ...
    def get(self, name: str) -> bytes: ...
    def get_range(self, name: str, start: int, stop: int) -> Buffer:
        """Fewer bytes only where the object ends."""

    def list(self, prefix: str) -> Iterable[ObjectInfo]:
        """In any order; what does not start with ``prefix`` may be among it."""

    def delete(self, names: Sequence[str]) -> None: ...
    def upload(self, upload: UploadJob) -> None: ...
    def abort_stale_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int: ...
    def close(self) -> None: ...


class FailureKind(Enum):
    """What a caller can do about it."""

    UNAVAILABLE = "no answer, or one that another try may change"
    BUSY = "asked to slow down"
    REFUSED = "the store says no, and would again"
    NOT_FOUND = "no such object"
    EXISTS = "there is one already"
    TRUNCATED = "the object ends before the bytes asked for"
    UPLOAD_GONE = "no such multipart upload, or not with these parts"
    NOT_FROM_STORE = "not about the store: a bug or a wrong call"


@dataclass(frozen=True)
class StoreFailure:
    meaning: FailureKind
    detail: str
    retry_after_s: float = 0.0
    credentials: bool = False
    """Other credentials may get another answer."""


class HttpStatusError(Exception):
    """An HTTP answer that is not a success, from this package's own sender."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(status, code, message, retry_after_s)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def classify_error(error: BaseException) -> StoreFailure:
    """What ``error`` (of obstore, botocore, fsspec, this package's sender, or the operating system) means."""
    if isinstance(error, HttpStatusError):
        return classify_response(error.status, error.code, error.message, retry_after_s=error.retry_after_s)
    for each in (error, error.__cause__):  # s3fs raises an OSError from what botocore said
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return _botocore_answer(response)
    text = str(error)
    if type(error).__module__.startswith("obstore") or "\n\nDebug source" in text:
        return _obstore(error, text.partition("\n\nDebug source")[0])
    named = _by_name(type(error), text)
    if named is not None:
        return named
    if isinstance(error, OSError):
        return _os_error(error)
    if type(error).__module__ == "builtins" or not isinstance(error, Exception):
        return StoreFailure(FailureKind.NOT_FROM_STORE, text)
    if type(error).__module__.startswith("tieredckpt"):
        return StoreFailure(FailureKind.NOT_FROM_STORE, text)
    return StoreFailure(FailureKind.UNAVAILABLE, _line(f"{type(error).__name__}: {text}"))


def classify_response(status: int, code: str = "", message: str = "", *, retry_after_s: float = 0.0) -> StoreFailure:
    """What an HTTP answer of an object store means."""
    meaning = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if meaning is None:
        meaning = FailureKind.UNAVAILABLE if status >= 500 else FailureKind.REFUSED
    what = " ".join(filter(None, (str(status or ""), code)))
    detail = _line(f"{what}: {message}" if message else what)
    advice = _ADVICE.get(code) or _ADVICE.get(str(status), "")
    if advice and meaning is FailureKind.REFUSED:
        detail = f"{detail}. {advice}"
    credentials = meaning is FailureKind.REFUSED and (status in (401, 403) or code in _CREDENTIAL_CODES)
    return StoreFailure(meaning, detail, retry_after_s, credentials)


def parse_retry_after(value: str, date: str = "") -> float:
    """Seconds that a ``Retry-After`` header asks for; a moment is read against the same answer's ``Date``."""
    if re.fullmatch(r"\s*[0-9]+(\.[0-9]*)?\s*", value):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - parsedate_to_datetime(date)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def parse_error_document(document: str) -> tuple[str, str]:
    """Code and message of an XML error document; empty where there are none."""
    code = re.search(r"<Code>([^<]+)</Code>", document)
    message = re.search(r"<Message>([^<]+)</Message>", document)
    return code[1] if code else "", message[1].strip() if message else ""


def _botocore_answer(response: dict[str, Any]) -> StoreFailure:
    said, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
    headers = {str(k).lower(): str(v) for k, v in meta.get("HTTPHeaders", {}).items()}
    status = int(meta.get("HTTPStatusCode", 0))
    code = str(said.get("Code", ""))
    if code.isdigit():  # an answer without a document, to HEAD
        status, code = int(code), ""
    wait_s = parse_retry_after(headers.get("retry-after", ""), headers.get("date", ""))
    return classify_response(status, code, str(said.get("Message", "")), retry_after_s=wait_s)


def _obstore(error: BaseException, text: str) -> StoreFailure:
    status = re.search(r"status code: (\d{3})", text)
    code, message = parse_error_document(text)
    if status:
        if not code and status[1] == "409" and type(error).__name__ == "AlreadyExistsError":
            return StoreFailure(FailureKind.EXISTS, _line(text))
        return classify_response(int(status[1]), code, message or _line(text))
    provider = re.search(r"credential provider: (\w+): (.*)", text, re.DOTALL)
    if provider:
        named = _NAMES.get(provider[1], FailureKind.REFUSED)
        return StoreFailure(named, _line(provider[2]), credentials=named is FailureKind.REFUSED)
    if re.search(r"Wanted range starting at", text):
        return StoreFailure(FailureKind.TRUNCATED, _line(text))
    if "redirect without LOCATION" in text:
        return classify_response(301, "", _line(text))
    return StoreFailure(_NAMES.get(type(error).__name__, FailureKind.UNAVAILABLE), _line(text))


def _by_name(kind: type[BaseException], text: str) -> StoreFailure | None:
    for each in kind.__mro__:
        meaning = _NAMES.get(each.__name__)
        if meaning is not None:
            if "CERTIFICATE_VERIFY_FAILED" in text:
                meaning = FailureKind.REFUSED
            return StoreFailure(meaning, _line(text or kind.__name__), credentials=meaning is FailureKind.REFUSED)
    return None


def _os_error(error: OSError) -> StoreFailure:
    detail = _line(str(error) or type(error).__name__)
    for kind, meaning in _OS_KINDS:
        if isinstance(error, kind):
            return StoreFailure(meaning, detail, credentials=kind is PermissionError)
    return StoreFailure(_ERRNO.get(error.errno or 0, FailureKind.UNAVAILABLE), detail)


def _line(text: str) -> str:
    return " ".join(text.split())[:500]


_OS_KINDS: tuple[tuple[type[OSError], FailureKind], ...] = (
    (FileNotFoundError, FailureKind.NOT_FOUND),
    (FileExistsError, FailureKind.EXISTS),
    (PermissionError, FailureKind.REFUSED),
    (NotADirectoryError, FailureKind.NOT_FOUND),
    (IsADirectoryError, FailureKind.NOT_FOUND),
    (ssl.SSLCertVerificationError, FailureKind.REFUSED),
)
_ERRNO = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP),
    FailureKind.REFUSED,
)

_BY_STATUS = {
    404: FailureKind.NOT_FOUND,
    408: FailureKind.UNAVAILABLE,
    412: FailureKind.EXISTS,
    416: FailureKind.TRUNCATED,
    425: FailureKind.UNAVAILABLE,
    429: FailureKind.BUSY,
    501: FailureKind.REFUSED,
    503: FailureKind.BUSY,
    505: FailureKind.REFUSED,
    507: FailureKind.REFUSED,
}
_BY_CODE = {
    **dict.fromkeys(
        (
            "SlowDown",
            "SlowDownRead",
            "SlowDownWrite",
            "Throttling",
            "ThrottlingException",
            "RequestLimitExceeded",
            "RequestThrottled",
            "TooManyRequests",
            "TooManyRequestsException",
            "ServerBusy",
            "BandwidthLimitExceeded",
        ),
        FailureKind.BUSY,
    ),
    **dict.fromkeys(
        (
            # the request was damaged or cut on its way
            "BadDigest",
            "XAmzContentChecksumMismatch",
            "IncompleteBody",
            "RequestTimeout",
            # another request was at work on the same name
            "OperationAborted",
            "ConditionalRequestConflict",
            "InternalError",
            "ServiceUnavailable",
        ),
        FailureKind.UNAVAILABLE,
    ),
    **dict.fromkeys(
        ("NoSuchBucket", "ContainerNotFound", "AccountIsDisabled", "InvalidBucketName", "QuotaExceeded"),
        FailureKind.REFUSED,
    ),
    **dict.fromkeys(("NoSuchKey", "BlobNotFound"), FailureKind.NOT_FOUND),
    **dict.fromkeys(("PreconditionFailed", "ConditionNotMet", "BlobAlreadyExists"), FailureKind.EXISTS),
    **dict.fromkeys(("NoSuchUpload", "InvalidPart", "InvalidPartOrder"), FailureKind.UPLOAD_GONE),
    "InvalidRange": FailureKind.TRUNCATED,
}
_CREDENTIAL_CODES = frozenset(
    (
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidToken",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    )
)
_CREDENTIALS = "Check the credentials (profile, role, environment) this process runs with"
_REGION = "The bucket is in another region: set `region` (or `endpoint`) in durable.options"
_ADVICE = {
    **dict.fromkeys(_CREDENTIAL_CODES, _CREDENTIALS),
    "ExpiredToken": "The session token ended and nothing here can renew it: log in again or give a role or profile",
    "AccessDenied": "Allow s3:GetObject, PutObject, DeleteObject, ListBucket, and the multipart actions",
    "RequestTimeTooSkewed": "Set this machine's clock",
    "NoSuchBucket": "Create the bucket, or correct durable.url",
    "ContainerNotFound": "Create the container, or correct durable.url",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "QuotaExceeded": "Make room, or raise the quota",
    "301": _REGION,
    "307": _REGION,
    "401": _CREDENTIALS,
    "403": _CREDENTIALS,
    "507": "Make room in the store",
}
_NAMES = {
    **dict.fromkeys(
        (
            # botocore, urllib3, http.client, aiohttp
            "HTTPClientError",
            "ConnectionError",
            "EndpointConnectionError",
            "IncompleteReadError",
            "ResponseStreamingError",
            "CredentialRetrievalError",
            "MetadataRetrievalError",
            "HTTPException",
            "HTTPError",
            "ClientError",
            "TimeoutError",
        ),
        FailureKind.UNAVAILABLE,
    ),
    **dict.fromkeys(
        (
            # botocore
            "NoCredentialsError",
            "PartialCredentialsError",
            "ProfileNotFound",
            "SSOError",
            "TokenRetrievalError",
            "NoAuthTokenError",
            "NoRegionError",
            "InvalidEndpointDiscoveryConfigurationError",
            "ParamValidationError",
            # obstore
            "PermissionDeniedError",
            "UnauthenticatedError",
            "NotSupportedError",
        ),
        FailureKind.REFUSED,
    ),
    **dict.fromkeys(("AlreadyExistsError", "PreconditionError"), FailureKind.EXISTS),
    **dict.fromkeys(("FileNotFoundError", "NotFoundError"), FailureKind.NOT_FOUND),
    **dict.fromkeys(("UnknownConfigurationKeyError", "InvalidPathError"), FailureKind.NOT_FROM_STORE),
}


BACKOFF_BASE_S = 0.2
BACKOFF_CAP_S = 20.0
T = TypeVar("T")


class UploadGoneError(TierUnavailableError):
    """The store no longer knows the multipart upload, or not all of its parts."""


def backoff_s(attempt: int, uniform: Callable[[float, float], float], retry_after_s: float = 0.0) -> float:
    """How long to wait after try number ``attempt`` (from 0): full jitter, on top of what the store asked for."""
    return retry_after_s + uniform(0.0, min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(attempt, 30)))


@dataclass(frozen=True)
class RetryPolicy:
    """The rule of one store. ``retry_s`` counts from an operation's first failure, however long a try takes."""

    retry_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform
    refresh_credentials: Callable[[], bool] = lambda: False
    """Looks for other credentials when these are refused; whether there are any."""

    def run(
        self,
        what: str,
        operation: Callable[[], T],
        *,
        absent: type[TieredCheckpointError] = DurableRefusedError,
    ) -> T:
        """The result of ``operation``, tried as often as it takes.

        ``what`` begins the message of the error ("reading s3://b/x"), ``absent`` is raised when the store knows no
        such object.
        """
        deadline = 0.0
        attempt = 0
        renewed = False
        while True:
            try:
                return operation()
            except TieredCheckpointError:
                raise
            except Exception as error:  # noqa: BLE001 - every library has a tree of its own; classify() knows them
                failure = classify_error(error)
                if failure.credentials and not renewed and self.refresh_credentials():
                    renewed = True
                    continue
                now = self.clock()
                deadline = deadline or now + self.retry_s
                wait_s = backoff_s(attempt, self.uniform, failure.retry_after_s)
                if failure.meaning not in (FailureKind.UNAVAILABLE, FailureKind.BUSY) or now + wait_s > deadline:
                    _raise(what, failure, error, absent, tries=attempt + 1)
                attempt += 1
                _log.info("%s: %s; try %d in %s", what, failure.detail, attempt + 1, show_seconds(wait_s))
                self.sleep(wait_s)


def _raise(
    what: str, failure: StoreFailure, error: Exception, absent: type[TieredCheckpointError], *, tries: int
) -> None:
    if failure.meaning is FailureKind.NOT_FROM_STORE:
        raise error
    kind = _KINDS.get(failure.meaning, absent)
    again = f" (tried {tries} times; raise durable.retry_s to try longer)" if tries > 1 else ""
    raise kind(f"{what}: {failure.detail}{again}") from error


_KINDS: dict[FailureKind, type[TieredCheckpointError]] = {
    FailureKind.UNAVAILABLE: TierUnavailableError,
    FailureKind.BUSY: StoreBusyError,
    FailureKind.REFUSED: DurableRefusedError,
    FailureKind.EXISTS: ObjectExistsError,
    FailureKind.TRUNCATED: CheckpointDamagedError,
    FailureKind.UPLOAD_GONE: UploadGoneError,
}
