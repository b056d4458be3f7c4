"""Which slot a writer gets, and what may be given up for it. Pure: values in, values out.

The rule that everything else serves: *a slot is only given up when a newer version is whole, or when its owner
said so*. "Newer" follows the job's incarnations first and version numbers second, because after a rollback the
running incarnation writes lower numbers than the one it replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from peerstore.records import Group, SlotState


@dataclass(frozen=True)
class SlotView:
    """What a decision needs to know about one slot."""

    name: str
    state: SlotState
    size_bytes: int
    job: str
    part: int
    """Whose slot it is (or was last)."""
    group: Group | None = None
    """The version in it, when it is sealed."""
    busy: bool = False
    """Pinned by a reader or held for an upload."""


@dataclass(frozen=True)
class Limits:
    budget_bytes: int
    slots: int
    burst: int


@dataclass(frozen=True)
class UseSlot:
    """Take this slot; when it is sealed, drop what is in it first."""

    name: str
    drop: tuple[str, ...] = ()
    """Free slots to remove first, to stay within the budget."""


@dataclass(frozen=True)
class CreateSlot:
    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class MakeRoom:
    """What to remove so that a slot can grow: free slots, and sealed ones nobody needs."""

    drop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Busy:
    """Not now: something transient is in the way."""

    reason: str


@dataclass(frozen=True)
class Full:
    """Not ever, at this budget."""

    reason: str


Decision = UseSlot | CreateSlot | Busy | Full


def whole_groups(parts_here: Mapping[Group, Collection[int]], parts: Mapping[Group, int]) -> set[Group]:
    """The versions all of whose parts are here."""
    return {group for group, here in parts_here.items() if len(set(here)) >= parts[group]}


def newest(groups: Iterable[Group]) -> Group | None:
    return max(groups, default=None)


def evictable(slots: Iterable[SlotView], whole: Mapping[str, Collection[Group]]) -> list[SlotView]:
    """Sealed slots nobody needs any more, the oldest version first.

    ``whole`` maps each job to its whole versions. A job without one keeps everything it has.
    """
    keep = {job: newest(groups) for job, groups in whole.items()}
    found = []
    for slot in slots:
        newest_whole = keep.get(slot.job)
        if slot.state is not SlotState.SEALED or slot.busy or slot.group is None or newest_whole is None:
            continue
        if slot.group < newest_whole:
            found.append(slot)
    return sorted(found, key=lambda slot: (slot.group or Group(0, 0, 0, ""), slot.name))


def choose_slot(
    slots: Collection[SlotView],
    *,
    job: str,
    part: int,
    size_bytes: int,
    limits: Limits,
    whole: Mapping[str, Collection[Group]],
) -> Decision:
    """Where ``part`` of ``job`` may write ``size_bytes``.

    Preference: this writer's own free slot (its mapping is warm), a new slot up to the steady number, this
    writer's oldest superseded version, an extra slot, somebody else's free slot or superseded version.
    """
    mine = [slot for slot in slots if (slot.job, slot.part) == (job, part)]
    free = [slot for slot in slots if slot.state is SlotState.FREE]
    old = evictable(slots, whole)
    allocated = sum(slot.size_bytes for slot in slots)

    def closest(candidates: list[SlotView]) -> list[SlotView]:
        return sorted(candidates, key=lambda slot: abs(slot.size_bytes - size_bytes))

    def fits(reused: SlotView | None) -> tuple[str, ...] | None:
        """Free slots to drop so that the budget holds, or None when that is not enough."""
        over = allocated - (reused.size_bytes if reused else 0) + size_bytes - limits.budget_bytes
        dropped = []
        for slot in sorted(free, key=lambda slot: ((slot.job, slot.part) == (job, part), -slot.size_bytes)):
            if over <= 0:
                break
            if slot is not reused:
                dropped.append(slot.name)
                over -= slot.size_bytes
        return tuple(dropped) if over <= 0 else None

    def use(candidates: list[SlotView]) -> UseSlot | None:
        for slot in candidates:
            drop = fits(slot)
            if drop is not None:
                return UseSlot(slot.name, drop)
        return None

    may_create = fits(None)
    decision: Decision | None = use(closest([slot for slot in free if slot in mine]))
    if decision is None and len(mine) < limits.slots and may_create is not None:
        decision = CreateSlot(may_create)
    if decision is None:
        decision = use([slot for slot in old if slot in mine])
    if decision is None and len(mine) < limits.slots + limits.burst:
        decision = CreateSlot(may_create) if may_create is not None else None
        decision = decision or use(closest(free)) or use(old)
    if decision is not None:
        return decision
    wanted = f"part {part} of job {job} ({size_bytes} bytes)"
    return _refusal(slots, mine, wanted=wanted, size_bytes=size_bytes, limits=limits, whole=whole)


def make_room(
    slots: Collection[SlotView],
    *,
    growing: str,
    size_bytes: int,
    limits: Limits,
    whole: Mapping[str, Collection[Group]],
) -> MakeRoom | Busy | Full:
    """What has to go so that the leased slot ``growing`` can have ``size_bytes``."""
    slot = next(slot for slot in slots if slot.name == growing)
    over = sum(other.size_bytes for other in slots) - slot.size_bytes + size_bytes - limits.budget_bytes
    free = [other for other in slots if other.state is SlotState.FREE]
    drop = []
    for other in [*sorted(free, key=lambda one: -one.size_bytes), *evictable(slots, whole)]:
        if over <= 0:
            break
        if other.size_bytes:
            drop.append(other.name)
            over -= other.size_bytes
    if over <= 0:
        return MakeRoom(tuple(drop))
    mine = [other for other in slots if (other.job, other.part) == (slot.job, slot.part)]
    wanted = f"part {slot.part} of job {slot.job} (a slot that grows to {size_bytes} bytes)"
    return _refusal(slots, mine, wanted=wanted, size_bytes=size_bytes, limits=limits, whole=whole)


def _refusal(
    slots: Collection[SlotView],
    mine: list[SlotView],
    *,
    wanted: str,
    size_bytes: int,
    limits: Limits,
    whole: Mapping[str, Collection[Group]],
) -> Busy | Full:
    keep = {name: newest(groups) for name, groups in whole.items()}
    fixed = sum(
        slot.size_bytes
        for slot in slots
        if slot.state is SlotState.SEALED and slot.group is not None and slot.group == keep.get(slot.job)
    )
    if fixed + size_bytes > limits.budget_bytes:
        return Full(
            f"{wanted} does not fit: the arena's budget is {limits.budget_bytes} bytes, of which {fixed} hold newest "
            f"whole versions. A writer needs room for two versions: raise it to {fixed + size_bytes} bytes or more"
        )
    kept = ", ".join(f"{slot.name}: {_why_kept(slot, keep.get(slot.job))}" for slot in mine) or "none of its own"
    return Busy(f"no slot for {wanted}: {kept}")


def _why_kept(slot: SlotView, newest_whole: Group | None) -> str:
    if slot.state is SlotState.LEASED:
        return "being written"
    if slot.group is None:
        return "free, but the budget is used up"
    version = f"version {slot.group.version}"
    if slot.busy:
        return f"{version}, being read or uploaded"
    if newest_whole is None:
        return f"{version}, and no version is whole yet"
    return f"{version}, " + ("the newest whole one" if slot.group == newest_whole else "not yet whole")
