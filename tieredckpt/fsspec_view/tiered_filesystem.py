"""TieredFileSystem: ``tiered://`` for fsspec. Torch is imported on the first use of a step.

DCP's own file writer and reader work on it unmodified, without ``enable_urls()``. They are slower than
:class:`~tieredckpt.dcp.tiered_writer.TieredWriter`, because DCP pickles every tensor. Steps of all writers are listed
and readable here, and a step written here is like any other. Other files may lie next to the steps.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractFileSystem

if TYPE_CHECKING:
    from tieredckpt.fsspec_view.file_space import SideFile, SideFileStore, StepFileSpace, TieredPath
    from tieredckpt.fsspec_view.plain_files import PlainFiles, PlainFileSpace
    from tieredckpt.fsspec_view.step_files import JobStepFiles, StepAsFiles

log = logging.getLogger(__name__)

_COPIED_BYTES = 8 << 20
_jobs: dict[tuple[int, str], _JobFiles] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class _JobFiles:
    """Files of one job, shared by all file systems of the process.

    fsspec creates a file system per thread, and a save may use several.
    """

    tiered: StepFileSpace
    plain: PlainFileSpace
    steps: JobStepFiles
    others: SideFileStore

    @property
    def writing(self) -> StepFileSpace | PlainFileSpace:
        """Files of steps that this process writes: of plain checkpoints while the package is disabled."""
        from tieredckpt.settings import load_complete_settings

        return self.tiered if load_complete_settings().enabled else self.plain


class TieredFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """File system ``tiered://JOB/step-N/FILE``. Complete steps are folders; other files behave as usual."""

    protocol = "tiered"
    root_marker = ""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT002
        """Begin a step, or create a folder for other files. A job needs no folder."""
        from tieredckpt.location import reject_local_tiered_folder

        reject_local_tiered_folder()
        target = self._parse_path(path)
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)
        if target.step is not None and not target.name:
            _job(target).writing.begin(target.step)
        elif target.other:
            found = _job(target).others.find(target.other)
            if found is None:
                _job(target).others.write(target.other, b"", folder=True)
            elif not found.folder:
                raise FileExistsError(path)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:  # noqa: FBT002
        self.makedirs(path, exist_ok=False)

    def rmdir(self, path: str) -> None:
        target = self._parse_path(path)
        if target.other:
            _job(target).others.remove(target.other)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:  # noqa: FBT002
        found = self._list(self._parse_path(path))
        return found if detail else [info["name"] for info in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        target = self._parse_path(path)
        if target.name:
            files = self._step(target)
            if files is None or target.name not in files.sizes:
                raise FileNotFoundError(path)
            return _file(str(target), files.sizes[target.name], files.saved_ns)
        if target.other:
            entry = _job(target).others.find(target.other)
            if entry is not None and not entry.folder:
                return _side_file(target.job, entry)
        if target.step is None or not _job(target).writing.has_begun(target.step):
            self._list(target)
        return _folder(str(target))

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Return whether ``path`` exists. An unreachable tier raises."""
        from tieredckpt.errors import UsageError

        try:
            self.info(path)
        except (FileNotFoundError, UsageError):
            return False
        return True

    def created(self, path: str) -> datetime:
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        """Return the time of the last write; for a step and its files, the time of the save."""
        target, info = self._parse_path(path), self.info(path)
        files = self._step(target) if target.step is not None else None
        at = info.get("mtime") if files is None else files.saved_ns / 1e9
        if at is None:
            raise io.UnsupportedOperation(f"{path}: a folder has no time")
        return datetime.fromtimestamp(at, tz=timezone.utc)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:  # noqa: FBT002
        """Rename a DCP file that this process has written to its final name.

        Other files are copied and removed.
        """
        old, new = self._parse_path(path1), self._parse_path(path2)
        if not old.name and not new.name:
            super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth, **kwargs)
        elif old.step is None or (old.job, old.step) != (new.job, new.step) or not old.name or not new.name:
            raise io.UnsupportedOperation(f"{path1} to {path2}: DCP's files move only within their step")
        else:
            _job(old).writing.rename(old.step, old.name, new.name)

    rename = mv

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            while data := source.read(_COPIED_BYTES):
                target.write(data)

    def rm_file(self, path: str) -> None:
        target = self._parse_path(path)
        if target.other:
            if not _job(target).others.remove(target.other):
                raise FileNotFoundError(path)
            return
        if target.step is None or not target.name:
            raise io.UnsupportedOperation(f"{path} is not a file: remove a step with rm(path, recursive=True)")
        writing = _job(target).writing
        # A file that will be replaced stays until then, so that the step is never without it.
        if not writing.drop(target.step, target.name) and not writing.is_pending(target.step, target.name):
            raise io.UnsupportedOperation(f"{path}: the files of a step are removed with their step")

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: FBT002
        for one in path if isinstance(path, list) else [path]:
            target = self._parse_path(one)
            if target.name:
                self.rm_file(one)
            elif target.other:
                self._remove_others(one, recursive=recursive, maxdepth=maxdepth)
            elif target.step is None or not recursive:
                raise io.UnsupportedOperation(f"{one}: only a step can be removed, with recursive=True")
            else:
                self._remove_step(target, target.step, one)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        target = self._parse_path(path)
        if mode not in ("rb", "wb", "xb"):
            raise io.UnsupportedOperation(f"{path}: mode {mode!r}; files are read and written as a whole (rb, wb, xb)")
        if mode == "xb" and self.exists(path):
            raise FileExistsError(path)
        if target.other:
            others = _job(target).others
            return io.BytesIO(others.read(target.other)) if mode == "rb" else _SideFileBuffer(others, target.other)
        if target.step is None or not target.name:
            raise IsADirectoryError(path)
        if mode != "rb":
            return _job(target).writing.writer(target.step, target.name)
        with _absent_files():
            return _job(target).steps.open(target.step, target.name)

    def _parse_path(self, path: str) -> TieredPath:
        from tieredckpt.fsspec_view.file_space import parse_tiered_path

        return parse_tiered_path(str(self._strip_protocol(path)))

    def _list(self, target: TieredPath) -> list[dict[str, Any]]:
        if target.name:
            return [self.info(str(target))]
        job, folder = _job(target), str(target)
        found: dict[str, dict[str, Any]] = {}
        exists = False
        if target.step is not None:
            files = self._step(target)
            exists = files is not None
            if files is not None:
                found = {name: _file(f"{folder}/{name}", size, files.saved_ns) for name, size in files.sizes.items()}
        elif not target.other:
            found = {f"step-{step}": _folder(f"{folder}/step-{step}") for step in job.steps.steps()}
        below = folder[len(target.job) + 1 :]
        if below:
            entry = job.others.find(below)
            if entry is not None and not entry.folder:
                return [_side_file(target.job, entry)]
            exists = exists or entry is not None
        for path in job.others.list_below(below):
            child, _, deeper = path[len(below) + 1 if below else 0 :].partition("/")
            entry = None if deeper or child in found else job.others.find(path)
            if deeper or (entry is not None and entry.folder):
                found.setdefault(child, _folder(f"{folder}/{child}"))
            elif entry is not None:
                found[child] = _side_file(target.job, entry)
        if not found and not exists:
            raise FileNotFoundError(f"tiered://{target}")
        return [found[name] for name in sorted(found, key=_listing_key)]

    def _step(self, target: TieredPath) -> StepAsFiles | PlainFiles | None:
        assert target.step is not None  # noqa: S101 - for the type checker; callers have looked
        return _job(target).steps.find(target.step)

    def _remove_others(self, path: str, *, recursive: bool, maxdepth: int | None) -> None:
        for one in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            target = self._parse_path(one)
            others = _job(target).others
            if not recursive and others.list_below(target.other):
                raise IsADirectoryError(one)
            others.remove(target.other)  # a folder without an entry exists while it has files

    def _remove_step(self, target: TieredPath, step: int, path: str) -> None:
        job = _job(target)
        removed = job.steps.remove(step)
        for inside in job.others.list_below(str(target)[len(target.job) + 1 :]):
            removed = job.others.remove(inside) or removed
        if not removed:
            raise FileNotFoundError(path)


class _SideFileBuffer(io.BytesIO):
    """Side file that is stored on close, and discarded if its ``with`` block raises."""

    def __init__(self, others: SideFileStore, path: str) -> None:
        super().__init__()
        self._others = others
        self._path = path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._others.write(self._path, data)

    def discard(self) -> None:
        super().close()

    def __del__(self) -> None:  # unlike other files, it does not close: an unclosed file is incomplete
        if not self.closed:
            log.warning("%s of %s was not closed, so that it is not kept", self._path, self._others.job)
            self.discard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        self.close()


@contextlib.contextmanager
def _absent_files() -> Iterator[None]:
    """Translate :class:`CheckpointNotFoundError` to ``FileNotFoundError``."""
    from tieredckpt.errors import CheckpointNotFoundError

    try:
        yield
    except CheckpointNotFoundError as error:
        raise FileNotFoundError(str(error)) from error


def _listing_key(name: str) -> tuple[str, int, str]:
    """Return a sort key that orders steps by number."""
    number = name.removeprefix("step-")
    return ("step-", int(number), "") if name != number and number.isdigit() else (name, 0, name)


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _file(name: str, size_bytes: int, changed_ns: int) -> dict[str, Any]:
    return {"name": name, "size": size_bytes, "type": "file", "mtime": changed_ns / 1e9, "created": changed_ns / 1e9}


def _side_file(job: str, entry: SideFile) -> dict[str, Any]:
    return _file(f"{job}/{entry.path}", entry.size_bytes, entry.changed_ns)


def _job(target: TieredPath) -> _JobFiles:
    from tieredckpt.fsspec_view.file_space import SideFileStore, StepFileSpace
    from tieredckpt.fsspec_view.plain_files import PlainFileSpace
    from tieredckpt.fsspec_view.step_files import JobStepFiles

    name = (os.getpid(), target.job)
    with _lock:
        found = _jobs.get(name)
        if found is None:
            found = _jobs[name] = _JobFiles(
                *(StepFileSpace(target.job), PlainFileSpace(target.job)),
                *(JobStepFiles(target.job), SideFileStore(target.job)),
            )
        return found
