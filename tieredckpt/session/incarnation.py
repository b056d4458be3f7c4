"""The incarnation (fencing epoch) of this process, agreed by all ranks of a save.

A tracker is in one of two states::

                      adopt: the ranks of a save agreed          agree again: same incarnation, or a newer one
                 ┌──────────────────────────────────────┐        ┌─────┐
                 │                                      ▼        ▼     │
        between incarnations                      writes for an incarnation
                 ▲                                      │
                 └──────────────────────────────────────┘
                      rewind_to: a step was loaded · leave_world

Before a save through DCP each rank makes a proposal (:class:`SaveProposal`). One rank decides for all
(:func:`decide_save`), and each rank adopts the decision. Ranks retain an incarnation that all of them have, with the
same number of parts, if none knows a newer one. So a load on any rank, a change of the ranks and another writer all
lead to a new incarnation on every rank. A decision belongs to one save. It is not stored in a plan, because DCP caches
plans by the class of their planner, across jobs and without expiry.

The epoch of a new incarnation is a hybrid logical clock. It is greater than every epoch that the ranks know of, and not
below the epoch that the coordinator allocated for their world (:func:`use_world_epoch`). Without a coordinator it is
not below the time in milliseconds. So a later incarnation has a greater epoch even if all processes that knew the
earlier ones have lost their memory. Two incarnations that begin independently do not share an epoch.

A state is saved for the incarnation in which it was captured (:class:`CapturePoint`). After a load, a state captured
earlier may still be written for its own incarnation, but never for the next one.

A process in which DCP saves writes for the trainer process. It receives the trainer's state with every save
(:class:`IncarnationHandover`). It returns the agreed incarnation through a page of shared memory that only it writes.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
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
from tieredckpt.rank_error import RankError

_KEPT_ENTRIES = 64
_PAGE_BYTES = 16 << 10
_HEADER = 8
_KINDS: tuple[type[TieredCheckpointError], ...] = (UsageError, DurableRefusedError, TierUnavailableError)
"""Errors that ranks report to each other by kind; any other is a :class:`SaveFailedError`."""


class Incarnation(NamedTuple):
    """Epoch and name of the incarnation that a process writes for."""

    epoch: int
    name: str


class CapturePoint(msgspec.Struct, frozen=True):
    """State of a tracker when a training state was captured."""

    lifetime_id: str
    """Random id that changes after each load and when the world is left."""
    current: Incarnation | None
    parts: int
    base: int | None
    """Step that was loaded last; -1 for none; ``None`` if unknown."""
    newest_sealed: int
    """Newest step sealed for ``current``; -1 for none."""
    world_epoch: int = 0
    """Epoch that the coordinator allocated for this world; 0 without a coordinator."""


class SaveProposal(msgspec.Struct, frozen=True):
    """Proposal of one rank for a save."""

    job: str
    step: int
    point: CapturePoint
    is_stale: bool
    """Whether the state was captured before a load or in another world."""
    attempts: int
    """Number of times that this rank has tried to write the step for this incarnation."""
    known_epoch: int
    """Newest epoch that its node knows."""
    newest_complete: VersionId | None = None
    """Newest version that it knows as complete."""
    problem: RankError | None = None
    """Reason why it cannot save, if any."""
    aborted_parts: tuple[tuple[VersionId, int], ...] = ()
    """Version and part of each shard that it never seals; empty if agents know each other."""


class SaveDecision(msgspec.Struct, frozen=True):
    """Incarnation, attempt and number of parts that all ranks of one save write for."""

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
    """Begin incarnations in the block with the epoch that the coordinator allocated; 0 for none."""
    _world_epochs.append(epoch)
    try:
        yield
    finally:
        _world_epochs.remove(epoch)


def decide_save(proposals: Sequence[SaveProposal], name: str, at_ms: int) -> SaveDecision:
    """Return the decision for a save from the proposals of all ranks; raise if they cannot save.

    A new incarnation has the name ``name``. Its epoch is at least the epoch of the ranks' world, or ``at_ms`` without
    one (milliseconds since 1970).
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
        old = [rank for rank, one in enumerate(proposals) if one.is_stale]
        if old:
            raise SaveFailedError(
                f"Cannot save step {first.step} of {first.job}: rank {old[0]} staged it before a load or before it "
                "left its world. A newer incarnation writes now. Wait for a save before loading another step"
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
    """Return the base of a new incarnation: the oldest step rewound to, or the newest saved one."""
    rewound = [one.base for one in points if one.current is None and one.base is not None]
    if rewound:
        return min(rewound)
    saved = [
        max(one.base if one.base is not None else -1, one.newest_sealed) for one in points if one.current is not None
    ]
    return max(saved, default=None)


class IncarnationState(msgspec.Struct, frozen=True):
    """State of a tracker, as exchanged between a trainer and its save process."""

    lifetime_id: str
    current: Incarnation | None
    parts: int
    base: int | None
    newest_sealed: int
    attempts: list[tuple[str, int, int]]


@dataclass(frozen=True)
class IncarnationHandover:
    """State that a save process receives from its trainer with every save."""

    adopted: IncarnationState
    page: torch.Tensor
    """Shared memory in which the save process returns its state."""


@dataclass
class _Lifetime:
    """Time from one load, or one world, to the next."""

    name: str = field(default_factory=lambda: secrets.token_hex(6))
    current: Incarnation | None = None
    parts: int = 0
    base: int | None = None
    reached: int = -1


class IncarnationTracker:
    """Incarnation of one job in one process. Any thread may call it."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._lock = threading.RLock()
        self._lifetime = _Lifetime()
        self._attempts: dict[tuple[str, int], int] = {}
        """Number of attempts by name of incarnation and step, for the newest entries."""
        self._bases: dict[Incarnation, int | None] = {}
        """Base step of each incarnation of this process, for the newest ones."""
        self._agreed_ranks: int | None = None
        """Number of ranks in the last save or load; ``None`` for all."""
        self._incoming: _SharedMessage | None = None
        """Message from the process that saves for this one."""
        self._outgoing: _SharedMessage | None = None
        """Message from this process to the trainer that it saves for."""
        self.on_change: Callable[[], object] = lambda: None
        """Function to call when a decision, a load or a left world changes the incarnation. Lock held."""

    @property
    def current(self) -> Incarnation | None:
        """Incarnation that this process writes for; ``None`` until the ranks of a save have agreed."""
        with self._lock:
            self._receive()
            return self._lifetime.current

    @property
    def part_count(self) -> int:
        """Number of ranks that write for the current incarnation."""
        with self._lock:
            return self._lifetime.parts

    def base_step_of(self, key: ShardKey) -> int | None:
        """Return the base step of a shard's incarnation; -1 for nothing; ``None`` if unknown.

        Later loads do not change it, because an older state may still be written for its own incarnation.
        """
        with self._lock:
            return self._bases.get(Incarnation(key.epoch, key.incarnation))

    @property
    def newest_step(self) -> int | None:
        """Step that the next save follows: the newest one saved, or the one loaded; -1 for none.

        ``None`` if no step was loaded and no save was agreed on.
        """
        with self._lock:
            self._receive()
            lifetime = self._lifetime
            if lifetime.current is None:
                return lifetime.base
            return max(lifetime.base if lifetime.base is not None else -1, lifetime.reached)

    @property
    def agreed_rank_count(self) -> int | None:
        """Number of ranks in the last save or load; ``None`` for all."""
        with self._lock:
            return self._agreed_ranks

    def capture(self) -> CapturePoint:
        """Return the point of a state that is captured now, for :meth:`propose` when it is saved."""
        with self._lock:
            self._receive()
            lifetime = self._lifetime
            world_epoch = _world_epochs[-1] if _world_epochs else 0
            return CapturePoint(
                lifetime.name, lifetime.current, lifetime.parts, lifetime.base, lifetime.reached, world_epoch
            )

    def propose(
        self,
        step: int,
        point: CapturePoint,
        known_epoch: int,
        whole: VersionId | None,
        left_out: Sequence[tuple[VersionId, int]] = (),
    ) -> SaveProposal:
        with self._lock:
            is_stale = point.lifetime_id != self._lifetime.name
            name = point.current.name if point.current is not None else ""
            attempts = self._attempts.get((name, step), 0)
            return SaveProposal(
                self.job, step, point, is_stale, attempts, known_epoch, whole, aborted_parts=tuple(left_out)
            )

    def next_key(self, step: int, part: int) -> ShardKey:
        """Return the key of a save that needs no agreement, because nothing changed since the last one."""
        with self._lock:
            current = self.current
            if current is None:
                raise SaveFailedError(f"step {step} of {self.job}: no incarnation was agreed on before writing")
            attempt = self.attempts_at(step)
            self._count_attempt(current, step, attempt)
            return ShardKey(self.job, step, current.epoch, current.name, attempt, part)

    def attempts_at(self, step: int) -> int:
        """Return the number of times that this process has tried to write ``step`` for this incarnation."""
        with self._lock:
            current = self.current
            return self._attempts.get((current.name, step), 0) if current is not None else 0

    def adopt(self, decision: SaveDecision, point: CapturePoint) -> None:
        """Use the decision of a save, unless its state was captured before the last load."""
        with self._lock:
            self._count_attempt(decision.incarnation, decision.step, decision.attempt)
            self._record_base(decision.incarnation, decision.base)
            lifetime, current = self._lifetime, self._lifetime.current
            if point.lifetime_id == lifetime.name and (current is None or decision.incarnation.epoch >= current.epoch):
                if decision.incarnation != current:
                    lifetime.reached = -1
                lifetime.current, lifetime.parts, lifetime.base = decision.incarnation, decision.parts, decision.base
                self._agreed_ranks = decision.parts
                if decision.incarnation != current:
                    self.on_change()
            self._send()

    def record_sealed(self, key: ShardKey) -> None:
        """Record that this process has sealed its part of a version."""
        with self._lock:
            if (key.epoch, key.incarnation) == self._lifetime.current:
                self._lifetime.reached = max(self._lifetime.reached, key.version)
                self._send()

    def skip_attempts(self, step: int, count: int) -> None:
        """Make ``count`` the lowest attempt number of the next try at ``step``."""
        with self._lock:
            if (current := self.current) is not None and count > self.attempts_at(step):
                self._count_attempt(current, step, count - 1)

    def rewind_to(self, step: int, ranks: int | None = None) -> None:
        """Make the next save continue from ``step`` (-1: none existed), which ``ranks`` ranks loaded together."""
        with self._lock:
            self._receive()
            self._agreed_ranks = ranks
            self._begin(_Lifetime(base=step))
            self.on_change()

    def leave_world(self) -> None:
        """Begin a new incarnation at the next save, even if the next world has the same size."""
        with self._lock:
            self._receive()
            previous = self._lifetime
            reached = max(previous.base if previous.base is not None else -1, previous.reached)
            self._begin(_Lifetime(base=previous.base if previous.current is None else reached))
            self._agreed_ranks = None
            self.on_change()

    def _begin(self, lifetime: _Lifetime) -> None:
        self._lifetime, self._incoming, self._outgoing = lifetime, None, None

    def _count_attempt(self, incarnation: Incarnation, step: int, attempt: int) -> None:
        entry = (incarnation.name, step)
        count = max(self._attempts.pop(entry, 0), attempt + 1)
        self._attempts[entry] = count
        while len(self._attempts) > _KEPT_ENTRIES:
            del self._attempts[next(iter(self._attempts))]

    def _record_base(self, incarnation: Incarnation, base: int | None) -> None:
        self._bases.pop(incarnation, None)
        self._bases[incarnation] = base
        while len(self._bases) > _KEPT_ENTRIES:
            del self._bases[next(iter(self._bases))]

    def hand_over(self) -> IncarnationHandover:
        """Return the state for a process that saves the state captured here."""
        with self._lock:
            self._receive()
            if self._incoming is None:
                self._incoming = _SharedMessage(torch.zeros(_PAGE_BYTES, dtype=torch.uint8).share_memory_())
            return IncarnationHandover(self._state(), self._incoming.memory)

    def take_over(self, given: IncarnationHandover) -> None:
        """Save for the trainer that created ``given``."""
        with self._lock:
            if given.adopted.lifetime_id != self._lifetime.name:
                self._begin(_Lifetime(given.adopted.lifetime_id))
                self._attempts.clear()
            self._merge(given.adopted)
            self._outgoing = _SharedMessage(given.page)

    def _state(self) -> IncarnationState:
        lifetime = self._lifetime
        tries = [(name, step, count) for (name, step), count in self._attempts.items()]
        return IncarnationState(lifetime.name, lifetime.current, lifetime.parts, lifetime.base, lifetime.reached, tries)

    def _merge(self, other: IncarnationState) -> None:
        lifetime = self._lifetime
        if other.lifetime_id != lifetime.name:
            return
        for name, step, count in other.attempts:
            self._count_attempt(Incarnation(0, name), step, count - 1)
        if other.current is None:
            if lifetime.current is None:
                lifetime.base = other.base
        elif other.current == lifetime.current:
            lifetime.reached = max(lifetime.reached, other.newest_sealed)
        elif lifetime.current is None or other.current.epoch > lifetime.current.epoch:
            lifetime.current, lifetime.parts, lifetime.base = other.current, other.parts, other.base
            lifetime.reached = other.newest_sealed
            self._record_base(other.current, other.base)

    def _receive(self) -> None:
        text = self._incoming.read() if self._incoming is not None else b""
        if text:
            self._merge(from_json(text, IncarnationState))

    def _send(self) -> None:
        if self._outgoing is not None:
            self._outgoing.write(msgspec.json.encode(self._state()))


class _SharedMessage:
    """Message in shared memory from one process to another; each write replaces the last one."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._bytes = memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")
        self._last = (b"", b"")

    def write(self, text: bytes) -> None:
        self._bytes[_HEADER : _HEADER + len(text)] = text
        self._bytes[:_HEADER] = _header(text)

    def read(self) -> bytes:
        """Return the message: empty before the first write, the previous one during a write."""
        header = bytes(self._bytes[:_HEADER])
        if header != self._last[0]:
            text = bytes(self._bytes[_HEADER : _HEADER + int.from_bytes(header[:4], "little")])
            if _header(text) == header:
                self._last = header, text
        return self._last[1]


def _header(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little")
