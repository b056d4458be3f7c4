"""Plain DCP checkpoints in the durable tier, used while the package is disabled."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import unquote, urlsplit

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from peerstore.optional_packages import optional_imports
from tieredckpt.durable.plain_objects import list_plain_steps
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import CheckpointDamagedError, CheckpointDeletedError, UsageError
from tieredckpt.format import object_keys
from tieredckpt.settings import DurableSettings
from tieredckpt.tensors.safe_objects import check_safe_object, load_dcp_metadata


def plain_writer(durable: DurableSettings, job: str, step: int) -> StorageWriter:
    """Return DCP's own writer for one step's folder below the durable URL."""
    path = _directory(durable.url)
    if path is not None:
        return FileSystemWriter(path / object_keys.plain_prefix(job, step))
    _require_fsspec(durable.url)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    options: dict[str, Any] = dict(durable.options)
    return FsspecWriter(_folder_url(durable, job, step), **options)


def plain_folder(durable: DurableSettings, job: str, step: int) -> tuple[Any, str]:
    """Return the file system and folder in which :func:`plain_writer` writes a step."""
    import fsspec

    path = _directory(durable.url)
    if path is not None:
        return fsspec.filesystem("file"), str(path / object_keys.plain_prefix(job, step))
    _require_fsspec(durable.url)
    files, folder = fsspec.url_to_fs(_folder_url(durable, job, step), **durable.options)
    return files, str(folder)


def plain_reader(durable: DurableSettings, job: str, step: int, *, trust_objects: bool = False) -> StorageReader:
    """Return DCP's own reader of one step's folder below the durable URL, without unpickling."""
    path = _directory(durable.url)
    if path is not None:
        return folder_reader(path / object_keys.plain_prefix(job, step), trust_objects=trust_objects)
    _require_fsspec(durable.url)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    class Reader(_SafeFileSystemReader, FsspecReader):  # fsspec is optional
        pass

    found = Reader(_folder_url(durable, job, step), **durable.options)
    found.trust_objects = trust_objects
    return found


def folder_reader(path: Path, *, trust_objects: bool = False) -> StorageReader:
    """Return DCP's own reader of a checkpoint's folder, without unpickling."""
    found = _SafeFileSystemReader(path)
    found.trust_objects = trust_objects
    return found


_DAMAGE = (
    *(AssertionError, EOFError, FileNotFoundError, LookupError, RuntimeError, TypeError, ValueError),
    *(pickle.UnpicklingError, zipfile.BadZipFile),
)
"""Errors of DCP and torch for a missing or damaged data file."""
_DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


def read_dcp_metadata(file: IO[bytes], path: object) -> Metadata:
    """Read a ``.metadata`` file as data; raise :class:`CheckpointDamagedError` for other contents."""
    try:
        return load_dcp_metadata(file)
    except (AttributeError, EOFError, ImportError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointDamagedError(f"{path} is not DCP metadata: {error}") from error


class _SafeFileSystemReader(FileSystemReader):
    """DCP's reader with ``.metadata`` and objects read as data. DCP unpickles both."""

    trust_objects = False
    _error: CheckpointDamagedError | None = None
    _found: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, or an empty one for DCP's second call with a rank after an error.

        :meth:`set_up_storage_reader` raises the error then; DCP would only report missing metadata.
        """
        rank = kwargs.get("rank")
        if rank is not None:
            return Metadata({}) if self._error is not None else self._metadata(rank)
        if self._error is not None:
            raise self._error
        try:
            if self._found is None:
                self._found = self._metadata(None)
            return self._found
        except CheckpointDamagedError as error:
            self._error = error
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._error is not None:
            raise self._error
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def _metadata(self, rank: int | None) -> Metadata:
        path = self.fs.concat_path(self.path, ".metadata" if rank is None else f"__{rank}.metadata")
        try:
            with self.fs.create_stream(path, "rb") as file:
                found = read_dcp_metadata(cast("IO[bytes]", file), path)
        except FileNotFoundError as error:
            raise CheckpointDeletedError(f"{path} was deleted before it was read. Load again") from error
        meta = getattr(found, "storage_meta", None) or StorageMeta()  # older releases wrote none
        meta.load_id = self.load_id
        found.storage_meta = meta
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner if self.trust_objects else _SafeLoadPlanner(planner))
        except _DEVICE_ERRORS:
            raise
        except _DAMAGE as error:
            raise CheckpointDamagedError(f"{self.path} cannot be read: {type(error).__name__}: {error}") from error


class _SafeLoadPlanner(LoadPlanner):
    """Planner that checks objects before it unpickles them."""

    def __init__(self, inner: LoadPlanner) -> None:
        self._inner = inner

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        check_safe_object(read_item.storage_index.fqn, value.getvalue())
        self._inner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._inner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._inner.commit_tensor(read_item, tensor)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._inner.set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> LoadPlan:
        return self._inner.create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return self._inner.create_global_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self._inner.finish_plan(central_plan)


def plain_steps(durable: DurableSettings, job: str) -> tuple[int, ...]:
    """Return the steps with a complete plain checkpoint, in order."""
    store = open_store(durable.url, durable)
    try:
        return list_plain_steps(store, job).complete
    finally:
        store.close()


def _folder_url(durable: DurableSettings, job: str, step: int) -> str:
    return f"{durable.url.rstrip('/')}/{object_keys.plain_prefix(job, step)}"


def _directory(url: str) -> Path | None:
    if url.startswith("/"):
        return Path(url)
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _require_fsspec(url: str) -> None:
    import fsspec

    scheme = urlsplit(url).scheme
    try:
        with optional_imports(f"a plain checkpoint on {scheme}://", "'tieredckpt[s3fs]'" if scheme == "s3" else ""):
            fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error
