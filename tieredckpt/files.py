"""Steps made of files, for writers that know files only (DCP's own, through fsspec).

A file is a shard with one item: its bytes. The files of a step lie in a job space beside the job's own (``.JOB`` for
``JOB``), so that steps of files and steps of tensors never mix, and everything else (leases, checksums, adoption,
drain, resolution, retention) is what it is for any shard::

    makedirs ──> the number of this attempt: the same on every rank, because DCP plans before anybody writes
    open("wb") ──> a leased slot that grows ──> close: sealed as FILE
                                         └────> close of FILE.tmp: kept until it is renamed to FILE
    .metadata.tmp becomes .metadata ──> checked that every file it names is here; sealed with their names: whole

Until ``.metadata`` is there, readers see the step as it was before.
"""

from __future__ import annotations

import io
import re
import threading
from dataclasses import dataclass

import xxhash

from peerstore.errors import ShardNotFoundError
from peerstore.records import Group, ShardFact, ShardKey
from tieredckpt.agent.catalog import Catalog
from tieredckpt.agent.drain import delete_step
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    SaveFailedError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.export.source import StepSource
from tieredckpt.location import Location, parse_location
from tieredckpt.manifest import OPEN_ENDED, StateTable
from tieredckpt.node import Described, StepView, Survey
from tieredckpt.resolve import resolve
from tieredckpt.session import Session, open_session
from tieredckpt.settings import Settings, load_settings
from tieredckpt.slot_files import METADATA, PENDING, SlotReader, SlotWriter, told
from tieredckpt.stored import StoredStep

_DCP_FILE = re.compile(r"__([0-9]{1,6})_([0-9]{1,6})\.distcp")
_RANKS = 1024
_ATTEMPT = "attempt."
_FIRST_BYTES = 16 << 20
_READ_BYTES = 8 << 20


def space_of(job: str) -> str:
    """The job space that holds the files of ``job``."""
    return f".{job}"


class FileSpace:
    """The steps of files of one job, as this process reads and writes them."""

    def __init__(self, job: str, settings: Settings | None = None) -> None:
        self.job = job
        self.space = space_of(job)
        parse_location(self.space)  # a name that is one character longer may be too long
        self._settings = settings
        self._lock = threading.RLock()
        self._last: Session | None = None
        self._begun: dict[int, Group] = {}
        """The attempt this process writes, by step."""
        self._open: dict[tuple[int, str], SlotWriter] = {}
        """Files that are being written, or written under a name that is not their own yet."""
        self._chosen: dict[int, Described] = {}
        """The attempt whose ``.metadata`` was opened last: the other files are read from the same one."""

    @property
    def session(self) -> Session:
        session = open_session(self.space, self._settings or load_settings())
        with self._lock:
            if session is not self._last:  # what was begun with another agent is not known to this one
                writers, self._open = list(self._open.values()), {}
                self._begun.clear()
                self._chosen.clear()
                self._last = session
                for writer in writers:
                    writer.let_go()
        return session

    # -- writing ----------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A new attempt at ``step``. What earlier ones left without becoming whole is given up."""
        session = self.session
        with self._lock:
            unfinished = [name for at, name in self._open if at == step]
        for name in unfinished:
            self.drop(step, name)
        with told(f"step {step} of {self.job} cannot be begun"):
            store = session.node.store
            incarnation = f"files-{store.arena_id}"
            # The first process asks what other arenas of this job have counted to; to the others it is given.
            at_least = 0 if store.epoch(self.space) else session.known_epoch()
            epoch = store.claim(self.space, incarnation, at_least=at_least)
            here = [fact for fact in store.inventory(self.space) if fact.key.version == step]
            noted = self._noted(session, step)
            last = max([noted, *(fact.key.attempt for fact in here)])
            if last > noted:
                store.put_blob(self.space, f"{_ATTEMPT}{step}", str(last).encode())
            torn = _groups(here) - _groups([fact for fact in here if fact.key.part == 0])
            if torn:
                store.forget(self.space, sorted(torn))
        with self._lock:
            self._begun[step] = Group(epoch, step, last + 1, incarnation)

    def has_begun(self, step: int) -> bool:
        with self._lock:
            return step in self._begun

    def writer(self, step: int, name: str) -> SlotWriter:
        """A file to write; it takes its place when it is closed, or renamed when its name ends in ``.tmp``."""
        if not self.has_begun(step):
            self.begin(step)
        session, final = self.session, name.removesuffix(PENDING)
        with self._lock:
            known = self._open.pop((step, name), None)
            others = {part_of(other.removesuffix(PENDING)) for at, other in self._open if at == step}
            group = self._begun[step]
        if known is not None:
            known.discard()
        if part_of(final) in others:
            raise UsageError(f"{name} of step {step} cannot be told from another file: give it another name")
        key = ShardKey(self.space, step, group.epoch, group.incarnation, group.attempt, part_of(final))
        with told(f"{name} of step {step} cannot be written"):
            store, wait_s = session.node.store, session.settings.memory.wait_s
            before = [fact.size_bytes for fact in store.inventory(self.space) if fact.key.part == key.part]
            lease = store.lease(key, max(before, default=_FIRST_BYTES), OPEN_ENDED, wait_s=wait_s)
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
        try:
            writer.seal(final, self._table(step, writer) if final == METADATA else None)
        except BaseException:
            self.drop(step, name)
            raise
        with self._lock:
            self._open.pop((step, name), None)
        if final == METADATA:
            self._commit(step, writer)

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

    def _table(self, step: int, writer: SlotWriter) -> StateTable:
        """The files of the step, by what its metadata says."""
        names = sorted(writer.referenced())
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

    def _commit(self, step: int, writer: SlotWriter) -> None:
        session = self.session
        with told(f"step {step} of {self.job} cannot be completed"):
            session.node.store.mark_whole(self.space, writer.group)
            kept = {fact.key.version for fact in session.node.store.inventory(self.space)} | {step}
            for name in session.node.store.blobs(self.space):
                if name.startswith(_ATTEMPT) and int(name.removeprefix(_ATTEMPT)) not in kept:
                    session.node.store.remove_blob(self.space, name)
        with self._lock:
            self._begun.pop(step, None)
            self._chosen.pop(step, None)

    def _noted(self, session: Session, step: int) -> int:
        try:
            return int(session.node.store.get_blob(self.space, f"{_ATTEMPT}{step}"))
        except ShardNotFoundError:
            return -1

    # -- reading ----------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The whole steps there are."""
        survey = self._survey()
        return sorted({view.group.version for view in survey.views if view.candidate.whole and not view.quarantined})

    def files(self, step: int) -> dict[str, int]:
        """Names and sizes of a whole step's files; raises when there is none."""
        return _sizes(StoredStep(self._described(step, fresh=True)))

    def reader(self, step: int, name: str) -> io.BufferedReader:
        described = self._described(step, fresh=name == METADATA)
        stored = StoredStep(described)
        if name not in stored.objects:
            raise FileNotFoundError(f"tiered://{self.job}/step-{step} has no file {name}")
        session = self.session
        source = StepSource(described, session.node.store, session.durable_store)
        return io.BufferedReader(SlotReader(source, name), _READ_BYTES)

    def remove(self, step: int) -> None:
        """Delete a step in all tiers."""
        session = self.session
        views = [view for view in self._survey().views if view.group.version == step]
        if not views:
            raise FileNotFoundError(f"tiered://{self.job}/step-{step}")
        if any(view.durable for view in views):
            catalog = Catalog(session.durable_store(), self.space)
            for view in views:
                if view.durable:
                    delete_step(catalog, self.space, view.group)
        with told(f"step {step} of {self.job} cannot be deleted"):
            session.node.store.forget(self.space, [view.group for view in views])
            session.node.survey(self.space, fresh=True)
        with self._lock:
            self._chosen.pop(step, None)

    def _survey(self) -> Survey:
        with told(f"{self.job} cannot be looked up"):
            return self.session.node.survey(self.space, fresh=True)

    def _described(self, step: int, *, fresh: bool) -> Described:
        with self._lock:
            known = self._chosen.get(step)
        if known is not None and not fresh:
            return known
        view = self._choose(step)
        with told(f"step {step} of {self.job} cannot be read"):
            described = self.session.node.describe(self.space, view.group)
        with self._lock:
            self._chosen[step] = described
        return described

    def _choose(self, step: int) -> StepView:
        survey = self._survey()
        found = resolve([view.candidate for view in survey.views], step=step, unreachable=list(survey.unreachable))
        if found.chosen is None:
            where = Location(parse_location(self.job).job, step)
            if survey.unreachable:
                text = "; ".join(survey.unreachable.values())
                raise TierUnavailableError(f"it is not known whether there is a {where}: {text}")
            if found.damaged:
                raise CheckpointDamagedError(f"{where} cannot be used any more ({found.explain()})")
            raise CheckpointNotFoundError(f"there is no {where} made of files ({found.explain()})")
        group = found.chosen.group
        return next(view for view in survey.views if view.group == group)


@dataclass(frozen=True)
class Place:
    """What a path below ``tiered://`` names."""

    job: str
    step: int | None = None
    name: str = ""


def place_of(path: str) -> Place:
    """``job``, ``job/step-N`` or ``job/step-N/file``."""
    job, _, rest = path.strip("/").partition("/")
    step, _, name = rest.partition("/")
    location = parse_location(f"{job}/{step}" if step else job)
    if "/" in name:
        raise UsageError(f"{path!r}: a step holds files, not folders")
    return Place(location.job, location.step, name)


def part_of(name: str) -> int:
    """The number a file has as a part of its step, whatever other files there are.

    What DCP calls its files never meets; the few that others may add are spread over all numbers.
    """
    if name == METADATA:
        return 0
    match = _DCP_FILE.fullmatch(name)
    rank, number = (int(match[1]), int(match[2])) if match else (_RANKS, 0)
    if rank < _RANKS and number < OPEN_ENDED // _RANKS - 1:
        return 1 + number * _RANKS + rank
    return 1 + xxhash.xxh3_64_intdigest(name.encode()) % (OPEN_ENDED - 1)


def _groups(facts: list[ShardFact]) -> set[Group]:
    return {fact.key.group for fact in facts}


def _sizes(stored: StoredStep) -> dict[str, int]:
    return {
        name: stored.shards[part].meta.item_sizes[number]
        for name, parts in stored.objects.items()
        for part, number in parts.items()
    }
