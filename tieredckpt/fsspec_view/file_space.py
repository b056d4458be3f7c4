"""Files being written: those that become a step when ``.metadata`` arrives, and side files beside the steps.

While it is written, a file is a shard with one item: its bytes. They lie in a job space beside the job's own (``.JOB``
for ``JOB``), because several processes of a node write one step. When its ``.metadata`` takes its name, the step is
saved as any other is, as tensors, and its files are given up::

    makedirs ──> the number of this attempt: the same on every rank, because DCP plans before anybody writes
    open("wb") ──> a leased slot that grows ──> close: sealed as FILE
                                         └────> close of FILE.tmp: kept until it is renamed to FILE
    .metadata.tmp becomes .metadata ──> checked that every file it names is here ──> saved by a TieredWriter: whole

Until then, readers see the step as it was before.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import string
import threading
import time
import urllib.parse
from dataclasses import dataclass

import msgspec
import xxhash
from torch.distributed.checkpoint.metadata import Metadata

from peerstore.daemon_process import process_identity
from peerstore.errors import ShardNotFoundError
from peerstore.message_codec import from_msgpack
from peerstore.server.store_api import Store
from peerstore.shard_records import ShardKey, VersionId, clock_ms
from peerstore.sizes_and_durations import show_size
from tieredckpt.dcp.tiered_writer import TieredWriter
from tieredckpt.durable.object_store import ObjectNotFoundError, ObjectStore
from tieredckpt.errors import CheckpointDamagedError, SaveFailedError, UsageError
from tieredckpt.export.step_source import StepSource
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT, StateTable
from tieredckpt.fsspec_view.step_files import (
    DCP_METADATA_NAME,
    PENDING_SUFFIX,
    SlotFile,
    save_from_files,
    translated_store_errors,
)
from tieredckpt.location import Location, parse_location
from tieredckpt.session.session import Session, open_session
from tieredckpt.settings import Settings, load_settings, override_settings

_DCP_FILE = re.compile(r"__([0-9]{1,6})_([0-9]{1,6})\.distcp")
_OF_DCP = re.compile(r"(__[0-9]{1,6}(_[0-9]{1,6}\.distcp|\.metadata)|\.metadata)(\.tmp)?")
_RANKS = 1024
_ATTEMPT = "attempt."
_FIRST_BYTES = 16 << 20


def file_space_job(job: str) -> str:
    """The job space that holds the files of ``job`` while they are written."""
    return f".{job}"


@dataclass(frozen=True)
class _Attempt:
    version_id: VersionId
    writer: TieredWriter
    """Saves the step when its files are complete, for the incarnation the job was in when it was begun."""


class StepFileSpace:
    """The files of one job that this node's processes write."""

    def __init__(self, job: str, settings: Settings | None = None) -> None:
        self.job = job
        self.space = file_space_job(job)
        parse_location(self.space)  # a name that is one character longer may be too long
        self._settings = settings
        self._lock = threading.RLock()
        self._last: Session | None = None
        self._begun: dict[int, _Attempt] = {}
        """The attempt this process writes, by step."""
        self._open: dict[tuple[int, str], SlotFile] = {}
        """Files that are being written, or written under a name that is not their own yet."""
        self._sizes: dict[int, int] = {}
        """How large the slot of each file became the last time."""

    @property
    def settings(self) -> Settings:
        return self._settings or load_settings()

    @property
    def session(self) -> Session:
        """What is written here goes nowhere else: neither to other nodes nor to the durable tier."""
        here = override_settings(self.settings, durable={"url": ""}, peer={"discovery": "off"})
        session = open_session(self.space, here)
        with self._lock:
            if session is not self._last:  # what was begun with another agent is not known to this one
                writers, self._open = list(self._open.values()), {}
                self._begun.clear()
                self._last = session
                for writer in writers:
                    writer.detach()
        return session

    def begin(self, step: int) -> None:
        """A new attempt at ``step``. What earlier ones left, here and at other steps, is given up: only the step before
        this one may still be on its way.
        """
        session = self.session
        with self._lock:
            before = [at for at in self._begun if at != step][-1:]
            self._begun = {at: self._begun[at] for at in before}
            unfinished = [(at, name) for at, name in self._open if at not in before]
        for at, name in unfinished:
            self.drop(at, name)
        saving = TieredWriter(self.job, step, settings=self.settings)
        with translated_store_errors(f"step {step} of {self.job} cannot be begun"):
            trainer = multiprocessing.parent_process()
            if trainer is not None and trainer.pid is not None and self.settings.enabled:
                saving.session.follow_trainer_rewind(
                    process_identity(trainer.pid)
                )  # DCP's background process saves for it
            saving.capture_point()
            store = session.agent.store
            incarnation = f"files-{store.arena_id}"
            # The first claim of an arena holds for all its processes. It is not below the world's epoch or the
            # time, like the epoch of any incarnation: two nodes do not know each other's claims.
            known = store.epoch(self.space) or session.newest_known_epoch()
            at_least = session.incarnation.capture().world_epoch or clock_ms()
            epoch = store.claim(self.space, incarnation, at_least=max(known, at_least))
            here = sorted(store.list_shards(self.space), key=lambda fact: fact.sealed_ns)
            spared = [fact.key.version for fact in here if fact.key.version != step][-1:]
            left = [fact.key for fact in here if fact.key.version not in spared]
            last = {step: -1}
            for key in left:
                last[key.version] = max(key.attempt, last.get(key.version, -1))
            for at, attempt in last.items():
                noted = self._noted(session, at)
                last[at] = max(noted, attempt)
                if attempt > noted:
                    self._note(session, at, attempt)
            if left:
                store.delete_versions(self.space, sorted({key.version_id for key in left}))
        with self._lock:
            self._begun[step] = _Attempt(VersionId(epoch, step, last[step] + 1, incarnation), saving)

    def has_begun(self, step: int) -> bool:
        """Whether this process writes it, for the agent there is now."""
        with self._lock:
            known = step in self._begun
        if known:
            _ = self.session  # forgets what was begun with another agent
        with self._lock:
            return known and step in self._begun

    def writer(self, step: int, name: str) -> SlotFile:
        """A file to write; it takes its place when it is closed, or renamed when its name ends in ``.tmp``."""
        if not self.has_begun(step):
            self.begin(step)
        session, final = self.session, name.removesuffix(PENDING_SUFFIX)
        with self._lock:
            known = self._open.pop((step, name), None)
            others = {file_part_number(other.removesuffix(PENDING_SUFFIX)) for at, other in self._open if at == step}
            group = self._begun[step].version_id
        if known is not None:
            known.discard()
        if file_part_number(final) in others:
            raise UsageError(f"{name} of step {step} cannot be told from another file: give it another name")
        key = ShardKey(self.space, step, group.epoch, group.incarnation, group.attempt, file_part_number(final))
        with translated_store_errors(f"{name} of step {step} cannot be written"):
            store, wait_s = session.agent.store, session.settings.memory.wait_s
            lease = store.lease(key, self._sizes.get(key.part, _FIRST_BYTES), UNKNOWN_PART_COUNT, wait_s=wait_s)
        writer = SlotFile(self.file_closed, self.space, session, lease, name)
        with self._lock:
            self._open[step, name] = writer
        return writer

    def file_closed(self, writer: SlotFile) -> None:
        """The writer has written everything."""
        if not writer.name.endswith(PENDING_SUFFIX):
            self.rename(writer.step, writer.name, writer.name)

    def rename(self, step: int, name: str, final: str) -> None:
        """Give a written file its name; ``.metadata`` makes its step whole."""
        with self._lock:
            writer = self._open.get((step, name))
        if writer is None:
            raise FileNotFoundError(f"tiered://{self.job}/step-{step}/{name} is not a file this process has written")
        if final != DCP_METADATA_NAME and final.endswith(DCP_METADATA_NAME):
            raise UsageError(
                f"{final}: metadata per rank (use_collectives=False) is not kept as files; write it with "
                "TieredWriter or after tieredckpt.enable_urls()"
            )
        metadata = None
        try:
            if final == DCP_METADATA_NAME:
                metadata = writer.read_dcp_metadata()
            writer.seal(final, None if metadata is None else self._table(step, writer, metadata))
        except BaseException:
            self.drop(step, name)
            raise
        with self._lock:
            self._open.pop((step, name), None)
            self._sizes[file_part_number(final)] = writer.slot_bytes
            attempt = self._begun[step] if metadata is None else self._begun.pop(step)
        if metadata is not None:
            self._commit(step, attempt, metadata)

    def is_pending(self, step: int, name: str) -> bool:
        """Whether ``name`` is about to be replaced."""
        with self._lock:
            return (step, name + PENDING_SUFFIX) in self._open

    def drop(self, step: int, name: str) -> bool:
        """Give up a file that is being written; False when there is none."""
        with self._lock:
            writer = self._open.pop((step, name), None)
        if writer is not None:
            writer.discard()
        return writer is not None

    def _table(self, step: int, writer: SlotFile, metadata: Metadata) -> StateTable:
        """The files of the step, by what its metadata says."""
        try:
            names = sorted({str(info.relative_path) for info in metadata.storage_data.values()})
        except AttributeError as error:
            raise UsageError(f"{DCP_METADATA_NAME} of step {step} is not what DCP writes: {error}") from error
        with translated_store_errors(f"step {step} of {self.job} cannot be completed"):
            facts = self.session.agent.store.list_shards(self.space)
        here = {fact.key.part for fact in facts if fact.key.version_id == writer.group}
        missing = [name for name in names if file_part_number(name) not in here]
        if missing:
            raise SaveFailedError(
                f"step {step} of {self.job}: its metadata names {', '.join(missing[:3])}, which this node's memory "
                "does not have. tiered:// as a file system is for jobs on one node; on several, call "
                "tieredckpt.enable_urls() or use TieredWriter"
            )
        return StateTable((), (DCP_METADATA_NAME, *names))

    def _commit(self, step: int, attempt: _Attempt, metadata: Metadata) -> None:
        """Save what the files hold, and give them up."""
        session = self.session
        with translated_store_errors(f"step {step} of {self.job} cannot be completed"):
            store = session.agent.store
            try:
                seen = session.agent.describe_step(self.space, attempt.version_id)
                source = StepSource(seen, store, session.durable_store, session.peers)
                try:
                    save_from_files(attempt.writer, metadata, source)
                finally:
                    source.close()
            finally:
                self._note(session, step, attempt.version_id.attempt)
                store.delete_versions(self.space, [attempt.version_id])
            kept = {fact.key.version for fact in store.list_shards(self.space)} | {step}
            for name in store.list_blobs(self.space):
                if name.startswith(_ATTEMPT) and int(name.removeprefix(_ATTEMPT)) not in kept:
                    store.remove_blob(self.space, name)

    def _note(self, session: Session, step: int, attempt: int) -> None:
        session.agent.store.put_blob(self.space, f"{_ATTEMPT}{step}", str(attempt).encode())

    def _noted(self, session: Session, step: int) -> int:
        try:
            return int(session.agent.store.get_blob(self.space, f"{_ATTEMPT}{step}"))
        except ShardNotFoundError:
            return -1


@dataclass(frozen=True)
class TieredPath:
    """What a path below ``tiered://`` names: a job, one of its steps, a file of DCP's in a step, or any other file."""

    job: str
    step: int | None = None
    name: str = ""
    """Of a file that DCP made of a step."""
    other: str = ""
    """Below the job, for any other file or folder; those of a step's folder begin with its name."""

    def __str__(self) -> str:
        folder = self.other or ("" if self.step is None else f"step-{self.step}")
        return "/".join(part for part in (self.job, folder, self.name) if part)


def parse_tiered_path(path: str) -> TieredPath:
    """``job``, ``job/step-N``, ``job/step-N/.metadata`` (or another of DCP's files), or ``job/any/thing/else``."""
    job, *rest = path.strip("/").split("/")
    location = Location(parse_location(job).job)
    if any(part in ("", ".", "..") for part in rest):
        raise UsageError(f"{path!r} is not a path below a job")
    if rest and len(rest) <= 2 and rest[0].startswith("step-") and "@" not in rest[0]:
        with contextlib.suppress(UsageError):  # a folder of that name is any other
            location = parse_location(f"{job}/{rest[0]}")
    if not rest or (location.step is not None and len(rest) == 1):
        return TieredPath(location.job, location.step)
    if not _OF_DCP.fullmatch(rest[-1]):
        return TieredPath(location.job, other="/".join(rest))
    if location.step is None:
        raise UsageError(f"{path!r}: a checkpoint is saved as tiered://JOB/step-N, and this is none")
    return TieredPath(location.job, location.step, rest[-1])


def file_part_number(name: str) -> int:
    """The number a file has as a part of its step, whatever other files there are.

    What DCP calls its files never meets.
    """
    if name == DCP_METADATA_NAME:
        return 0
    match = _DCP_FILE.fullmatch(name)
    rank, number = (int(match[1]), int(match[2])) if match else (_RANKS, 0)
    if rank < _RANKS and number < UNKNOWN_PART_COUNT // _RANKS - 1:
        return 1 + number * _RANKS + rank
    return 1 + xxhash.xxh3_64_intdigest(name.encode()) % (UNKNOWN_PART_COUNT - 1)


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


class SideFileStore:
    """Those of one job: in the durable tier where there is one, else in this node's memory.

    In one place: a copy in memory would be what another node wrote over, or removed, long ago.
    """

    def __init__(self, job: str) -> None:
        self.job = job

    def write(self, path: str, data: bytes, *, folder: bool = False) -> None:
        entry = SideFile(path, time.time_ns(), len(data), folder)
        if len(data) > _MOST_BYTES:
            raise UsageError(
                f"tiered://{self.job}/{path} has {show_size(len(data))}; files beside checkpoints have at most "
                f"{show_size(_MOST_BYTES)}: save tensors with dcp.save, as tiered://JOB/step-N"
            )
        stem = _stem(path)
        with translated_store_errors(f"{path} of {self.job} cannot be written"):
            durable = self._durable()
            if durable is None:
                self._tidy(path)
            for name, content in ((f"{_DATA}{stem}", data), (f"{_NOTE}{stem}", msgspec.msgpack.encode(entry))):
                if durable is not None:
                    durable.put(object_keys.side_file_key(self.job, name), content)
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

    def list_below(self, folder: str) -> list[str]:
        """The paths of everything below a folder ("": all there is), however deep."""
        prefix = _NOTE + (_stem(f"{folder}/") if folder else "")
        with translated_store_errors(f"the files of {self.job} cannot be listed"):
            found = {name for name in self._store.list_blobs(self.job) if name.startswith(prefix)}
            durable = self._durable()
            if durable is not None:
                found |= {
                    info.name.rpartition("/")[2] for info in durable.list(object_keys.side_file_key(self.job, prefix))
                }
        return sorted(_path(name.removeprefix(_NOTE)) for name in found)

    def remove(self, path: str) -> bool:
        """False where there is none."""
        if self.find(path) is None:
            return False
        both = [f"{_NOTE}{_stem(path)}", f"{_DATA}{_stem(path)}"]
        with translated_store_errors(f"{path} of {self.job} cannot be removed"):
            durable = self._durable()
            if durable is not None:
                durable.delete([object_keys.side_file_key(self.job, name) for name in both])
            for name in both:
                self._store.remove_blob(self.job, name)
        return True

    def _tidy(self, path: str) -> None:
        """Memory gives up steps for newer ones, and what lies in their folders: seen to once for each step's folder."""
        own, known = self._step_of(path), self.list_below("")
        if own is None or any(self._step_of(other) == own for other in known):
            return
        folders = {step for other in known if (step := self._step_of(other)) is not None}
        if not folders:
            return
        seen = self._session.agent.list_steps(self.job, fresh=True)
        newest = max((view.version_id.version for view in seen.views if view.candidate.is_complete), default=-1)
        gone = {step for step in folders if step < newest} - {view.version_id.version for view in seen.views}
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
        return self._session.agent.store

    def _durable(self) -> ObjectStore | None:
        session = self._session
        return session.durable_store() if session.settings.durable.url else None

    def _get(self, name: str) -> bytes | None:
        with translated_store_errors(f"{self.job} cannot be looked up"):
            durable = self._durable()
            if durable is not None:
                with contextlib.suppress(ObjectNotFoundError):
                    return durable.get(object_keys.side_file_key(self.job, name))
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
