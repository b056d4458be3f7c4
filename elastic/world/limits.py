"""What is wrong with a scaling policy, all of it at once and by the names that were used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from elastic.errors import PolicyError


class Bound(NamedTuple):
    """What one field may be."""

    whole: bool
    lowest: int
    optional: bool = False

    @property
    def words(self) -> str:
        kind = "a whole number" if self.whole else "a number of seconds"
        return f"{kind}, {self.lowest} or more" + (", or nothing" if self.optional else "")

    def admits(self, value: object) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        return math.isfinite(value) and value >= self.lowest


_SECONDS = Bound(whole=False, lowest=0)

BOUNDS: Mapping[str, Bound] = {
    "min_replicas": Bound(whole=True, lowest=1),
    "max_replicas": Bound(whole=True, lowest=1),
    "replica_increment_step": Bound(whole=True, lowest=1, optional=True),
    "replicas": Bound(whole=True, lowest=1, optional=True),
    "scaling_timeout_s": _SECONDS,
    "graceful_shutdown_timeout_s": _SECONDS,
    "faulty_scale_down_timeout_s": _SECONDS,
    "scale_up_snooze_s": _SECONDS,
    "restart_timeout_s": Bound(whole=False, lowest=1),
    "leave_timeout_s": Bound(whole=False, lowest=1),
    "startup_timeout_s": Bound(whole=False, lowest=0, optional=True),
    "eval_period_s": Bound(whole=False, lowest=1),
    "num_restart_before_full_job_restart": Bound(whole=True, lowest=0, optional=True),
    "max_full_job_restarts": Bound(whole=True, lowest=0, optional=True),
    "job_max_retry_count": Bound(whole=True, lowest=0, optional=True),
    "max_num_repeat_offenders_to_avoid": Bound(whole=True, lowest=0),
    "repeat_offender_faults": Bound(whole=True, lowest=1),
}
"""All fields but the list of sizes."""

_SIZES = "replica_discrete_values"
_EACH_SIZE = Bound(whole=True, lowest=1)


def problems(fields: Mapping[str, Any], called: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Why there can be no policy with these fields; ``called`` says what whoever wrote them calls them."""
    names = {name: (called or {}).get(name, name) for name in (*BOUNDS, _SIZES)}
    wrong = {
        name: f"{names[name]} is {fields[name]!r}, must be {bound.words}"
        for name, bound in BOUNDS.items()
        if not bound.admits(fields[name])
    }
    sizes = fields[_SIZES]
    if not isinstance(sizes, (tuple, list)) or not all(_EACH_SIZE.admits(size) for size in sizes):
        wrong[_SIZES] = f"{names[_SIZES]} is {sizes!r}, must be a list of whole numbers, 1 or more each"
    if not wrong.keys().isdisjoint((_SIZES, "min_replicas", "max_replicas", "replica_increment_step", "replicas")):
        return tuple(wrong.values())
    return (*wrong.values(), *_contradictions(fields, names))


def refuse(problems: tuple[str, ...]) -> None:
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
