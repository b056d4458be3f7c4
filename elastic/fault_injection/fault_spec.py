"""One fault as a value, its command-line syntax, random plans, and the FaultPlan builder. Pure.

``$ELASTIC_INJECT`` has faults in this syntax, separated by ``;``, or as JSON. ``file:PATH`` names a file with either.
"""

from __future__ import annotations

import enum
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from elastic.errors import PolicyError
from peerstore.message_codec import from_json


class InjectionKind(enum.Enum):
    """The effect of a fault."""

    SIGKILL = "sigkill"
    """The rank is killed, as by the kernel or an operator."""
    SIGSTOP = "sigstop"
    """The rank stops and holds all its resources; ``--hang-timeout`` detects it."""
    EXCEPTION = "exception"
    """The train function raises an error."""
    SEGFAULT = "segfault"
    """The rank reads an invalid address."""
    HOLD_GIL = "hold_gil"
    """One thread of the rank holds the interpreter's lock forever; ``--hang-timeout`` detects it."""
    HANG = "hang"
    """The training thread waits forever, the others run; ``--hang-timeout`` detects it."""
    OOM = "oom"
    """The rank allocates memory up to a limit far below the machine's, then is killed."""
    NODE = "node"
    """The node's supervisor is killed with its ranks, and with the memory tier if only this job uses it."""
    AGENT = "agent"
    """The node's memory agent is killed. Training continues, and the next request starts a new agent."""
    SLOW = "slow"
    """The next steps take longer. This is not a fault: the job must not react."""
    PARTITION = "partition"
    """The node's connections to the coordinator and to other ranks are cut for some seconds."""
    NAN = "nan"
    """The result of the phase is NaN."""


class InjectionPhase(enum.Enum):
    """A part of a step, of a save, or of the start of a world."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ALLREDUCE = "allreduce"
    OPTIMIZER = "optimizer"
    SAVE = "save"
    """Before the state is staged."""
    SEAL = "seal"
    """In the background, after the state is staged and before it is sealed."""
    REPLICATE = "replicate"
    """After the seal, before the copy to other nodes."""
    RESTORE = "restore"
    """In a new world after its ranks have met, before the state is restored."""
    RECOVERY = "recovery"
    """At the entry to a world after a fault, while the other ranks wait."""

    @property
    def is_between_steps(self) -> bool:
        """Whether no step runs in this phase, so that an injection cannot name a step."""
        return self in (InjectionPhase.RESTORE, InjectionPhase.RECOVERY)


SUPERVISOR_KINDS = frozenset(
    {InjectionKind.SIGKILL, InjectionKind.SIGSTOP, InjectionKind.NODE, InjectionKind.AGENT, InjectionKind.PARTITION}
)
"""Kinds that a supervisor can execute in any phase of the rank."""
NAN_PHASES = (InjectionPhase.FORWARD, InjectionPhase.BACKWARD, InjectionPhase.ALLREDUCE)
"""Phases for ``nan``. In later ones, NaN would enter the state without detection."""

_DEFAULT_SECONDS = {InjectionKind.SLOW: 0.1, InjectionKind.PARTITION: 5.0}
_DEFAULT_STEP_COUNT = 10
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class RankLocation(NamedTuple):
    """Rank, node and local rank of a process."""

    rank: int
    node: str
    local_rank: int


class FaultInjection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fault. It happens once, when its rank is first in ``phase`` at or after ``step``."""

    kind: InjectionKind
    step: int | None = None
    phase: InjectionPhase | None = None
    """Phase of the rank; ``None`` for forward, or for an immediate fault if a supervisor can execute it."""
    after_s: float | None = None
    """Earliest time, in seconds since the job's first rank started."""
    rank: int | None = None
    """Rank in the current world, not on the node."""
    node: str | None = None
    local_rank: int | None = None
    seconds: float | None = None
    """For ``slow``, seconds per step; for ``partition``, its duration."""
    times: int | None = None
    """For ``slow``, the number of steps."""
    then: str | None = None
    """Name of another injection that must happen first."""
    name: str = ""
    """Name that is unique in the job and identifies the injection's claim file."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise PolicyError("; ".join(problems))

    @property
    def is_immediate(self) -> bool:
        """Whether the injection has no condition that only a rank can check."""
        return self.step is None and self.phase is None and self.after_s is None and self.then is None

    @property
    def effective_phase(self) -> InjectionPhase:
        return self.phase or InjectionPhase.FORWARD

    @property
    def duration_s(self) -> float:
        return self.seconds if self.seconds is not None else _DEFAULT_SECONDS.get(self.kind, 0.0)

    @property
    def step_count(self) -> int:
        return self.times if self.times is not None else _DEFAULT_STEP_COUNT

    def matches(self, place: RankLocation) -> bool:
        """Return whether the injection is for the process at ``place``."""
        wanted = (self.rank, self.node, self.local_rank)
        return all(value is None or value == other for value, other in zip(wanted, place, strict=True))

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in ("step", "after_s", "rank", "node", "local_rank", "then")}
        where = " ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{self.kind.value} at {self.effective_phase.value} {where}".rstrip()


def _problems(injection: FaultInjection) -> Iterator[str]:
    for field in ("step", "rank", "local_rank"):
        value = getattr(injection, field)
        if value is not None and value < 0:
            yield f"{field}={value}: must be 0 or more"
    for field in ("after_s", "seconds"):
        value = getattr(injection, field)
        if value is not None and not (math.isfinite(value) and value >= 0):
            yield f"{field}={value}: must be a number of seconds, 0 or more"
    if injection.rank is None and not injection.node:
        yield "rank: say which rank, or which node"
    if injection.node == "":
        yield "node: is empty"
    if injection.effective_phase.is_between_steps and injection.step is not None:
        phase = injection.effective_phase.value
        yield f"step={injection.step}: phase {phase} is between steps; say after_s, or what it follows"
    if injection.kind is InjectionKind.NAN and injection.effective_phase not in NAN_PHASES:
        yield f"phase={injection.effective_phase.value}: nan is for {', '.join(phase.value for phase in NAN_PHASES)}"
    if injection.seconds is not None and injection.kind not in _DEFAULT_SECONDS:
        yield f"seconds={injection.seconds:g}: {injection.kind.value} lasts no particular time"
    if injection.times is not None and (injection.kind is not InjectionKind.SLOW or injection.times < 1):
        yield f"times={injection.times}: is for slow, and 1 or more"
    for field in ("name", "then"):
        value = getattr(injection, field)
        if value and _NAME.fullmatch(value) is None:
            yield f"{field}={value!r}: letters, digits, dots, dashes and underscores, 64 at the most"
    if injection.then and injection.then == injection.name:
        yield f"then={injection.then}: it would wait for itself"


def fault_plan_problems(plan: tuple[FaultInjection, ...]) -> list[str]:
    """Return the conflicts between the injections of a plan."""
    names = [injection.name for injection in plan]
    wrong = [f"name={name}: is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    known = set[str]()
    for injection in plan:
        if injection.then is not None and injection.then not in known:
            wrong.append(f"then={injection.then}: no injection before {injection.name} has this name")
        known.add(injection.name)
    return wrong


def validated_injections(plan: tuple[FaultInjection, ...]) -> tuple[FaultInjection, ...]:
    """Return ``plan`` with names for all injections; raise :class:`PolicyError` if they conflict."""
    named = tuple(
        injection if injection.name else msgspec.structs.replace(injection, name=f"{number:04d}")
        for number, injection in enumerate(plan)
    )
    wrong = fault_plan_problems(named)
    if wrong:
        raise PolicyError("; ".join(wrong))
    return named


INJECT_VARIABLE = "ELASTIC_INJECT"
"""Faults to inject: the faults as text or JSON, or ``file:/path`` of either."""
_FILE_PREFIX = "file:"
_FIELDS: Mapping[str, type] = {
    "step": int,
    "after_s": float,
    "phase": InjectionPhase,
    "rank": int,
    "node": str,
    "local_rank": int,
    "kind": InjectionKind,
    "seconds": float,
    "times": int,
    "then": str,
    "name": str,
}
_TYPE_NAMES = {int: "a whole number", float: "a number of seconds"}


def parse_injection_phase(word: object) -> InjectionPhase:
    try:
        return InjectionPhase(word)
    except ValueError:
        raise PolicyError(f"phase={word}: one of {', '.join(phase.value for phase in InjectionPhase)}") from None


def parse_injection_kind(word: str) -> InjectionKind:
    try:
        return InjectionKind(word)
    except ValueError:
        raise PolicyError(f"kind={word}: one of {', '.join(kind.value for kind in InjectionKind)}") from None


def parse_injection(words: Iterable[str], kind: str | None = None) -> FaultInjection:
    """Return the injection of words like ``step=30``; ``kind`` is used if the words have none."""
    values: dict[str, object] = {} if kind is None else {"kind": parse_injection_kind(kind)}
    for word in words:
        name, sign, text = word.partition("=")
        if name not in _FIELDS or not sign:
            raise PolicyError(f"{word!r}: write NAME=VALUE, with a name of {', '.join(_FIELDS)}")
        if name in values:
            raise PolicyError(f"{name}={text}: {name} occurs twice")
        values[name] = _value(name, text)
    if "kind" not in values:
        raise PolicyError(f"kind is missing: write one of {', '.join(kind.value for kind in InjectionKind)}")
    return FaultInjection(**values)  # type: ignore[arg-type]


def _value(name: str, text: str) -> object:
    kind = _FIELDS[name]
    if kind is InjectionPhase:
        return parse_injection_phase(text)
    if kind is InjectionKind:
        return parse_injection_kind(text)
    try:
        if not text:
            raise ValueError(text)
        return kind(text)
    except ValueError:
        raise PolicyError(f"{name}={text}: must be {_TYPE_NAMES.get(kind, 'a name')}") from None


def parse_injections(text: str) -> tuple[FaultInjection, ...]:
    """Return the injections in a value of ``$ELASTIC_INJECT``; raise :class:`PolicyError` if invalid."""
    if text.startswith(_FILE_PREFIX):
        path = Path(text.removeprefix(_FILE_PREFIX))
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"{INJECT_VARIABLE}: the faults cannot be read from {path}: {error}") from error
    if text.lstrip().startswith("["):
        try:
            return validated_injections(from_json(text, tuple[FaultInjection, ...]))
        except msgspec.MsgspecError as error:
            raise PolicyError(f"{INJECT_VARIABLE}: {error}") from error
    return validated_injections(tuple(parse_injection(part.split()) for part in text.split(";") if part.strip()))


_STEP_PHASES = tuple(phase for phase in InjectionPhase if not phase.is_between_steps)


def random_injections(
    seed: int,
    count: int,
    *,
    ranks: int,
    first: int = 1,
    gap: int = 3,
    kinds: Sequence[InjectionKind] = (
        InjectionKind.SIGKILL,
        InjectionKind.EXCEPTION,
        InjectionKind.SEGFAULT,
        InjectionKind.OOM,
        InjectionKind.NAN,
    ),
    phases: Sequence[InjectionPhase] = tuple(InjectionPhase),
    together: float = 0.1,
) -> tuple[FaultInjection, ...]:
    """Return ``count`` random faults of ranks 0 to ``ranks - 1``, about every ``gap`` steps.

    With probability ``together`` a fault follows the previous one, in a phase between steps.
    """
    if count < 0 or ranks < 1 or gap < 1 or first < 0:
        raise PolicyError(f"count={count}, ranks={ranks}, gap={gap}, first={first}: too small")
    draw = random.Random(seed)
    found: list[FaultInjection] = []
    step = first
    for number in range(count):
        kind, name = draw.choice(list(kinds)), f"{seed}.{number:04d}"
        allowed = [phase for phase in phases if kind is not InjectionKind.NAN or phase in NAN_PHASES]
        if not allowed:
            raise PolicyError(f"phases: none of them is one for {kind.value}")
        between = [phase for phase in allowed if phase.is_between_steps]
        during = [phase for phase in allowed if phase in _STEP_PHASES]
        follows = bool(found and between) and (not during or draw.random() < together)
        rank = draw.randrange(ranks)
        if follows or not during:
            then = found[-1].name if found else None
            found.append(FaultInjection(kind=kind, phase=draw.choice(between), rank=rank, then=then, name=name))
            continue
        found.append(FaultInjection(kind=kind, phase=draw.choice(during), step=step, rank=rank, name=name))
        step += draw.randint(1, 2 * gap - 1)
    return tuple(found)


class FaultPlan:
    """The faults to inject into a job. Immutable: each method returns a longer plan.

    ::

        FaultPlan().at(step=30, rank=1).sigkill().at(step=40, node="n0", phase="seal").node()
        FaultPlan().at(step=30, rank=1).sigkill().then(phase="recovery", rank=0).exception()
        FaultPlan(seed=7).random(100, ranks=4, first=10, gap=3)
    """

    def __init__(self, seed: int = 0, injections: tuple[FaultInjection, ...] = ()) -> None:
        self.seed = seed
        self.injections = validated_injections(injections)

    def at(self, **when: Any) -> FaultPlanStep:
        """Choose a fault's ``step``, ``phase``, ``after_s``, ``rank``, ``node`` and ``local_rank``."""
        return FaultPlanStep(self, when)

    def then(self, **when: Any) -> FaultPlanStep:
        """Choose time and place of a fault that follows the last fault of the plan."""
        return FaultPlanStep(self, {"then": self.injections[-1].name, **when} if self.injections else when)

    def random(self, count: int, **how: Any) -> FaultPlan:
        """Add random faults; see :func:`elastic.fault_injection.fault_spec.random_injections`."""
        return FaultPlan(self.seed, self.injections + random_injections(self.seed, count, **how))

    def encode(self) -> str:
        return msgspec.json.encode(self.injections).decode()

    def environ(self) -> dict[str, str]:
        """Return the environment variable for ``elastic run``. Write a very long plan to a file instead."""
        return {INJECT_VARIABLE: self.encode()}


class FaultPlanStep:
    """Time and place of a fault, before its kind is chosen."""

    def __init__(self, faults: FaultPlan, when: dict[str, Any]) -> None:
        self._faults = faults
        self._when = when

    def inject(self, kind: InjectionKind, **more: Any) -> FaultPlan:
        values = {**self._when, **more}
        if "phase" in values and not isinstance(values["phase"], InjectionPhase):
            values["phase"] = parse_injection_phase(values["phase"])
        injection = FaultInjection(kind=kind, **values)
        return FaultPlan(self._faults.seed, (*self._faults.injections, injection))

    def sigkill(self) -> FaultPlan:
        return self.inject(InjectionKind.SIGKILL)

    def sigstop(self) -> FaultPlan:
        return self.inject(InjectionKind.SIGSTOP)

    def exception(self) -> FaultPlan:
        return self.inject(InjectionKind.EXCEPTION)

    def segfault(self) -> FaultPlan:
        return self.inject(InjectionKind.SEGFAULT)

    def hold_gil(self) -> FaultPlan:
        return self.inject(InjectionKind.HOLD_GIL)

    def hang(self) -> FaultPlan:
        return self.inject(InjectionKind.HANG)

    def oom(self) -> FaultPlan:
        return self.inject(InjectionKind.OOM)

    def node(self) -> FaultPlan:
        return self.inject(InjectionKind.NODE)

    def agent(self) -> FaultPlan:
        return self.inject(InjectionKind.AGENT)

    def slow(self, seconds: float | None = None, times: int | None = None) -> FaultPlan:
        return self.inject(InjectionKind.SLOW, seconds=seconds, times=times)

    def partition(self, seconds: float | None = None) -> FaultPlan:
        return self.inject(InjectionKind.PARTITION, seconds=seconds)

    def nan(self) -> FaultPlan:
        return self.inject(InjectionKind.NAN)
