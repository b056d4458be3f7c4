"""Backends of object stores: single attempts, the meaning of their errors, and the retry policy.

:class:`~tieredckpt.durable.retrying_store.RetryingStore` builds an ``ObjectStore`` on a backend.
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
    """Parameters of one upload. Setting ``stop`` also ends the waits of ``retry``."""

    name: str
    what: str
    """Start of error messages."""
    source: UploadSource
    identity: str
    journal: UploadJournal
    progress: ProgressCallback
    stop: StopSignal
    retry: RetryPolicy
    bandwidth: RateLimiter

    def pieces(self) -> Generator[memoryview, None, None]:
        """Yield the whole source within the bandwidth limit.

        Each piece is valid until the next; ``stop`` raises.
        """
        for start in range(0, self.source.size_bytes, _WINDOW_BYTES):
            with self.source.window(start, min(start + _WINDOW_BYTES, self.source.size_bytes)) as window:
                yield from self.pieces_of(window)

    def pieces_of(self, view: memoryview) -> Generator[memoryview, None, None]:
        """Yield a part of the source in the same way."""
        step = self.bandwidth.slice_bytes
        for start in range(0, len(view), step):
            self.stop.raise_if_set()
            with view[start : start + step] as piece:
                self.bandwidth.acquire(len(piece), self.stop.wait)
                yield piece


class ObjectBackend(Protocol):
    """Single attempts at requests to one store. Any thread may call any method; callers check names."""

    @property
    def url(self) -> str: ...
    @property
    def resumes_uploads(self) -> bool:
        """Whether an interrupted upload can resume."""

    @property
    def lists_in_pages(self) -> bool:
        """Whether listings come in pages, so that a long silence means an unreachable store."""

    def refresh_credentials(self) -> bool:
        """Reload the credentials after a refusal; return whether they changed."""

    def check_root(self) -> None:
        """Raise if a directory cannot be created. Other stores are not contacted."""

    def put(self, name: str, data: bytes, *, create_only: bool) -> None:
        """Write an object atomically. ``create_only`` is ignored if the store cannot enforce it."""

    def exists(self, name: str) -> bool: ...
    def get(self, name: str) -> bytes: ...
    def get_range(self, name: str, start: int, stop: int) -> Buffer:
        """Return these bytes, fewer only if the object ends before ``stop``."""

    def list(self, prefix: str) -> Iterable[ObjectInfo]:
        """Return objects in any order, possibly with names that do not start with ``prefix``."""

    def delete(self, names: Sequence[str]) -> None: ...
    def upload(self, upload: UploadJob) -> None: ...
    def abort_stale_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int: ...
    def close(self) -> None: ...


class FailureKind(Enum):
    """Kind of a failed request, by the caller's possible reaction."""

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
    """Whether the request may succeed with other credentials."""


class HttpStatusError(Exception):
    """An HTTP error response, received by this package's own sender."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(status, code, message, retry_after_s)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def classify_error(error: BaseException) -> StoreFailure:
    """Classify an error of obstore, botocore, fsspec, this package's sender or the operating system."""
    if isinstance(error, HttpStatusError):
        return classify_response(error.status, error.code, error.message, retry_after_s=error.retry_after_s)
    for each in (error, error.__cause__):  # s3fs raises an OSError with botocore's error as its cause
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return _classify_botocore(response)
    text = str(error)
    if type(error).__module__.startswith("obstore") or "\n\nDebug source" in text:
        return _classify_obstore(error, text.partition("\n\nDebug source")[0])
    named = _classify_by_name(type(error), text)
    if named is not None:
        return named
    if isinstance(error, OSError):
        return _classify_os_error(error)
    if type(error).__module__ == "builtins" or not isinstance(error, Exception):
        return StoreFailure(FailureKind.NOT_FROM_STORE, text)
    if type(error).__module__.startswith("tieredckpt"):
        return StoreFailure(FailureKind.NOT_FROM_STORE, text)
    return StoreFailure(FailureKind.UNAVAILABLE, _one_line(f"{type(error).__name__}: {text}"))


def classify_response(status: int, code: str = "", message: str = "", *, retry_after_s: float = 0.0) -> StoreFailure:
    """Classify an HTTP response of an object store."""
    meaning = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if meaning is None:
        meaning = FailureKind.UNAVAILABLE if status >= 500 else FailureKind.REFUSED
    what = " ".join(filter(None, (str(status or ""), code)))
    detail = _one_line(f"{what}: {message}" if message else what)
    advice = _ADVICE.get(code) or _ADVICE.get(str(status), "")
    if advice and meaning is FailureKind.REFUSED:
        detail = f"{detail}. {advice}"
    credentials = meaning is FailureKind.REFUSED and (status in (401, 403) or code in _CREDENTIAL_CODES)
    return StoreFailure(meaning, detail, retry_after_s, credentials)


def parse_retry_after(value: str, date: str = "") -> float:
    """Return the seconds of a ``Retry-After`` header, 0 if invalid.

    A date counts from the response's ``Date``.
    """
    if re.fullmatch(r"\s*[0-9]+(\.[0-9]*)?\s*", value):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - parsedate_to_datetime(date)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def parse_error_document(document: str) -> tuple[str, str]:
    """Return code and message of an XML error document, each "" if absent."""
    code = re.search(r"<Code>([^<]+)</Code>", document)
    message = re.search(r"<Message>([^<]+)</Message>", document)
    return code[1] if code else "", message[1].strip() if message else ""


def _classify_botocore(response: dict[str, Any]) -> StoreFailure:
    problem, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
    headers = {str(k).lower(): str(v) for k, v in meta.get("HTTPHeaders", {}).items()}
    status = int(meta.get("HTTPStatusCode", 0))
    code = str(problem.get("Code", ""))
    if code.isdigit():  # a response to HEAD, which has no document
        status, code = int(code), ""
    wait_s = parse_retry_after(headers.get("retry-after", ""), headers.get("date", ""))
    return classify_response(status, code, str(problem.get("Message", "")), retry_after_s=wait_s)


def _classify_obstore(error: BaseException, text: str) -> StoreFailure:
    status = re.search(r"status code: (\d{3})", text)
    code, message = parse_error_document(text)
    if status:
        if not code and status[1] == "409" and type(error).__name__ == "AlreadyExistsError":
            return StoreFailure(FailureKind.EXISTS, _one_line(text))
        return classify_response(int(status[1]), code, message or _one_line(text))
    provider = re.search(r"credential provider: (\w+): (.*)", text, re.DOTALL)
    if provider:
        named = _NAMES.get(provider[1], FailureKind.REFUSED)
        return StoreFailure(named, _one_line(provider[2]), credentials=named is FailureKind.REFUSED)
    if re.search(r"Wanted range starting at", text):
        return StoreFailure(FailureKind.TRUNCATED, _one_line(text))
    if "redirect without LOCATION" in text:
        return classify_response(301, "", _one_line(text))
    return StoreFailure(_NAMES.get(type(error).__name__, FailureKind.UNAVAILABLE), _one_line(text))


def _classify_by_name(kind: type[BaseException], text: str) -> StoreFailure | None:
    for each in kind.__mro__:
        meaning = _NAMES.get(each.__name__)
        if meaning is not None:
            if "CERTIFICATE_VERIFY_FAILED" in text:
                meaning = FailureKind.REFUSED
            advice = f". {_ADVICE[each.__name__]}" if each.__name__ in _ADVICE else ""
            detail = _one_line(text or kind.__name__).removesuffix(".") + advice
            return StoreFailure(meaning, detail, credentials=meaning is FailureKind.REFUSED)
    return None


def _classify_os_error(error: OSError) -> StoreFailure:
    detail = _one_line(str(error) or type(error).__name__)
    for kind, meaning in _OS_KINDS:
        if isinstance(error, kind):
            return StoreFailure(meaning, detail, credentials=kind is PermissionError)
    return StoreFailure(_ERRNO.get(error.errno or 0, FailureKind.UNAVAILABLE), detail)


def _one_line(text: str) -> str:
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
            # the request was damaged or truncated in transit
            "BadDigest",
            "XAmzContentChecksumMismatch",
            "IncompleteBody",
            "RequestTimeout",
            # a concurrent request used the same name
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
_CREDENTIALS = (
    "Check the credentials (profile, role, environment) of this process. A node agent has those of its start: "
    "`tieredckpt agent restart` gives it those of your shell"
)
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
    **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"), _CREDENTIALS),
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
    """Return the seconds to wait after attempt ``attempt``, counted from 0.

    The wait has full jitter and is added to the seconds that the store requests.
    """
    return retry_after_s + uniform(0.0, min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(attempt, 30)))


@dataclass(frozen=True)
class RetryPolicy:
    """Retry policy of one store.

    ``retry_s`` counts from an operation's first failure, however long attempts take.
    """

    retry_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform
    refresh_credentials: Callable[[], bool] = lambda: False
    """Reloads refused credentials; returns whether they changed."""

    def run(
        self,
        what: str,
        operation: Callable[[], T],
        *,
        absent: type[TieredCheckpointError] = DurableRefusedError,
    ) -> T:
        """Return the result of ``operation``, which is retried for up to ``retry_s`` seconds.

        ``what`` starts the error message ("reading s3://b/x"). ``absent`` is raised if the object does not exist.
        """
        deadline = 0.0
        attempt = 0
        renewed = False
        while True:
            try:
                return operation()
            except TieredCheckpointError:
                raise
            except Exception as error:  # noqa: BLE001 - each library has its own errors; classify_error() knows them
                failure = classify_error(error)
                if failure.credentials and not renewed and self.refresh_credentials():
                    renewed = True
                    continue
                now = self.clock()
                deadline = deadline or now + self.retry_s
                wait_s = backoff_s(attempt, self.uniform, failure.retry_after_s)
                if failure.meaning not in (FailureKind.UNAVAILABLE, FailureKind.BUSY) or now + wait_s > deadline:
                    _raise_failure(what, failure, error, absent, tries=attempt + 1)
                attempt += 1
                _log.info("%s: %s; try %d in %s", what, failure.detail, attempt + 1, show_seconds(wait_s))
                self.sleep(wait_s)


def _raise_failure(
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
