"""What must hold whatever happens, and what of it the faults so far excuse."""

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
"""After this long without trouble, what was lost has been noticed and copied again."""
NOTICED_S = 8.0
"""After this long both sides of a partition know of it."""


@dataclass
class _Rollback:
    """The job went on from ``base`` as incarnation ``epoch``, which left what is newer and older than that."""

    base: VersionId
    epoch: int
    told: set[str]
    """The machines that did, and have not crashed since."""

    def leaves(self, group: VersionId) -> bool:
        return group > self.base and group.epoch < self.epoch


class Invariants(Holdings):
    """What is there, and what the job was promised."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__(world)
        self._bases: dict[VersionId, int | None] = {}
        self._saved_in_calm: set[VersionId] = set()
        self._owner: dict[str, tuple[tuple[int, str], float]] = {}
        """The newest incarnation that each machine has let write in its memory's life, and since when."""
        self._accepted: dict[tuple[int, str], dict[str, float]] = {}
        self._declared: list[tuple[float, str, VersionId]] = []
        """Who said of which version that it is settled, and when."""
        self._went_back: list[_Rollback] = []
        self._unsaid: set[tuple[int, VersionId]] = set()
        """Incarnations that may say what they went on from only once they are let write."""
        self.floor: VersionId | None = None
        """The version that must stay recoverable: the last one that was settled, or that the job went on from."""
        self._floor_at = 0.0
        self._floor_lost = False
        self._troubled_at = 0.0
        self.replicated: list[VersionId] = []
        self._left_out: set[VersionId] = set()
        """Versions of which a rank has left out its part, and told its agent so."""
        self._answers: dict[VersionId, str] = {}
        """What was told of versions: whole, or torn."""

    # -- what happens -------------------------------------------------------------------------------------------------

    def version_saved(self, group: VersionId, base: int | None, parts: int) -> None:
        self._bases[group] = base
        self._parts[group] = parts
        if self.is_calm:
            self._saved_in_calm.add(group)

    def begin(self) -> None:
        """That all machines start is no trouble: the first version is kept as well as any other."""
        self._troubled_at = float("-inf")

    def record_trouble(self) -> None:
        """Something went wrong that the cluster needs time to get over."""
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
        self._forget_restarts(machine.name)
        self._fault(f"the crash of {machine.name}", excused=not was_calm)

    def corrupt_shard(self, machine: Machine, number: int) -> bool:
        """Flip a bit of a sealed shard of this machine."""
        parities = {where: kept.key for where, kept in self._parities.items() if kept.parity.size_bytes}
        slots = sorted(
            (key, slot)
            for (name, slot), key in [*self._keys.items(), *parities.items()]
            if name == machine.name
            if (name, slot) not in self._hidden  # the same bit twice would mend it
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

    def _fault(self, what: str, *, excused: bool) -> None:
        self.record_trouble()
        if self.floor is None or self._floor_lost or self.is_recoverable(self.floor):
            return
        self._floor_lost = True
        enough = self._world.redundant and bool(self.live_machines()) and not self._hidden
        if not excused and enough and self._world.now - self._floor_at > CALM_S and self._has_room:
            raise Violation(
                f"{what} took the last copy of a part of {self._world.short_name(self.floor)}, which was to have "
                f"{self._world.copies}"
            )

    @property
    def _has_room(self) -> bool:
        return self._world.shape.budget_shards >= 12 * self._world.shape.parts

    # -- what is there ------------------------------------------------------------------------------------------------

    def is_protected(self) -> bool:
        """Whether the version to go back to has all the copies it can have."""
        if self.floor is None or self._floor_lost:
            return True
        living = self.live_machines()
        if not self.is_recoverable(self.floor, living):
            return True  # what it needs is on machines that are away
        if self._world.shape.parity:
            return all(self._survives_one(self.floor, part, living) for part in range(self.parts_of(self.floor)))
        return all(self._has_all_copies(self.floor, part, living) for part in range(self.parts_of(self.floor)))

    def is_parity_restored(self) -> bool:
        """Whether all of the version to go back to is there that parity can make again."""
        if self.floor is None or self._floor_lost or not self._world.shape.parity:
            return True
        living = self.live_machines()
        return self.is_complete(self.floor, living) or not self.is_recoverable(self.floor, living)

    def _survives_one(self, group: VersionId, part: int, living: set[str]) -> bool:
        """Whether any one machine may be lost, as far as another one is there."""
        return len(living) < 2 or all(self._is_part_recoverable(group, part, living - {one}) for one in living)

    def _has_all_copies(self, group: VersionId, part: int, living: set[str]) -> bool:
        """Whether a part has all the copies it can have: of no part more than a few versions are kept on one machine,
        and newer ones that may yet be whole are not given up for another copy of this one."""
        newer = Counter(
            machine
            for (machine, _), key in self._keys.items()
            if key.part == part and key.version_id > group
            if not self._is_rolled_back(key.version_id)
        )
        holders = self.holders(group, part) & living
        able = [name for name in living - holders if newer[name] < SLOTS + BURST]
        return len(holders) >= min(self._world.copies, len(holders) + len(able))

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing that was given up was the last way back."""
        given_up, self.news = self.news, []
        gone = {key for _, key in given_up}
        for machine, key in given_up:
            group = key.version_id
            if self._floor_lost or group not in self._whole_at or self.holders(group, key.part):
                continue
            if group == self.floor or (
                self.floor is None and not self.groups() and self._was_complete_with(group, gone)
            ):
                raise Violation(
                    f"{machine} gave up {self._world.short_name(key)}, "
                    "the last copy of a part of what the job goes back to"
                )

    def restore_chosen(self, restore: SimulatedRestore) -> None:
        """The ranks know what they are about to load."""
        groups = set(restore.choices.values())
        if len(groups) > 1 or len(restore.choices) < len(restore.nodes):
            ways = ", ".join(f"{name}: {self._world.short_name(group)}" for name, group in restore.choices.items())
            raise Violation(f"the ranks do not load the same step: {ways} of {','.join(restore.nodes)}")
        torn = [group for group in groups if len(self._sealed_once[group]) < self.parts_of(group)]
        if torn:
            raise Violation(f"the ranks choose {self._world.short_name(min(torn))}, which was never complete")

    def _was_complete_with(self, group: VersionId, gone: set[ShardKey]) -> bool:
        just = {key.part for key in gone if key.version_id == group}
        return all(part in just or self.holders(group, part) for part in range(self.parts_of(group)))

    def shard_loaded(self, key: ShardKey, data: bytes, written: bytes) -> None:
        if data != written:
            raise Violation(f"{self._world.short_name(key)} was loaded with bytes that nobody wrote")

    def part_aborted(self, key: ShardKey) -> None:
        """An agent has heard, and believes, that this part was never sealed."""
        if key.part in self._sealed_once.get(key.version_id, ()):
            raise Violation(f"{self._world.short_name(key)} is taken for left out, and was sealed")
        self._left_out.add(key.version_id)

    def commit_decided(self, agent: SimulatedAgent, found: CommitDecision) -> None:
        """The one that counts has come to an answer."""
        for group in found.aborted:
            self._record_answer(agent, group, "torn")
            if group not in self._left_out:
                raise Violation(f"{agent.name}: {self._world.short_name(group)} is torn, and nobody left a part out")
        if found.committed is not None:
            missing = self.parts_of(found.committed) - len(self._sealed_once.get(found.committed, ()))
            if missing:
                raise Violation(
                    f"{agent.name} says that {self._world.short_name(found.committed)} is whole without {missing}"
                )
            self._record_answer(agent, found.committed, "whole")
        if found.replicated is not None:
            self.version_replicated(agent, found.replicated)

    def _record_answer(self, agent: SimulatedAgent, group: VersionId, answer: str) -> None:
        if self._answers.setdefault(group, answer) != answer:
            raise Violation(
                f"two answers: {agent.name} says that {self._world.short_name(group)} is {answer} after all"
            )

    def retained_torn_versions(self) -> str:
        """What is kept of versions that a node which is there knows to be torn; nothing when all has heard of it."""
        agents = [machine.agent for machine in self._world.machines.values() if machine.agent is not None]
        known = {group for agent in agents for group in agent.jobs.versions("job").aborted}
        living = self.live_machines()
        held = {group for group in known for part in range(self.parts_of(group)) if self.holders(group, part) & living}
        return "; ".join(f"{self._world.short_name(group)}: {self.describe(group)}" for group in sorted(held))

    def version_replicated(self, agent: SimulatedAgent, group: VersionId) -> None:
        """The commit leader says that all parts of a version have their copies."""
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
                        f"{agent.name} says that {world.short_name(group)} is settled, but {self.describe(group)}"
                    )
                if group in self._saved_in_calm and self._is_in_one_rack(group, part):
                    raise Violation(
                        f"{agent.name} says that {world.short_name(group)} is settled, "
                        "but all copies of a part are in one "
                        f"rack: {self.describe(group)}"
                    )
        unnoticed = any(self._keys[where].version_id == group for where in self._hidden if where in self._keys)
        if not self.is_recoverable(group) and (unnoticed or world.now - self._troubled_at < NOTICED_S):
            self._floor_lost = True  # what was lost could not be known yet, and is more than the copies allow for
        elif (
            world.redundant  # with one copy of each, what is whole counts
            and self.is_recoverable(group)
            and not self._is_rolled_back(group)
            and (self.floor is None or self._floor_lost or group > self.floor)
        ):
            self._set_floor(group)

    def _check_one_side(self, leader: str, group: VersionId) -> None:
        """What is settled makes older versions superfluous: never may both halves of a partition say it."""
        began = self._parted_since()
        here = self._side_of(leader)
        if here is None or self._world.now < began:
            return
        for at, other, replicated in self._declared:
            if at >= began and other not in here:
                raise Violation(
                    f"both halves of a partition settle versions, and may give up older ones: {leader} "
                    f"{self._world.short_name(group)}, {other} {self._world.short_name(replicated)}"
                )
        self._declared.append((self._world.now, leader, group))

    def _parted_since(self) -> float:
        """Since when both sides of the partition there is have had the time to notice it."""
        return self._world.network.parted_at + self._world.window_s

    def _side_of(self, machine: str) -> Collection[str] | None:
        return next((side for side in self._world.network.sides if machine in side), None)

    def _is_in_one_rack(self, group: VersionId, part: int) -> bool:
        """Whether one rack has all copies of a part although every node could have a partner in another one."""
        racks = {name: machine.node.failure_domain("rack") for name, machine in self._world.machines.items()}
        sizes = Counter(racks[name] for name in self.live_machines())
        there = {racks[name] for name in self.holders(group, part)}
        return self._world.copies > 1 and len(there) == 1 and 2 * max(sizes.values()) <= sizes.total()

    def _is_rolled_back(self, group: VersionId) -> bool:
        """Whether the job has gone back to an older version since this one was written."""
        return any(restart.leaves(group) for restart in self._went_back)

    def _forget_restarts(self, machine: str) -> None:
        """A restart that only machines knew of that have crashed since has not happened, as far as anybody can know.

        What was settled meanwhile by those who had not heard of it is what the job goes back to then.
        """
        for restart in list(self._went_back):
            restart.told.discard(machine)
            if not restart.told and restart.base not in self._recorded_bases():
                self._went_back.remove(restart)
                kept = [
                    group for group in self.replicated if self.is_complete(group) and not self._is_rolled_back(group)
                ]
                if self.floor == restart.base and max(kept, default=self.floor) > self.floor:
                    self._set_floor(max(kept))

    def _recorded_bases(self) -> set[VersionId]:
        """What the job went on from, as it is noted on the machines that are there."""
        notes = [machine.arena.get_metadata(f"{JOB_METADATA}job") for machine in self._world.machines.values()]
        bases = [msgspec.msgpack.decode(note, type=JobMetadata).resume_point for note in notes if note is not None]
        return {base.version_id for base in bases if base is not None}

    def _set_floor(self, group: VersionId) -> None:
        self.floor, self._floor_at, self._floor_lost = group, self._world.now, False

    def restarted_empty(self, restore: SimulatedRestore) -> None:
        """Everybody answered that there is nothing."""
        there = self._known_versions(self.live_machines(), restore.began)
        if there:
            raise Violation(
                f"the job starts from nothing on {','.join(restore.nodes)}, "
                f"but {self._world.short_name(max(there))} is "
                f"there: {self.describe(max(there))}"
            )

    def version_restored(self, restore: SimulatedRestore, group: VersionId) -> None:
        """All ranks have loaded ``group``."""
        reach = restore.answering_nodes() & self.live_machines()
        there = [
            one
            for one in self._known_versions(reach, restore.began)
            if self._was_held_throughout(one, reach, restore.photo)
        ]
        best = self._newest_valid(there)
        world = self._world
        if best is not None and best not in restore.refused and _version_order(group) < _version_order(best):
            raise Violation(
                f"the job goes back to {world.short_name(group)} although {world.short_name(best)} could be reached: "
                f"{self.describe(best)}"
            )
        later = [one for one in there if self._discards(one, group)]
        if later:
            raise Violation(f"{world.short_name(group)} won although {world.short_name(later[0])} had left it behind")
        if any(agent.members.has_quorum for agent in restore.agents.values()):
            self._record_resume(group, restore.epoch, restore.nodes)
        else:  # of nodes that cannot go on alone: what the others keep is not known here
            self._floor_lost = True
            self._unsaid.add((restore.epoch, group))

    def _record_resume(self, group: VersionId, epoch: int, nodes: Iterable[str]) -> None:
        self._went_back = [earlier for earlier in self._went_back if earlier.base > group]
        self._went_back.append(_Rollback(group, epoch, set(nodes)))
        self._set_floor(group)
        self._floor_lost = not self.is_complete(group)

    def _was_held_throughout(self, group: VersionId, reach: set[str], photo: dict[ShardKey, set[str]]) -> bool:
        """Whether who answered held all of it from when they were asked until now."""
        keys = [key for key in photo if key.version_id == group]
        held = [photo[key] & self.holders(group, key.part) & reach for key in keys]
        return len(keys) == self.parts_of(group) and all(held)

    def committed(self, group: VersionId) -> None:
        """All parts of a version are sealed: with one copy of each that is all there can be.

        A fault that takes it before its version is committed takes as much as one does that comes right after that,
        and nobody has promised that one fault is survived.
        """
        if self._world.redundant:
            return
        if self.is_complete(group) and not self._is_rolled_back(group) and (self.floor is None or group > self.floor):
            self._set_floor(group)
        elif any(key.version_id == group and not self._held[key] for key in self._taken):
            self._floor_lost = True

    def _known_versions(self, among: Iterable[str], before: float) -> list[VersionId]:
        return [group for group in self.groups(set(among)) if self._whole_at[group] < before]

    def _newest_valid(self, groups: list[VersionId]) -> VersionId | None:
        """The newest of those that no later incarnation has left behind. Told anew, not by calling the resolver."""
        kept = [group for group in groups if not any(self._discards(later, group) for later in groups)]
        return max(kept, key=_version_order, default=None)

    def _discards(self, later: VersionId, earlier: VersionId) -> bool:
        base = self._bases.get(later)
        return later.epoch > earlier.epoch and base is not None and base < earlier.version

    def write_admitted(self, trainers: Trainers, machine: str) -> None:
        """A machine has let a rank write or seal: never one of the past, once it can know of a newer incarnation."""
        incarnation, living = (trainers.epoch, trainers.name), self.live_machines()
        if self._owner.get(machine, (incarnation, 0.0))[0] != incarnation or machine not in self._owner:
            self._owner[machine] = incarnation, self._world.now
        newest, since = max(
            (self._owner[name][0], -self._owner[name][1]) for name in self._owner.keys() & living | {machine}
        )
        known = self._world.network.is_calm and self._world.now - max(self._quiet_since, -since) > NOTICED_S
        if incarnation < newest and machine in living and known:
            raise Violation(f"{machine} lets {incarnation} write although the job belongs to {newest}")

    def incarnation_admitted(self, trainers: Trainers, machine: str) -> None:
        """A machine lets an incarnation write: never may both halves of a partition let different ones begin."""
        self.write_admitted(trainers, machine)
        incarnation, origin = (trainers.epoch, trainers.name), trainers.origin
        if origin is not None and (trainers.epoch, origin) in self._unsaid:
            self._unsaid.discard((trainers.epoch, origin))
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
