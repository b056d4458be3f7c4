"""Files beside a job's steps: what frameworks keep next to a checkpoint, under ``tiered://JOB/any/name``."""

from __future__ import annotations

import contextlib
import string
import time
import urllib.parse

import msgspec

from peerstore.decode import from_msgpack
from peerstore.errors import ShardNotFoundError
from peerstore.operations import Store
from tieredckpt.durable import names
from tieredckpt.durable.store import ObjectNotFoundError, ObjectStore
from tieredckpt.errors import CheckpointDamagedError, UsageError
from tieredckpt.location import parse_location
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
    """Those of one job: in the durable tier where there is one, else in this node's memory.

    In one place: a copy in memory would be what another node wrote over, or removed, long ago.
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
        stem = _stem(path)
        with told(f"{path} of {self.job} cannot be written"):
            durable = self._durable()
            if durable is None:
                self._tidy(path)
            for name, content in ((f"{_DATA}{stem}", data), (f"{_NOTE}{stem}", msgspec.msgpack.encode(entry))):
                if durable is not None:
                    durable.put(names.side_file(self.job, name), content)
                else:
                    self._store.put_blob(self.job, name, content)

    def find(self, path: str) -> SideFile | None:
        data = self._get(f"{_NOTE}{_stem(path)}")
        return None if data is None else _entry(data)

    def read(self, path: str) -> bytes:
        entry = self.find(path)
        data = None if entry is None or entry.folder else self._get(f"{_DATA}{_stem(path)}")
        if data is None:
            raise FileNotFoundError(f"tiered://{self.job}/{path}")
        return data

    def below(self, folder: str) -> list[str]:
        """The paths of everything below a folder ("": all there is), however deep."""
        prefix = _NOTE + (_stem(f"{folder}/") if folder else "")
        with told(f"the files of {self.job} cannot be listed"):
            found = {name for name in self._store.blobs(self.job) if name.startswith(prefix)}
            durable = self._durable()
            if durable is not None:
                found |= {info.name.rpartition("/")[2] for info in durable.list(names.side_file(self.job, prefix))}
        return sorted(_path(name.removeprefix(_NOTE)) for name in found)

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

    def _tidy(self, path: str) -> None:
        """Memory gives up steps for newer ones, and what lies in their folders: seen to once for each step's folder."""
        own, known = self._step_of(path), self.below("")
        if own is None or any(self._step_of(other) == own for other in known):
            return
        folders = {step for other in known if (step := self._step_of(other)) is not None}
        if not folders:
            return
        seen = self._session.node.survey(self.job, fresh=True)
        newest = max((view.group.version for view in seen.views if view.candidate.whole), default=-1)
        gone = {step for step in folders if step < newest} - {view.group.version for view in seen.views}
        for other in known if not seen.unreachable else ():
            if self._step_of(other) in gone:
                self.remove(other)

    def _step_of(self, path: str) -> int | None:
        """Of the step's folder that a file is in."""
        folder, inside, _ = path.partition("/")
        with contextlib.suppress(UsageError):
            return parse_location(f"{self.job}/{folder}").step if inside else None
        return None

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
            durable = self._durable()
            if durable is not None:
                with contextlib.suppress(ObjectNotFoundError):
                    return durable.get(names.side_file(self.job, name))
            with contextlib.suppress(ShardNotFoundError):  # also what was written before there was a durable tier
                return self._store.get_blob(self.job, name)
        return None


def _stem(path: str) -> str:
    """The path as part of a name that agents and every durable store take; equal only for equal paths."""
    stem = "".join(one if one in _PLAIN else "".join(f"@{byte:02x}" for byte in one.encode()) for one in path)
    if len(stem) > _LONGEST:
        raise UsageError(f"{path!r} is too long a name for a file beside checkpoints")
    return stem


def _path(stem: str) -> str:
    """What :func:`_stem` was given."""
    return urllib.parse.unquote(stem.replace("@", "%"))


def _entry(data: bytes) -> SideFile:
    try:
        return from_msgpack(data, SideFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointDamagedError(f"not what describes a file: {error}") from error
