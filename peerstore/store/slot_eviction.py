"""Which slot a writer gets, and which shards may be evicted for it. Pure.

The main rule: *a version is evicted only when a newer version is complete, or when its owner deletes it*. "Newer"
compares incarnations first and version numbers second, because after a rollback the running incarnation writes lower
numbers than the one it replaced.

If shards are replicated, complete is not enough: an older version is evicted only when a newer one is *replicated*.
Otherwise the loss of a node during replication could take the last version that can be restored.

One exception prevents a deadlock: if a writer gets no slot otherwise, unfinished versions of earlier incarnations are
evicted, the oldest first. The running incarnation has chosen the version that it resumes from, which is complete.

:mod:`peerstore.commit_protocol` decides which versions are complete, replicated or aborted; aborted versions are
deleted at once.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.commit_protocol import is_abandoned, is_superseded
from peerstore.shard_records import VersionId
from peerstore.sizes_and_durations import show_size


class SlotUse(enum.Enum):
    """The state of a slot, reduced to the distinctions that eviction needs."""

    FREE = "free"
    LEASED = "leased"
    SEALED = "sealed"


@dataclass(frozen=True)
class SlotView:
    """The fields of a slot that eviction needs."""

    name: str
    use: SlotUse
    size_bytes: int
    job: str
    part: int
    """The part that owns the slot, or owned it last."""
    version_id: VersionId | None = None
    """The version of the sealed shard in the slot."""
    busy: bool = False
    """Pinned by a reader, held for an upload, or not verified yet."""
    reusable: bool = True
    """Whether the file may be written again. False if a reader without a pin may still read it."""


@dataclass(frozen=True)
class SlotLimits:
    budget_bytes: int
    slots: int
    burst: int
    restart_command: str = "tieredckpt agent restart"
    """Command with which a user changes the budget of this store."""


@dataclass(frozen=True)
class SlotRequest:
    """A writer's request for a slot, and the versions that no eviction may take."""

    job: str
    part: int
    size_bytes: int
    limits: SlotLimits
    whole: Mapping[str, Collection[VersionId]]
    """Complete versions of each job."""
    rollback_targets: Mapping[str, VersionId]
    """The version that each job can always resume from; older versions may be evicted."""
    kept: Mapping[str, Collection[VersionId]] = field(default_factory=dict)
    """Versions of each job that are retained on request."""
    epoch: int = 0
    """The writer's incarnation; unfinished versions of earlier incarnations may be evicted."""
    version: int = -1
    """The version number that is written; a further attempt at it does not count its complete predecessor."""
    writers: int = 1
    """Expected writers of the job on this node."""

    def owns(self, slot: SlotView) -> bool:
        """Return whether the slot belongs to this writer, or did last."""
        return (slot.job, slot.part) == (self.job, self.part)

    def is_kept(self, slot: SlotView) -> bool:
        """Return whether the slot holds a version that is retained on request."""
        return slot.version_id is not None and slot.version_id in self.kept.get(slot.job, ())


@dataclass(frozen=True)
class ReuseSlot:
    """Use this slot, whose file is large enough; if it is sealed, drop its shard first."""

    name: str
    drop: tuple[str, ...] = ()
    """Other slots to remove first, to stay within the budget."""


@dataclass(frozen=True)
class CreateSlot:
    """Create a file after these slots were removed."""

    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvictSlots:
    """Remove these slots so that a larger one fits: free slots, and sealed slots that no job needs."""

    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlotsBusy:
    """No slot is available now, but a retry may succeed."""

    reason: str


@dataclass(frozen=True)
class BudgetExceeded:
    """The request cannot succeed with this budget."""

    reason: str


SlotDecision = ReuseSlot | CreateSlot | SlotsBusy | BudgetExceeded


def size_class(size_bytes: int) -> int:
    """Return the size of the slot for this many bytes: at most 1/64 more.

    Shards whose size changes a little from save to save then fit into the slots of earlier saves.
    """
    step = max(1, (1 << max(0, size_bytes - 1).bit_length()) >> 7)
    return -(-size_bytes // step) * step


def slot_fits(slot: SlotView, size_bytes: int) -> bool:
    """Return whether the slot's file is large enough, and at most a quarter larger than needed."""
    return slot.reusable and size_bytes <= slot.size_bytes <= size_bytes + size_bytes // 4


def evictable_slots(slots: Iterable[SlotView], request: SlotRequest) -> list[SlotView]:
    """Return sealed slots that no job needs: replaced attempts first, then the oldest versions.

    A job without a rollback target needs all its versions.
    """
    latest: dict[tuple[str, int], VersionId] = {}
    for job, groups in request.whole.items():
        for group in groups:
            latest[job, group.version] = max(group, latest.get((job, group.version), group))

    def again(slot: SlotView) -> bool:
        return (
            slot.version_id is not None
            and latest.get((slot.job, slot.version_id.version), slot.version_id) > slot.version_id
        )

    found = [
        slot
        for slot in slots
        if slot.use is SlotUse.SEALED and not slot.busy and slot.version_id is not None
        if is_superseded(slot.version_id, request.rollback_targets.get(slot.job), request.kept.get(slot.job, ()))
    ]
    return sorted(found, key=lambda slot: (not again(slot), _age(slot)))


def abandoned_slots(slots: Iterable[SlotView], request: SlotRequest) -> list[SlotView]:
    """Return slots of unfinished versions from before the request's epoch, oldest first."""
    job, found = request.job, []
    whole, target = request.whole.get(job, ()), request.rollback_targets.get(job)
    for slot in slots:
        if slot.use is not SlotUse.SEALED or slot.busy or slot.job != job or slot.version_id is None:
            continue
        if is_abandoned(slot.version_id, request.epoch, whole, target):
            found.append(slot)
    return sorted(found, key=_age)


def _age(slot: SlotView) -> tuple[VersionId, int, str]:
    return slot.version_id or VersionId(0, 0, 0, ""), slot.part, slot.name


class _Placement:
    """Slots that may hold one writer's bytes."""

    def __init__(self, slots: Collection[SlotView], allocated_bytes: int, request: SlotRequest) -> None:
        self._allocated_bytes = allocated_bytes
        self._size_bytes = request.size_bytes
        self._limits = request.limits
        self.mine = [slot for slot in slots if request.owns(slot)]
        self.free = [slot for slot in slots if slot.use is SlotUse.FREE]
        self.old = evictable_slots(slots, request)
        newest, stay = request.rollback_targets.get(request.job), request.kept.get(request.job, ())
        uncounted = {*stay, *([newest] if newest is not None and newest.version == request.version else [])}
        self._counted = sum(slot.version_id not in uncounted for slot in self.mine)

    @property
    def spared(self) -> list[SlotView]:
        """Free slots that may be removed, other writers' before this one's."""
        ordered = sorted(self.free, key=lambda slot: (slot in self.mine, -slot.size_bytes))
        return [slot for slot in ordered if slot.size_bytes]

    def choose(self, droppable: list[SlotView], candidates: list[SlotView]) -> ReuseSlot | CreateSlot | None:
        room = _drop(self._allocated_bytes + self._size_bytes - self._limits.budget_bytes, droppable)
        new = CreateSlot(room) if room is not None else None
        mine, counted, limits = self.mine, self._counted, self._limits
        most = limits.slots + limits.burst

        def use(candidates: list[SlotView]) -> ReuseSlot | CreateSlot | None:
            places = (self._replace(slot, droppable) for slot in candidates)
            return next((found for found in places if found is not None), None)

        return (
            use(self._closest([slot for slot in self.free if slot in mine]))
            or (new if counted < limits.slots else None)
            or use([slot for slot in candidates if slot in mine])
            or ((new or use(self._closest(self.free)) or use(candidates)) if counted < most else None)
        )

    def _replace(self, slot: SlotView, droppable: list[SlotView]) -> ReuseSlot | CreateSlot | None:
        others = [other for other in droppable if other is not slot]
        over_bytes = self._allocated_bytes - self._limits.budget_bytes
        if slot_fits(slot, self._size_bytes):
            drop = _drop(over_bytes, others)
            return ReuseSlot(slot.name, drop) if drop is not None else None
        drop = _drop(over_bytes - slot.size_bytes + self._size_bytes, others)
        return CreateSlot((slot.name, *drop)) if drop is not None else None

    def _closest(self, candidates: list[SlotView]) -> list[SlotView]:
        size_bytes = self._size_bytes
        return sorted(candidates, key=lambda slot: (not slot_fits(slot, size_bytes), abs(slot.size_bytes - size_bytes)))


def choose_own_slot(
    slots: Collection[SlotView], request: SlotRequest, *, allocated_bytes: int
) -> ReuseSlot | CreateSlot | None:
    """Decide as :func:`choose_slot` if the writer's own and the free slots suffice, else return ``None``.

    ``slots`` has only those slots; ``allocated_bytes`` is the size of all slots.
    """
    place = _Placement(slots, allocated_bytes, request)
    return place.choose(place.spared, place.old)


def choose_slot(slots: Collection[SlotView], request: SlotRequest) -> SlotDecision:
    """Choose the slot that the request's writer may write.

    Slots are counted by version. Versions that are ``kept`` on request do not count, and neither does the newest
    complete attempt at the ``version`` that is written again.

    The order of preference is:

    1. this writer's own free slot, whose mapping is warm
    2. a new slot, up to the regular number
    3. this writer's oldest superseded version
    4. an extra slot
    5. another writer's free slot or superseded version

    To stay within the budget, free slots are removed first, then superseded versions, then unfinished versions of
    earlier incarnations. A chosen slot of the wrong size is removed, and a new one is created.
    """
    place = _Placement(slots, sum(slot.size_bytes for slot in slots), request)
    old, spared = place.old, place.spared
    left = [slot for slot in abandoned_slots(slots, request) if slot not in old]
    return (
        place.choose(spared, old)
        or place.choose(spared + old, old)
        or place.choose(spared + old + left, old + left)
        or _refusal(slots, request, [*place.free, *old, *left])
    )


def evictions_to_grow(
    slots: Collection[SlotView], request: SlotRequest, *, growing: str
) -> EvictSlots | SlotsBusy | BudgetExceeded:
    """Choose what to evict so that a slot of the request's size fits next to the leased slot ``growing``.

    The leased slot is removed after its bytes were copied.
    """
    slot = next(slot for slot in slots if slot.name == growing)
    over = sum(other.size_bytes for other in slots) + request.size_bytes - request.limits.budget_bytes
    free = sorted((s for s in slots if s.use is SlotUse.FREE and s.size_bytes), key=lambda s: -s.size_bytes)
    old = evictable_slots(slots, request)
    left = [other for other in abandoned_slots(slots, request) if other not in old]
    drop = _drop(over, [*free, *old, *left])
    return EvictSlots(drop) if drop is not None else _refusal(slots, request, [*free, *old, *left], growing=slot)


def _drop(over_bytes: int, candidates: list[SlotView]) -> tuple[str, ...] | None:
    """Return the first candidates that free ``over_bytes``, or ``None`` if all of them are not enough."""
    dropped = []
    for slot in candidates:
        if over_bytes <= 0:
            break
        dropped.append(slot.name)
        over_bytes -= slot.size_bytes
    return tuple(dropped) if over_bytes <= 0 else None


def _refusal(
    slots: Collection[SlotView], request: SlotRequest, spared: Collection[SlotView], *, growing: SlotView | None = None
) -> SlotsBusy | BudgetExceeded:
    """Explain why the request got no slot; ``spared`` are the slots that may be evicted for it."""
    held = [slot for slot in slots if request.is_kept(slot)]
    beside_bytes = growing.size_bytes if growing is not None else 0
    enough = _sufficient_budget(slots, request, held, spared, beside_bytes)
    grows, budget_bytes = "a slot that grows to " if growing is not None else "", request.limits.budget_bytes
    wanted = f"part {request.part} of job {request.job} ({grows}{show_size(request.size_bytes)})"
    fixed = sum(
        slot.size_bytes
        for slot in slots
        if slot.use is SlotUse.SEALED
        and slot.version_id is not None
        and slot.version_id == request.rollback_targets.get(slot.job)
        if slot not in held
    )
    held_bytes = sum(slot.size_bytes for slot in held)
    versions = sorted({slot.version_id.version for slot in held if slot.version_id is not None})
    on_request = (
        f", and {show_size(held_bytes)} hold versions that are pinned ({', '.join(map(str, versions))}): "
        "unpin them (tieredckpt unpin)"
        if held
        else ""
    )
    advice = (
        f"Each writer needs room for two versions: raise the budget to {show_size(enough)} ({enough} bytes) or more "
        f"(`{request.limits.restart_command} --budget {enough}` retains the shards in memory)"
    )
    if fixed + held_bytes + request.size_bytes + beside_bytes > budget_bytes:
        return BudgetExceeded(
            f"{wanted} does not fit: the memory budget is {show_size(budget_bytes)}, of which "
            f"{show_size(fixed)} hold newest complete versions{on_request}. {advice}"
        )
    short = f". The memory budget of {show_size(budget_bytes)} is too small for this job{on_request}. {advice}"
    mine = [slot for slot in slots if request.owns(slot)]
    used = f"no slot is free for {wanted}: {_describe_slots(mine, request.rollback_targets)}"
    return SlotsBusy(f"{used}{short if enough > budget_bytes else ''}")


def _describe_slots(mine: Sequence[SlotView], settled: Mapping[str, VersionId]) -> str:
    """Return how many slots a writer has, and why none of them can be reused, each cause once."""
    if not mine:
        return "it has none of its own"
    causes: dict[str, list[int]] = {}
    for slot in mine:
        known = causes.setdefault(_why_kept(slot, settled.get(slot.job)), [])
        if slot.version_id is not None and slot.use is SlotUse.SEALED:
            known.append(slot.version_id.version)
    descriptions = [
        f"version{'s' * (len(known) > 1)} {', '.join(map(str, sorted(known)))}: {cause}" if known else cause
        for cause, known in causes.items()
    ]
    return f"all {len(mine)} slots are in use ({'; '.join(descriptions)})"


def _sufficient_budget(
    slots: Collection[SlotView],
    request: SlotRequest,
    held_on_request: Collection[SlotView],
    spared: Collection[SlotView],
    beside_bytes: int,
) -> int:
    """Return a budget at which no writer of the job is refused, now or at its next saves.

    It has room for two versions of each writer, including expected writers without a slot, and for all slots that
    cannot be ``spared``. ``beside_bytes`` is the size of a slot that stays until a larger one has replaced it.
    """
    held: Counter[tuple[str, int]] = Counter()
    largest: dict[tuple[str, int], int] = {}
    names = {slot.name for slot in (*spared, *held_on_request)}
    for slot in slots:
        if slot.name not in names:
            writer = (slot.job, slot.part)
            # in a larger budget the next slot of the writer has the size of its class
            held[writer] += size_class(slot.size_bytes) if slot.job == request.job else slot.size_bytes
            largest[writer] = max(slot.size_bytes, largest.get(writer, 0))
    job, size_bytes = request.job, size_class(request.size_bytes)
    mine = max(held.pop((job, request.part), 0) + size_bytes, 2 * size_bytes + beside_bytes)
    others = sum(
        max(size, 2 * size_class(largest[writer])) if writer[0] == job else size for writer, size in held.items()
    )
    unseen = max(0, request.writers - 1 - sum(writer_job == job and part >= 0 for writer_job, part in held))
    return mine + others + unseen * 2 * size_bytes + sum(slot.size_bytes for slot in held_on_request)


def _why_kept(slot: SlotView, rollback_target: VersionId | None) -> str:
    if slot.use is SlotUse.LEASED:
        return "being written"
    if slot.use is SlotUse.FREE:
        return "free, but the budget is used up"
    if slot.version_id is None:
        return "deleted, being read"
    if slot.busy:
        return "being read or uploaded"
    if rollback_target is None:
        return "no version is complete yet, with its copies on other nodes"
    if slot.version_id == rollback_target:
        return "the newest complete one"
    return "not complete yet, with its copies on other nodes"
