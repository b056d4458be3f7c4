"""Steps that are written as files, by writers that know files only (DCP's own, through fsspec).

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
import threading
from dataclasses import dataclass

import xxhash
from torch.distributed.checkpoint.metadata import Metadata

from peerstore.errors import ShardNotFoundError
from peerstore.owners import owner_of
from peerstore.records import Group, ShardKey
from tieredckpt.errors import SaveFailedError, UsageError
from tieredckpt.export.source import StepSource
from tieredckpt.location import Location, parse_location
from tieredckpt.manifest import OPEN_ENDED, StateTable
from tieredckpt.session import Session, open_session
from tieredckpt.settings import Settings, load_settings, override
from tieredckpt.slot_files import METADATA, PENDING, SlotWriter, told
from tieredckpt.step_files import save_files
from tieredckpt.writer import TieredWriter

_DCP_FILE = re.compile(r"__([0-9]{1,6})_([0-9]{1,6})\.distcp")
_OF_DCP = re.compile(r"(__[0-9]{1,6}(_[0-9]{1,6}\.distcp|\.metadata)|\.metadata)(\.tmp)?")
_RANKS = 1024
_ATTEMPT = "attempt."
_FIRST_BYTES = 16 << 20


def space_of(job: str) -> str:
    """The job space that holds the files of ``job`` while they are written."""
    return f".{job}"


@dataclass(frozen=True)
class _Attempt:
    group: Group
    writer: TieredWriter
    """Saves the step when its files are complete, for the incarnation the job was in when it was begun."""


class FileSpace:
    """The files of one job that this node's processes write."""

    def __init__(self, job: str, settings: Settings | None = None) -> None:
        self.job = job
        self.space = space_of(job)
        parse_location(self.space)  # a name that is one character longer may be too long
        self._settings = settings
        self._lock = threading.RLock()
        self._last: Session | None = None
        self._begun: dict[int, _Attempt] = {}
        """The attempt this process writes, by step."""
        self._open: dict[tuple[int, str], SlotWriter] = {}
        """Files that are being written, or written under a name that is not their own yet."""
        self._sizes: dict[int, int] = {}
        """How large the slot of each file became the last time."""

    @property
    def settings(self) -> Settings:
        return self._settings or load_settings()

    @property
    def session(self) -> Session:
        """What is written here goes nowhere else: neither to other nodes nor to the durable tier."""
        here = override(self.settings, durable={"url": ""}, peer={"discovery": "off"})
        session = open_session(self.space, here)
        with self._lock:
            if session is not self._last:  # what was begun with another agent is not known to this one
                writers, self._open = list(self._open.values()), {}
                self._begun.clear()
                self._last = session
                for writer in writers:
                    writer.let_go()
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
        with told(f"step {step} of {self.job} cannot be begun"):
            trainer = multiprocessing.parent_process()
            if trainer is not None and trainer.pid is not None and self.settings.enabled:
                saving.session.follow(owner_of(trainer.pid))  # DCP's background process saves for it
            saving.captured()
            store = session.node.store
            incarnation = f"files-{store.arena_id}"
            # The first process asks what other arenas of this job have counted to; to the others it is given.
            at_least = 0 if store.epoch(self.space) else session.known_epoch()
            epoch = store.claim(self.space, incarnation, at_least=at_least)
            here = sorted(store.inventory(self.space), key=lambda fact: fact.sealed_ns)
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
                store.forget(self.space, sorted({key.group for key in left}))
        with self._lock:
            self._begun[step] = _Attempt(Group(epoch, step, last[step] + 1, incarnation), saving)

    def has_begun(self, step: int) -> bool:
        """Whether this process writes it, for the agent there is now."""
        with self._lock:
            known = step in self._begun
        if known:
            _ = self.session  # forgets what was begun with another agent
        with self._lock:
            return known and step in self._begun

    def writer(self, step: int, name: str) -> SlotWriter:
        """A file to write; it takes its place when it is closed, or renamed when its name ends in ``.tmp``."""
        if not self.has_begun(step):
            self.begin(step)
        session, final = self.session, name.removesuffix(PENDING)
        with self._lock:
            known = self._open.pop((step, name), None)
            others = {part_of(other.removesuffix(PENDING)) for at, other in self._open if at == step}
            group = self._begun[step].group
        if known is not None:
            known.discard()
        if part_of(final) in others:
            raise UsageError(f"{name} of step {step} cannot be told from another file: give it another name")
        key = ShardKey(self.space, step, group.epoch, group.incarnation, group.attempt, part_of(final))
        with told(f"{name} of step {step} cannot be written"):
            store, wait_s = session.node.store, session.settings.memory.wait_s
            lease = store.lease(key, self._sizes.get(key.part, _FIRST_BYTES), OPEN_ENDED, wait_s=wait_s)
        writer = SlotWriter(self.closed, self.space, session, lease, name)
        with self._lock:
            self._open[step, name] = writer
        return writer

    def closed(self, writer: SlotWriter) -> None:
        """The writer has written everything."""
        if not writer.name.endswith(PENDING):
            self.place(writer.step, writer.name, writer.name)

    def place(self, step: int, name: str, final: str) -> None:
        """Give a written file its name; ``.metadata`` makes its step whole."""
        with self._lock:
            writer = self._open.get((step, name))
        if writer is None:
            raise FileNotFoundError(f"tiered://{self.job}/step-{step}/{name} is not a file this process has written")
        if final != METADATA and final.endswith(METADATA):
            raise UsageError(
                f"{final}: metadata per rank (use_collectives=False) is not kept as files; write it with "
                "TieredWriter or after tieredckpt.enable_urls()"
            )
        metadata = None
        try:
            if final == METADATA:
                metadata = writer.metadata()
            writer.seal(final, None if metadata is None else self._table(step, writer, metadata))
        except BaseException:
            self.drop(step, name)
            raise
        with self._lock:
            self._open.pop((step, name), None)
            self._sizes[part_of(final)] = writer.slot_bytes
            attempt = self._begun[step] if metadata is None else self._begun.pop(step)
        if metadata is not None:
            self._commit(step, attempt, metadata)

    def is_pending(self, step: int, name: str) -> bool:
        """Whether ``name`` is about to be replaced."""
        with self._lock:
            return (step, name + PENDING) in self._open

    def drop(self, step: int, name: str) -> bool:
        """Give up a file that is being written; False when there is none."""
        with self._lock:
            writer = self._open.pop((step, name), None)
        if writer is not None:
            writer.discard()
        return writer is not None

    def _table(self, step: int, writer: SlotWriter, metadata: Metadata) -> StateTable:
        """The files of the step, by what its metadata says."""
        try:
            names = sorted({str(info.relative_path) for info in metadata.storage_data.values()})
        except AttributeError as error:
            raise UsageError(f"{METADATA} of step {step} is not what DCP writes: {error}") from error
        with told(f"step {step} of {self.job} cannot be completed"):
            facts = self.session.node.store.inventory(self.space)
        here = {fact.key.part for fact in facts if fact.key.group == writer.group}
        missing = [name for name in names if part_of(name) not in here]
        if missing:
            raise SaveFailedError(
                f"step {step} of {self.job}: its metadata names {', '.join(missing[:3])}, which this node's memory "
                "does not have. tiered:// as a file system is for jobs on one node; on several, call "
                "tieredckpt.enable_urls() or use TieredWriter"
            )
        return StateTable((), (METADATA, *names))

    def _commit(self, step: int, attempt: _Attempt, metadata: Metadata) -> None:
        """Save what the files hold, and give them up."""
        session = self.session
        with told(f"step {step} of {self.job} cannot be completed"):
            store = session.node.store
            try:
                seen = session.node.describe(self.space, attempt.group)
                source = StepSource(seen, store, session.durable_store, session.peers)
                try:
                    save_files(attempt.writer, metadata, source)
                finally:
                    source.close()
            finally:
                self._note(session, step, attempt.group.attempt)
                store.forget(self.space, [attempt.group])
            kept = {fact.key.version for fact in store.inventory(self.space)} | {step}
            for name in store.blobs(self.space):
                if name.startswith(_ATTEMPT) and int(name.removeprefix(_ATTEMPT)) not in kept:
                    store.remove_blob(self.space, name)

    def _note(self, session: Session, step: int, attempt: int) -> None:
        session.node.store.put_blob(self.space, f"{_ATTEMPT}{step}", str(attempt).encode())

    def _noted(self, session: Session, step: int) -> int:
        try:
            return int(session.node.store.get_blob(self.space, f"{_ATTEMPT}{step}"))
        except ShardNotFoundError:
            return -1


@dataclass(frozen=True)
class Place:
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


def place_of(path: str) -> Place:
    """``job``, ``job/step-N``, ``job/step-N/.metadata`` (or another of DCP's files), or ``job/any/thing/else``."""
    job, *rest = path.strip("/").split("/")
    location = Location(parse_location(job).job)
    if any(part in ("", ".", "..") for part in rest):
        raise UsageError(f"{path!r} is not a path below a job")
    if rest and len(rest) <= 2 and rest[0].startswith("step-"):
        with contextlib.suppress(UsageError):  # a folder of that name is any other
            location = parse_location(f"{job}/{rest[0]}")
    if not rest or (location.step is not None and len(rest) == 1):
        return Place(location.job, location.step)
    if not _OF_DCP.fullmatch(rest[-1]):
        return Place(location.job, other="/".join(rest))
    if location.step is None:
        raise UsageError(f"{path!r}: a checkpoint is saved as tiered://JOB/step-N, and this is none")
    return Place(location.job, location.step, rest[-1])


def part_of(name: str) -> int:
    """The number a file has as a part of its step, whatever other files there are.

    What DCP calls its files never meets.
    """
    if name == METADATA:
        return 0
    match = _DCP_FILE.fullmatch(name)
    rank, number = (int(match[1]), int(match[2])) if match else (_RANKS, 0)
    if rank < _RANKS and number < OPEN_ENDED // _RANKS - 1:
        return 1 + number * _RANKS + rank
    return 1 + xxhash.xxh3_64_intdigest(name.encode()) % (OPEN_ENDED - 1)
