"""Batch and learning rate of a recipe at every number of nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from elastic.batch.plan import BatchPlan
from elastic.batch.recipes import Disagreement, world_of
from elastic.errors import PolicyError
from elastic.rates.rules import Table
from integration.hyperpod.recipes.recipe import Recipe

_RANGE = re.compile(r"([0-9]{1,6}):([0-9]{1,6})", re.ASCII)
_MOST = 4096


class AtSize(NamedTuple):
    """What holds at one number of nodes."""

    nodes: int
    plan: BatchPlan
    learning_rate: float | None
    stated: bool
    """Whether the recipe has this size; between two, the batch of the smaller one is shared out."""


def at_sizes(recipe: Recipe, nodes: Sequence[int] = ()) -> tuple[AtSize, ...]:
    """At these, or at all sizes that the recipe's policy allows; or the limit that makes one impossible."""
    return tuple(_at(recipe, one) for one in nodes or recipe.policy.sizes)


def disagreements(recipe: Recipe, nodes: Sequence[int] = ()) -> list[Disagreement]:
    """What the recipe states otherwise than it is planned, at these sizes or at all."""
    found = recipe.scale.disagreements(ranks_per_node=recipe.devices, model_parallel=recipe.model_parallel)
    wanted = set(nodes or recipe.policy.sizes)
    return [one for one in found if one.nodes in wanted]


def rates(recipe: Recipe) -> Table | None:
    """Learning rates by world, on top of the recipe's at its smallest size; ``None`` where it states none at all."""
    stated = {size.nodes: size.learning_rate for size in recipe.scale.sizes.values()}
    if all(rate is None for rate in stated.values()):
        return None
    missing = [nodes for nodes, rate in stated.items() if rate is None]
    if missing:
        raise PolicyError(f"{recipe.file}: scale_config.{missing[0]} and the recipe state no learning_rate")
    by_world = {
        world_of(nodes, recipe.devices, recipe.model_parallel): rate
        for nodes, rate in stated.items()
        if rate is not None
    }
    base = by_world[min(by_world)]
    try:
        return Table(by_world, base)
    except PolicyError as error:
        raise PolicyError(f"{recipe.file}: learning_rate: {error}") from error


def numbers_of_nodes(texts: Sequence[str]) -> tuple[int, ...]:
    """``2``, ``1,2,4`` or ``1:16``, once or several times."""
    found: list[int] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        ends = _RANGE.fullmatch(part)
        if not part.isdecimal() and ends is None:
            raise PolicyError(f"--nodes {part!r}: write a number, a list as 1,2,4 or a range as 1:16")
        least, most = (int(ends[1]), int(ends[2])) if ends else (int(part), int(part))
        if not 1 <= least <= most or most - least >= _MOST:
            raise PolicyError(f"--nodes {part!r}: 1 or more, the smaller number first, {_MOST} at once at the most")
        found += range(least, most + 1)
    return tuple(dict.fromkeys(found))


def _at(recipe: Recipe, nodes: int) -> AtSize:
    try:
        size = recipe.scale.size_for(nodes)
        plan = recipe.scale.plan(nodes, ranks_per_node=recipe.devices, model_parallel=recipe.model_parallel)
    except PolicyError as error:
        text = str(error)
        raise PolicyError(text if text.startswith(recipe.file) else f"{recipe.file}: {nodes} nodes: {text}") from error
    return AtSize(nodes, plan, size.learning_rate, nodes in {one.nodes for one in recipe.scale.sizes.values()})
