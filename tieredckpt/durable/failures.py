"""What a failed request means, whichever library raised it: pure, by status, error code and class name."""

from __future__ import annotations

import errno
import re
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any


class Meaning(Enum):
    """What a caller can do about it."""

    AWAY = "no answer, or one that another try may change"
    BUSY = "asked to slow down"
    REFUSED = "the store says no, and would again"
    ABSENT = "no such object"
    EXISTS = "there is one already"
    SHORT = "the object ends before the bytes asked for"
    GONE = "no such multipart upload, or not with these parts"
    FOREIGN = "not about the store: a bug or a wrong call"


@dataclass(frozen=True)
class Failure:
    meaning: Meaning
    detail: str
    retry_after_s: float = 0.0
    credentials: bool = False
    """Other credentials may get another answer."""


class ReplyError(Exception):
    """An HTTP answer that is not a success, from this package's own sender."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(status, code, message, retry_after_s)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def classify(error: BaseException) -> Failure:
    """What ``error`` (of obstore, botocore, fsspec, this package's sender, or the operating system) means."""
    if isinstance(error, ReplyError):
        return judge(error.status, error.code, error.message, retry_after_s=error.retry_after_s)
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
        return Failure(Meaning.FOREIGN, text)
    if type(error).__module__.startswith("tieredckpt"):
        return Failure(Meaning.FOREIGN, text)
    return Failure(Meaning.AWAY, _line(f"{type(error).__name__}: {text}"))


def judge(status: int, code: str = "", message: str = "", *, retry_after_s: float = 0.0) -> Failure:
    """What an HTTP answer of an object store means."""
    meaning = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if meaning is None:
        meaning = Meaning.AWAY if status >= 500 else Meaning.REFUSED
    what = " ".join(filter(None, (str(status or ""), code)))
    detail = _line(f"{what}: {message}" if message else what)
    advice = _ADVICE.get(code) or _ADVICE.get(str(status), "")
    if advice and meaning is Meaning.REFUSED:
        detail = f"{detail}. {advice}"
    credentials = meaning is Meaning.REFUSED and (status in (401, 403) or code in _CREDENTIAL_CODES)
    return Failure(meaning, detail, retry_after_s, credentials)


def retry_after(value: str, date: str = "") -> float:
    """Seconds that a ``Retry-After`` header asks for; a moment is read against the same answer's ``Date``."""
    if re.fullmatch(r"\s*[0-9]+(\.[0-9]*)?\s*", value):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - parsedate_to_datetime(date)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def error_code(document: str) -> tuple[str, str]:
    """Code and message of an XML error document; empty where there are none."""
    code = re.search(r"<Code>([^<]+)</Code>", document)
    message = re.search(r"<Message>([^<]+)</Message>", document)
    return code[1] if code else "", message[1].strip() if message else ""


def _botocore_answer(response: dict[str, Any]) -> Failure:
    said, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
    headers = {str(k).lower(): str(v) for k, v in meta.get("HTTPHeaders", {}).items()}
    status = int(meta.get("HTTPStatusCode", 0))
    code = str(said.get("Code", ""))
    if code.isdigit():  # an answer without a document, to HEAD
        status, code = int(code), ""
    wait_s = retry_after(headers.get("retry-after", ""), headers.get("date", ""))
    return judge(status, code, str(said.get("Message", "")), retry_after_s=wait_s)


def _obstore(error: BaseException, text: str) -> Failure:
    status = re.search(r"status code: (\d{3})", text)
    code, message = error_code(text)
    if status:
        if not code and status[1] == "409" and type(error).__name__ == "AlreadyExistsError":
            return Failure(Meaning.EXISTS, _line(text))
        return judge(int(status[1]), code, message or _line(text))
    provider = re.search(r"credential provider: (\w+): (.*)", text, re.DOTALL)
    if provider:
        named = _NAMES.get(provider[1], Meaning.REFUSED)
        return Failure(named, _line(provider[2]), credentials=named is Meaning.REFUSED)
    if re.search(r"Wanted range starting at", text):
        return Failure(Meaning.SHORT, _line(text))
    if "redirect without LOCATION" in text:
        return judge(301, "", _line(text))
    return Failure(_NAMES.get(type(error).__name__, Meaning.AWAY), _line(text))


def _by_name(kind: type[BaseException], text: str) -> Failure | None:
    for each in kind.__mro__:
        meaning = _NAMES.get(each.__name__)
        if meaning is not None:
            if "CERTIFICATE_VERIFY_FAILED" in text:
                meaning = Meaning.REFUSED
            return Failure(meaning, _line(text or kind.__name__), credentials=meaning is Meaning.REFUSED)
    return None


def _os_error(error: OSError) -> Failure:
    detail = _line(str(error) or type(error).__name__)
    for kind, meaning in _OS_KINDS:
        if isinstance(error, kind):
            return Failure(meaning, detail, credentials=kind is PermissionError)
    return Failure(_ERRNO.get(error.errno or 0, Meaning.AWAY), detail)


def _line(text: str) -> str:
    return " ".join(text.split())[:500]


_OS_KINDS: tuple[tuple[type[OSError], Meaning], ...] = (
    (FileNotFoundError, Meaning.ABSENT),
    (FileExistsError, Meaning.EXISTS),
    (PermissionError, Meaning.REFUSED),
    (NotADirectoryError, Meaning.ABSENT),
    (IsADirectoryError, Meaning.ABSENT),
    (ssl.SSLCertVerificationError, Meaning.REFUSED),
)
_ERRNO = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP),
    Meaning.REFUSED,
)

_BY_STATUS = {
    404: Meaning.ABSENT,
    408: Meaning.AWAY,
    412: Meaning.EXISTS,
    416: Meaning.SHORT,
    425: Meaning.AWAY,
    429: Meaning.BUSY,
    501: Meaning.REFUSED,
    503: Meaning.BUSY,
    505: Meaning.REFUSED,
    507: Meaning.REFUSED,
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
        Meaning.BUSY,
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
        Meaning.AWAY,
    ),
    **dict.fromkeys(
        ("NoSuchBucket", "ContainerNotFound", "AccountIsDisabled", "InvalidBucketName", "QuotaExceeded"),
        Meaning.REFUSED,
    ),
    **dict.fromkeys(("NoSuchKey", "BlobNotFound"), Meaning.ABSENT),
    **dict.fromkeys(("PreconditionFailed", "ConditionNotMet", "BlobAlreadyExists"), Meaning.EXISTS),
    **dict.fromkeys(("NoSuchUpload", "InvalidPart", "InvalidPartOrder"), Meaning.GONE),
    "InvalidRange": Meaning.SHORT,
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
        Meaning.AWAY,
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
        Meaning.REFUSED,
    ),
    **dict.fromkeys(("AlreadyExistsError", "PreconditionError"), Meaning.EXISTS),
    **dict.fromkeys(("FileNotFoundError", "NotFoundError"), Meaning.ABSENT),
    **dict.fromkeys(("UnknownConfigurationKeyError", "InvalidPathError"), Meaning.FOREIGN),
}
