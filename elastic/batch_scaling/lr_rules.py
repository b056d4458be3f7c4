"""Learning rate, betas and epsilon as functions of batch and world size, and re-warmup. Pure.

A rule knows the batch for which the learning rate was chosen. So nothing accumulates: after any number of changes the
factor depends only on the current batch.

With a batch κ times as large, an optimizer makes the same progress per sample with::

    learning rate · √κ      1 - β → κ · (1 - β)      ε / √κ

This rule holds if gradients are mostly noise. It does not cover decoupled weight decay, which remains unchanged.
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
    """Changes of an optimizer's hyperparameters during its step."""

    lr: float = 1.0
    """Factor of the learning rate."""
    kappa: float = 1.0
    """Ratio of the batch to the base batch, for betas and epsilon. 1 leaves them unchanged."""


class LRRule(Protocol):
    """Rule for the scale. It is a pure function, and returns exactly 1.0 for no change."""

    def scale(self, global_batch: int, world_size: int) -> LRScale: ...


def lr_factor(law: LRLaw, base: int, new: int) -> float:
    """Return the factor of the learning rate from a batch of ``base`` to one of ``new`` samples."""
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
    """Rule that changes nothing. Correct while the global batch does not change."""

    def scale(self, global_batch: int, world_size: int) -> LRScale:
        return LRScale()


@dataclass(frozen=True)
class LinearLRRule:
    """Rule in proportion to the batch (Goyal et al. 2017): for SGD, up to a critical batch size."""

    base_batch: int

    def scale(self, global_batch: int, world_size: int) -> LRScale:
        return LRScale(lr_factor("linear", self.base_batch, global_batch))


@dataclass(frozen=True)
class SqrtLRRule:
    """Rule with the square root of the batch, for the learning rate only."""

    base_batch: int

    def scale(self, global_batch: int, world_size: int) -> LRScale:
        return LRScale(lr_factor("sqrt", self.base_batch, global_batch))


@dataclass(frozen=True)
class AdamSqrtLRRule:
    """Rule with the square root of the batch, and matching betas and epsilon (see the module)."""

    base_batch: int

    def scale(self, global_batch: int, world_size: int) -> LRScale:
        return LRScale(
            lr_factor("sqrt", self.base_batch, global_batch), lr_factor("linear", self.base_batch, global_batch)
        )


@dataclass(frozen=True)
class LRTable:
    """Measured learning rates by world size. Each applies up to the next larger size."""

    rates: Mapping[int, float]
    base: float
    """Learning rate that the optimizer was created with, which the schedule assumes."""

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
                f"rates have no entry for a world_size of {world_size}: the smallest is {min(self.rates)}"
            )
        return LRScale(self.rates[max(below)] / self.base)


_ROUNDING = 1e-12


def validated_kappa(kappa: float) -> float:
    if not (math.isfinite(kappa) and kappa > 0):
        raise PolicyError(f"kappa is {kappa!r}: a batch is more than 0 times another")
    return kappa


def scaled_beta(name: str, beta: float, kappa: float) -> float:
    """Return ``1 - κ(1 - β)``.

    Raises :class:`PolicyError` below 0: an average cannot be shorter than one step.
    """
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
    """Ramp of ``steps`` factors in equal steps from ``start`` up to ``target``, then exactly ``target``."""

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
        """Return the ramp from the current factor to ``target``. The same target returns this ramp."""
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
            raise PolicyError(f"this is not the state of a learning rate rule: {wrong!r}") from wrong


@dataclass(frozen=True)
class Rewarmup:
    """Change of the learning rate to a new factor: at once (0 steps), or over ``steps`` optimizer steps."""

    steps: int = 0
    start: float | None = None
    """First factor, as a fraction of the new one.

    ``None``: the old factor, or at once if the new one is lower.
    """

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise PolicyError(f"rewarm steps is {self.steps!r}: it must be a whole number, 0 or more")
        if self.start is not None and not (math.isfinite(self.start) and 0 <= self.start <= 1):
            raise PolicyError(f"rewarm start is {self.start!r}: it must be between 0 and 1")
