"""ScalingPolicy: sizes, timeouts and restart budgets, and their validation.

Sizes count nodes: a replica is all ranks of one node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from elastic.errors import PolicyError

_LEAVE_HANG_S = 4.0
"""Seconds that ranks may take to leave a world after a hang."""


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes, timeouts and restart limits of a job. Contradictory values raise :class:`PolicyError`.

    :func:`elastic.world.next_world.next_world` decides by them.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    replica_increment_step: int | None = None
    """Step between sizes, from ``min_replicas``; 1 if neither this nor discrete values are set."""
    replica_discrete_values: tuple[int, ...] = ()
    """All allowed sizes; an empty tuple for sizes by step."""
    replicas: int | None = None
    """Nodes to wait for at the start; ``None`` for ``max_replicas``."""

    scaling_timeout_s: float = 60.0
    """Seconds to collect nodes before the world grows or starts with fewer nodes than requested."""
    graceful_shutdown_timeout_s: float = 600.0
    """Seconds that ranks may take to reach and seal a common step; 0 changes the world without a pause."""
    faulty_scale_down_timeout_s: float = 30.0
    """Seconds to wait for a replacement after a fault, before the world becomes smaller."""
    scale_up_snooze_s: float = 0.0
    """Seconds after a fault made the world smaller during which it does not grow."""
    restart_timeout_s: float = 300.0
    """Seconds until the ranks of a node must be ready. They restart once; then the node counts as lost."""
    abort_timeout_s: float = 10.0
    """Seconds that a live process may take to leave a broken world, before another process replaces it.

    The limit is at most ``restart_timeout_s``, the limit of the new process, and at most 4 s after a hang.
    """
    lost_state_timeout_s: float = 60.0
    """Seconds that a new coordinator waits for the nodes of the newest world, if none of them responds.

    Without these nodes the job may return to an older step.
    """
    startup_timeout_s: float | None = None
    """Seconds until the first world must form, or the job fails; ``None`` for no limit."""

    eval_period_s: float = 3600.0
    """Seconds of the sliding period in which restarts and node faults count."""
    num_restart_before_full_job_restart: int | None = 10
    """Restarts in the period that retain healthy processes. The next one restarts all; ``None``: never."""
    max_full_job_restarts: int | None = 3
    """Restarts of all processes allowed in the period; one more fails the job. ``None`` for no limit."""
    job_max_retry_count: int | None = None
    """Restarts allowed in the whole life of the job; one more fails it. ``None`` for no limit."""
    max_num_repeat_offenders_to_avoid: int = 1
    """Most repeat offenders that have no rank while other nodes are available."""
    repeat_offender_faults: int = 2
    """Faults in the period that make a node a repeat offender."""

    def __post_init__(self) -> None:
        raise_policy_error(policy_problems(msgspec.structs.asdict(self)))

    @property
    def initial_nodes(self) -> int:
        """Nodes that the first world should have."""
        return self.replicas or self.max_replicas

    @property
    def abort_limit_s(self) -> float:
        """Seconds that a live process may take to leave a broken world."""
        return min(self.abort_timeout_s, self.restart_timeout_s)

    @property
    def leave_hang_s(self) -> float:
        """Like :attr:`abort_limit_s`, after a hang: the abort wakes the waiting ranks at once."""
        return min(self.abort_limit_s, _LEAVE_HANG_S)

    def allows(self, size: int) -> bool:
        return self.largest_size_within(size) == size

    def largest_size_within(self, nodes: int) -> int:
        """Return the largest size that this number of nodes allows; 0 if no size fits."""
        nodes = min(nodes, self.max_replicas)
        if self.replica_discrete_values:
            return max((size for size in self.replica_discrete_values if size <= nodes), default=0)
        if nodes < self.min_replicas:
            return 0
        return nodes - (nodes - self.min_replicas) % (self.replica_increment_step or 1)

    @property
    def smallest_size(self) -> int:
        """Smallest allowed number of nodes."""
        return min(self.replica_discrete_values, default=self.min_replicas)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in range(self.min_replicas, self.max_replicas + 1) if self.allows(size))

    @classmethod
    def from_fields(cls, read: PolicyFields, **others: Any) -> ScalingPolicy:
        """Return the policy of ``read``; ``others`` replace or add fields.

        Raises :class:`~elastic.errors.PolicyError` with all problems. It names each field by its key in the file.
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
    """Type and lower bound of one field."""

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
"""Bounds of all fields except the list of sizes."""

_SIZES = "replica_discrete_values"
_EACH_SIZE = FieldBound(is_integer=True, lowest=1)


def policy_problems(fields: Mapping[str, Any], called: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the reasons why these fields form no policy; ``called`` has their keys in the file."""
    names = {name: (called or {}).get(name, name) for name in (*FIELD_BOUNDS, _SIZES)}
    problems = {
        name: f"{names[name]} is {fields[name]!r}, must be {bound.description}"
        for name, bound in FIELD_BOUNDS.items()
        if not bound.admits(fields[name])
    }
    sizes = fields[_SIZES]
    if not isinstance(sizes, (tuple, list)) or not all(_EACH_SIZE.admits(size) for size in sizes):
        problems[_SIZES] = f"{names[_SIZES]} is {sizes!r}, must be a list of whole numbers, 1 or more each"
    if not problems.keys().isdisjoint((_SIZES, "min_replicas", "max_replicas", "replica_increment_step", "replicas")):
        return tuple(problems.values())
    return (*problems.values(), *_contradictions(fields, names))


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
