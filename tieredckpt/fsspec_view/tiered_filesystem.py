"""TieredFileSystem: ``tiered://`` for fsspec. Torch is imported when a step is first touched.

DCP's own file writer and reader work on it unmodified, without ``enable_urls()``: slower than
:class:`~tieredckpt.dcp.tiered_writer.TieredWriter` (DCP pickles every tensor), but nothing has to be changed or called.
Whoever saved a step, it is listed and read here, and what is written here is a step like any other. Other files may lie
beside
the steps.
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
    from tieredckpt.fsspec_view.step_files import JobStepFiles, StepAsFiles

log = logging.getLogger(__name__)

_COPIED_BYTES = 8 << 20
_jobs: dict[tuple[int, str], _JobFiles] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class _JobFiles:
    """One of each per job and process: fsspec makes a file system for every thread, and a save may use several."""

    writing: StepFileSpace
    steps: JobStepFiles
    others: SideFileStore


class TieredFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """``tiered://JOB/step-N/FILE``: a job's steps are folders, there when they are whole; other files as anywhere."""

    protocol = "tiered"
    root_marker = ""

    # -- folders ----------------------------------------------------------------------------------------------

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT002
        """Begin a step, or make a folder for other files; a job needs none."""
        from tieredckpt.location import reject_local_tiered_folder

        reject_local_tiered_folder()
        place = self._place(path)
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)
        if place.step is not None and not place.name:
            _job(place).writing.begin(place.step)
        elif place.other:
            found = _job(place).others.find(place.other)
            if found is None:
                _job(place).others.write(place.other, b"", folder=True)
            elif not found.folder:
                raise FileExistsError(path)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:  # noqa: FBT002
        self.makedirs(path, exist_ok=False)

    def rmdir(self, path: str) -> None:
        place = self._place(path)
        if place.other:
            _job(place).others.remove(place.other)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:  # noqa: FBT002
        found = self._list(self._place(path))
        return found if detail else [info["name"] for info in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        place = self._place(path)
        if place.name:
            files = self._step(place)
            if files is None or place.name not in files.sizes:
                raise FileNotFoundError(path)
            return _file(str(place), files.sizes[place.name], files.saved_ns)
        if place.other:
            entry = _job(place).others.find(place.other)
            if entry is not None and not entry.folder:
                return _side_file(place.job, entry)
        if place.step is None or not _job(place).writing.has_begun(place.step):
            self._list(place)
        return _folder(str(place))

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether it is there; a tier that cannot be asked is an error, and not a no."""
        from tieredckpt.errors import UsageError

        try:
            self.info(path)
        except (FileNotFoundError, UsageError):
            return False
        return True

    def created(self, path: str) -> datetime:
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        """When it was written; of a step, when it was saved."""
        place, info = self._place(path), self.info(path)
        files = self._step(place) if place.step is not None else None
        at = info.get("mtime") if files is None else files.saved_ns / 1e9
        if at is None:
            raise io.UnsupportedOperation(f"{path}: a folder has no time")
        return datetime.fromtimestamp(at, tz=timezone.utc)

    # -- files ------------------------------------------------------------------------------------------------

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:  # noqa: FBT002
        """Give a file of DCP's that this process has just written its final name; others are copied and removed."""
        old, new = self._place(path1), self._place(path2)
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
        place = self._place(path)
        if place.other:
            if not _job(place).others.remove(place.other):
                raise FileNotFoundError(path)
            return
        if place.step is None or not place.name:
            raise io.UnsupportedOperation(f"{path}: only whole steps and files are removed")
        writing = _job(place).writing
        # What is about to be replaced stays until then, so that the step never is without.
        if not writing.drop(place.step, place.name) and not writing.is_pending(place.step, place.name):
            raise io.UnsupportedOperation(f"{path}: the files of a step are removed with their step")

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: FBT002
        for one in path if isinstance(path, list) else [path]:
            place = self._place(one)
            if place.name:
                self.rm_file(one)
            elif place.other:
                self._remove_others(one, recursive=recursive, maxdepth=maxdepth)
            elif place.step is None or not recursive:
                raise io.UnsupportedOperation(f"{one}: only whole steps are removed, recursively")
            else:
                self._remove_step(place, place.step, one)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        place = self._place(path)
        if mode not in ("rb", "wb", "xb"):
            raise io.UnsupportedOperation(f"{path}: mode {mode!r}; files are read and written as a whole (rb, wb, xb)")
        if mode == "xb" and self.exists(path):
            raise FileExistsError(path)
        if place.other:
            others = _job(place).others
            return io.BytesIO(others.read(place.other)) if mode == "rb" else _SideFileBuffer(others, place.other)
        if place.step is None or not place.name:
            raise IsADirectoryError(path)
        if mode != "rb":
            return _job(place).writing.writer(place.step, place.name)
        with _absent_files():
            return _job(place).steps.open(place.step, place.name)

    # -- inside -----------------------------------------------------------------------------------------------

    def _place(self, path: str) -> TieredPath:
        from tieredckpt.fsspec_view.file_space import parse_tiered_path

        return parse_tiered_path(str(self._strip_protocol(path)))

    def _list(self, place: TieredPath) -> list[dict[str, Any]]:
        if place.name:
            return [self.info(str(place))]
        job, folder = _job(place), str(place)
        found: dict[str, dict[str, Any]] = {}
        there = False
        if place.step is not None:
            files = self._step(place)
            there = files is not None
            if files is not None:
                found = {name: _file(f"{folder}/{name}", size, files.saved_ns) for name, size in files.sizes.items()}
        elif not place.other:
            found = {f"step-{step}": _folder(f"{folder}/step-{step}") for step in job.steps.steps()}
        below = folder[len(place.job) + 1 :]
        if below:
            entry = job.others.find(below)
            if entry is not None and not entry.folder:
                return [_side_file(place.job, entry)]
            there = there or entry is not None
        for path in job.others.list_below(below):
            child, _, deeper = path[len(below) + 1 if below else 0 :].partition("/")
            entry = None if deeper or child in found else job.others.find(path)
            if deeper or (entry is not None and entry.folder):
                found.setdefault(child, _folder(f"{folder}/{child}"))
            elif entry is not None:
                found[child] = _side_file(place.job, entry)
        if not found and not there:
            raise FileNotFoundError(f"tiered://{place}")
        return [found[name] for name in sorted(found, key=_in_order)]

    def _step(self, place: TieredPath) -> StepAsFiles | None:
        assert place.step is not None  # noqa: S101 - for the type checker; callers have looked
        return _job(place).steps.find(place.step)

    def _remove_others(self, path: str, *, recursive: bool, maxdepth: int | None) -> None:
        for one in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            place = self._place(one)
            others = _job(place).others
            if not recursive and others.list_below(place.other):
                raise IsADirectoryError(one)
            others.remove(place.other)  # a folder that nobody made is there by what is in it

    def _remove_step(self, place: TieredPath, step: int, path: str) -> None:
        job = _job(place)
        removed = job.steps.remove(step)
        for inside in job.others.list_below(str(place)[len(place.job) + 1 :]):
            removed = job.others.remove(inside) or removed
        if not removed:
            raise FileNotFoundError(path)


class _SideFileBuffer(io.BytesIO):
    """A file that is kept when it is closed; given up when its block ends with an error."""

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

    def __del__(self) -> None:  # of files in general it closes them
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
    """A step that is not there is a file that is not there."""
    from tieredckpt.errors import CheckpointNotFoundError

    try:
        yield
    except CheckpointNotFoundError as error:
        raise FileNotFoundError(str(error)) from error


def _in_order(name: str) -> tuple[str, int, str]:
    """Steps by their number."""
    number = name.removeprefix("step-")
    return ("step-", int(number), "") if name != number and number.isdigit() else (name, 0, name)


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _file(name: str, size_bytes: int, changed_ns: int) -> dict[str, Any]:
    return {"name": name, "size": size_bytes, "type": "file", "mtime": changed_ns / 1e9, "created": changed_ns / 1e9}


def _side_file(job: str, entry: SideFile) -> dict[str, Any]:
    return _file(f"{job}/{entry.path}", entry.size_bytes, entry.changed_ns)


def _job(place: TieredPath) -> _JobFiles:
    from tieredckpt.fsspec_view.file_space import SideFileStore, StepFileSpace
    from tieredckpt.fsspec_view.step_files import JobStepFiles

    name = (os.getpid(), place.job)
    with _lock:
        found = _jobs.get(name)
        if found is None:
            found = _jobs[name] = _JobFiles(StepFileSpace(place.job), JobStepFiles(place.job), SideFileStore(place.job))
        return found
