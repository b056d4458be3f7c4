"""The leader record in a file on storage that all machines of the job share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, unquote

import msgspec

from elastic.control.leader_election import LeaderRecord
from elastic.errors import ControlPlaneRefusedError, ControlPlaneUnavailableError, PolicyError
from peerstore.daemon_process import trusted_users
from peerstore.message_codec import from_json

_LOCK_S = 2.0
_RETRY_S = 0.02
_MAX_BYTES = 64 << 10


class LeaderRecordFile:
    """Leader record in the file of ``file:///DIRECTORY/NAME``, written under a lock on ``NAME.lock``.

    The storage must support locks across all machines of the job: NFS 4, Lustre with ``flock``, or for one machine any
    local file system.
    """

    def __init__(self, path: Path, duration_s: float) -> None:
        self.path, self.duration_s = path, duration_s

    @classmethod
    def at(cls, url: SplitResult, duration_s: float) -> LeaderRecordFile:
        path = Path(unquote(url.path))
        if url.netloc not in ("", "localhost") or not path.is_absolute() or not path.name:
            raise PolicyError(f"{url.geturl()}: write file:///DIRECTORY/NAME, with a directory that all machines share")
        return cls(path, duration_s)

    def read(self) -> LeaderRecord | None:
        try:
            trusted_users(self.path.parent, setting="--coordinator file:///DIRECTORY/NAME")
            with self._locked():
                return self._load()
        except (PermissionError, FileNotFoundError) as error:
            raise ControlPlaneRefusedError(str(error)) from error
        except OSError as error:
            raise ControlPlaneUnavailableError(f"{self.path}: {error}") from error

    def write(self, record: LeaderRecord, over: LeaderRecord | None) -> LeaderRecord | None:
        try:
            with self._locked():
                stored = self._load()
                if (stored and stored.version) != (over and over.version):
                    return None
                new = msgspec.structs.replace(record, version=secrets.token_hex(8))
                self._replace(new)
                return new
        except PermissionError as error:
            raise ControlPlaneRefusedError(str(error)) from error
        except OSError as error:
            raise ControlPlaneUnavailableError(f"{self.path}: {error}") from error

    def close(self) -> None:
        """Do nothing: no resource stays open between calls."""

    def _load(self) -> LeaderRecord | None:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MAX_BYTES)
        try:
            return from_json(data, LeaderRecord)
        except msgspec.MsgspecError as error:
            raise ControlPlaneUnavailableError(f"{self.path} does not say who leads: {error}") from error

    def _replace(self, record: LeaderRecord) -> None:
        temporary = self.path.with_name(f".{self.path.name}.new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(fd)
        temporary.replace(self.path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self.path.with_name(f"{self.path.name}.lock")
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ControlPlaneUnavailableError(f"{lock} has been held for {_LOCK_S:g} s") from None
                    time.sleep(_RETRY_S)
            yield
        finally:
            os.close(fd)
