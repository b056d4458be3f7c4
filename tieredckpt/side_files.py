"""Files beside a job's steps: what frameworks keep next to a checkpoint, under ``tiered://JOB/any/name``."""

from __future__ import annotations

import string
import time

import msgspec

from peerstore.errors import ShardNotFoundError
from peerstore.operations import Store
from tieredckpt.durable import names
from tieredckpt.durable.store import ObjectNotFoundError, ObjectStore
from tieredckpt.errors import CheckpointDamagedError, UsageError
from tieredckpt.session import Session, open_session
from tieredckpt.settings import load_settings
from tieredckpt.slot_files import told

_NOTE, _DATA = "file.", "data."
_MOST_BYTES = 32 << 20
_PLAIN = frozenset(string.ascii_letters + string.digits + "._-")
_LONGEST = 230


class SideFile(msgspec.Struct, frozen=True):
    """A small file that is no part of a step, kept whole."""

    path: str
    """Below its job."""
    changed_ns: int
    size_bytes: int
    folder: bool = False


class SideFiles:
    """Those of one job, in this node's memory and, where there is one, in the durable tier.

    Written through: a file is in both when its writing has ended, and is read from the nearer.
    """

    def __init__(self, job: str) -> None:
        self.job = job

    def put(self, path: str, data: bytes, *, folder: bool = False) -> None:
        entry = SideFile(path, time.time_ns(), len(data), folder)
        if len(data) > _MOST_BYTES:
            raise UsageError(
                f"tiered://{self.job}/{path} has {len(data)} bytes; files beside checkpoints have at most "
                f"{_MOST_BYTES}: save tensors with dcp.save, as tiered://JOB/step-N"
            )
        stem, store = _stem(path), self._store
        with told(f"{path} of {self.job} cannot be written"):
            durable = self._durable()
            for name, content in ((f"{_DATA}{stem}", data), (f"{_NOTE}{stem}", msgspec.msgpack.encode(entry))):
                if durable is not None:
                    durable.put(names.side_file(self.job, name), content)
                store.put_blob(self.job, name, content)

    def find(self, path: str) -> SideFile | None:
        data = self._get(f"{_NOTE}{_stem(path)}")
        return None if data is None else _entry(data)

    def read(self, path: str) -> bytes:
        entry = self.find(path)
        data = None if entry is None or entry.folder else self._get(f"{_DATA}{_stem(path)}")
        if data is None:
            raise FileNotFoundError(f"tiered://{self.job}/{path}")
        return data

    def below(self, folder: str) -> list[SideFile]:
        """Everything below a folder ("": all there is), however deep."""
        prefix = _NOTE + (_stem(f"{folder}/") if folder else "")
        with told(f"the files of {self.job} cannot be listed"):
            found = {name for name in self._store.blobs(self.job) if name.startswith(prefix)}
            durable = self._durable()
            if durable is not None:
                found |= {info.name.rpartition("/")[2] for info in durable.list(names.side_file(self.job, prefix))}
        notes = (self._get(name) for name in sorted(found))
        return [_entry(data) for data in notes if data is not None]

    def remove(self, path: str) -> bool:
        """False where there is none."""
        if self.find(path) is None:
            return False
        both = [f"{_NOTE}{_stem(path)}", f"{_DATA}{_stem(path)}"]
        with told(f"{path} of {self.job} cannot be removed"):
            durable = self._durable()
            if durable is not None:
                durable.delete([names.side_file(self.job, name) for name in both])
            for name in both:
                self._store.remove_blob(self.job, name)
        return True

    @property
    def _session(self) -> Session:
        return open_session(self.job, load_settings())

    @property
    def _store(self) -> Store:
        return self._session.node.store

    def _durable(self) -> ObjectStore | None:
        session = self._session
        return session.durable_store() if session.settings.durable.url else None

    def _get(self, name: str) -> bytes | None:
        with told(f"{self.job} cannot be looked up"):
            try:
                return self._store.get_blob(self.job, name)
            except ShardNotFoundError:
                durable = self._durable()
            try:
                return None if durable is None else durable.get(names.side_file(self.job, name))
            except ObjectNotFoundError:
                return None


def _stem(path: str) -> str:
    """The path as part of a name that agents and every durable store take; equal only for equal paths."""
    stem = "".join(one if one in _PLAIN else "".join(f"@{byte:02x}" for byte in one.encode()) for one in path)
    if len(stem) > _LONGEST:
        raise UsageError(f"{path!r} is too long a name for a file beside checkpoints")
    return stem


def _entry(data: bytes) -> SideFile:
    try:
        return msgspec.msgpack.decode(data, type=SideFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointDamagedError(f"not what describes a file: {error}") from error
