"""ScalingPolicy: sizes, timeouts and restart budgets, and their validation.

Sizes count nodes: a replica is a node's worth of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from elastic.errors import PolicyError

_LEAVE_HANG_S = 4.0


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What :func:`elastic.world.next_world.next_world` keeps to. Impossible ones cannot be made."""

    min_replicas: int = 1
    max_replicas: int = 1
    replica_increment_step: int | None = None
    """Sizes are ``min_replicas + k * step``; one node at a time where neither this nor discrete values are given."""
    replica_discrete_values: tuple[int, ...] = ()
    """Or exactly these."""
    replicas: int | None = None
    """So many are waited for at the start; ``max_replicas`` where it is not given."""

    scaling_timeout_s: float = 60.0
    """How long nodes are collected before the world grows, or is begun with fewer than are wanted."""
    graceful_shutdown_timeout_s: float = 600.0
    """How long ranks may take to reach a common step and to seal; then they are ended."""
    faulty_scale_down_timeout_s: float = 30.0
    """How long a replacement is waited for after a fault, before the world becomes smaller."""
    scale_up_snooze_s: float = 0.0
    """How long a world that a fault has made smaller does not grow."""
    restart_timeout_s: float = 300.0
    """How long the ranks of a node may take to be ready; then they are started anew, and the next time given up."""
    abort_timeout_s: float = 10.0
    """Seconds that a live process may take to leave a broken world.

    Then another process replaces it. After a hang the limit is 4 s at most. No longer than ``restart_timeout_s``, the
    limit of the new process.
    """
    lost_state_timeout_s: float = 60.0
    """How long a new coordinator waits where no node of the newest world answers.

    Without these nodes the job may go back to an older step.
    """
    startup_timeout_s: float | None = None
    """How long the first world may take to begin."""

    eval_period_s: float = 3600.0
    """The time within which restarts and offences are counted."""
    num_restart_before_full_job_restart: int | None = 10
    """So many restarts in the period keep the healthy processes; with the next one all are started anew."""
    max_full_job_restarts: int | None = 3
    """Restarts of all processes in the period, after which the job fails."""
    job_max_retry_count: int | None = None
    """So many restarts in the whole life of the job."""
    max_num_repeat_offenders_to_avoid: int = 1
    """So many nodes at the most that were to blame for several faults have no rank while others can be had."""
    repeat_offender_faults: int = 2
    """So many faults in the period make a repeated offender."""

    def __post_init__(self) -> None:
        raise_policy_error(policy_problems(msgspec.structs.asdict(self)))

    @property
    def initial_nodes(self) -> int:
        """The size to begin with."""
        return self.replicas or self.max_replicas

    @property
    def abort_limit_s(self) -> float:
        return min(self.abort_timeout_s, self.restart_timeout_s)

    @property
    def leave_hang_s(self) -> float:
        """The same after a hang: every other rank has waited for so long that the abort wakes it at once."""
        return min(self.abort_limit_s, _LEAVE_HANG_S)

    def allows(self, size: int) -> bool:
        return self.largest_size_within(size) == size

    def largest_size_within(self, nodes: int) -> int:
        """The greatest size that so many nodes allow; 0 when there is none."""
        nodes = min(nodes, self.max_replicas)
        if self.replica_discrete_values:
            return max((size for size in self.replica_discrete_values if size <= nodes), default=0)
        if nodes < self.min_replicas:
            return 0
        return nodes - (nodes - self.min_replicas) % (self.replica_increment_step or 1)

    @property
    def smallest_size(self) -> int:
        """The smallest size there is."""
        return min(self.replica_discrete_values, default=self.min_replicas)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in range(self.min_replicas, self.max_replicas + 1) if self.allows(size))

    @classmethod
    def from_fields(cls, read: PolicyFields, **others: Any) -> ScalingPolicy:
        """Return the policy of ``read``; ``others`` are fields that replace or complete it.

        Raises :class:`~elastic.errors.PolicyError` with every problem at once. It names each field by the key that the
        file has for it.
        """
        unknown = tuple(f"{name} is unknown" for name in others if name not in cls.__struct_fields__)
        fields = {**read.fields, **others}
        all_fields = msgspec.structs.asdict(cls()) | fields
        raise_policy_error(read.problems + unknown + policy_problems(all_fields, read.spelled))
        return cls(**fields)


class PolicyFields(NamedTuple):
    """Fields of a policy file in another format: the result of a reader in ``elastic.policy_readers``."""

    fields: dict[str, Any]
    """Fields of :class:`ScalingPolicy` that the file sets."""
    spelled: dict[str, str]
    """The file's key for each field, for error messages."""
    problems: tuple[str, ...]
    """One sentence for each key that could not be read."""


class FieldBound(NamedTuple):
    """What one field may be."""

    is_integer: bool
    lowest: int
    optional: bool = False

    @property
    def description(self) -> str:
        kind = "a whole number" if self.is_integer else "a number of seconds"
        return f"{kind}, {self.lowest} or more" + (", or nothing" if self.optional else "")

    def admits(self, value: object) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int if self.is_integer else (int, float)):
            return False
        return math.isfinite(value) and value >= self.lowest


_SECONDS = FieldBound(is_integer=False, lowest=0)

FIELD_BOUNDS: Mapping[str, FieldBound] = {
    "min_replicas": FieldBound(is_integer=True, lowest=1),
    "max_replicas": FieldBound(is_integer=True, lowest=1),
    "replica_increment_step": FieldBound(is_integer=True, lowest=1, optional=True),
    "replicas": FieldBound(is_integer=True, lowest=1, optional=True),
    "scaling_timeout_s": _SECONDS,
    "graceful_shutdown_timeout_s": _SECONDS,
    "faulty_scale_down_timeout_s": _SECONDS,
    "scale_up_snooze_s": _SECONDS,
    "restart_timeout_s": FieldBound(is_integer=False, lowest=1),
    "abort_timeout_s": FieldBound(is_integer=False, lowest=1),
    "lost_state_timeout_s": _SECONDS,
    "startup_timeout_s": FieldBound(is_integer=False, lowest=0, optional=True),
    "eval_period_s": FieldBound(is_integer=False, lowest=1),
    "num_restart_before_full_job_restart": FieldBound(is_integer=True, lowest=0, optional=True),
    "max_full_job_restarts": FieldBound(is_integer=True, lowest=0, optional=True),
    "job_max_retry_count": FieldBound(is_integer=True, lowest=0, optional=True),
    "max_num_repeat_offenders_to_avoid": FieldBound(is_integer=True, lowest=0),
    "repeat_offender_faults": FieldBound(is_integer=True, lowest=1),
}
"""All fields but the list of sizes."""

_SIZES = "replica_discrete_values"
_EACH_SIZE = FieldBound(is_integer=True, lowest=1)


def policy_problems(fields: Mapping[str, Any], called: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Why there can be no policy with these fields; ``called`` says what whoever wrote them calls them."""
    names = {name: (called or {}).get(name, name) for name in (*FIELD_BOUNDS, _SIZES)}
    wrong = {
        name: f"{names[name]} is {fields[name]!r}, must be {bound.description}"
        for name, bound in FIELD_BOUNDS.items()
        if not bound.admits(fields[name])
    }
    sizes = fields[_SIZES]
    if not isinstance(sizes, (tuple, list)) or not all(_EACH_SIZE.admits(size) for size in sizes):
        wrong[_SIZES] = f"{names[_SIZES]} is {sizes!r}, must be a list of whole numbers, 1 or more each"
    if not wrong.keys().isdisjoint((_SIZES, "min_replicas", "max_replicas", "replica_increment_step", "replicas")):
        return tuple(wrong.values())
    return (*wrong.values(), *_contradictions(fields, names))


def raise_policy_error(problems: tuple[str, ...]) -> None:
    if problems:
        raise PolicyError("impossible scaling policy: " + "; ".join(problems))


def _contradictions(fields: Mapping[str, Any], names: Mapping[str, str]) -> Iterable[str]:
    least, most, step = (fields[name] for name in ("min_replicas", "max_replicas", "replica_increment_step"))
    sizes = fields[_SIZES]
    if most < least:
        yield f"{names['max_replicas']} is {most}, less than {names['min_replicas']} ({least})"
    for size in sizes:
        if not least <= size <= most:
            between = f"between {names['min_replicas']} ({least}) and {names['max_replicas']} ({most})"
            yield f"{names[_SIZES]} has {size}, which is not {between}"
        elif step is not None and (size - least) % step:
            yield (
                f"{names[_SIZES]} has {size}, which {names['replica_increment_step']} ({step}) does "
                f"not reach from {names['min_replicas']} ({least}): give one of the two"
            )
    if len(set(sizes)) < len(sizes):
        yield f"{names[_SIZES]} is {list(sizes)}, and names a size twice"
    begin = fields["replicas"]
    if begin is None or most < least:
        return
    allowed = begin in sizes if sizes else (begin - least) % (step or 1) == 0
    if not least <= begin <= most or not allowed:
        yield f"{names['replicas']} is {begin}, which is none of the sizes allowed"
