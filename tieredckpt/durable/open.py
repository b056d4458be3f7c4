"""An object store for a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from peerstore.bandwidth import Bandwidth
from peerstore.units import parse_size
from tieredckpt.durable.parts import part_size_for
from tieredckpt.durable.reliable import ReliableStore
from tieredckpt.durable.retry import Retry
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from tieredckpt.durable.backend import Backend
    from tieredckpt.settings import DurableSettings

_READ_THREADS = 8


def open_store(url: str, settings: DurableSettings, *, bandwidth: Bandwidth | None = None) -> ReliableStore:
    """The store at ``url``. Nothing is asked of it, nor is its library imported, before the first call.

    ``bandwidth`` is for several stores that share one limit; by default ``settings.bandwidth`` is this store's own.
    """
    limit = bandwidth or Bandwidth(parse_size(settings.bandwidth) if settings.bandwidth else 0)
    return ReliableStore(
        _backend(url, settings),
        retry=Retry(settings.retry_s),
        bandwidth=limit,
        fetch_bytes=part_size_for(0, parse_size(settings.part_size)),
        fetch_threads=max(_READ_THREADS, settings.concurrency),
    )


def _backend(url: str, settings: DurableSettings) -> Backend:
    # Each library is imported only where its scheme is used: the node agent starts without any of them.
    parts = urlsplit(url)
    if url.startswith("/") or parts.scheme == "file":
        from tieredckpt.durable.directory import DirectoryBackend

        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"durable.url {url}: a file URL names this machine, write file:///path")
        _no_options(url, settings)
        return DirectoryBackend(Path(url if url.startswith("/") else unquote(parts.path)))
    if not parts.scheme:
        raise UsageError(f"durable.url {url!r} is neither a URL (s3://bucket/prefix) nor an absolute path")
    if parts.scheme == "s3":
        from tieredckpt.durable.s3 import S3Backend

        if not parts.netloc:
            raise UsageError(f"durable.url {url}: names no bucket, write s3://bucket/prefix")
        return S3Backend(url, parts.netloc, parts.path.strip("/"), settings)
    if parts.scheme in ("gs", "az", "abfs", "abfss", "memory"):
        from tieredckpt.durable.cloud import open_cloud

        return open_cloud(url, settings)
    from tieredckpt.durable.filesystem import FilesystemBackend

    return FilesystemBackend(url, settings.options)


def _no_options(url: str, settings: DurableSettings) -> None:
    if settings.options:
        raise UsageError(f"durable.options: {url} takes none, found {', '.join(sorted(settings.options))}")
