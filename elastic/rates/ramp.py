"""Back to full learning rate in small steps, after a change. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.errors import PolicyError


@dataclass(frozen=True)
class Ramp:
    """``steps`` factors in equal steps from ``start`` up to ``target``, then ``target`` exactly."""

    target: float
    start: float = 1.0
    steps: int = 0
    done: int = 0

    @property
    def factor(self) -> float:
        if not self.rising:
            return self.target
        return self.start + (self.target - self.start) * (self.done + 1) / (self.steps + 1)

    @property
    def rising(self) -> bool:
        return self.done < self.steps

    def next(self) -> Ramp:
        return dataclasses.replace(self, done=self.done + 1) if self.rising else self

    def to(self, target: float, policy: Rewarm) -> Ramp:
        """What follows when the factor is to be ``target`` from now on. The same target: nothing new."""
        if target == self.target:
            return self
        start = min(self.factor, target) if policy.start is None else policy.start * target
        return Ramp(target, start, 0 if start == target else policy.steps)

    def as_state(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Ramp:
        try:
            return cls(float(state["target"]), float(state["start"]), int(state["steps"]), int(state["done"]))
        except (KeyError, TypeError, ValueError) as wrong:
            raise PolicyError(f"this is no state of a learning rate rule: {wrong!r}") from wrong


@dataclass(frozen=True)
class Rewarm:
    """How the learning rate gets to a new factor: at once (no steps), or in ``steps`` optimizer steps."""

    steps: int = 0
    start: float | None = None
    """Where to begin, as a part of the new factor. ``None``: at the old factor; at once, where the new one is less."""

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise PolicyError(f"rewarm steps is {self.steps!r}: it must be a whole number, 0 or more")
        if self.start is not None and not (math.isfinite(self.start) and 0 <= self.start <= 1):
            raise PolicyError(f"rewarm start is {self.start!r}: it must be between 0 and 1")
