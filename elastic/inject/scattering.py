"""Random faults, the same ones for the same seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from elastic.errors import PolicyError
from elastic.inject.plan import NAN_PHASES, Injection, Kind, Phase

_STEPPING = tuple(phase for phase in Phase if not phase.is_between)


def scattered(
    seed: int,
    count: int,
    *,
    ranks: int,
    first: int = 1,
    gap: int = 3,
    kinds: Sequence[Kind] = (Kind.SIGKILL, Kind.EXCEPTION, Kind.SEGFAULT, Kind.OOM, Kind.NAN),
    phases: Sequence[Phase] = tuple(Phase),
    together: float = 0.1,
) -> tuple[Injection, ...]:
    """``count`` faults at ranks 0 to ``ranks``, about every ``gap`` steps.

    With the chance ``together`` one follows in the recovery from the one before; phases between steps always do.
    """
    if count < 0 or ranks < 1 or gap < 1 or first < 0:
        raise PolicyError(f"count={count}, ranks={ranks}, gap={gap}, first={first}: too small")
    draw = random.Random(seed)
    found: list[Injection] = []
    step = first
    for number in range(count):
        kind, name = draw.choice(list(kinds)), f"{seed}.{number:04d}"
        allowed = [phase for phase in phases if kind is not Kind.NAN or phase in NAN_PHASES]
        if not allowed:
            raise PolicyError(f"phases: none of them is one for {kind.value}")
        between = [phase for phase in allowed if phase.is_between]
        during = [phase for phase in allowed if phase in _STEPPING]
        follows = bool(found and between) and (not during or draw.random() < together)
        rank = draw.randrange(ranks)
        if follows or not during:
            then = found[-1].name if found else None
            found.append(Injection(kind=kind, phase=draw.choice(between), rank=rank, then=then, name=name))
            continue
        found.append(Injection(kind=kind, phase=draw.choice(during), step=step, rank=rank, name=name))
        step += draw.randint(1, 2 * gap - 1)
    return tuple(found)
