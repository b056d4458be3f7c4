"""The incarnation (fencing epoch) of this process, agreed by all ranks of a save.

An owner is in one of two states::

                      adopt: the ranks of a save agreed          agree again: same incarnation, or a newer one
                 ┌──────────────────────────────────────┐        ┌─────┐
                 │                                      ▼        ▼     │
        between incarnations                      writes for an incarnation
                 ▲                                      │
                 └──────────────────────────────────────┘
                      go_back: a step was loaded · leave_world

Before every save that goes through DCP each rank proposes what it knows (:class:`SaveProposal`), one of them decides
for all (:func:`decide_save`), and each adopts the decision. Ranks go on with their incarnation only when all of them
are in the same one, with as many parts, and nobody has heard of a newer one. So a load on any rank, a rank that came or
left, and a writer elsewhere all lead to a new incarnation that every rank hears of. What is decided belongs to that
one save: it is kept in no plan, because DCP keeps plans by the class of their planner, for whatever job and for good.

The epoch of a new incarnation is a hybrid logical clock: greater than every epoch that the ranks know of, and not below
the one that the coordinator allocated for their world (:func:`use_world_epoch`). Without a coordinator it is not below
the time in milliseconds. So a later incarnation has the greater epoch also where all processes that knew the earlier
ones have lost their memory, and two that begin without knowing of each other do not share one.

A state is saved for the incarnation in which it was captured (:class:`CapturePoint`). When a step was loaded since, it
is of a past that the job has left: it may still be written for its own incarnation, and never for the next one.

A process that DCP saves in writes for the process that trains. It is handed the trainer's owner with every save
(:class:`IncarnationHandover`), and what is agreed there comes back through a page of shared memory that only it writes.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from peerstore.message_codec import from_json
from peerstore.shard_records import ShardKey, VersionId, next_epoch
from tieredckpt.errors import (
    DurableRefusedError,
    SaveFailedError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)

_TRIES_KEPT = 64
_PAGE_BYTES = 16 << 10
_HEADER = 8
_KINDS: tuple[type[TieredCheckpointError], ...] = (UsageError, DurableRefusedError, TierUnavailableError)
"""The kinds of errors that ranks report to each other; every other one is a :class:`SaveFailedError`."""


class Incarnation(NamedTuple):
    """On whose behalf a process writes."""

    epoch: int
    name: str


class CapturePoint(msgspec.Struct, frozen=True):
    """Where an owner stood when a state was captured."""

    lifetime_id: str
    """Changes whenever a step is loaded or the world is left."""
    current: Incarnation | None
    parts: int
    base: int | None
    """The step that was loaded last; -1 for none; ``None`` when nobody said."""
    newest_sealed: int
    """The newest step sealed for ``current``; -1 for none."""
    world_epoch: int = 0
    """What the coordinator allocated for the incarnations of this world; 0 where there is none."""


class SaveProblem(msgspec.Struct, frozen=True):
    """Why a rank cannot save: the message and the kind of an error, as the other ranks receive it."""

    message: str
    kind: str = SaveFailedError.__name__

    @classmethod
    def of(cls, error: Exception) -> SaveProblem:
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), SaveFailedError)
        return cls(str(error), kind.__name__)

    def error(self, context: str = "") -> TieredCheckpointError:
        """Return the error that the other ranks raise."""
        kind = next((kind for kind in _KINDS if kind.__name__ == self.kind), SaveFailedError)
        return kind(f"{context}{self.message}")


class SaveProposal(msgspec.Struct, frozen=True):
    """What one rank says before a save."""

    job: str
    step: int
    point: CapturePoint
    is_stale: bool
    """The state was captured before a step was loaded, or in another world."""
    attempts: int
    """How often this rank has tried to write the step for this incarnation."""
    known_epoch: int
    """The newest epoch its node has heard of."""
    newest_complete: VersionId | None = None
    """The newest version that it knows to be whole."""
    problem: SaveProblem | None = None
    """Why it cannot save."""
    aborted_parts: tuple[tuple[VersionId, int], ...] = ()
    """Parts that it will never seal, where agents do not tell each other: the version, and its part of it."""


class SaveDecision(msgspec.Struct, frozen=True):
    """What all ranks of one save write for."""

    job: str
    step: int
    incarnation: Incarnation
    parts: int
    attempt: int
    base: int | None
    newest_complete: VersionId | None
    aborted_parts: tuple[tuple[VersionId, int], ...] = ()

    def key(self, part: int) -> ShardKey:
        return ShardKey(self.job, self.step, self.incarnation.epoch, self.incarnation.name, self.attempt, part)


_world_epochs: list[int] = []


@contextmanager
def use_world_epoch(epoch: int) -> Iterator[None]:
    """Begin incarnations in the block with the epoch that the coordinator allocated for their world; 0: none did."""
    _world_epochs.append(epoch)
    try:
        yield
    finally:
        _world_epochs.remove(epoch)


def decide_save(proposals: Sequence[SaveProposal], name: str, at_ms: int) -> SaveDecision:
    """Return what the ranks of a save write for.

    A new incarnation has this name. Its epoch is not below the one of the ranks' world, or ``at_ms`` where it has none.
    """
    first, parts = proposals[0], len(proposals)
    for rank, one in enumerate(proposals):
        if one.problem:
            raise one.problem.error(f"rank {rank} cannot save step {one.step} of {one.job}: ")
        if (one.job, one.step) != (first.job, first.step):
            raise UsageError(
                f"rank {rank} saves step {one.step} of {one.job} while rank 0 saves step {first.step} of {first.job}"
            )
    points = [one.point for one in proposals]
    known = max(one.known_epoch for one in proposals)
    current = points[0].current
    same = all((point.current, point.parts) == (current, parts) for point in points)
    if current is None or not same or known > current.epoch:
        gone = [rank for rank, one in enumerate(proposals) if one.is_stale]
        if gone:
            raise SaveFailedError(
                f"step {first.step} of {first.job} was staged before this job went back to an older step or left its "
                f"world (rank {gone[0]}), and another incarnation writes now: this state is of a past that the job has "
                "left, and is not saved. Wait for a save before loading another step"
            )
        at_least = max(point.world_epoch for point in points) or at_ms
        current, base = Incarnation(next_epoch(known, at_least), name), _base(points)
    else:
        base = points[0].base
    return SaveDecision(
        first.job,
        first.step,
        current,
        parts,
        max(one.attempts for one in proposals),
        base,
        max((one.newest_complete for one in proposals if one.newest_complete is not None), default=None),
        tuple(sorted({left for one in proposals for left in one.aborted_parts})),
    )


def _base(points: Sequence[CapturePoint]) -> int | None:
    """What a new incarnation goes on from: where a rank went back to, else all that was saved so far."""
    went_back = [one.base for one in points if one.current is None and one.base is not None]
    if went_back:
        return min(went_back)
    had = [
        max(one.base if one.base is not None else -1, one.newest_sealed) for one in points if one.current is not None
    ]
    return max(had, default=None)


class IncarnationState(msgspec.Struct, frozen=True):
    """What an owner knows that somebody else may need to know."""

    lifetime_id: str
    current: Incarnation | None
    parts: int
    base: int | None
    newest_sealed: int
    attempts: list[tuple[str, int, int]]


@dataclass(frozen=True)
class IncarnationHandover:
    """What a process that saves for this one is given with every save."""

    adopted: IncarnationState
    page: torch.Tensor
    """Shared memory in which it says what it has agreed on."""


@dataclass
class _Life:
    """From one load, or one world, to the next."""

    name: str = field(default_factory=lambda: secrets.token_hex(6))
    current: Incarnation | None = None
    parts: int = 0
    base: int | None = None
    reached: int = -1


class IncarnationTracker:
    """One process's answer for one job. Any thread may ask."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._lock = threading.RLock()
        self._life = _Life()
        self._tries: dict[tuple[str, int], int] = {}
        """By incarnation and step; the oldest are forgotten."""
        self._bases: dict[Incarnation, int | None] = {}
        """What each incarnation that this process writes for goes on from; the oldest are forgotten."""
        self._changed_by: int | None = None
        self._hears: _SharedMessage | None = None
        """Written by a process that saves for this one."""
        self._tells: _SharedMessage | None = None
        """Written by this one, which saves for another."""

    # -- asking -----------------------------------------------------------------------------------------------

    @property
    def current(self) -> Incarnation | None:
        """What this process writes for; ``None`` until the ranks of a save have agreed."""
        with self._lock:
            self._hear()
            return self._life.current

    @property
    def part_count(self) -> int:
        """How many ranks write for it."""
        with self._lock:
            return self._life.parts

    def base_step_of(self, key: ShardKey) -> int | None:
        """The step that the incarnation of a shard goes on from; -1 for nothing; ``None`` when nobody said.

        Whatever was loaded since: what was captured before that may still be written for its own incarnation.
        """
        with self._lock:
            return self._bases.get(Incarnation(key.epoch, key.incarnation))

    @property
    def newest_step(self) -> int | None:
        """The step that the next save follows: the newest one saved or, before that, loaded; -1 for none. ``None``
        where nothing was loaded and no save was agreed on.
        """
        with self._lock:
            self._hear()
            life = self._life
            if life.current is None:
                return life.base
            return max(life.base if life.base is not None else -1, life.reached)

    @property
    def agreed_rank_count(self) -> int | None:
        """How many ranks know of what this owner was told last: those of that save or load. ``None``: all there are."""
        with self._lock:
            return self._changed_by

    def capture(self) -> CapturePoint:
        """To be taken when a state is captured, and given to :meth:`propose` when it is saved."""
        with self._lock:
            self._hear()
            life = self._life
            world_epoch = _world_epochs[-1] if _world_epochs else 0
            return CapturePoint(life.name, life.current, life.parts, life.base, life.reached, world_epoch)

    def propose(
        self,
        step: int,
        point: CapturePoint,
        known_epoch: int,
        whole: VersionId | None,
        left_out: Sequence[tuple[VersionId, int]] = (),
    ) -> SaveProposal:
        with self._lock:
            left = point.lifetime_id != self._life.name
            name = point.current.name if point.current is not None else ""
            tried = self._tries.get((name, step), 0)
            return SaveProposal(self.job, step, point, left, tried, known_epoch, whole, aborted_parts=tuple(left_out))

    def next_key(self, step: int, part: int) -> ShardKey:
        """For a save that needs no agreement, because nothing has changed since the last one that had it."""
        with self._lock:
            current = self.current
            if current is None:
                raise SaveFailedError(f"step {step} of {self.job}: no incarnation was agreed on before writing")
            attempt = self.attempts_at(step)
            self._tried(current, step, attempt)
            return ShardKey(self.job, step, current.epoch, current.name, attempt, part)

    def attempts_at(self, step: int) -> int:
        """How often this process has tried to write ``step`` for this incarnation."""
        with self._lock:
            current = self.current
            return self._tries.get((current.name, step), 0) if current is not None else 0

    # -- events -----------------------------------------------------------------------------------------------

    def adopt(self, decision: SaveDecision, point: CapturePoint) -> None:
        """The ranks of a save have agreed. What was captured before a step was loaded changes nothing of that."""
        with self._lock:
            self._tried(decision.incarnation, decision.step, decision.attempt)
            self._goes_on_from(decision.incarnation, decision.base)
            life, current = self._life, self._life.current
            if point.lifetime_id == life.name and (current is None or decision.incarnation.epoch >= current.epoch):
                if decision.incarnation != current:
                    life.reached = -1
                life.current, life.parts, life.base = decision.incarnation, decision.parts, decision.base
                self._changed_by = decision.parts
            self._tell()

    def record_sealed(self, key: ShardKey) -> None:
        """This process has sealed its part of a version."""
        with self._lock:
            if (key.epoch, key.incarnation) == self._life.current:
                self._life.reached = max(self._life.reached, key.version)
                self._tell()

    def skip_attempts(self, step: int, count: int) -> None:
        """The next try at ``step`` is at least the one that others would call ``count``."""
        with self._lock:
            if (current := self.current) is not None and count > self.attempts_at(step):
                self._tried(current, step, count - 1)

    def rewind_to(self, step: int, ranks: int | None = None) -> None:
        """A step was loaded (-1: there was none), by so many ranks together: what is saved next goes on from it."""
        with self._lock:
            self._hear()
            self._changed_by = ranks
            self._begin(_Life(base=step))

    def leave_world(self) -> None:
        """What is saved next is of a new incarnation, also where the next world is as large as this one."""
        with self._lock:
            self._hear()
            old = self._life
            reached = max(old.base if old.base is not None else -1, old.reached)
            self._begin(_Life(base=old.base if old.current is None else reached))
            self._changed_by = None

    def _begin(self, life: _Life) -> None:
        self._life, self._hears, self._tells = life, None, None

    def _tried(self, incarnation: Incarnation, step: int, attempt: int) -> None:
        place = (incarnation.name, step)
        count = max(self._tries.pop(place, 0), attempt + 1)
        self._tries[place] = count
        while len(self._tries) > _TRIES_KEPT:
            del self._tries[next(iter(self._tries))]

    def _goes_on_from(self, incarnation: Incarnation, base: int | None) -> None:
        self._bases.pop(incarnation, None)
        self._bases[incarnation] = base
        while len(self._bases) > _TRIES_KEPT:
            del self._bases[next(iter(self._bases))]

    # -- another process that saves for this one --------------------------------------------------------------

    def hand_over(self) -> IncarnationHandover:
        """For the process that saves next what this one has captured."""
        with self._lock:
            self._hear()
            if self._hears is None:
                self._hears = _SharedMessage(torch.zeros(_PAGE_BYTES, dtype=torch.uint8).share_memory_())
            return IncarnationHandover(self._adopted(), self._hears.memory)

    def take_over(self, given: IncarnationHandover) -> None:
        """This process saves for the one that gave this."""
        with self._lock:
            if given.adopted.lifetime_id != self._life.name:
                self._begin(_Life(given.adopted.lifetime_id))
                self._tries.clear()
            self._merge(given.adopted)
            self._tells = _SharedMessage(given.page)

    def _adopted(self) -> IncarnationState:
        life = self._life
        tries = [(name, step, count) for (name, step), count in self._tries.items()]
        return IncarnationState(life.name, life.current, life.parts, life.base, life.reached, tries)

    def _merge(self, other: IncarnationState) -> None:
        life = self._life
        if other.lifetime_id != life.name:
            return
        for name, step, count in other.attempts:
            self._tried(Incarnation(0, name), step, count - 1)
        if other.current is None:
            if life.current is None:
                life.base = other.base
        elif other.current == life.current:
            life.reached = max(life.reached, other.newest_sealed)
        elif life.current is None or other.current.epoch > life.current.epoch:
            life.current, life.parts, life.base = other.current, other.parts, other.base
            life.reached = other.newest_sealed
            self._goes_on_from(other.current, other.base)

    def _hear(self) -> None:
        text = self._hears.read() if self._hears is not None else b""
        if text:
            self._merge(from_json(text, IncarnationState))

    def _tell(self) -> None:
        if self._tells is not None:
            self._tells.write(msgspec.json.encode(self._adopted()))


class _SharedMessage:
    """A message in shared memory, written by one process and read by another: the last one, whole."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._bytes = memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")
        self._last = (b"", b"")

    def write(self, text: bytes) -> None:
        self._bytes[_HEADER : _HEADER + len(text)] = text
        self._bytes[:_HEADER] = _header(text)

    def read(self) -> bytes:
        """Empty while nothing was written, and what was read last while something is being written."""
        header = bytes(self._bytes[:_HEADER])
        if header != self._last[0]:
            text = bytes(self._bytes[_HEADER : _HEADER + int.from_bytes(header[:4], "little")])
            if _header(text) == header:
                self._last = header, text
        return self._last[1]


def _header(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
