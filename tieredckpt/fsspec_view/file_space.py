"""Written files: the files of a step until ``.metadata`` completes it, and side files.

While it is written, a file is a shard with one item: its bytes. Several processes of a node write one step, so its
files lie in a separate job space (``.JOB`` for ``JOB``). The rename to ``.metadata`` saves the step as tensors, like
any other step, and deletes its files::

    makedirs ──> the number of this attempt: the same on every rank, because DCP plans before any rank writes
    open("wb") ──> a leased slot that grows ──> close: sealed as FILE
                                         └────> close of FILE.tmp: stays open until it is renamed to FILE
    .metadata.tmp becomes .metadata ──> check that all its files exist here ──> save by a TieredWriter: complete

Until then readers see the earlier state of the step.
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

from peerstore.client.store_api import Blobs
from peerstore.daemon_process import process_identity
from peerstore.errors import ShardNotFoundError
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import ShardKey, VersionId, clock_ms
from peerstore.sizes_and_durations import show_size
from tieredckpt.dcp.tiered_writer import TieredWriter
from tieredckpt.durable.object_store import ObjectNotFoundError, ObjectStore
from tieredckpt.durable.plain_objects import DCP_FILE, DCP_METADATA_NAME
from tieredckpt.errors import CheckpointDamagedError, SaveFailedError, UsageError
from tieredckpt.export.step_source import StepSource
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT, StateTable
from tieredckpt.fsspec_view.plain_files import PENDING_SUFFIX, DurableAccess, is_rank_metadata, rank_metadata_error
from tieredckpt.fsspec_view.step_files import (
    SlotFile,
    save_from_files,
    translated_store_errors,
)
from tieredckpt.location import Location, parse_location
from tieredckpt.session.session import Session, open_session
from tieredckpt.settings import Settings, load_complete_settings, override_settings

_DCP_NAME = re.compile(r"(__[0-9]{1,6}(_[0-9]{1,6}\.distcp|\.metadata)|\.metadata)(\.tmp)?")
_RANKS = 1024
_ATTEMPT = "attempt."
_FIRST_BYTES = 16 << 20


def file_space_job(job: str) -> str:
    """Return the job space that holds the files of ``job`` while they are written."""
    return f".{job}"


@dataclass(frozen=True)
class _Attempt:
    version_id: VersionId
    writer: TieredWriter
    """Writer that saves the step when its files are complete.
    It saves for the incarnation at the begin of the attempt."""


class StepFileSpace:
    """Files of one job that this process writes, in the space shared with the other processes of the node."""

    def __init__(self, job: str, settings: Settings | None = None) -> None:
        self.job = job
        self.space = file_space_job(job)
        parse_location(self.space)  # the name of the space has one more character: it may be too long
        self._settings = settings
        self._lock = threading.RLock()
        self._last_session: Session | None = None
        self._begun: dict[int, _Attempt] = {}
        """Attempts that this process writes, by step."""
        self._open: dict[tuple[int, str], SlotFile] = {}
        """Files that are being written, or wait for the rename to their final name."""
        self._sizes: dict[int, int] = {}
        """Slot size in bytes of each part at its last write."""

    @property
    def settings(self) -> Settings:
        return self._settings or load_complete_settings()

    @property
    def session(self) -> Session:
        """Session of the space. Its shards are neither replicated nor uploaded."""
        here = override_settings(self.settings, durable={"url": ""}, peer={"discovery": "off"})
        session = open_session(self.space, here)
        with self._lock:
            if session is not self._last_session:  # a new agent does not know the attempts of the old one
                writers, self._open = list(self._open.values()), {}
                self._begun.clear()
                self._last_session = session
                for writer in writers:
                    writer.detach()
        return session

    def begin(self, step: int) -> None:
        """Begin a new attempt at ``step``.

        Drop the remains of earlier attempts at all steps, except for the last other step: its save may still run.
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
            if trainer is not None and trainer.pid is not None:
                saving.session.loads.follow_trainer(
                    process_identity(trainer.pid)
                )  # DCP's background process saves for the trainer
            saving.capture_point()
            store = session.agent.store
            incarnation = f"files-{store.arena_id}"
            # The first claim of an arena holds for all its processes. Its epoch is at least the world's epoch or the
            # time, like any incarnation's, because two nodes do not know each other's claims.
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
                recorded = self._recorded_attempt(session, at)
                last[at] = max(recorded, attempt)
                if attempt > recorded:
                    self._record_attempt(session, at, attempt)
            if left:
                store.versions.delete(self.space, sorted({key.version_id for key in left}))
        with self._lock:
            self._begun[step] = _Attempt(VersionId(epoch, step, last[step] + 1, incarnation), saving)

    def has_begun(self, step: int) -> bool:
        """Return whether this process has begun ``step`` with the current agent."""
        with self._lock:
            known = step in self._begun
        if known:
            _ = self.session  # clears the attempts that were begun with another agent
        with self._lock:
            return known and step in self._begun

    def writer(self, step: int, name: str) -> SlotFile:
        """Return a file to write. It becomes visible on close, or on its rename if its name ends in ``.tmp``."""
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
        """Seal a closed file under its name, unless it waits for a rename."""
        if not writer.name.endswith(PENDING_SUFFIX):
            self.rename(writer.step, writer.name, writer.name)

    def rename(self, step: int, name: str, final: str) -> None:
        """Seal a written file under the name ``final``. ``.metadata`` completes its step."""
        with self._lock:
            writer = self._open.get((step, name))
        if writer is None:
            raise FileNotFoundError(f"tiered://{self.job}/step-{step}/{name} is not a file this process has written")
        if is_rank_metadata(final):
            raise rank_metadata_error(final)
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
        """Return whether a temporary file that will replace ``name`` is open."""
        with self._lock:
            return (step, name + PENDING_SUFFIX) in self._open

    def drop(self, step: int, name: str) -> bool:
        """Discard a file that is being written. False: no such file exists."""
        with self._lock:
            writer = self._open.pop((step, name), None)
        if writer is not None:
            writer.discard()
        return writer is not None

    def _table(self, step: int, writer: SlotFile, metadata: Metadata) -> StateTable:
        """Return the table of the files in ``metadata``.

        Raise :class:`SaveFailedError` if this node lacks one.
        """
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
                f"step {step} of {self.job}: this node's memory lacks {', '.join(missing[:3])}, which the metadata "
                "names. As a file system, tiered:// is for jobs on one node. On several nodes, call "
                "tieredckpt.enable_urls() or use TieredWriter"
            )
        return StateTable((), (DCP_METADATA_NAME, *names))

    def _commit(self, step: int, attempt: _Attempt, metadata: Metadata) -> None:
        """Save the contents of the files as the step, and delete the files."""
        session = self.session
        with translated_store_errors(f"step {step} of {self.job} cannot be completed"):
            store = session.agent.store
            try:
                seen = session.agent.steps.describe(self.space, attempt.version_id)
                source = StepSource(seen, store, session.durable.open, session.peers)
                try:
                    save_from_files(attempt.writer, metadata, source)
                finally:
                    source.close()
            finally:
                self._record_attempt(session, step, attempt.version_id.attempt)
                store.versions.delete(self.space, [attempt.version_id])
            kept = {fact.key.version for fact in store.list_shards(self.space)} | {step}
            for name in store.blobs.list_names(self.space):
                if name.startswith(_ATTEMPT) and int(name.removeprefix(_ATTEMPT)) not in kept:
                    store.blobs.remove(self.space, name)

    def _record_attempt(self, session: Session, step: int, attempt: int) -> None:
        session.agent.store.blobs.put(self.space, f"{_ATTEMPT}{step}", str(attempt).encode())

    def _recorded_attempt(self, session: Session, step: int) -> int:
        try:
            return int(session.agent.store.blobs.get(self.space, f"{_ATTEMPT}{step}"))
        except ShardNotFoundError:
            return -1


@dataclass(frozen=True)
class TieredPath:
    """Path below ``tiered://``: a job, one of its steps, a DCP file of a step, or any other file."""

    job: str
    step: int | None = None
    name: str = ""
    """Name of a DCP file in the step. Empty: none."""
    other: str = ""
    """Path below the job of any other file or folder. In the folder of a step it begins with ``step-N``."""

    def __str__(self) -> str:
        folder = self.other or ("" if self.step is None else f"step-{self.step}")
        return "/".join(part for part in (self.job, folder, self.name) if part)


def parse_tiered_path(path: str) -> TieredPath:
    """Parse ``job``, ``job/step-N``, ``job/step-N/DCP_FILE`` or ``job/any/other/path``."""
    job, *rest = path.strip("/").split("/")
    location = Location(parse_location(job).job)
    if any(part in ("", ".", "..") for part in rest):
        raise UsageError(f"{path!r} is not a path below a job")
    if rest and len(rest) <= 2 and rest[0].startswith("step-") and "@" not in rest[0]:
        with contextlib.suppress(UsageError):  # not a step: a folder with a similar name
            location = parse_location(f"{job}/{rest[0]}")
    if not rest or (location.step is not None and len(rest) == 1):
        return TieredPath(location.job, location.step)
    if not _DCP_NAME.fullmatch(rest[-1]):
        return TieredPath(location.job, other="/".join(rest))
    if location.step is None:
        raise UsageError(f"{path!r}: a checkpoint is saved as tiered://JOB/step-N, and this is none")
    return TieredPath(location.job, location.step, rest[-1])


def file_part_number(name: str) -> int:
    """Return the part number of a file of a step. It depends on the name alone.

    Numbers of DCP's file names never collide. Those of other names are hashes.
    """
    if name == DCP_METADATA_NAME:
        return 0
    match = DCP_FILE.fullmatch(name)
    rank, number = (int(match[1]), int(match[2])) if match else (_RANKS, 0)
    if rank < _RANKS and number < UNKNOWN_PART_COUNT // _RANKS - 1:
        return 1 + number * _RANKS + rank
    return 1 + xxhash.xxh3_64_intdigest(name.encode()) % (UNKNOWN_PART_COUNT - 1)


_ENTRY, _DATA = "file.", "data."
_MAX_BYTES = 32 << 20
_PLAIN = frozenset(string.ascii_letters + string.digits + "._-")
_MAX_STEM_LENGTH = 230


class SideFile(msgspec.Struct, frozen=True):
    """A small file that is not part of a step, stored as one blob."""

    path: str
    """Path below its job."""
    changed_ns: int
    size_bytes: int
    folder: bool = False


class SideFileStore:
    """Side files of one job: in the durable tier, or without one in this node's memory.

    They are never in both: a copy in memory would be out of date after a write or removal by another node.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self._access = DurableAccess(job)

    def write(self, path: str, data: bytes, *, folder: bool = False) -> None:
        entry = SideFile(path, time.time_ns(), len(data), folder)
        if len(data) > _MAX_BYTES:
            raise UsageError(
                f"tiered://{self.job}/{path} has {show_size(len(data))}, and a file outside a step may have at most "
                f"{show_size(_MAX_BYTES)}. Save tensors with dcp.save, as tiered://JOB/step-N"
            )
        stem = _encode_path(path)
        with translated_store_errors(f"{path} of {self.job} cannot be written"):
            durable = self._durable()
            if durable is None:
                self._remove_stale_files(path)
            for name, content in ((f"{_DATA}{stem}", data), (f"{_ENTRY}{stem}", msgspec.msgpack.encode(entry))):
                if durable is not None:
                    durable.put(object_keys.side_file_key(self.job, name), content)
                else:
                    self._session.agent.store.blobs.put(self.job, name, content)

    def find(self, path: str) -> SideFile | None:
        data = self._get(f"{_ENTRY}{_encode_path(path)}")
        return None if data is None else _entry(data)

    def read(self, path: str) -> bytes:
        entry = self.find(path)
        data = None if entry is None or entry.folder else self._get(f"{_DATA}{_encode_path(path)}")
        if data is None:
            raise FileNotFoundError(f"tiered://{self.job}/{path}")
        return data

    def list_below(self, folder: str) -> list[str]:
        """Return the paths of all side files and folders below ``folder``, at any depth. Empty: below the job."""
        prefix = _ENTRY + (_encode_path(f"{folder}/") if folder else "")
        with translated_store_errors(f"the files of {self.job} cannot be listed"):
            memory, durable = self._memory(), self._durable()
            known = () if memory is None else memory.list_names(self.job)
            found = {name for name in known if name.startswith(prefix)}
            if durable is not None:
                found |= {
                    info.name.rpartition("/")[2] for info in durable.list(object_keys.side_file_key(self.job, prefix))
                }
        return sorted(_decode_path(name.removeprefix(_ENTRY)) for name in found)

    def remove(self, path: str) -> bool:
        """Delete a side file or folder. False: it does not exist."""
        if self.find(path) is None:
            return False
        both = [f"{_ENTRY}{_encode_path(path)}", f"{_DATA}{_encode_path(path)}"]
        with translated_store_errors(f"{path} of {self.job} cannot be removed"):
            memory, durable = self._memory(), self._durable()
            if durable is not None:
                durable.delete([object_keys.side_file_key(self.job, name) for name in both])
            if memory is not None:
                for name in both:
                    memory.remove(self.job, name)
        return True

    def _remove_stale_files(self, path: str) -> None:
        """Delete side files of evicted steps, before the first side file of a step is written."""
        own, known = self._step_of(path), self.list_below("")
        if own is None or any(self._step_of(other) == own for other in known):
            return
        folders = {step for other in known if (step := self._step_of(other)) is not None}
        if not folders:
            return
        seen = self._session.list_steps(fresh=True)
        newest = max((view.version_id.version for view in seen.views if view.candidate.is_complete), default=-1)
        gone = {step for step in folders if step < newest} - {view.version_id.version for view in seen.views}
        for other in known if not seen.unreachable else ():
            if self._step_of(other) in gone:
                self.remove(other)

    def _step_of(self, path: str) -> int | None:
        """Return the step whose folder contains ``path``. ``None``: it is in no such folder."""
        folder, inside, _ = path.partition("/")
        with contextlib.suppress(UsageError):
            return parse_location(f"{self.job}/{folder}").step if inside else None
        return None

    @property
    def _session(self) -> Session:
        return open_session(self.job, load_complete_settings())

    def _durable(self) -> ObjectStore | None:
        return self._access.open() if load_complete_settings().durable.url else None

    def _memory(self) -> Blobs | None:
        """Return the files in this node's memory; ``None`` while the package is disabled."""
        return self._session.agent.store.blobs if load_complete_settings().enabled else None

    def _get(self, name: str) -> bytes | None:
        with translated_store_errors(f"{self.job} cannot be looked up"):
            memory, durable = self._memory(), self._durable()
            if durable is not None:
                with contextlib.suppress(ObjectNotFoundError):
                    return durable.get(object_keys.side_file_key(self.job, name))
            if memory is not None:
                with contextlib.suppress(ShardNotFoundError):  # also files from before a durable tier was configured
                    return memory.get(self.job, name)
        return None


def _encode_path(path: str) -> str:
    """Return ``path`` encoded as a part of a name that agents and durable stores allow.

    The encoding is unique.
    """
    stem = "".join(one if one in _PLAIN else "".join(f"@{byte:02x}" for byte in one.encode()) for one in path)
    if len(stem) > _MAX_STEM_LENGTH:
        raise UsageError(f"{path!r} is too long for the name of a file outside a step")
    return stem


def _decode_path(stem: str) -> str:
    """Return the path that :func:`_encode_path` encoded."""
    return urllib.parse.unquote(stem.replace("@", "%"))


def _entry(data: bytes) -> SideFile:
    try:
        return from_msgpack(data, SideFile)
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointDamagedError(f"not what describes a file: {error}") from error
