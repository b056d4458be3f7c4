"""Objects as files below a directory: local, NFS, Lustre. Written beside their place, made durable, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tieredckpt.durable.object_names import folder
from tieredckpt.durable.store import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tieredckpt.durable.backend import Upload

_STAGED = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.staged")
_TRIES = 100
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


class DirectoryBackend:
    resumes = False
    pages = False

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def renew(self) -> bool:
        return False

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
            if _STAGED.fullmatch(path.name):
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

    def upload(self, upload: Upload) -> None:
        upload.retry.run(upload.what, partial(self._copy, upload))
        upload.progress(upload.source.size_bytes)

    def discard_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int:
        count = 0
        before = time.time() - older_than_s
        for path, _ in self._files(folder(prefix)):
            staged = _STAGED.fullmatch(path.name)
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
        top = str(self._root / folder(prefix))
        begins = prefix.rpartition("/")[2]
        for directory, folders, files in os.walk(top, onerror=_not_absent):
            if directory == top:
                folders[:] = [name for name in folders if name.startswith(begins)]
                files[:] = [name for name in files if name.startswith(begins)]
            for file in files:
                path = Path(directory, file)
                yield path, str(path.relative_to(self._root))

    def _copy(self, upload: Upload) -> None:
        with self._staged(upload.name, create_only=False) as file, contextlib.closing(upload.pieces()) as pieces:
            for piece in pieces:
                file.write(piece)

    @contextlib.contextmanager
    def _staged(self, name: str, *, create_only: bool) -> Iterator[BinaryIO]:
        """A file that takes its place, whole and on disk, when the block ends well."""
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
            with contextlib.suppress(FileNotFoundError):  # it was deleted already, with the last object in it
                _sync_directory(path.parent)
        finally:
            staged.unlink(missing_ok=True)


def _not_absent(error: OSError) -> None:
    """A directory that is gone lists as empty; one that cannot be read must not."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _create(path: Path) -> BinaryIO:
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # no such directory yet, or a delete() just found it empty
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
    """Give the file its name unless that is taken, in one step where the file system has hard links."""
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
        if error.errno != errno.EINVAL:  # file systems that have nothing to sync here
            raise
    finally:
        os.close(fd)
