"""Random schedules of events in a small cluster, derived from a seed. Any event can be dropped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tests.simulation.memory import seeded_randomness
from tests.simulation.sealed_shards import Violation
from tests.simulation.world import ClusterShape, Machine, SimulatedWorld

_GAPS_S = (0.0, 0.01, 0.05, 0.3, 0.3, 1.0, 2.0, 4.0)
_MOST_NODES = 7
PARITIES = 0.125
"""Share of the schedules in which nodes keep parities of each other's shards instead of copies."""


@dataclass(frozen=True)
class Event:
    gap_s: float
    """Seconds before the event."""
    kind: str
    one: int = 0
    other: int = 0

    def __str__(self) -> str:
        return f"+{self.gap_s:g} s {self.kind} {self.one} {self.other}"


@dataclass(frozen=True)
class Schedule:
    seed: int
    shape: ClusterShape
    events: tuple[Event, ...]


@dataclass
class Finding:
    """A schedule that breaks an invariant."""

    schedule: Schedule
    violation: Violation

    def __str__(self) -> str:
        events = "\n".join(f"  {event}" for event in self.schedule.events)
        return f"seed {self.schedule.seed}, {self.schedule.shape}: {self.violation}\n{events}"


def schedule_of(seed: int, kinds: Sequence[str] = (), shape: ClusterShape | None = None) -> Schedule:
    """Derive a schedule from a seed, with random events or with these kinds of events in this order."""
    rng = random.Random(seed)
    nodes = rng.choice((2, 3, 3, 4, 4, 5, 6))
    copies = rng.choice((1, 2, 2, 2, 2, 3))
    parts = rng.choice((nodes, nodes, max(1, nodes - 1), 2))
    racks = rng.choice((0, 0, 2, 3))
    roomy = rng.random() < 0.8
    budget = 12 * parts if roomy else rng.randint(2, 4) * copies * -(-parts // nodes) + 1
    weights = [weight for weight, _ in KINDS.values()]
    events = [Event(0.5, "save"), Event(1.0, "save")] if rng.random() < 0.8 else []
    drawn = (rng.choices(list(KINDS), weights)[0] for _ in range(rng.randint(4, 14)))
    events += [
        Event(rng.choice(_GAPS_S), kind, rng.randrange(1 << 16), rng.randrange(1 << 16)) for kind in kinds or drawn
    ]
    parity_rng = random.Random(f"parity {seed}")
    parity = parity_rng.choice((1, 2, 3)) if parity_rng.random() < PARITIES else 0
    return Schedule(
        seed, shape or ClusterShape(nodes, racks, 1 if parity else copies, parts, budget, parity), tuple(events)
    )


def run(schedule: Schedule, log: Callable[[str], None] | None = None) -> SimulatedWorld:
    """Run a schedule and check that the cluster recovers afterwards. Raises :class:`Violation`."""
    with seeded_randomness(random.Random(f"names {schedule.seed}")):
        world = SimulatedWorld(schedule.seed, schedule.shape, log=log)
        try:
            world.restart(list(world.machines))
            for event in schedule.events:
                world.run(event.gap_s)
                if world.machines:
                    KINDS[event.kind][1](world, event)
                world.truth.check()
            check_recovery(world)
        finally:
            world.turns.close()
    return world


def find_violation(schedule: Schedule) -> Finding | None:
    try:
        run(schedule)
    except Violation as violation:
        return Finding(schedule, violation)
    except Exception as error:  # report every error with its seed
        return Finding(schedule, Violation(f"{type(error).__name__}: {error}"))
    return None


def shrink_finding(finding: Finding, budget: int = 200) -> Finding:
    """Drop events one after the other as long as the schedule still fails."""
    tried, number = 0, 0
    while number < len(finding.schedule.events) and tried < budget:
        events = finding.schedule.events
        fewer = Schedule(finding.schedule.seed, finding.schedule.shape, events[:number] + events[number + 1 :])
        tried += 1
        found = find_violation(fewer)
        if found is None:
            number += 1
        else:
            finding, number = found, 0
    return finding


# -- the end ----------------------------------------------------------------------------------------------------------


def check_recovery(world: SimulatedWorld) -> None:
    """Stop the faults, and check that lost copies are replaced and the job can resume."""
    world.log("faults stop")
    world.heal()
    for machine in world.machines.values():
        if machine.up and machine.agent is None:
            world.boot(machine)
        if machine.agent is not None:
            machine.agent.verify_all()  # the cluster cannot repair damage that no check has detected
    roomy = world.shape.budget_shards >= 12 * world.shape.parts
    if not world.run(45.0, world.truth.is_parity_restored) and roomy:
        floor = world.truth.floor
        assert floor is not None
        raise Violation(f"{world.short_name(floor)} is not rebuilt from parity: {world.truth.describe(floor)}")
    if not world.run(45.0, world.truth.is_protected) and roomy:
        floor = world.truth.floor
        assert floor is not None
        raise Violation(f"{world.short_name(floor)} lacks copies after the faults: {world.truth.describe(floor)}")
    if not world.run(30.0, lambda: not world.truth.retained_aborted_versions()):
        raise Violation(f"aborted versions are not deleted: {world.truth.retained_aborted_versions()}")
    if roomy:
        _check_resume(world)


def _check_resume(world: SimulatedWorld) -> None:
    living = sorted(world.truth.live_machines())
    if 2 * len(set(living) - set(world.member_list.standby)) <= world.member_list.voters:
        return
    for _ in range(4):
        restore = world.restart(living)
        if restore is None:
            return
        world.run(20.0, lambda restore=restore: bool(restore.outcome))
        if restore.outcome != "done":
            world.run(10.0)
            continue
        job = world.jobs[-1]
        for _ in range(4):
            before = len(world.truth.replicated)
            group = job.save()
            if group is None:
                break
            done = partial(_is_replicated, world, group, before)
            world.run(25.0, done)
            if done():
                return
        world.run(5.0)
    if _lost_for_good(world):
        return
    raise Violation(f"the job cannot resume: {world.restores[-1].outcome}; {[str(job) for job in world.jobs]}")


def _is_replicated(world: SimulatedWorld, group: object, before: int) -> bool:
    return group in world.truth.replicated[before:]


def _lost_for_good(world: SimulatedWorld) -> bool:
    """Return whether the live machines hold no complete version, so that the job has to fail."""
    return not world.truth.groups(world.truth.live_machines())


# -- events -----------------------------------------------------------------------------------------------------------


def _machine_of(world: SimulatedWorld, event: Event, *, up: bool = True) -> Machine | None:
    machines = [machine for machine in world.machines.values() if machine.up is up]
    return machines[event.one % len(machines)] if machines else None


def _save(world: SimulatedWorld, event: Event) -> None:
    jobs = [job for job in world.jobs if job.running]
    if jobs:
        jobs[event.one % len(jobs)].save()


def _skip_part(world: SimulatedWorld, event: Event) -> None:
    """Save a step of which one rank skips its part, or seals it and then aborts it."""
    jobs = [job for job in world.jobs if job.running]
    if jobs:
        jobs[event.one % len(jobs)].save(without=event.other % world.shape.parts, sealed=event.one % 3 == 0)


def _crash(world: SimulatedWorld, event: Event) -> None:
    machine = _machine_of(world, event)
    if machine is not None:
        world.crash(machine)


def _crash_soon(world: SimulatedWorld, event: Event) -> None:
    """Save a step, and crash a machine while copies are in flight."""
    _save(world, event)
    world.run(event.other % 400 / 1000)
    _crash(world, event)


def _return_machine(world: SimulatedWorld, event: Event) -> None:
    machine = _machine_of(world, event, up=False)
    if machine is not None:
        world.log(f"{machine.name} returns empty")
        world.boot(machine)


def _crash_and_return(world: SimulatedWorld, event: Event) -> None:
    machine = _machine_of(world, event)
    if machine is not None:
        world.crash(machine)
        world.run(event.other % 1500 / 1000)
        if not machine.up:
            world.log(f"{machine.name} returns empty")
            world.boot(machine)


def _crash_two(world: SimulatedWorld, event: Event) -> None:
    for number in (event.one, event.other):
        machine = _machine_of(world, Event(0, "", number))
        if machine is not None and len([m for m in world.machines.values() if m.up]) > 1:
            world.crash(machine)


def _crash_rack(world: SimulatedWorld, event: Event) -> None:
    first = _machine_of(world, event)
    if first is None or not world.shape.racks:
        return
    for machine in list(world.machines.values()):
        if machine.up and machine.node.labels == first.node.labels:
            world.crash(machine)


def _crash_leader(world: SimulatedWorld, event: Event) -> None:
    """Crash the commit leader."""
    up = [machine for machine in world.machines.values() if machine.up]
    if up:
        world.crash(min(up, key=lambda machine: machine.name))


def _restart_agent(world: SimulatedWorld, event: Event) -> None:
    """End an agent, and later start a new one over the same arena."""
    machine = _machine_of(world, event)
    if machine is None or machine.agent is None:
        return
    world.log(f"the agent of {machine.name} ends")
    world.truth.record_trouble()
    machine.agent = None
    away = (0.05, 0.5, 2.0, 12.0)[event.other % 4]
    world.events.schedule(away, partial(_start_agent, world, machine, machine.lives))


def _start_agent(world: SimulatedWorld, machine: Machine, life: int) -> None:
    if machine.up and machine.agent is None and machine.lives == life:
        world.log(f"the agent of {machine.name} restarts")
        world.truth.record_trouble()
        world.boot(machine)


def _partition_network(world: SimulatedWorld, event: Event) -> None:
    names = sorted(world.machines)
    order = sorted(names, key=lambda name: hash_of(name, event.other))
    size = 1 + event.one % max(1, len(names) - 1)
    side, others = frozenset(order[:size]), frozenset(order[size:])
    both = event.one % 3 != 0
    world.log(f"{','.join(sorted(side))} {'<-/->' if both else '-/->'} {','.join(sorted(others))}")
    world.truth.record_trouble()
    world.network.partition(side, others, both=both)


def _heal(world: SimulatedWorld, event: Event) -> None:
    world.log("the network heals")
    world.heal()


def _lose_messages(world: SimulatedWorld, event: Event) -> None:
    world.log("the network loses and duplicates messages")
    world.truth.record_trouble()
    world.network.loss = (event.one % 30) / 100
    world.network.doubled = (event.other % 50) / 100
    world.wire_damage = 0.05 if event.other % 3 == 0 else 0.0


def _slow_machine(world: SimulatedWorld, event: Event) -> None:
    machine = _machine_of(world, event)
    if machine is not None:
        world.log(f"{machine.name} is slow")
        world.truth.record_trouble()
        world.network.slow.add(machine.name)


def _move_clock(world: SimulatedWorld, event: Event) -> None:
    machine = _machine_of(world, event)
    if machine is not None:
        leap = (-3600.0, -20.0, -2.0, 2.0, 20.0, 3600.0)[event.other % 6]
        world.log(f"the clock of {machine.name} leaps by {leap:g} s")
        world.truth.record_trouble()
        machine.clock_off_s += leap


def _corrupt(world: SimulatedWorld, event: Event) -> None:
    machine = _machine_of(world, event)
    if (
        machine is not None
        and world.truth.corrupt_shard(machine, event.other)
        and machine.agent is not None
        and event.one % 2
    ):
        machine.agent.verify_all()


def _fill_machine(world: SimulatedWorld, event: Event) -> None:
    machine = _machine_of(world, event)
    if machine is not None:
        world.log(f"{machine.name} is full")
        world.truth.record_trouble()
        if event.other % 2:
            machine.arena.full = True
        else:
            world.set_budget(machine, max(2, world.shape.parts))


def _join(world: SimulatedWorld, event: Event) -> None:
    if len(world.machines) < _MOST_NODES:
        world.join()


def _replace(world: SimulatedWorld, event: Event) -> None:
    """Remove a crashed machine from the member list, and let a new one join in half of the cases."""
    gone = [machine for machine in world.machines.values() if not machine.up]
    if gone:
        machine = gone[event.one % len(gone)]
        world.log(f"{machine.name} leaves the member list")
        del world.machines[machine.name]
        world.publish(
            [node for node in world.member_list.nodes if node.id != machine.name] or [*world.member_list.nodes]
        )
        if event.other % 2 and len(world.machines) < _MOST_NODES:
            world.join()


def _stand_by(world: SimulatedWorld, event: Event) -> None:
    """Remove or restore one machine's vote. Quorums of successive member lists must overlap."""
    agents = [machine.agent for machine in world.machines.values() if machine.agent is not None]
    if world.network.sides or any(agent.members.member_list != world.member_list for agent in agents):
        return
    name = sorted(world.machines)[event.one % len(world.machines)]
    standby = set(world.member_list.standby) ^ {world.machines[name].node.id}
    if len(standby) < len(world.member_list.nodes):
        world.log(f"{name} {'stands by' if name in standby else 'votes again'}")
        world.truth.record_trouble()
        world.publish(world.member_list.nodes, standby)


def _restart(world: SimulatedWorld, event: Event) -> None:
    """Restart the job on all live machines or on some of them."""
    up = sorted(machine.name for machine in world.machines.values() if machine.agent is not None)
    up.sort(key=lambda name: hash_of(name, event.other))
    if event.one % 2:
        up = up[: 1 + event.one % max(1, len(up))]
    sides = world.network.sides
    if sides:
        up = [name for name in up if name in sides[event.one % 2]]
    if up:
        world.restart(sorted(up))


def _restart_all(world: SimulatedWorld, event: Event) -> None:
    sides = world.network.sides
    up = [machine.name for machine in world.machines.values() if machine.agent is not None]
    world.restart(sorted(name for name in up if not sides or name in sides[event.one % 2]))


def _wait(world: SimulatedWorld, event: Event) -> None:
    world.run(float(3 + event.one % 7))


def hash_of(name: str, number: int) -> int:
    return random.Random(f"{name} {number}").getrandbits(32)


KINDS: dict[str, tuple[int, Callable[[SimulatedWorld, Event], None]]] = {
    "save": (30, _save),
    "skip part": (8, _skip_part),
    "crash": (6, _crash),
    "save and crash": (4, _crash_soon),
    "return": (6, _return_machine),
    "crash and return": (3, _crash_and_return),
    "crash two": (2, _crash_two),
    "crash rack": (1, _crash_rack),
    "crash leader": (2, _crash_leader),
    "end agent": (6, _restart_agent),
    "partition": (6, _partition_network),
    "heal": (6, _heal),
    "noise": (3, _lose_messages),
    "slow": (2, _slow_machine),
    "clock": (3, _move_clock),
    "corrupt": (5, _corrupt),
    "full": (2, _fill_machine),
    "join": (2, _join),
    "replace": (2, _replace),
    "stand by": (4, _stand_by),
    "restart": (8, _restart),
    "restart all": (8, _restart_all),
    "wait": (8, _wait),
}
