"""One fault as a value, its command-line syntax, random plans, and the FaultPlan builder. Pure.

The variable holds such words, several of them with ``;`` between, or their JSON, or ``file:PATH`` with either.
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
    """What happens."""

    SIGKILL = "sigkill"
    """The rank is ended, as by the kernel or an operator."""
    SIGSTOP = "sigstop"
    """It stops and holds everything it has; ``--hang-timeout`` notices."""
    EXCEPTION = "exception"
    """The train function raises."""
    SEGFAULT = "segfault"
    """It reads where there is nothing."""
    HOLD_GIL = "hold_gil"
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


class InjectionPhase(enum.Enum):
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
    def is_between_steps(self) -> bool:
        """No step is being done then, so that there is none to name."""
        return self in (InjectionPhase.RESTORE, InjectionPhase.RECOVERY)


SUPERVISOR_KINDS = frozenset(
    {InjectionKind.SIGKILL, InjectionKind.SIGSTOP, InjectionKind.NODE, InjectionKind.AGENT, InjectionKind.PARTITION}
)
"""Kinds that a supervisor can carry out, whatever its rank is doing."""
NAN_PHASES = (InjectionPhase.FORWARD, InjectionPhase.BACKWARD, InjectionPhase.ALLREDUCE)
"""Later than these a number that is none goes into the state, and nothing that is done later finds it."""

_SECONDS = {InjectionKind.SLOW: 0.1, InjectionKind.PARTITION: 5.0}
_TIMES = 10
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class RankLocation(NamedTuple):
    """Where a rank is, in its world and on its machine."""

    rank: int
    node: str
    local_rank: int


class FaultInjection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fault, which happens once: at the first moment at or after ``step`` when its rank is in ``phase``."""

    kind: InjectionKind
    step: int | None = None
    phase: InjectionPhase | None = None
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
    def is_immediate(self) -> bool:
        """It waits for nothing that only a rank knows of."""
        return self.step is None and self.phase is None and self.after_s is None and self.then is None

    @property
    def effective_phase(self) -> InjectionPhase:
        return self.phase or InjectionPhase.FORWARD

    @property
    def duration_s(self) -> float:
        return self.seconds if self.seconds is not None else _SECONDS.get(self.kind, 0.0)

    @property
    def step_count(self) -> int:
        return self.times if self.times is not None else _TIMES

    def matches(self, place: RankLocation) -> bool:
        """Whether it is meant for who is there."""
        asked = (self.rank, self.node, self.local_rank)
        return all(one is None or one == other for one, other in zip(asked, place, strict=True))

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in ("step", "after_s", "rank", "node", "local_rank", "then")}
        where = " ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{self.kind.value} at {self.effective_phase.value} {where}".rstrip()


def _problems(one: FaultInjection) -> Iterator[str]:
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
    if one.effective_phase.is_between_steps and one.step is not None:
        yield f"step={one.step}: phase {one.effective_phase.value} is between steps; say after_s, or what it follows"
    if one.kind is InjectionKind.NAN and one.effective_phase not in NAN_PHASES:
        yield f"phase={one.effective_phase.value}: nan is for {', '.join(phase.value for phase in NAN_PHASES)}"
    if one.seconds is not None and one.kind not in _SECONDS:
        yield f"seconds={one.seconds:g}: {one.kind.value} lasts no particular time"
    if one.times is not None and (one.kind is not InjectionKind.SLOW or one.times < 1):
        yield f"times={one.times}: is for slow, and 1 or more"
    for field in ("name", "then"):
        value = getattr(one, field)
        if value and _NAME.fullmatch(value) is None:
            yield f"{field}={value!r}: letters, digits, dots, dashes and underscores, 64 at the most"
    if one.then and one.then == one.name:
        yield f"then={one.then}: it would wait for itself"


def fault_plan_problems(plan: tuple[FaultInjection, ...]) -> list[str]:
    """What is wrong with several of them together."""
    names = [one.name for one in plan]
    wrong = [f"name={name}: is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    known = set[str]()
    for one in plan:
        if one.then is not None and one.then not in known:
            wrong.append(f"then={one.then}: no injection before {one.name} has this name")
        known.add(one.name)
    return wrong


def validated_injections(plan: tuple[FaultInjection, ...]) -> tuple[FaultInjection, ...]:
    """``plan`` with a name for everybody who has none, and nothing wrong with it as a whole."""
    named = tuple(
        one if one.name else msgspec.structs.replace(one, name=f"{number:04d}") for number, one in enumerate(plan)
    )
    wrong = fault_plan_problems(named)
    if wrong:
        raise PolicyError("; ".join(wrong))
    return named


INJECT_VARIABLE = "ELASTIC_INJECT"
"""Faults to inject: the faults as text or JSON, or ``file:/path`` of either."""
_FILE = "file:"
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
_WORDS = {int: "a whole number", float: "a number of seconds"}


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
    """``step=30 rank=8``, and what is to happen there, if it is not among the words."""
    values: dict[str, object] = {} if kind is None else {"kind": parse_injection_kind(kind)}
    for word in words:
        name, sign, text = word.partition("=")
        if name not in _FIELDS or not sign:
            raise PolicyError(f"{word!r}: write NAME=VALUE, with a name of {', '.join(_FIELDS)}")
        if name in values:
            raise PolicyError(f"{name}={text}: {name} was said twice")
        values[name] = _value(name, text)
    if "kind" not in values:
        raise PolicyError(f"kind: say what is to happen, one of {', '.join(kind.value for kind in InjectionKind)}")
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
        raise PolicyError(f"{name}={text}: must be {_WORDS.get(kind, 'a name')}") from None


def parse_injections(text: str) -> tuple[FaultInjection, ...]:
    """All faults that the variable's value speaks of."""
    if text.startswith(_FILE):
        path = Path(text.removeprefix(_FILE))
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


_STEPPING = tuple(phase for phase in InjectionPhase if not phase.is_between_steps)


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
    """``count`` faults at ranks 0 to ``ranks``, about every ``gap`` steps.

    With the chance ``together`` one follows in the recovery from the one before; phases between steps always do.
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
        during = [phase for phase in allowed if phase in _STEPPING]
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
    """What is to happen to a job. Never changed in place: each call answers with a longer one.

    ::

        Faults().at(step=30, rank=1).sigkill().at(step=40, node="n0", phase="seal").node()
        Faults().at(step=30, rank=1).sigkill().then(phase="recovery", rank=0).exception()
        Faults(seed=7).scattered(100, ranks=4, first=10, gap=3)
    """

    def __init__(self, seed: int = 0, injections: tuple[FaultInjection, ...] = ()) -> None:
        self.seed = seed
        self.injections = validated_injections(injections)

    def at(self, **when: Any) -> FaultPlanStep:
        """A moment and a place: ``step``, ``phase``, ``after_s``; ``rank``, ``node``, ``local_rank``."""
        return FaultPlanStep(self, when)

    def then(self, **when: Any) -> FaultPlanStep:
        """The same, and not before the last one that was said has happened."""
        return FaultPlanStep(self, {"then": self.injections[-1].name, **when} if self.injections else when)

    def random(self, count: int, **how: Any) -> FaultPlan:
        """As many more, drawn by the seed: see :func:`elastic.fault_injection.fault_spec.random_injections`."""
        return FaultPlan(self.seed, self.injections + random_injections(self.seed, count, **how))

    def encode(self) -> str:
        return msgspec.json.encode(self.injections).decode()

    def environ(self) -> dict[str, str]:
        """What to put into the environment of ``elastic run``. Very many do not fit there: write them to a file."""
        return {INJECT_VARIABLE: self.encode()}


class FaultPlanStep:
    """A moment and a place at which something is to happen."""

    def __init__(self, faults: FaultPlan, when: dict[str, Any]) -> None:
        self._faults = faults
        self._when = when

    def inject(self, kind: InjectionKind, **more: Any) -> FaultPlan:
        values = {**self._when, **more}
        if "phase" in values and not isinstance(values["phase"], InjectionPhase):
            values["phase"] = parse_injection_phase(values["phase"])
        one = FaultInjection(kind=kind, **values)
        return FaultPlan(self._faults.seed, (*self._faults.injections, one))

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
