"""What a seed stands for: a job, and the faults that are to happen to it. Pure."""

from __future__ import annotations

import enum
import math
import random

import msgspec

NEVER = math.inf


class FaultKind(enum.Enum):
    """What happens. Values are what is printed."""

    RANK_KILLED = "rank killed"
    RANK_STOPPED = "rank stopped"
    RANK_SEGFAULT = "rank segfault"
    RANK_OUT_OF_MEMORY = "rank out of memory"
    SPARE_KILLED = "spare killed"
    SPARE_STOPPED = "spare stopped"
    SUPERVISOR_KILLED = "supervisor killed"
    SUPERVISOR_STOPPED = "supervisor stopped"
    COORDINATOR_KILLED = "coordinator killed"
    COORDINATOR_STOPPED = "coordinator stopped"
    COORDINATOR_KILLED_TWICE = "coordinator killed twice"
    AGENT_KILLED = "agent killed"
    AGENT_STOPPED = "agent stopped"
    STORE_KILLED = "store killed"
    STORE_STOPPED = "store stopped"
    NODE_LOST = "node lost"
    NODE_PAUSED = "node paused"
    MEMORY_FULL = "memory full"
    MEMORY_TRUNCATED = "memory truncated"
    MEMORY_FLIPPED = "memory flipped"
    CLOCK_SET = "clock set"
    RESIZED = "resized"
    JOB_STOPPED = "job stopped"
    DURABLE_SLOW = "durable slow"
    DURABLE_DEAD = "durable dead"
    DURABLE_ERRORS = "durable errors"
    CUT = "cut"
    CUT_ONE_WAY = "cut one way"
    UNPLUGGED = "unplugged"


_ON_HOSTS = (FaultKind.CUT, FaultKind.CUT_ONE_WAY, FaultKind.UNPLUGGED)
_OF_DURABLE = (FaultKind.DURABLE_SLOW, FaultKind.DURABLE_DEAD, FaultKind.DURABLE_ERRORS)
_NOT_ON_HOSTS = (FaultKind.CLOCK_SET, FaultKind.JOB_STOPPED, *_OF_DURABLE)
"""Clocks, stores and stops are what one machine shows as well."""
_FOR_EVER = {
    FaultKind.RANK_STOPPED: 0.5,
    FaultKind.SPARE_STOPPED: 0.5,
    FaultKind.AGENT_STOPPED: 0.3,
    FaultKind.SUPERVISOR_STOPPED: 0.3,
}
"""How often what is stopped is never let go on. Nobody takes over from a coordinator or a store that only stands still:
those go on after a while."""
_PAUSES_S = (5.0, 10.0, 20.0, 30.0)
_CALM_STEPS = 40


class JobShape(msgspec.Struct, frozen=True):
    """The job."""

    nodes: int
    """At most in the world."""
    spare_nodes: int
    nproc: int
    spares: int
    how: str
    every: int
    durable: str = ""
    """``directory`` or ``s3``; "" for none."""
    budget: int | None = None
    """Restarts after which the job fails; ``None``: no limit."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(self.nodes + self.spare_nodes))


class PlannedFault(msgspec.Struct, frozen=True):
    """A fault to come. ``pick`` chooses among those it can happen to at that moment: from 0 to 1."""

    kind: FaultKind
    after_steps: int
    """That the job has done since it recovered from the one before; -1: within 50 ms of that."""
    pick: float
    other: float
    lasts_s: float = 0.0


class FaultPlan(msgspec.Struct, frozen=True):
    seed: int
    shape: JobShape
    faults: tuple[PlannedFault, ...]
    clocks: bool = False
    """Whether every node has a clock of its own that may be set."""


def make_plan(seed: int, *, hosts: bool = False, full: bool = True, faults: int = 6) -> FaultPlan:
    """The same one for the same arguments. ``full``: nodes have memory of their own that may be filled up."""
    chance = random.Random(f"{seed} {hosts}")
    shape = _random_shape(chance, hosts=hosts)
    kinds = [kind for kind in FaultKind if _is_possible(kind, shape, hosts=hosts, full=full)]
    swarm = chance.sample(kinds, chance.randint(2, max(2, len(kinds) // 2)))  # few kinds often, and together
    planned = [_random_faults(chance, chance.choice(swarm)) for _ in range(faults)]
    planned[0] = msgspec.structs.replace(planned[0], after_steps=max(1, planned[0].after_steps))
    return FaultPlan(seed, shape, tuple(planned), clocks=FaultKind.CLOCK_SET in swarm)


def _random_shape(chance: random.Random, *, hosts: bool) -> JobShape:
    nodes, nproc = chance.choice([(1, 1), (2, 1), (2, 1), (3, 1), (2, 2), (3, 2), (5, 1), (7, 1)])
    if hosts:
        nodes, nproc = chance.choice([(2, 1), (3, 1), (2, 2)])
    return JobShape(
        nodes,
        chance.choice([0, 1]),
        nproc,
        chance.choice([0, 0, 1]),
        chance.choice(["ddp", "fsdp"]),
        chance.choice([1, 1, 4]),
        durable="" if hosts else chance.choice(["", "", "directory", "s3"]),
        budget=chance.choice([None, None, None, 2]),
    )


def _is_possible(kind: FaultKind, shape: JobShape, *, hosts: bool, full: bool) -> bool:
    if kind in _OF_DURABLE and shape.durable != "s3":
        return False
    if kind in (FaultKind.SPARE_KILLED, FaultKind.SPARE_STOPPED) and not shape.spares:
        return False
    if kind is FaultKind.MEMORY_FULL and not full:
        return False
    return kind not in (_NOT_ON_HOSTS if hosts else _ON_HOSTS)


def _random_faults(chance: random.Random, kind: FaultKind) -> PlannedFault:
    after = -1 if chance.random() < 0.25 else chance.randint(0, _CALM_STEPS)
    lasts_s = chance.choice([0.2, 1.0, 3.0, 8.0, 15.0])
    if chance.random() < _FOR_EVER.get(kind, 0.0):
        lasts_s = NEVER
    if kind is FaultKind.NODE_PAUSED:
        lasts_s = chance.choice(_PAUSES_S)
    return PlannedFault(kind, after, chance.random(), chance.random(), lasts_s)
