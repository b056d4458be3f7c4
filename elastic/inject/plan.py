"""One fault: what happens, at whom, and when. Pure; an impossible one cannot be made."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from elastic.errors import PolicyError


class Kind(enum.Enum):
    """What happens."""

    SIGKILL = "sigkill"
    """The rank is ended, as by the kernel or an operator."""
    SIGSTOP = "sigstop"
    """It stops and holds everything it has; ``--hang-timeout`` notices."""
    EXCEPTION = "exception"
    """The train function raises."""
    SEGFAULT = "segfault"
    """It reads where there is nothing."""
    GIL = "gil"
    """One thread keeps the interpreter's lock for ever, so that no other one runs; ``--hang-timeout`` notices."""
    HANG = "hang"
    """The thread that trains waits for ever, the others run; ``--hang-timeout`` notices."""
    OOM = "oom"
    """It allocates until a limit of its own, far below the machine's, ends it."""
    NODE = "node"
    """The node's supervisor ends at once, with it its ranks, and the memory tier where it is this job's own."""
    AGENT = "agent"
    """The node's memory agent is killed; training goes on, and who needs it next starts another one."""
    SLOW = "slow"
    """From then on each step takes longer; no fault, so nothing is to happen."""
    PARTITION = "partition"
    """The node's lines to the coordinator and to other ranks are cut, for a while."""
    NAN = "nan"
    """What is computed there is not a number."""


class Phase(enum.Enum):
    """Where in a step, or on the way to the next one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALLREDUCE = "allreduce"
    OPTIMIZER = "optimizer"
    SAVE = "save"
    """Before the state is staged."""
    SEAL = "seal"
    """In the background: staged, and not yet safe."""
    REPLICATE = "replicate"
    """Sealed here, and about to be copied to other nodes."""
    RESTORE = "restore"
    """In a new world, whose ranks have met, before the state is there."""
    RECOVERY = "recovery"
    """On the way into a world that follows a fault, while the others wait."""

    @property
    def is_between(self) -> bool:
        """No step is being done then, so that there is none to name."""
        return self in (Phase.RESTORE, Phase.RECOVERY)


WAITED_FOR = frozenset({Kind.SIGSTOP, Kind.GIL, Kind.HANG})
"""Kinds that nobody notices but by nothing happening."""
OUTSIDE = frozenset({Kind.SIGKILL, Kind.SIGSTOP, Kind.NODE, Kind.AGENT, Kind.PARTITION})
"""Kinds that a supervisor can carry out, whatever its rank is doing."""
BORNE = frozenset({Kind.AGENT, Kind.SLOW})
"""Kinds that no world has to end for."""
NAN_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.ALLREDUCE)
"""Later than these a number that is none goes into the state, and nothing that is done later finds it."""

_SECONDS = {Kind.SLOW: 0.1, Kind.PARTITION: 5.0}
_TIMES = 10
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class Place(NamedTuple):
    """Where a rank is, in its world and on its machine."""

    rank: int
    node: str
    local_rank: int


class Injection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fault, which happens once: at the first moment at or after ``step`` when its rank is in ``phase``."""

    kind: Kind
    step: int | None = None
    phase: Phase | None = None
    """By default forward, or for kinds that can be done from outside and no step: at once."""
    after_s: float | None = None
    """Seconds since the job's first rank began."""
    rank: int | None = None
    """In the world of that moment; by position in the job, not on the node."""
    node: str | None = None
    local_rank: int | None = None
    seconds: float | None = None
    """slow: per step. partition: how long."""
    times: int | None = None
    """slow: for so many steps."""
    then: str | None = None
    """Not before the injection of this name has happened."""
    name: str = ""
    """No two of a job have the same; what has happened is known by it."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise PolicyError("; ".join(problems))

    @property
    def is_at_once(self) -> bool:
        """It waits for nothing that only a rank knows of."""
        return self.step is None and self.phase is None and self.after_s is None and self.then is None

    @property
    def when(self) -> Phase:
        return self.phase or Phase.FORWARD

    @property
    def lasts_s(self) -> float:
        return self.seconds if self.seconds is not None else _SECONDS.get(self.kind, 0.0)

    @property
    def repeats(self) -> int:
        return self.times if self.times is not None else _TIMES

    def is_at(self, place: Place) -> bool:
        """Whether it is meant for who is there."""
        asked = (self.rank, self.node, self.local_rank)
        return all(one is None or one == other for one, other in zip(asked, place, strict=True))

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in ("step", "after_s", "rank", "node", "local_rank", "then")}
        where = " ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{self.kind.value} at {self.when.value} {where}".rstrip()


def _problems(one: Injection) -> Iterator[str]:
    for field in ("step", "rank", "local_rank"):
        value = getattr(one, field)
        if value is not None and value < 0:
            yield f"{field}={value}: must be 0 or more"
    for field in ("after_s", "seconds"):
        value = getattr(one, field)
        if value is not None and not (math.isfinite(value) and value >= 0):
            yield f"{field}={value}: must be a number of seconds, 0 or more"
    if one.rank is None and not one.node:
        yield "rank: say which rank, or which node"
    if one.node == "":
        yield "node: is empty"
    if one.when.is_between and one.step is not None:
        yield f"step={one.step}: phase {one.when.value} is between steps; say after_s, or what it follows"
    if one.kind is Kind.NAN and one.when not in NAN_PHASES:
        yield f"phase={one.when.value}: nan is for {', '.join(phase.value for phase in NAN_PHASES)}"
    if one.seconds is not None and one.kind not in _SECONDS:
        yield f"seconds={one.seconds:g}: {one.kind.value} lasts no particular time"
    if one.times is not None and (one.kind is not Kind.SLOW or one.times < 1):
        yield f"times={one.times}: is for slow, and 1 or more"
    for field in ("name", "then"):
        value = getattr(one, field)
        if value and _NAME.fullmatch(value) is None:
            yield f"{field}={value!r}: letters, digits, dots, dashes and underscores, 64 at the most"
    if one.then and one.then == one.name:
        yield f"then={one.then}: it would wait for itself"


def plan_problems(plan: tuple[Injection, ...]) -> list[str]:
    """What is wrong with several of them together."""
    names = [one.name for one in plan]
    wrong = [f"name={name}: is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    known = set[str]()
    for one in plan:
        if one.then is not None and one.then not in known:
            wrong.append(f"then={one.then}: no injection before {one.name} has this name")
        known.add(one.name)
    return wrong


def checked(plan: tuple[Injection, ...]) -> tuple[Injection, ...]:
    """``plan`` with a name for everybody who has none, and nothing wrong with it as a whole."""
    named = tuple(
        one if one.name else msgspec.structs.replace(one, name=f"{number:04d}") for number, one in enumerate(plan)
    )
    wrong = plan_problems(named)
    if wrong:
        raise PolicyError("; ".join(wrong))
    return named
