"""Objects as files: a local or shared directory, and any fsspec file system."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from peerstore.optional_packages import optional_imports
from tieredckpt.durable.object_store import ObjectInfo, join_object_name, listable_folder
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tieredckpt.durable.object_backend import UploadJob

_STAGED_FILE = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.staged")
_TRIES = 100
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


class DirectoryBackend:
    resumes_uploads = False
    lists_in_pages = False

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def refresh_credentials(self) -> bool:
        return False

    def check_root(self) -> None:
        existing = next(path for path in (self._root, *self._root.parents) if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
        if existing != self._root:
            probe = existing / f".probe.{secrets.token_hex(8)}.staged"
            probe.mkdir()
            probe.rmdir()

    def put(self, name: str, data: bytes, *, create_only: bool) -> None:
        with self._staged(name, create_only=create_only) as file:
            file.write(data)

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def get(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def get_range(self, name: str, start: int, stop: int) -> bytearray:
        found = bytearray(stop - start)
        with self._path(name).open("rb", buffering=0) as file, memoryview(found) as view:
            done = 0
            while done < len(found):
                count = os.preadv(file.fileno(), [view[done:]], start + done)
                if not count:
                    break
                done += count
        del found[done:]
        return found

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for path, name in self._files(prefix):
            if _STAGED_FILE.fullmatch(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted since the directory was read
                status = path.stat()
                yield ObjectInfo(name, status.st_size, status.st_mtime)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._path(name)
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == self._root or not _remove_if_empty(parent):
                    break

    def upload(self, upload: UploadJob) -> None:
        upload.retry.run(upload.what, partial(self._copy, upload))
        upload.progress(upload.source.size_bytes)

    def abort_stale_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int:
        count = 0
        before = time.time() - older_than_s
        for path, _ in self._files(listable_folder(prefix)):
            staged = _STAGED_FILE.fullmatch(path.name)
            if not staged:
                continue
            name = str((path.parent / staged["name"]).relative_to(self._root))
            with contextlib.suppress(FileNotFoundError):
                if name.startswith(prefix) and name not in keep and path.stat().st_mtime <= before:
                    path.unlink()
                    count += 1
        return count

    def close(self) -> None:
        pass

    def _path(self, name: str) -> Path:
        return self._root / name

    def _files(self, prefix: str) -> Iterator[tuple[Path, str]]:
        top = str(self._root / listable_folder(prefix))
        name_prefix = prefix.rpartition("/")[2]
        for directory, folders, files in os.walk(top, onerror=_raise_unless_absent):
            if directory == top:
                folders[:] = [name for name in folders if name.startswith(name_prefix)]
                files[:] = [name for name in files if name.startswith(name_prefix)]
            for file in files:
                path = Path(directory, file)
                yield path, str(path.relative_to(self._root))

    def _copy(self, upload: UploadJob) -> None:
        with self._staged(upload.name, create_only=False) as file, contextlib.closing(upload.pieces()) as pieces:
            for piece in pieces:
                file.write(piece)

    @contextlib.contextmanager
    def _staged(self, name: str, *, create_only: bool) -> Iterator[BinaryIO]:
        """Yield a file that replaces the object, complete and synced to disk, if the block ends without error."""
        path = self._path(name)
        staged = path.with_name(f".{path.name}.{secrets.token_hex(8)}.staged")
        try:
            with _create(staged) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if create_only:
                _link(staged, path)
            else:
                staged.replace(path)
            with contextlib.suppress(FileNotFoundError):  # already deleted, with the last object in it
                _sync_directory(path.parent)
        finally:
            staged.unlink(missing_ok=True)


def _raise_unless_absent(error: OSError) -> None:
    """Ignore a missing directory, which lists as empty, but raise for one that cannot be read."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _create(path: Path) -> BinaryIO:
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # the directory is missing, or delete() just removed it
            return path.open("xb")
        with contextlib.suppress(FileNotFoundError):
            _make_directory(path.parent)
    return path.open("xb")


def _make_directory(path: Path) -> None:
    if path.is_dir():
        return
    _make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    _sync_directory(path.parent)


def _remove_if_empty(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return False
    return True


def _link(staged: Path, path: Path) -> None:
    """Give the file its name unless that exists; atomically if the file system has hard links."""
    try:
        os.link(staged, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        staged.replace(path)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not sync directories
            raise
    finally:
        os.close(fd)


_STAGED_MARK = ".staged-"
_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class FsspecBackend:
    """Backend over any fsspec file system.

    If the file system has its own move, an object is written under another name and then moved. The other file systems
    are object stores: an object appears when its file is closed, so the file is closed only when complete.
    """

    resumes_uploads = False
    lists_in_pages = False

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.url = url
        self._options = dict(options)
        self._local = threading.local()
        fs, root = _open(url, self._options)
        self._root = root.rstrip("/")
        self._moves = _has_own_move(fs)

    def refresh_credentials(self) -> bool:
        return False

    def check_root(self) -> None:
        pass

    def put(self, name: str, data: bytes, *, create_only: bool) -> None:
        if self._moves:
            self._write_and_move(name, (data,))
        else:
            self._fs.pipe_file(self._path(name), data)

    def exists(self, name: str) -> bool:
        return bool(self._fs.isfile(self._path(name)))

    def get(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(name)))

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return bytes(self._fs.cat_file(self._path(name), start=start, end=stop))

    def list(self, prefix: str) -> Iterable[ObjectInfo]:
        return [info for info in self._all(prefix) if not _is_staged(info.name)]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def upload(self, upload: UploadJob) -> None:
        def send() -> None:
            with contextlib.closing(upload.pieces()) as pieces:
                if self._moves:
                    self._write_and_move(upload.name, pieces)
                else:
                    _write_uncommitted(self._fs, self._path(upload.name), pieces)

        upload.retry.run(upload.what, send)
        upload.progress(upload.source.size_bytes)

    def abort_stale_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int:
        before = time.time() - older_than_s
        count = 0
        for info in self._all(prefix):
            if not _is_staged(info.name) or info.modified_s > before:
                continue
            parent, _, file = info.name.rpartition("/")
            name = join_object_name(parent, file[len(_STAGED_MARK) + 17 :])
            if name.startswith(prefix) and name not in keep:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(info.name))
                    count += 1
        return count

    def close(self) -> None:
        pass

    @property
    def _fs(self) -> Any:
        """File system of this thread. Threads must not share synchronous file systems of fsspec."""
        if not hasattr(self._local, "fs"):
            self._local.fs = _open(self.url, self._options)[0]
        return self._local.fs

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _all(self, prefix: str) -> Iterator[ObjectInfo]:
        fs = self._fs
        fs.invalidate_cache()
        top = self._path(listable_folder(prefix))
        try:
            if prefix.endswith("/") or not prefix:
                found = fs.find(top, detail=True)
            else:  # search only folders that match the prefix
                there = [info for info in fs.ls(top, detail=True) if info["name"].startswith(self._path(prefix))]
                found = {info["name"]: info for info in there if info["type"] != "directory"}
                for info in there:
                    if info["type"] == "directory":
                        found |= fs.find(info["name"], detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            name = path[len(self._root) + 1 :]
            yield ObjectInfo(name, int(info["size"]), _modified_s(info))

    def _write_and_move(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        fs, path = self._fs, self._path(name)
        parent, _, file = path.rpartition("/")
        staged = f"{parent}/{_STAGED_MARK}{secrets.token_hex(8)}-{file}"
        fs.makedirs(parent, exist_ok=True)
        try:
            with fs.open(staged, "wb") as out:
                for piece in pieces:
                    out.write(piece)
            fs.mv(staged, path)
            if fs.exists(staged):  # WebHDFS does not raise if a move fails
                raise OSError(f"{staged} could not be moved to {path}")
        except BaseException:
            with contextlib.suppress(Exception):  # report the first error; abort_stale_uploads deletes the file later
                fs.rm_file(staged)
            raise


def _write_uncommitted(fs: Any, path: str, pieces: Iterable[bytes | memoryview]) -> None:
    out = fs.open(path, "wb", autocommit=False)
    try:
        for piece in pieces:
            out.write(piece)
        out.close()
        out.commit()
    except BaseException:
        with contextlib.suppress(Exception):  # report the first error
            out.discard()
        with contextlib.suppress(AttributeError):
            out.closed = True  # its finalizer would otherwise close and so publish the incomplete object
        raise


def _open(url: str, options: Mapping[str, str]) -> tuple[Any, str]:
    import fsspec.core

    scheme = url.partition("://")[0]
    try:
        with optional_imports(f"durable.url {url}"):
            fs, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        raise UsageError(
            f"durable.url {url}: no file system is installed for {scheme}:// ({error}). Install the fsspec "
            "implementation for it, or use s3://, gs://, az://, file:// or an absolute path"
        ) from error
    except TypeError as error:
        raise UsageError(f"durable.options do not fit {scheme}://: {error}") from error
    return fs, str(root)


def _has_own_move(fs: Any) -> bool:
    from fsspec import AbstractFileSystem
    from fsspec.implementations.dirfs import DirFileSystem

    while isinstance(fs, DirFileSystem):
        fs = fs.fs
    return type(fs).mv is not AbstractFileSystem.mv


def _is_staged(name: str) -> bool:
    return name.rpartition("/")[2].startswith(_STAGED_MARK)


def _modified_s(info: Mapping[str, Any]) -> float:
    """Return the Unix time of an object's last change, or now if unknown, so that its age deletes nothing."""
    for key in _MODIFIED:
        value = info.get(key)
        if isinstance(value, datetime):
            return value.replace(tzinfo=value.tzinfo or timezone.utc).timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return time.time()
