"""Plain DCP checkpoints in the durable tier as files, read and written without an agent."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tieredckpt.dcp.plain_checkpoints import plain_folder, read_dcp_metadata
from tieredckpt.durable.object_store import ObjectNotFoundError, ObjectStore
from tieredckpt.durable.plain_objects import DCP_METADATA_NAME, list_plain_files
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import UsageError
from tieredckpt.format import object_keys
from tieredckpt.fsspec_view.segmented_file import READ_BUFFER_BYTES, SegmentedFile
from tieredckpt.restore.step_index import ByteRange
from tieredckpt.session.session import open_session
from tieredckpt.settings import DurableSettings, load_complete_settings

PENDING_SUFFIX = ".tmp"


class DurableAccess:
    """Durable tier of one job: that of its session, or of the settings while the package is disabled."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._opened: tuple[DurableSettings, ObjectStore] | None = None

    def open(self) -> ObjectStore:
        """Return the store, opened by this process. Changed settings close it."""
        settings = load_complete_settings()
        if settings.enabled:
            return open_session(self._job, settings).durable.open()
        with self._lock:
            if self._opened is None or self._opened[0] != settings.durable:
                before, self._opened = self._opened, None
                if before is not None:
                    before[1].close()
                self._opened = settings.durable, open_store(settings.durable.url, settings.durable)
            return self._opened[1]


class PlainFiles:
    """Files that DCP wrote for one step. Other objects in their folder are ignored."""

    def __init__(self, open_store: Callable[[], ObjectStore], job: str, step: int) -> None:
        self.job = job
        self.step = step
        self._open_store = open_store
        found = list_plain_files(open_store(), job, step)
        if DCP_METADATA_NAME not in found:
            raise ObjectNotFoundError(f"the plain checkpoint of step {step} of {job} was deleted")
        self.sizes = {name: info.size_bytes for name, info in found.items()}
        self.saved_ns = int(found[DCP_METADATA_NAME].modified_s * 1e9)

    def open(self, name: str) -> io.BufferedIOBase:
        """Open a file. ``.metadata`` is checked to be data first, because DCP unpickles it."""
        if name not in self.sizes:
            raise FileNotFoundError(f"tiered://{self.job}/step-{self.step} has no file {name}")
        store, key = self._open_store(), f"{object_keys.plain_prefix(self.job, self.step)}/{name}"
        if name == DCP_METADATA_NAME:
            data = store.get(key)
            read_dcp_metadata(io.BytesIO(data), f"{store.url}/{key}")
            return io.BytesIO(data)
        whole = ByteRange(0, self.sizes[name])
        return io.BufferedReader(SegmentedFile([(0, whole)], _PlainFile(store, key), lambda: None), READ_BUFFER_BYTES)


@dataclass(frozen=True)
class _PlainFile:
    """Bytes of one file. The store remains open for other files."""

    store: ObjectStore
    key: str

    def read_into(self, target: memoryview, part: int, span: ByteRange) -> None:
        (target[:],) = self.store.get_ranges(self.key, [span])

    def close(self) -> None: ...


class PlainFileSpace:
    """Files of one job's plain checkpoints that this process writes, while the package is disabled.

    They are written where DCP's own writer writes them. The rename to ``.metadata`` completes a step.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self._lock = threading.Lock()
        self._begun: dict[int, set[str]] = {}
        """Files that this process has written, by unfinished step."""

    def begin(self, step: int) -> None:
        """Create the folder of a step. An earlier checkpoint remains until its files are replaced."""
        files, folder = self._folder(step)
        files.makedirs(folder, exist_ok=True)
        with self._lock:
            self._begun[step] = set()

    def has_begun(self, step: int) -> bool:
        with self._lock:
            return step in self._begun

    def writer(self, step: int, name: str) -> Any:
        """Return a file to write, as the durable tier's file system opens it."""
        if not self.has_begun(step):
            self.begin(step)
        files, folder = self._folder(step)
        with self._lock:
            self._begun.setdefault(step, set()).add(name)
        return files.open(f"{folder}/{name}", "wb")

    def rename(self, step: int, name: str, final: str) -> None:
        """Give a written file its final name. ``.metadata`` completes its step."""
        with self._lock:
            is_known = name in self._begun.get(step, ())
        if not is_known:
            raise FileNotFoundError(f"tiered://{self.job}/step-{step}/{name} is not a file this process has written")
        if is_rank_metadata(final):
            self.drop(step, name)
            raise rank_metadata_error(final)
        files, folder = self._folder(step)
        files.mv(f"{folder}/{name}", f"{folder}/{final}")
        with self._lock:
            written = self._begun.get(step, set())
            written.discard(name)
            written.add(final)
            if final == DCP_METADATA_NAME:
                self._begun.pop(step, None)

    def is_pending(self, step: int, name: str) -> bool:
        """Return whether a temporary file that will replace ``name`` is written."""
        with self._lock:
            return name + PENDING_SUFFIX in self._begun.get(step, ())

    def drop(self, step: int, name: str) -> bool:
        """Delete a file that this process has written for an unfinished step. False: no such file exists."""
        with self._lock:
            written = self._begun.get(step, set())
            if name not in written:
                return False
            written.discard(name)
        files, folder = self._folder(step)
        files.rm_file(f"{folder}/{name}")
        return True

    def _folder(self, step: int) -> tuple[Any, str]:
        return plain_folder(load_complete_settings().durable, self.job, step)


def is_rank_metadata(name: str) -> bool:
    """Return whether ``name`` is the metadata of one rank, of a save without collectives."""
    return name != DCP_METADATA_NAME and name.endswith(DCP_METADATA_NAME)


def rank_metadata_error(name: str) -> UsageError:
    """Return the error for metadata of one rank."""
    return UsageError(
        f"{name}: metadata per rank (use_collectives=False) is not kept as files; write it with TieredWriter or after "
        "tieredckpt.enable_urls()"
    )
