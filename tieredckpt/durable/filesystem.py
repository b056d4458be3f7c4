"""Any other scheme, through fsspec: HDFS, SFTP, and whatever is installed."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from tieredckpt.durable.object_names import folder, join
from tieredckpt.durable.store import ObjectInfo
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tieredckpt.durable.backend import Upload

_STAGED = ".staged-"
_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class FilesystemBackend:
    """Writes beside the object's place and moves where the file system has a move of its own.

    The others are object stores: what is written there appears when it is closed, so it is closed only when whole.
    """

    resumes = False
    pages = False

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.url = url
        self._options = dict(options)
        self._local = threading.local()
        fs, root = _open(url, self._options)
        self._root = root.rstrip("/")
        self._moves = _has_own_move(fs)

    def renew(self) -> bool:
        return False

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

    def upload(self, upload: Upload) -> None:
        def send() -> None:
            with contextlib.closing(upload.pieces()) as pieces:
                if self._moves:
                    self._write_and_move(upload.name, pieces)
                else:
                    _write_uncommitted(self._fs, self._path(upload.name), pieces)

        upload.retry.run(upload.what, send)
        upload.progress(upload.source.size_bytes)

    def discard_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int:
        before = time.time() - older_than_s
        count = 0
        for info in self._all(prefix):
            if not _is_staged(info.name) or info.modified_s > before:
                continue
            parent, _, file = info.name.rpartition("/")
            name = join(parent, file[len(_STAGED) + 17 :])
            if name.startswith(prefix) and name not in keep:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(info.name))
                    count += 1
        return count

    def close(self) -> None:
        pass

    @property
    def _fs(self) -> Any:
        """Of this thread: synchronous file systems of fsspec must not be shared."""
        if not hasattr(self._local, "fs"):
            self._local.fs = _open(self.url, self._options)[0]
        return self._local.fs

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _all(self, prefix: str) -> Iterator[ObjectInfo]:
        fs = self._fs
        fs.invalidate_cache()
        top = self._path(folder(prefix))
        try:
            if prefix.endswith("/") or not prefix:
                found = fs.find(top, detail=True)
            else:  # not all that is beside what is asked for
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
        staged = f"{parent}/{_STAGED}{secrets.token_hex(8)}-{file}"
        fs.makedirs(parent, exist_ok=True)
        try:
            with fs.open(staged, "wb") as out:
                for piece in pieces:
                    out.write(piece)
            fs.mv(staged, path)
            if fs.exists(staged):  # WebHDFS says so instead of raising
                raise OSError(f"{staged} could not be moved to {path}")
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell; discard_uploads finds the rest
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
        with contextlib.suppress(Exception):  # the first error is the one to tell
            out.discard()
        with contextlib.suppress(AttributeError):
            out.closed = True  # or its finaliser would close, and so publish, what there is
        raise


def _open(url: str, options: Mapping[str, str]) -> tuple[Any, str]:
    import fsspec.core

    scheme = url.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise UsageError(f"durable.url {url}: {error}") from error
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
    return name.rpartition("/")[2].startswith(_STAGED)


def _modified_s(info: Mapping[str, Any]) -> float:
    """Unknown counts as now, so that nothing is deleted for its age."""
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
