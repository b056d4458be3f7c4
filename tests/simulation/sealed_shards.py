"""The undamaged sealed shards of a simulated cluster, tracked independently of its agents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from peerstore.parity.stripes import StoredParity, parse_stored_parity
from peerstore.shard_records import ShardKey, VersionId
from peerstore.store.slot_metadata import SealMetadata
from tests.simulation.memory import shard_content

if TYPE_CHECKING:
    from tests.simulation.world import Machine, SimulatedWorld


class Violation(AssertionError):
    """A broken invariant."""


def expected_parity(kept: StoredParity) -> bytes:
    """Compute the correct parity bytes from the trainers' shard contents."""
    stripe = kept.parity.stripe
    parity = stripe.parity(kept.parity.keeper)
    result = bytearray(parity.size_bytes)
    for segment in parity.segments:
        shard = stripe.shard(segment.member)
        assert shard is not None
        for at, byte in enumerate(shard_content(shard.key)[segment.start : segment.stop]):
            result[at] ^= byte
    return bytes(result)


class Holdings:
    """The holders of every shard according to the arenas, and the copies lost to faults."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._held: dict[ShardKey, dict[str, str]] = {}
        """The slots of undamaged copies, by machine."""
        self._keys: dict[tuple[str, str], ShardKey] = {}
        self._parities: dict[tuple[str, str], StoredParity] = {}
        self._hidden: set[tuple[str, str]] = set()
        """Damaged copies and parities that no agent has detected."""
        self._parts: dict[VersionId, int] = {}
        """Number of parts of each saved version."""
        self._completed_at: dict[VersionId, float] = {}
        self._sealed_once: dict[VersionId, set[int]] = {}
        """Parts that were sealed, including deleted ones."""
        self._taken: set[ShardKey] = set()
        """Shards whose last copy was lost to a fault."""
        self.deleted_copies: list[tuple[str, ShardKey]] = []
        """Undamaged copies that an agent deleted since the last check."""

    def watch(self, machine: Machine) -> None:
        machine.arena.sealed = partial(self._sealed, machine.name)
        machine.arena.unsealed = partial(self._unsealed, machine.name)

    def _sealed(self, machine: str, slot: str, metadata: bytes) -> None:
        record = msgspec.msgpack.decode(metadata, type=SealMetadata).record
        key, data = record.key, self._world.machines[machine].arena.bytes[slot]
        if key.kind:
            self._parities[machine, slot] = parse_stored_parity(record)
        else:
            self._sealed_once.setdefault(key.version_id, set()).add(key.part)
        if (machine, slot) in self._hidden:
            return  # new metadata does not repair a damaged slot
        if data[: record.size_bytes] != (
            expected_parity(self._parities[machine, slot]) if key.kind else shard_content(key)
        ):
            raise Violation(f"{machine} sealed a damaged copy of {self._world.short_name(key)}")
        if key.kind:
            return
        self._held.setdefault(key, {})[machine] = slot
        self._keys[machine, slot] = key
        if key.version_id not in self._completed_at and self.is_complete(key.version_id):
            self._completed_at[key.version_id] = self._world.now

    def _unsealed(self, machine: str, slot: str) -> None:
        self._parities.pop((machine, slot), None)
        key = self._keys.pop((machine, slot), None)
        self._hidden.discard((machine, slot))
        if key is not None and self._held[key].get(machine) == slot:
            del self._held[key][machine]
            self.deleted_copies.append((machine, key))

    def _lose_machine(self, machine: str) -> None:
        """Remove a machine with all its shards."""
        for key in self._held:
            self._take_copy(key, machine)
        self._keys = {where: key for where, key in self._keys.items() if where[0] != machine}
        self._parities = {where: kept for where, kept in self._parities.items() if where[0] != machine}
        self._hidden = {where for where in self._hidden if where[0] != machine}

    def _take_copy(self, key: ShardKey, machine: str) -> None:
        """Remove one copy that a fault destroyed."""
        holders = self._held[key]
        if holders.pop(machine, None) is not None and not holders:
            self._taken.add(key)

    # -- queries ------------------------------------------------------------------------------------------------------

    def parts_of(self, group: VersionId) -> int:
        return self._parts.get(group, self._world.shape.parts)

    def holders(self, group: VersionId, part: int) -> set[str]:
        key = ShardKey("job", group.version, group.epoch, group.incarnation, group.attempt, part)
        return set(self._held.get(key, ()))

    def is_complete(self, group: VersionId, among: Collection[str] | None = None) -> bool:
        """Return whether every part has an undamaged copy, on one of the machines ``among`` if given."""
        parts = range(self.parts_of(group))
        if among is None:
            return all(self.holders(group, part) for part in parts)
        names = set(among)
        return all(self.holders(group, part) & names for part in parts)

    def is_recoverable(self, group: VersionId, among: Collection[str] | None = None) -> bool:
        """Return whether these machines hold every part or can rebuild it from parity."""
        names = set(self._world.machines if among is None else among)
        return all(self._is_part_recoverable(group, part, names) for part in range(self.parts_of(group)))

    def _is_part_recoverable(self, group: VersionId, part: int, among: set[str]) -> bool:
        return bool(self.holders(group, part) & among) or self._can_rebuild(group, part, among)

    def _can_rebuild(self, group: VersionId, part: int, among: set[str]) -> bool:
        """Return whether parities and shards on these machines are enough to rebuild a part."""
        rows: dict[tuple[object, int, str], dict[str, list[StoredParity]]] = defaultdict(lambda: defaultdict(list))
        for (machine, slot), kept in self._parities.items():
            if machine in among and (machine, slot) not in self._hidden and kept.key.version_id == group:
                for member, shard in kept.shards.items():
                    if shard.key.part == part:
                        rows[kept.members, kept.parity.stripe.number, member][machine].append(kept)

        def has_other_members(kept: StoredParity, member: str) -> bool:
            others = [shard.key for other, shard in kept.shards.items() if other != member]
            return all(self.holders(group, key.part) & among for key in others)

        for (_, _, member), keepers in rows.items():
            one = next(iter(keepers.values()))[0].parity.stripe
            needed = {segment.keeper for segment in one.segments(member) if segment.size_bytes}  # type: ignore[arg-type]
            if all(any(has_other_members(kept, member) for kept in keepers.get(keeper, ())) for keeper in needed):
                return True
        return False

    def groups(self, among: Collection[str] | None = None) -> list[VersionId]:
        return [group for group in self._completed_at if self.is_complete(group, among)]

    def live_machines(self) -> set[str]:
        """Return the machines of the member list whose agents run."""
        names = {node.id for node in self._world.member_list.nodes}
        return {machine.name for machine in self._world.machines.values() if machine.agent is not None} & names

    def describe(self, group: VersionId) -> str:
        """Describe the holders of each part of a version."""
        parts = range(self.parts_of(group))
        return ", ".join(f"part {part}: {' '.join(sorted(self.holders(group, part))) or 'none'}" for part in parts)

    def snapshot(self) -> dict[ShardKey, set[str]]:
        """Return the current holders of every shard."""
        return {key: set(holders) for key, holders in self._held.items() if holders}
