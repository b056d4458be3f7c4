"""Who asks S3, and where: credentials, region, endpoint and certificates, as the AWS SDK finds them.

One chain decides for every client used here: profiles, SSO, roles, pod identity, environment and the shared config
files, with their renewal. obstore and the sender of parts are handed what the SDK decided.
"""

from __future__ import annotations

import datetime as dt
import functools
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from tieredckpt.durable.cloud import CloudObjects, client_options
from tieredckpt.durable.digest import Checksum
from tieredckpt.durable.wire import CONNECT_S, Wire, WireSettings
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_CACHE_S = 480.0  # less than the ten minutes that the SDK's credentials are good for when it hands them out


@dataclass(frozen=True)
class S3Options:
    """``durable.options`` for ``s3://``; what is left out comes from the AWS environment and config files."""

    endpoint: str = ""
    region: str = ""
    profile: str = ""
    checksum: Checksum = "crc32"
    server_side_encryption: str = ""
    """``AES256`` or ``aws:kms``; empty: what the bucket does by default."""
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
        if options.get("checksum", "crc32") not in get_args(Checksum):
            raise UsageError(
                f"durable.options: checksum is {options['checksum']!r}, expected {', '.join(get_args(Checksum))}"
            )
        return S3Options(**options)  # type: ignore[arg-type]

    def encryption(self) -> dict[str, str]:
        """Parameters of the SDK's calls that begin an object."""
        asked = {"ServerSideEncryption": self.server_side_encryption, "SSEKMSKeyId": self.sse_kms_key_id}
        return {name: value for name, value in asked.items() if value}


@dataclass(frozen=True)
class Connection:
    """Clients that share one set of credentials."""

    client: Any
    """The SDK's S3 client; one try per call."""
    objects: CloudObjects
    secrets: tuple[str | None, ...]

    def presign(self, operation: str, params: Mapping[str, object]) -> str:
        """A URL that allows one request, signed with the credentials of this moment."""
        return str(self.client.generate_presigned_url(operation, Params=params, ExpiresIn=3600))


def aws_session(profile: str) -> Any:
    """The SDK's own chain, with the variable for the region that all other SDKs of AWS read beside its own."""
    import botocore.session

    region = {"region": ("region", ["AWS_DEFAULT_REGION", "AWS_REGION"], None, None)}
    session = botocore.session.Session(session_vars=region, profile=profile or None)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


@functools.cache
def _loader(data_path: str | None) -> Any:
    """What the SDK knows of AWS, read from its files once: nine tenths of the time that a client takes to be made."""
    import botocore.loaders

    return botocore.loaders.create_loader(data_path)


class Account:
    """Any thread may call. Nothing is imported, read or opened before it is asked for."""

    def __init__(self, bucket: str, root: str, options: S3Options, *, timeout_s: float) -> None:
        self.bucket = bucket
        self._root = root
        self._options = options
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._retired: list[Connection] = []  # other threads may still be in the middle of a call
        self._used = threading.local()
        self._wire: Wire | None = None

    def connection(self) -> Connection:
        with self._lock:
            if self._connection is None:
                self._connection = self._connect()
            self._used.connection = self._connection
            return self._connection

    def renew(self) -> bool:
        """Read the credentials anew; whether there are others now than those this thread used last."""
        with self._lock:
            old = self._connection
            if old is None:
                return False
            if old is not self._used.connection:  # another thread was faster
                return True
            fresh = self._connect()
            if fresh.secrets == old.secrets:
                fresh.client.close()
                return False
            self._retired.append(old)
            self._connection = fresh
            return True

    def wire(self) -> Wire:
        """The sender of parts."""
        with self._lock:
            if self._wire is None:
                self._wire = Wire(self._wire_settings())
            return self._wire

    def close(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
            if self._connection is not None:
                retired.append(self._connection)
                self._connection = None
            wire, self._wire = self._wire, None
        for connection in retired:
            connection.client.close()
        if wire is not None:
            wire.close()

    def _wire_settings(self) -> WireSettings:
        import botocore.httpsession
        from botocore.utils import get_environ_proxies

        trusted = self._session().get_config_variable("ca_bundle") or botocore.httpsession.get_cert_path(verify=True)

        def proxy_for(url: str) -> str:
            return str(get_environ_proxies(url).get(urlsplit(url).scheme, ""))

        return WireSettings(self._timeout_s, proxy_for, str(trusted))

    def _session(self) -> Any:
        return aws_session(self._options.profile)

    def _connect(self) -> Connection:
        from botocore.exceptions import NoCredentialsError

        session = self._session()
        credentials = session.get_credentials()
        if credentials is None:
            raise NoCredentialsError
        client = self._client(session)
        frozen = credentials.get_frozen_credentials()
        secrets = (frozen.access_key, frozen.secret_key, frozen.token)
        return Connection(client, self._objects(session, credentials, client), secrets)

    def _client(self, session: Any) -> Any:
        def create(style: str) -> Any:
            from botocore.config import Config

            config = Config(
                signature_version="s3v4",
                connect_timeout=min(CONNECT_S, self._timeout_s),
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

    def _objects(self, session: Any, credentials: Any, client: Any) -> CloudObjects:
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
            "aws_endpoint_url_s3": endpoint,  # or its variable in the environment would win over ours
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
        return CloudObjects(S3Store(self.bucket, prefix=self._root or None, **arguments))

    def _client_options(self, session: Any, scheme: str) -> dict[str, Any]:
        options = client_options(self._timeout_s)
        options["allow_http"] = scheme == "http"
        bundle = session.get_config_variable("ca_bundle")
        if bundle and Path(bundle).is_file():
            options["root_certificate"] = Path(bundle).read_bytes()
        return options
