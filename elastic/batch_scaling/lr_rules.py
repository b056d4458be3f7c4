"""Learning rate, betas and epsilon as functions of batch and world size, and re-warmup. Pure.

A rule knows the batch for which the learning rate was chosen, so that nothing accumulates: after any number of changes
the factor is that of the batch now.

For a batch κ times as large the optimizer goes on as it did, per sample, with::

    learning rate · √κ      1 - β → κ · (1 - β)      ε / √κ

The rule holds where gradients are mostly noise. It says nothing about decoupled weight decay, which is left alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from elastic.errors import PolicyError

LRLaw = Literal["constant", "linear", "sqrt"]


class LRScale(NamedTuple):
    """What is done to an optimizer's numbers while it steps."""

    lr: float = 1.0
    """Times the learning rate."""
    kappa: float = 1.0
    """How many times its batch an adaptive optimizer's betas and epsilon are to be for; 1 leaves them as they are."""


class LRRule(Protocol):
    """Same arguments, same answer; 1.0 exactly where nothing is to change."""

    def scale(self, global_batch: int, world_size: int) -> LRScale: ...


def lr_factor(law: LRLaw, base: int, new: int) -> float:
    """How the learning rate chosen for a batch of ``base`` changes for one of ``new``."""
    for name, batch in (("base batch", base), ("batch", new)):
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise PolicyError(f"{name} is {batch!r}: it must be a whole number of samples, 1 or more")
    if law == "constant":
        return 1.0
    if law == "linear":
        return new / base
    if law == "sqrt":
        return math.sqrt(new / base)
    raise PolicyError(f"learning rate rule is {law!r}: there are constant, linear and sqrt")


@dataclass(frozen=True)
class ConstantLRRule:
    """The schedule and nothing else. Right while the global batch stays what it is."""

    def scale(self, global_batch: int, world_size: int) -> LRScale:
        return LRScale()


@dataclass(frozen=True)
class LinearLRRule:
    """In proportion to the batch (Goyal et al. 2017): for SGD, up to the batch where it stops working."""

    base_batch: int

    def scale(self, global_batch: int, world_size: int) -> LRScale:
        return LRScale(lr_factor("linear", self.base_batch, global_batch))


@dataclass(frozen=True)
class SqrtLRRule:
    """With the root of the batch, and nothing but the learning rate."""

    base_batch: int

    def scale(self, global_batch: int, world_size: int) -> LRScale:
        return LRScale(lr_factor("sqrt", self.base_batch, global_batch))


@dataclass(frozen=True)
class AdamSqrtLRRule:
    """Scale the learning rate with the root of the batch, and betas and epsilon with it (see the module)."""

    base_batch: int

    def scale(self, global_batch: int, world_size: int) -> LRScale:
        return LRScale(
            lr_factor("sqrt", self.base_batch, global_batch), lr_factor("linear", self.base_batch, global_batch)
        )


@dataclass(frozen=True)
class LRTable:
    """Learning rates by world size, as somebody measured them. Each holds until the next larger size."""

    rates: Mapping[int, float]
    base: float
    """The learning rate that the optimizer was made with; the schedule is drawn for this one."""

    def __post_init__(self) -> None:
        if not self.rates:
            raise PolicyError("rates is empty: it must say a learning rate for at least one world size")
        for world, rate in self.rates.items():
            if world < 1 or not (math.isfinite(rate) and rate >= 0):
                raise PolicyError(f"rates.{world} is {rate!r}: sizes are 1 or more, learning rates 0 or more")
        if not (math.isfinite(self.base) and self.base > 0):
            raise PolicyError(f"base is {self.base!r}: it must be a learning rate above 0")

    def scale(self, global_batch: int, world_size: int) -> LRScale:
        below = [size for size in self.rates if size <= world_size]
        if not below:
            raise PolicyError(
                f"rates say nothing about a world_size of {world_size}: the smallest is {min(self.rates)}"
            )
        return LRScale(self.rates[max(below)] / self.base)


_ROUNDING = 1e-12


def validated_kappa(kappa: float) -> float:
    if not (math.isfinite(kappa) and kappa > 0):
        raise PolicyError(f"kappa is {kappa!r}: a batch is more than 0 times another")
    return kappa


def scaled_beta(name: str, beta: float, kappa: float) -> float:
    """``1 - κ(1 - β)``, where that is not below 0: an average cannot be shorter than one step."""
    if kappa == 1:
        return beta
    scaled = 1 - kappa * (1 - beta)
    if scaled < -_ROUNDING:
        raise PolicyError(
            f"{name} is {beta}, which the square root rule makes {scaled:.3g} for a batch {kappa:g} times as large: it "
            f"holds up to {1 / (1 - beta):.4g} times. Use a larger {name}, a smaller batch, or another rule"
        )
    return max(0.0, scaled)


@dataclass(frozen=True)
class WarmupRamp:
    """``steps`` factors in equal steps from ``start`` up to ``target``, then ``target`` exactly."""

    target: float
    start: float = 1.0
    steps: int = 0
    done: int = 0

    @property
    def factor(self) -> float:
        if not self.is_warming_up:
            return self.target
        return self.start + (self.target - self.start) * (self.done + 1) / (self.steps + 1)

    @property
    def is_warming_up(self) -> bool:
        return self.done < self.steps

    def next(self) -> WarmupRamp:
        return dataclasses.replace(self, done=self.done + 1) if self.is_warming_up else self

    def towards(self, target: float, policy: Rewarmup) -> WarmupRamp:
        """What follows when the factor is to be ``target`` from now on. The same target: nothing new."""
        if target == self.target:
            return self
        start = min(self.factor, target) if policy.start is None else policy.start * target
        return WarmupRamp(target, start, 0 if start == target else policy.steps)

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> WarmupRamp:
        try:
            return cls(float(state["target"]), float(state["start"]), int(state["steps"]), int(state["done"]))
        except (KeyError, TypeError, ValueError) as wrong:
            raise PolicyError(f"this is no state of a learning rate rule: {wrong!r}") from wrong


@dataclass(frozen=True)
class Rewarmup:
    """How the learning rate gets to a new factor: at once (no steps), or in ``steps`` optimizer steps."""

    steps: int = 0
    start: float | None = None
    """Where to begin, as a part of the new factor. ``None``: at the old factor; at once, where the new one is less."""

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise PolicyError(f"rewarm steps is {self.steps!r}: it must be a whole number, 0 or more")
        if self.start is not None and not (math.isfinite(self.start) and 0 <= self.start <= 1):
            raise PolicyError(f"rewarm start is {self.start!r}: it must be between 0 and 1")
