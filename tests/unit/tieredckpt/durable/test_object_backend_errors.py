"""The classification of errors that the storage libraries really raise."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl

import pytest
from botocore import exceptions as botocore
from obstore import exceptions as obstore

from tieredckpt.durable.object_backend import (
    FailureKind,
    HttpStatusError,
    StoreFailure,
    classify_error,
    classify_response,
    parse_error_document,
    parse_retry_after,
)
from tieredckpt.errors import UsageError

AWAY, BUSY, REFUSED = FailureKind.UNAVAILABLE, FailureKind.BUSY, FailureKind.REFUSED
ABSENT, EXISTS, SHORT, GONE, FOREIGN = (
    FailureKind.NOT_FOUND,
    FailureKind.EXISTS,
    FailureKind.TRUNCATED,
    FailureKind.UPLOAD_GONE,
    FailureKind.NOT_FROM_STORE,
)


@pytest.mark.parametrize(
    ("status", "code", "meaning"),
    [
        (500, "InternalError", AWAY),
        (502, "", AWAY),
        (504, "", AWAY),
        (408, "", AWAY),
        (599, "", AWAY),
        (400, "RequestTimeout", AWAY),
        (400, "BadDigest", AWAY),
        (400, "XAmzContentChecksumMismatch", AWAY),
        (400, "IncompleteBody", AWAY),
        (409, "OperationAborted", AWAY),
        (409, "ConditionalRequestConflict", AWAY),
        (503, "SlowDown", BUSY),
        (503, "", BUSY),
        (429, "", BUSY),
        (403, "RequestLimitExceeded", BUSY),
        (200, "SlowDown", BUSY),
        (200, "InternalError", AWAY),
        (400, "", REFUSED),
        (400, "EntityTooSmall", REFUSED),
        (400, "ExpiredToken", REFUSED),
        (401, "", REFUSED),
        (403, "", REFUSED),
        (403, "QuotaExceeded", REFUSED),
        (404, "NoSuchBucket", REFUSED),
        (404, "ContainerNotFound", REFUSED),
        (405, "", REFUSED),
        (301, "PermanentRedirect", REFUSED),
        (307, "", REFUSED),
        (409, "", REFUSED),
        (501, "NotImplemented", REFUSED),
        (507, "", REFUSED),
        (404, "", ABSENT),
        (404, "NoSuchKey", ABSENT),
        (404, "BlobNotFound", ABSENT),
        (404, "NoSuchUpload", GONE),
        (400, "InvalidPart", GONE),
        (412, "", EXISTS),
        (409, "BlobAlreadyExists", EXISTS),
        (416, "", SHORT),
        (416, "InvalidRange", SHORT),
    ],
)
def test_answers(status: int, code: str, meaning: FailureKind):
    failure = classify_response(status, code, "words")
    assert failure.meaning is meaning
    assert str(status) in failure.detail
    assert code in failure.detail
    assert classify_error(HttpStatusError(status, code, "words")) == failure


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_other_credentials_may_help_when_these_are_refused(code: str):
    assert classify_response(400, code).credentials
    assert not classify_response(400, "EntityTooSmall").credentials
    assert not classify_response(404, "NoSuchBucket").credentials


def client_error(status: int, code: str, headers: dict[str, str] | None = None) -> botocore.ClientError:
    meta = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    return botocore.ClientError({"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": meta}, "PutObject")


def s3fs_error(kind: OSError, cause: Exception) -> OSError:
    kind.__cause__ = cause
    return kind


OBSTORE_503 = (
    "Generic S3 error: Error performing GET http://127.0.0.1:9/b/x in 1ms - Server returned non-2xx status code: "
    "503 Service Unavailable: <Error><Code>SlowDown</Code></Error>\n\nDebug source:\nGeneric {}"
)
OBSTORE_BUCKET = (
    "Object at location x not found: Error performing GET http://127.0.0.1:9/b/x in 1ms - Server returned non-2xx "
    "status code: 404 Not Found: <Error>\n<Code>NoSuchBucket</Code>\n</Error>\n\nDebug source:\nNotFound {}"
)
OBSTORE_KEY = OBSTORE_BUCKET.replace("NoSuchBucket", "NoSuchKey")
OBSTORE_PROVIDER = (
    "The operation lacked valid authentication credentials for path External AWS credential provider: {}: why"
    "\n\nDebug source:\nUnauthenticated"
)


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        # botocore
        (client_error(503, "SlowDown"), BUSY),
        (client_error(403, "AccessDenied"), REFUSED),
        (client_error(404, "404"), ABSENT),
        (client_error(404, "NoSuchUpload"), GONE),
        (client_error(412, "PreconditionFailed"), EXISTS),
        (botocore.EndpointConnectionError(endpoint_url="http://x"), AWAY),
        (botocore.ConnectTimeoutError(endpoint_url="http://x"), AWAY),
        (botocore.ReadTimeoutError(endpoint_url="http://x"), AWAY),
        (botocore.ConnectionClosedError(endpoint_url="http://x"), AWAY),
        (botocore.ResponseStreamingError(error="x"), AWAY),
        (botocore.IncompleteReadError(actual_bytes=1, expected_bytes=2), AWAY),
        (botocore.MetadataRetrievalError(error_msg="x"), AWAY),
        (botocore.CredentialRetrievalError(provider="x", error_msg="x"), AWAY),
        (botocore.NoCredentialsError(), REFUSED),
        (botocore.PartialCredentialsError(provider="x", cred_var="y"), REFUSED),
        (botocore.ProfileNotFound(profile="x"), REFUSED),
        (botocore.UnauthorizedSSOTokenError(), REFUSED),
        (botocore.SSLError(endpoint_url="x", error="CERTIFICATE_VERIFY_FAILED"), REFUSED),
        (botocore.SSLError(endpoint_url="x", error="UNEXPECTED_EOF"), AWAY),
        # obstore
        (obstore.GenericError(OBSTORE_503), BUSY),
        (FileNotFoundError(OBSTORE_BUCKET), REFUSED),
        (FileNotFoundError(OBSTORE_KEY), ABSENT),
        (obstore.AlreadyExistsError("Object at location x already exists: x"), EXISTS),
        (obstore.AlreadyExistsError(OBSTORE_KEY.replace("404", "409").replace("NoSuchKey", "OperationAborted")), AWAY),
        (obstore.AlreadyExistsError(OBSTORE_503.replace("503", "409").replace("<Code>SlowDown</Code>", "")), EXISTS),
        (obstore.GenericError("Generic S3 error: HTTP error: error sending request"), AWAY),
        (obstore.GenericError("Generic InMemory error: Invalid range: Wanted range starting at 5, but"), SHORT),
        (obstore.GenericError("Generic S3 error: Received redirect without LOCATION, this normally"), REFUSED),
        (obstore.UnauthenticatedError(OBSTORE_PROVIDER.format("NoCredentialsError")), REFUSED),
        (obstore.UnauthenticatedError(OBSTORE_PROVIDER.format("MetadataRetrievalError")), AWAY),
        # the operating system, http.client, fsspec
        (FileNotFoundError(errno.ENOENT, "x"), ABSENT),
        (NotADirectoryError(errno.ENOTDIR, "x"), ABSENT),
        (IsADirectoryError(errno.EISDIR, "x"), ABSENT),
        (FileExistsError(errno.EEXIST, "x"), EXISTS),
        (PermissionError(errno.EACCES, "x"), REFUSED),
        (OSError(errno.ENOSPC, "x"), REFUSED),
        (OSError(errno.EROFS, "x"), REFUSED),
        (OSError(errno.EIO, "x"), AWAY),
        (OSError(errno.ESTALE, "x"), AWAY),
        (OSError("without a number"), AWAY),
        (ConnectionResetError(), AWAY),
        (BrokenPipeError(), AWAY),
        (TimeoutError(), AWAY),
        (socket.gaierror(socket.EAI_AGAIN, "x"), AWAY),
        (ssl.SSLEOFError(8, "EOF occurred"), AWAY),
        (ssl.SSLCertVerificationError(1, "CERTIFICATE_VERIFY_FAILED"), REFUSED),
        (http.client.RemoteDisconnected("x"), AWAY),
        (http.client.IncompleteRead(b""), AWAY),
        (http.client.BadStatusLine("x"), AWAY),
        (s3fs_error(OSError(errno.EINVAL, "x"), client_error(416, "InvalidRange")), SHORT),
        (s3fs_error(OSError(errno.EBUSY, "x"), client_error(503, "SlowDown")), BUSY),
        # not about the store
        (TypeError("x"), FOREIGN),
        (KeyError("x"), FOREIGN),
        (UsageError("x"), FOREIGN),
        (KeyboardInterrupt(), FOREIGN),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors(error: BaseException, meaning: FailureKind):
    assert classify_error(error).meaning is meaning


def test_error_of_an_unknown_library_is_unclassified():
    error = type("StrangeError", (Exception,), {"__module__": "strange"})("why")
    assert classify_error(error) == StoreFailure(AWAY, "StrangeError: why")


def test_retry_after_is_read_from_the_headers():
    error = client_error(503, "SlowDown", {"retry-after": "12"})
    assert classify_error(error).retry_after_s == 12


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        ("3", "", 3),
        (" 0.5 ", "", 0.5),
        ("Wed, 21 Oct 2026 07:28:05 GMT", "Wed, 21 Oct 2026 07:28:00 GMT", 5),
        ("Wed, 21 Oct 2026 07:27:00 GMT", "Wed, 21 Oct 2026 07:28:00 GMT", 0),
        ("Wed, 21 Oct 2026 07:28:05 GMT", "", 0),
        ("soon", "", 0),
        ("-1", "", 0),
        ("", "", 0),
    ],
)
def test_retry_after(value: str, date: str, seconds: float):
    assert parse_retry_after(value, date) == seconds


def test_error_documents():
    assert parse_error_document("<Error>\n <Code>A</Code><Message> b c </Message></Error>") == ("A", "b c")
    assert parse_error_document("<html>no</html>") == ("", "")
