"""Plain DCP checkpoints in the durable tier: what is written when this package is switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from tieredckpt.durable import names
from tieredckpt.durable.open import open_store
from tieredckpt.errors import UsageError
from tieredckpt.settings import DurableSettings


def plain_writer(durable: DurableSettings, job: str, step: int) -> StorageWriter:
    """DCP's own writer for one step's folder below the durable URL."""
    path = _directory(durable.url)
    if path is not None:
        return FileSystemWriter(path / names.plain(job, step))
    _require_fsspec(durable.url)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    options: dict[str, Any] = dict(durable.options)
    return FsspecWriter(f"{durable.url.rstrip('/')}/{names.plain(job, step)}", **options)


def plain_reader(durable: DurableSettings, job: str, step: int) -> StorageReader:
    """DCP's own reader for one step's folder below the durable URL."""
    path = _directory(durable.url)
    if path is not None:
        return FileSystemReader(path / names.plain(job, step))
    _require_fsspec(durable.url)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(f"{durable.url.rstrip('/')}/{names.plain(job, step)}", **durable.options)


def plain_steps(durable: DurableSettings, job: str) -> list[int]:
    """Steps whose plain checkpoint is complete."""
    store = open_store(durable.url, durable)
    try:
        found = (names.parse_plain(info.name, job) for info in store.list(names.plain(job)))
        return sorted({step for step in found if step is not None})
    finally:
        store.close()


def _directory(url: str) -> Path | None:
    if url.startswith("/"):
        return Path(url)
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _require_fsspec(url: str) -> None:
    import fsspec

    scheme = urlsplit(url).scheme
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"plain checkpoints on {scheme}:// are written by DCP through fsspec: {error}. "
            "For s3:// install tieredckpt[s3fs]"
        ) from error
