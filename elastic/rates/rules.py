"""Learning rate by batch or world: factors on whatever the schedule says. Pure.

A rule knows the batch for which the learning rate was chosen, so that nothing accumulates: after any number of changes
the factor is that of the batch now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from elastic.batch.recipes import read_scale_config, world_of
from elastic.errors import PolicyError

Law = Literal["constant", "linear", "sqrt"]


class Scale(NamedTuple):
    """What is done to an optimizer's numbers while it steps."""

    lr: float = 1.0
    """Times the learning rate."""
    kappa: float = 1.0
    """How many times its batch an adaptive optimizer's betas and epsilon are to be for; 1 leaves them as they are."""


class Rule(Protocol):
    """Same arguments, same answer; 1.0 exactly where nothing is to change."""

    def scale(self, global_batch: int, world_size: int) -> Scale: ...


def factor(law: Law, base: int, new: int) -> float:
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
class Constant:
    """The schedule and nothing else. Right while the global batch stays what it is."""

    def scale(self, global_batch: int, world_size: int) -> Scale:
        return Scale()


@dataclass(frozen=True)
class Linear:
    """In proportion to the batch (Goyal et al. 2017): for SGD, up to the batch where it stops working."""

    base_batch: int

    def scale(self, global_batch: int, world_size: int) -> Scale:
        return Scale(factor("linear", self.base_batch, global_batch))


@dataclass(frozen=True)
class Sqrt:
    """With the root of the batch, and nothing but the learning rate."""

    base_batch: int

    def scale(self, global_batch: int, world_size: int) -> Scale:
        return Scale(factor("sqrt", self.base_batch, global_batch))


@dataclass(frozen=True)
class AdamSqrt:
    """With the root of the batch, betas and epsilon with it: :class:`~elastic.rates.adam.AdamScaling`."""

    base_batch: int

    def scale(self, global_batch: int, world_size: int) -> Scale:
        return Scale(factor("sqrt", self.base_batch, global_batch), factor("linear", self.base_batch, global_batch))


@dataclass(frozen=True)
class Table:
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

    def scale(self, global_batch: int, world_size: int) -> Scale:
        below = [size for size in self.rates if size <= world_size]
        if not below:
            raise PolicyError(
                f"rates say nothing about a world_size of {world_size}: the smallest is {min(self.rates)}"
            )
        return Scale(self.rates[max(below)] / self.base)

    @classmethod
    def of_recipe(
        cls, recipe: str | Path | Mapping[Any, Any], base: float, *, ranks_per_node: int = 8, model_parallel: int = 1
    ) -> Table:
        """The ``scale_config`` of a HyperPod recipe, as it is."""
        config = read_scale_config(recipe)
        rates = {}
        for size in config.sizes.values():
            if size.learning_rate is None:
                raise PolicyError(f"{config.name}: scale_config.{size.key} and the recipe state no learning_rate")
            rates[world_of(size.nodes, ranks_per_node, model_parallel)] = size.learning_rate
        return cls(rates, base)
