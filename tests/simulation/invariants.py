"""Invariants of a simulated cluster, and the faults that excuse a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from peerstore.commit_protocol import CommitDecision
from peerstore.shard_records import ShardKey, VersionId
from peerstore.store.slot_metadata import JOB_METADATA, JobMetadata
from tests.simulation.memory import BURST, SHARD_BYTES, SLOTS
from tests.simulation.sealed_shards import Holdings, Violation

if TYPE_CHECKING:
    from tests.simulation.agent import SimulatedAgent
    from tests.simulation.simulated_restore import SimulatedRestore
    from tests.simulation.trainers import Trainers
    from tests.simulation.world import Machine, SimulatedWorld

CALM_S = 12.0
"""Seconds without a fault after which lost copies must have been detected and replaced."""
NOTICED_S = 8.0
"""Seconds after which both sides must have detected a partition."""


@dataclass
class _Rollback:
    """A resume from ``base`` as ``epoch``, which abandons newer versions of earlier epochs."""

    base: VersionId
    epoch: int
    machines: set[str]
    """Machines that resumed and have not crashed since."""

    def abandons(self, group: VersionId) -> bool:
        return group > self.base and group.epoch < self.epoch


class Invariants(Holdings):
    """Checks of the cluster's decisions against the sealed shards that exist."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__(world)
        self._bases: dict[VersionId, int | None] = {}
        self._saved_in_calm: set[VersionId] = set()
        self._owner: dict[str, tuple[tuple[int, str], float]] = {}
        """The newest incarnation that each machine has admitted since its last crash, and since when."""
        self._accepted: dict[tuple[int, str], dict[str, float]] = {}
        self._declared: list[tuple[float, str, VersionId]] = []
        """Time, commit leader and version of each report that a version is replicated."""
        self._rollbacks: list[_Rollback] = []
        self._unrecorded: set[tuple[int, VersionId]] = set()
        """Epochs that resumed without a quorum, whose rollback counts once a machine admits them."""
        self.floor: VersionId | None = None
        """The version that must stay recoverable: the last one replicated or resumed from."""
        self._floor_at = 0.0
        self._floor_lost = False
        self._troubled_at = 0.0
        self.replicated: list[VersionId] = []
        self._skipped: set[VersionId] = set()
        """Versions of which a rank skipped its part and reported that to its agent."""
        self._answers: dict[VersionId, str] = {}
        """The decision about each version: committed or aborted."""

    # -- events -------------------------------------------------------------------------------------------------------

    def version_saved(self, group: VersionId, base: int | None, parts: int) -> None:
        self._bases[group] = base
        self._parts[group] = parts
        if self.is_calm:
            self._saved_in_calm.add(group)

    def begin(self) -> None:
        """Forget the start of the machines, which excuses no loss."""
        self._troubled_at = float("-inf")

    def record_trouble(self) -> None:
        """Record a fault from which the cluster needs time to recover."""
        self._troubled_at = self._world.now

    @property
    def is_calm(self) -> bool:
        return self._undisturbed and self._world.now - self._quiet_since > CALM_S

    @property
    def _undisturbed(self) -> bool:
        world = self._world
        return world.network.is_calm and not world.wire_damage and not any(map(world.is_full, world.machines.values()))

    @property
    def _quiet_since(self) -> float:
        return max(self._troubled_at, self._world.network.troubled_at)

    def machine_crashed(self, machine: Machine) -> None:
        was_calm = self.is_calm
        self._owner.pop(machine.name, None)
        self._lose_machine(machine.name)
        self._forget_rollbacks(machine.name)
        self._fault(f"the crash of {machine.name}", excused=not was_calm)

    def corrupt_shard(self, machine: Machine, number: int) -> bool:
        """Flip a bit of a sealed shard of this machine."""
        parities = {where: kept.key for where, kept in self._parities.items() if kept.parity.size_bytes}
        slots = sorted(
            (key, slot)
            for (name, slot), key in [*self._keys.items(), *parities.items()]
            if name == machine.name
            if (name, slot) not in self._hidden  # flipping the same bit twice would repair it
        )
        if not slots:
            return False
        was_calm = self.is_calm
        key, slot = slots[number % len(slots)]
        self._world.log(f"a bit of {self._world.short_name(key)} flips at {machine.name}")
        size = SHARD_BYTES if not key.kind else self._parities[machine.name, slot].parity.size_bytes
        machine.arena.bytes[slot][number % size] ^= 1
        if not key.kind:
            self._take_copy(key, machine.name)
        self._hidden.add((machine.name, slot))
        self._fault(f"one flipped bit at {machine.name}", excused=not was_calm)
        return True

    def _fault(self, fault: str, *, excused: bool) -> None:
        self.record_trouble()
        if self.floor is None or self._floor_lost or self.is_recoverable(self.floor):
            return
        self._floor_lost = True
        enough = self._world.redundant and bool(self.live_machines()) and not self._hidden
        if not excused and enough and self._world.now - self._floor_at > CALM_S and self._has_room:
            raise Violation(
                f"{fault} took the last copy of a part of {self._world.short_name(self.floor)}, which should have "
                f"{self._world.copies}"
            )

    @property
    def _has_room(self) -> bool:
        return self._world.shape.budget_shards >= 12 * self._world.shape.parts

    # -- recoverability -----------------------------------------------------------------------------------------------

    def is_protected(self) -> bool:
        """Return whether the version to resume from has all the copies it can have."""
        if self.floor is None or self._floor_lost:
            return True
        living = self.live_machines()
        if not self.is_recoverable(self.floor, living):
            return True  # the other machines have its parts
        if self._world.shape.parity:
            return all(self._survives_one(self.floor, part, living) for part in range(self.parts_of(self.floor)))
        return all(self._has_all_copies(self.floor, part, living) for part in range(self.parts_of(self.floor)))

    def is_parity_restored(self) -> bool:
        """Return whether parity has rebuilt every part it can of the version to resume from."""
        if self.floor is None or self._floor_lost or not self._world.shape.parity:
            return True
        living = self.live_machines()
        return self.is_complete(self.floor, living) or not self.is_recoverable(self.floor, living)

    def _survives_one(self, group: VersionId, part: int, living: set[str]) -> bool:
        """Return whether a part survives the loss of any one machine, if more than one is live."""
        return len(living) < 2 or all(self._is_part_recoverable(group, part, living - {one}) for one in living)

    def _has_all_copies(self, group: VersionId, part: int, living: set[str]) -> bool:
        """Return whether a part has all the copies it can have.

        A machine holds only a few versions of each part, and does not evict newer ones that can still become complete.
        """
        newer = Counter(
            machine
            for (machine, _), key in self._keys.items()
            if key.part == part and key.version_id > group
            if not self._is_rolled_back(key.version_id)
        )
        holders = self.holders(group, part) & living
        able = [name for name in living - holders if newer[name] < SLOTS + BURST]
        return len(holders) >= min(self._world.copies, len(holders) + len(able))

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that no agent has deleted the last copy of a part of the version to resume from."""
        deleted, self.deleted_copies = self.deleted_copies, []
        gone = {key for _, key in deleted}
        for machine, key in deleted:
            group = key.version_id
            if self._floor_lost or group not in self._completed_at or self.holders(group, key.part):
                continue
            if group == self.floor or (
                self.floor is None and not self.groups() and self._was_complete_with(group, gone)
            ):
                raise Violation(
                    f"{machine} deleted {self._world.short_name(key)}, "
                    "the last copy of a part of the version to resume from"
                )

    def restore_chosen(self, restore: SimulatedRestore) -> None:
        """Check that all ranks load the same complete step."""
        groups = set(restore.choices.values())
        if len(groups) > 1 or len(restore.choices) < len(restore.nodes):
            choices = ", ".join(f"{name}: {self._world.short_name(group)}" for name, group in restore.choices.items())
            raise Violation(f"the ranks on {','.join(restore.nodes)} do not all choose the same step: {choices}")
        incomplete = [group for group in groups if len(self._sealed_once[group]) < self.parts_of(group)]
        if incomplete:
            raise Violation(f"the ranks choose {self._world.short_name(min(incomplete))}, which was never complete")

    def _was_complete_with(self, group: VersionId, gone: set[ShardKey]) -> bool:
        just = {key.part for key in gone if key.version_id == group}
        return all(part in just or self.holders(group, part) for part in range(self.parts_of(group)))

    def shard_loaded(self, key: ShardKey, data: bytes, written: bytes) -> None:
        if data != written:
            raise Violation(f"{self._world.short_name(key)} was loaded damaged")

    def part_aborted(self, key: ShardKey) -> None:
        """Check that the part an agent aborted was never sealed."""
        if key.part in self._sealed_once.get(key.version_id, ()):
            raise Violation(f"{self._world.short_name(key)} was aborted although it was sealed")
        self._skipped.add(key.version_id)

    def commit_decided(self, agent: SimulatedAgent, found: CommitDecision) -> None:
        """Check a decision of the commit leader against the sealed shards."""
        for group in found.aborted:
            self._record_answer(agent, group, "aborted")
            if group not in self._skipped:
                raise Violation(
                    f"{agent.name} reports {self._world.short_name(group)} as aborted, but no rank skipped its part"
                )
        if found.committed is not None:
            missing = self.parts_of(found.committed) - len(self._sealed_once.get(found.committed, ()))
            if missing:
                raise Violation(
                    f"{agent.name} reports {self._world.short_name(found.committed)} as committed without "
                    f"{missing} of its parts"
                )
            self._record_answer(agent, found.committed, "committed")
        if found.replicated is not None:
            self.version_replicated(agent, found.replicated)

    def _record_answer(self, agent: SimulatedAgent, group: VersionId, answer: str) -> None:
        if self._answers.setdefault(group, answer) != answer:
            raise Violation(
                f"contradictory decisions: {agent.name} reports {self._world.short_name(group)} as {answer} after "
                f"it was {self._answers[group]}"
            )

    def retained_aborted_versions(self) -> str:
        """Describe the copies left of versions that a live node knows to be aborted; empty for none."""
        agents = [machine.agent for machine in self._world.machines.values() if machine.agent is not None]
        known = {group for agent in agents for group in agent.jobs.versions("job").aborted}
        living = self.live_machines()
        held = {group for group in known for part in range(self.parts_of(group)) if self.holders(group, part) & living}
        return "; ".join(f"{self._world.short_name(group)}: {self.describe(group)}" for group in sorted(held))

    def version_replicated(self, agent: SimulatedAgent, group: VersionId) -> None:
        """Check the commit leader's report that all parts of a version have their copies."""
        self.replicated.append(group)
        world = self._world
        self._check_one_side(agent.name, group)
        living = self.live_machines()
        if self.is_calm and self._has_room:
            wanted = min(world.copies, len(living))
            for part in range(self.parts_of(group)):
                if len(self.holders(group, part)) < wanted or (
                    world.shape.parity and not self._survives_one(group, part, living)
                ):
                    raise Violation(
                        f"{agent.name} reports {world.short_name(group)} as replicated, but {self.describe(group)}"
                    )
                if group in self._saved_in_calm and self._is_in_one_rack(group, part):
                    raise Violation(
                        f"{agent.name} reports {world.short_name(group)} as replicated, but all copies of a part are "
                        f"in one rack: {self.describe(group)}"
                    )
        unnoticed = any(self._keys[where].version_id == group for where in self._hidden if where in self._keys)
        if not self.is_recoverable(group) and (unnoticed or world.now - self._troubled_at < NOTICED_S):
            self._floor_lost = True  # more copies were lost than the version tolerates, and no node could know yet
        elif (
            world.redundant  # with one copy of each part, `committed` sets the floor
            and self.is_recoverable(group)
            and not self._is_rolled_back(group)
            and (self.floor is None or self._floor_lost or group > self.floor)
        ):
            self._set_floor(group)

    def _check_one_side(self, leader: str, group: VersionId) -> None:
        """Check that only one half of a partition reports replicated versions, which let it delete older ones."""
        began = self._parted_since()
        here = self._side_of(leader)
        if here is None or self._world.now < began:
            return
        for at, other, replicated in self._declared:
            if at >= began and other not in here:
                raise Violation(
                    "both halves of a partition report versions as replicated, and may delete older ones: "
                    f"{leader} {self._world.short_name(group)}, {other} {self._world.short_name(replicated)}"
                )
        self._declared.append((self._world.now, leader, group))

    def _parted_since(self) -> float:
        """Return the time by which both sides must have detected the current partition."""
        return self._world.network.parted_at + self._world.window_s

    def _side_of(self, machine: str) -> Collection[str] | None:
        return next((side for side in self._world.network.sides if machine in side), None)

    def _is_in_one_rack(self, group: VersionId, part: int) -> bool:
        """Return whether one rack has all copies although every node could have a partner in another rack."""
        racks = {name: machine.node.failure_domain("rack") for name, machine in self._world.machines.items()}
        sizes = Counter(racks[name] for name in self.live_machines())
        used = {racks[name] for name in self.holders(group, part)}
        return self._world.copies > 1 and len(used) == 1 and 2 * max(sizes.values()) <= sizes.total()

    def _is_rolled_back(self, group: VersionId) -> bool:
        """Return whether the job has resumed from an older version since this one was written."""
        return any(rollback.abandons(group) for rollback in self._rollbacks)

    def _forget_rollbacks(self, machine: str) -> None:
        """Forget rollbacks that no machine remembers after a crash.

        The job then resumes from the newest version that other nodes replicated in the meantime.
        """
        for rollback in list(self._rollbacks):
            rollback.machines.discard(machine)
            if not rollback.machines and rollback.base not in self._recorded_bases():
                self._rollbacks.remove(rollback)
                kept = [
                    group for group in self.replicated if self.is_complete(group) and not self._is_rolled_back(group)
                ]
                if self.floor == rollback.base and max(kept, default=self.floor) > self.floor:
                    self._set_floor(max(kept))

    def _recorded_bases(self) -> set[VersionId]:
        """Return the versions that the arenas record as the job's resume point."""
        records = [machine.arena.get_metadata(f"{JOB_METADATA}job") for machine in self._world.machines.values()]
        bases = [msgspec.msgpack.decode(data, type=JobMetadata).resume_point for data in records if data is not None]
        return {base.version_id for base in bases if base is not None}

    def _set_floor(self, group: VersionId) -> None:
        self.floor, self._floor_at, self._floor_lost = group, self._world.now, False

    def restarted_empty(self, restore: SimulatedRestore) -> None:
        """Check that the job starts without a checkpoint only if the live machines have none."""
        existing = self._known_versions(self.live_machines(), restore.began)
        if existing:
            raise Violation(
                f"the job starts without a checkpoint on {','.join(restore.nodes)}, "
                f"but {self._world.short_name(max(existing))} exists: {self.describe(max(existing))}"
            )

    def version_restored(self, restore: SimulatedRestore, group: VersionId) -> None:
        """Check that ``group``, which all ranks have loaded, is the newest valid version."""
        reach = restore.answering_nodes() & self.live_machines()
        reachable = [
            one
            for one in self._known_versions(reach, restore.began)
            if self._was_held_throughout(one, reach, restore.holders_before)
        ]
        best = self._newest_valid(reachable)
        world = self._world
        if best is not None and best not in restore.refused and _version_order(group) < _version_order(best):
            raise Violation(
                f"the job resumes from {world.short_name(group)} although {world.short_name(best)} could be reached: "
                f"{self.describe(best)}"
            )
        later = [one for one in reachable if self._discards(one, group)]
        if later:
            raise Violation(
                f"the job resumes from {world.short_name(group)} although {world.short_name(later[0])} superseded it"
            )
        if any(agent.members.has_quorum for agent in restore.agents.values()):
            self._record_resume(group, restore.epoch, restore.nodes)
        else:  # without a quorum, the other nodes may still resume from another version
            self._floor_lost = True
            self._unrecorded.add((restore.epoch, group))

    def _record_resume(self, group: VersionId, epoch: int, nodes: Iterable[str]) -> None:
        self._rollbacks = [earlier for earlier in self._rollbacks if earlier.base > group]
        self._rollbacks.append(_Rollback(group, epoch, set(nodes)))
        self._set_floor(group)
        self._floor_lost = not self.is_complete(group)

    def _was_held_throughout(self, group: VersionId, reach: set[str], before: dict[ShardKey, set[str]]) -> bool:
        """Return whether nodes in ``reach`` held all parts of a version, in ``before`` and now."""
        keys = [key for key in before if key.version_id == group]
        held = [before[key] & self.holders(group, key.part) & reach for key in keys]
        return len(keys) == self.parts_of(group) and all(held)

    def committed(self, group: VersionId) -> None:
        """Require a version whose parts are all sealed to stay recoverable, if each part has one copy only.

        A fault before the commit excuses the loss, like a fault right after it: one copy survives no fault.
        """
        if self._world.redundant:
            return
        if self.is_complete(group) and not self._is_rolled_back(group) and (self.floor is None or group > self.floor):
            self._set_floor(group)
        elif any(key.version_id == group and not self._held[key] for key in self._taken):
            self._floor_lost = True

    def _known_versions(self, among: Iterable[str], before: float) -> list[VersionId]:
        return [group for group in self.groups(set(among)) if self._completed_at[group] < before]

    def _newest_valid(self, groups: list[VersionId]) -> VersionId | None:
        """Return the newest version that no later incarnation has superseded, without the production resolver."""
        valid = [group for group in groups if not any(self._discards(later, group) for later in groups)]
        return max(valid, key=_version_order, default=None)

    def _discards(self, later: VersionId, earlier: VersionId) -> bool:
        base = self._bases.get(later)
        return later.epoch > earlier.epoch and base is not None and base < earlier.version

    def write_admitted(self, trainers: Trainers, machine: str) -> None:
        """Check that a machine admits no write of an old incarnation once it can know of a newer one."""
        incarnation, living = (trainers.epoch, trainers.name), self.live_machines()
        if self._owner.get(machine, (incarnation, 0.0))[0] != incarnation or machine not in self._owner:
            self._owner[machine] = incarnation, self._world.now
        newest, since = max(
            (self._owner[name][0], -self._owner[name][1]) for name in self._owner.keys() & living | {machine}
        )
        known = self._world.network.is_calm and self._world.now - max(self._quiet_since, -since) > NOTICED_S
        if incarnation < newest and machine in living and known:
            raise Violation(f"{machine} admits a write of {incarnation} although the job belongs to {newest}")

    def incarnation_admitted(self, trainers: Trainers, machine: str) -> None:
        """Check that the halves of a partition do not admit different incarnations."""
        self.write_admitted(trainers, machine)
        incarnation, origin = (trainers.epoch, trainers.name), trainers.origin
        if origin is not None and (trainers.epoch, origin) in self._unrecorded:
            self._unrecorded.discard((trainers.epoch, origin))
            self._record_resume(origin, trainers.epoch, trainers.places)
        known = self._accepted.setdefault(incarnation, {})
        if machine in known:
            return
        known[machine] = self._world.now
        here, since = self._side_of(machine), self._parted_since()
        if here is None or self._world.now < since:
            return
        for other, where in self._accepted.items():
            began = min(where.values())
            elsewhere = [name for name, at in where.items() if name not in here and at >= since]
            if other != incarnation and elsewhere and began >= since and min(known.values()) >= since:
                raise Violation(
                    f"both halves of a partition let an incarnation begin: {incarnation} on {machine}, {other} on "
                    f"{','.join(elsewhere)}"
                )


def _version_order(group: VersionId) -> tuple[int, int, int, str]:
    return group.version, group.epoch, group.attempt, group.incarnation
