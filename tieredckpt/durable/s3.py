"""S3 and compatible stores: requests, listings, and credentials as the AWS SDK finds them.

The SDK's credential chain serves all clients: profiles, SSO, roles, pod identity, environment and config files. The SDK
also renews credentials. obstore and the sender of parts receive the credentials that the SDK chose.
"""

from __future__ import annotations

import datetime as dt
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from typing_extensions import Buffer

from peerstore.sizes_and_durations import parse_size
from tieredckpt.durable.object_store import ObjectInfo, join_object_name
from tieredckpt.durable.obstore_backend import ObstoreClient, obstore_client_options
from tieredckpt.durable.s3_upload import (
    CONNECT_TIMEOUT_S,
    ChecksumKind,
    MultipartUploader,
    PartSender,
    PartSenderSettings,
)
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tieredckpt.durable.object_backend import UploadJob
    from tieredckpt.settings import DurableSettings


class S3Backend:
    resumes_uploads = True
    lists_in_pages = True

    def __init__(self, url: str, bucket: str, root: str, settings: DurableSettings) -> None:
        options = S3Options.parse(settings.options)
        self.url = url
        self._root = root
        self._account = S3Account(bucket, root, options, timeout_s=settings.timeout_s)
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="tieredckpt-part")
        self._uploader = MultipartUploader(
            self._account, self._pool, options, part_bytes=parse_size(settings.part_size)
        )
        self._sdk_reads_ranges = False

    def refresh_credentials(self) -> bool:
        return self._account.refresh_credentials()

    def check_root(self) -> None:
        pass

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
        """Yield objects with the SDK: obstore cannot list a bucket with a name that it finds invalid."""
        for page in self._pages("list_objects_v2", prefix):
            for each in page.get("Contents", ()):
                yield ObjectInfo(self._name(each["Key"]), each["Size"], each["LastModified"].timestamp())

    def delete(self, names: Sequence[str]) -> None:
        self._account.connection().objects.delete(names)

    def upload(self, upload: UploadJob) -> None:
        self._uploader.send(upload, join_object_name(self._root, upload.name))

    def abort_stale_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int:
        found = [
            each
            for page in self._upload_pages(prefix)
            for each in page.get("Uploads", ())
            if self._name(each["Key"]) not in keep
            and each["Initiated"] <= _store_time(page) - timedelta(seconds=older_than_s)
        ]
        return sum(self._abort(each["Key"], each["UploadId"]) for each in found)

    def close(self) -> None:
        self._pool.shutdown()
        self._account.close()

    def _name(self, key: str) -> str:
        return key[len(self._root) + 1 :] if self._root else key

    def _pages(self, operation: str, prefix: str) -> Iterator[dict[str, Any]]:
        paginator = self._account.connection().client.get_paginator(operation)
        yield from paginator.paginate(Bucket=self._account.bucket, Prefix=join_object_name(self._root, prefix))

    def _upload_pages(self, prefix: str) -> Iterable[dict[str, Any]]:
        try:
            return tuple(self._pages("list_multipart_uploads", prefix))
        except self._account.connection().client.exceptions.NoSuchUpload:  # rclone's response without uploads
            return ()

    def _abort(self, key: str, upload_id: str) -> bool:
        client = self._account.connection().client
        try:
            client.abort_multipart_upload(Bucket=self._account.bucket, Key=key, UploadId=upload_id)
        except client.exceptions.NoSuchUpload:
            return False
        return True

    def _range_by_sdk(self, name: str, start: int, stop: int) -> bytes:
        response = self._account.connection().client.get_object(
            Bucket=self._account.bucket, Key=join_object_name(self._root, name), Range=f"bytes={start}-{stop - 1}"
        )
        with response["Body"] as body:
            content_range = str(response.get("ContentRange", "no range"))
            if not content_range.startswith(f"bytes {start}-"):
                raise ConnectionError(f"asked for bytes {start}-{stop - 1}, the answer has {content_range}")
            return bytes(body.read())


def _store_time(page: dict[str, Any]) -> datetime:
    """Return the time of the store's clock, which also set the times in the listing.

    The header omits fractions.
    """
    try:
        return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"]) + timedelta(seconds=1)
    except (KeyError, ValueError):
        return datetime.now(timezone.utc)


_CACHE_S = 480.0  # less than the ten minutes for which credentials from the SDK are valid at least


@dataclass(frozen=True)
class S3Options:
    """``durable.options`` of ``s3://``. Omitted options come from the AWS environment and config files."""

    endpoint: str = ""
    region: str = ""
    profile: str = ""
    checksum: ChecksumKind = "crc32"
    server_side_encryption: str = ""
    """``AES256`` or ``aws:kms``; "" for the bucket's default."""
    sse_kms_key_id: str = ""

    @staticmethod
    def parse(options: Mapping[str, str]) -> S3Options:
        known = [field.name for field in fields(S3Options)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise UsageError(
                f"durable.options: s3:// does not know {', '.join(unknown)}; known are {', '.join(known)}. "
                "Credentials come from the AWS environment, config files or role"
            )
        if options.get("checksum", "crc32") not in get_args(ChecksumKind):
            raise UsageError(
                f"durable.options: checksum is {options['checksum']!r}, expected {', '.join(get_args(ChecksumKind))}"
            )
        return S3Options(**options)  # type: ignore[arg-type]

    def encryption(self) -> dict[str, str]:
        """Return the encryption parameters of SDK calls that create an object."""
        parameters = {"ServerSideEncryption": self.server_side_encryption, "SSEKMSKeyId": self.sse_kms_key_id}
        return {name: value for name, value in parameters.items() if value}


@dataclass(frozen=True)
class S3Clients:
    """Clients with the same credentials."""

    client: Any
    """The SDK's S3 client, with one attempt for each call."""
    objects: ObstoreClient
    secrets: tuple[str | None, ...]

    def presign(self, operation: str, params: Mapping[str, object]) -> str:
        """Return a URL for one request, signed with the current credentials and valid for an hour."""
        return str(self.client.generate_presigned_url(operation, Params=params, ExpiresIn=3600))


def aws_session(profile: str) -> Any:
    """Return an SDK session that also reads ``AWS_REGION``, like all other AWS SDKs."""
    import botocore.session

    region = {"region": ("region", ["AWS_DEFAULT_REGION", "AWS_REGION"], None, None)}
    session = botocore.session.Session(session_vars=region, profile=profile or None)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


@functools.cache
def _loader(data_path: str | None) -> Any:
    """Return the SDK's data loader. Reading its files takes nine tenths of the time to create a client."""
    import botocore.loaders

    return botocore.loaders.create_loader(data_path)


class S3Account:
    """Clients and credentials of one bucket. Any thread may call; the first use imports and connects."""

    def __init__(self, bucket: str, root: str, options: S3Options, *, timeout_s: float) -> None:
        self.bucket = bucket
        self._root = root
        self._options = options
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: S3Clients | None = None
        self._retired: list[S3Clients] = []  # other threads may still use them
        self._used = threading.local()
        self._sender: PartSender | None = None

    def connection(self) -> S3Clients:
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
            self._used.connection = self._connection
            return self._connection

    def refresh_credentials(self) -> bool:
        """Reload the credentials; return whether they differ from those that this thread used last."""
        with self._lock:
            old = self._connection
            if old is None:
                return False
            if old is not self._used.connection:  # another thread has reloaded them
                return True
            fresh = self._connect()
            if fresh.secrets == old.secrets:
                fresh.client.close()
                return False
            self._retired.append(old)
            self._connection = fresh
            return True

    def part_sender(self) -> PartSender:
        """Return the sender of parts, which the first call creates."""
        with self._lock:
            if self._sender is None:
                self._sender = PartSender(self._sender_settings())
            return self._sender

    def close(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
            if self._connection is not None:
                retired.append(self._connection)
                self._connection = None
            sender, self._sender = self._sender, None
        for connection in retired:
            connection.client.close()
        if sender is not None:
            sender.close()

    def _sender_settings(self) -> PartSenderSettings:
        import botocore.httpsession
        from botocore.utils import get_environ_proxies

        trusted = self._session().get_config_variable("ca_bundle") or botocore.httpsession.get_cert_path(verify=True)

        def proxy_for(url: str) -> str:
            return str(get_environ_proxies(url).get(urlsplit(url).scheme, ""))

        return PartSenderSettings(self._timeout_s, proxy_for, str(trusted))

    def _session(self) -> Any:
        return aws_session(self._options.profile)

    def _connect(self) -> S3Clients:
        from botocore.exceptions import NoCredentialsError

        session = self._session()
        credentials = session.get_credentials()
        if credentials is None:
            raise NoCredentialsError
        client = self._client(session)
        frozen = credentials.get_frozen_credentials()
        secrets = (frozen.access_key, frozen.secret_key, frozen.token)
        return S3Clients(client, self._objects(session, credentials, client), secrets)

    def _client(self, session: Any) -> Any:
        def create(style: str) -> Any:
            from botocore.config import Config

            config = Config(
                signature_version="s3v4",
                connect_timeout=min(CONNECT_TIMEOUT_S, self._timeout_s),
                read_timeout=self._timeout_s,
                max_pool_connections=16,
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                user_agent_extra="tieredckpt",
                s3={"addressing_style": style} if style else None,
            )
            return session.create_client(
                "s3",
                region_name=self._options.region or None,
                endpoint_url=self._options.endpoint or None,
                config=config,
            )

        client = create("")
        host = urlsplit(client.meta.endpoint_url).hostname or ""
        chosen = (session.get_config_variable("s3") or {}).get("addressing_style")
        if not chosen and ".amazonaws.com" in f".{host}" and "." not in self.bucket:
            client.close()
            return create("virtual")  # otherwise the SDK presigns for the global endpoint, which redirects
        return client

    def _objects(self, session: Any, credentials: Any, client: Any) -> ObstoreClient:
        from obstore.store import S3Store

        url = urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": self.bucket, "Key": "k"}))
        in_path = url.path.startswith(f"/{self.bucket}/")
        endpoint = f"{url.scheme}://{url.netloc}"

        def provide() -> dict[str, Any]:
            frozen = credentials.get_frozen_credentials()
            until = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=_CACHE_S)
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": until,
            }

        config: dict[str, Any] = {
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,  # overrides this variable in the environment
            "region": client.meta.region_name.replace("aws-global", "us-east-1"),
            "virtual_hosted_style_request": not in_path,
            "unsigned_payload": True,  # hashing gigabytes for the signature costs more than sending them
        }
        for key in ("server_side_encryption", "sse_kms_key_id"):
            if value := getattr(self._options, key):
                config[key] = value
        arguments: dict[str, Any] = {
            "config": config,
            "client_options": self._client_options(session, url.scheme),
            "retry_config": {"max_retries": 0},
            "credential_provider": provide,
        }
        return ObstoreClient(S3Store(self.bucket, prefix=self._root or None, **arguments))

    def _client_options(self, session: Any, scheme: str) -> dict[str, Any]:
        options = obstore_client_options(self._timeout_s)
        options["allow_http"] = scheme == "http"
        bundle = session.get_config_variable("ca_bundle")
        if bundle and Path(bundle).is_file():
            options["root_certificate"] = Path(bundle).read_bytes()
        return options
