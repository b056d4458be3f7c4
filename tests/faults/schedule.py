"""The plan of a seed: a job and its faults."""

from __future__ import annotations

import enum
import math
import random

import msgspec

NEVER = math.inf


class FaultKind(enum.Enum):
    """The kinds of faults. Values are printed."""

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
"""Faults that jobs on one machine cover."""
_FOR_EVER = {
    FaultKind.RANK_STOPPED: 0.5,
    FaultKind.SPARE_STOPPED: 0.5,
    FaultKind.AGENT_STOPPED: 0.3,
    FaultKind.SUPERVISOR_STOPPED: 0.3,
}
"""Share of the stopped processes that never continue.

A stopped coordinator or store always continues, because no other process replaces it.
"""
_PAUSES_S = (5.0, 10.0, 20.0, 30.0)
_CALM_STEPS = 40


class JobShape(msgspec.Struct, frozen=True):
    """The size and the options of a job."""

    nodes: int
    """Most nodes in a world."""
    spare_nodes: int
    nproc: int
    spares: int
    how: str
    every: int
    durable: str = ""
    """``directory`` or ``s3``; "" for none."""
    budget: int | None = None
    """Restarts after which the job fails; ``None`` for no limit."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(self.nodes + self.spare_nodes))


class PlannedFault(msgspec.Struct, frozen=True):
    """A planned fault."""

    kind: FaultKind
    after_steps: int
    """Steps after the recovery from the fault before; -1 for at most 50 ms after that fault."""
    pick: float
    """Choice of the target among those available at that time, from 0 to 1."""
    other: float
    lasts_s: float = 0.0


class FaultPlan(msgspec.Struct, frozen=True):
    seed: int
    shape: JobShape
    faults: tuple[PlannedFault, ...]
    clocks: bool = False
    """Whether the job runs with a clock that can be set."""


def make_plan(seed: int, *, hosts: bool = False, full: bool = True, faults: int = 6) -> FaultPlan:
    """Derive the plan from a seed. With ``full``, faults may fill up a node's memory."""
    chance = random.Random(f"{seed} {hosts}")
    shape = _random_shape(chance, hosts=hosts)
    kinds = [kind for kind in FaultKind if _is_possible(kind, shape, hosts=hosts, full=full)]
    swarm = chance.sample(kinds, chance.randint(2, max(2, len(kinds) // 2)))  # few kinds, often and together
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
