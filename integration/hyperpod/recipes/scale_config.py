"""A training recipe's ``scale_config``: read, planned, compared with BatchPlan.

A size overrides parts of its recipe, so missing values come from the recipe. Values missing in both are planned. Keys
that concern neither batch nor learning rate are ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from elastic.batch_scaling.batch_plan import BatchPlan
from elastic.batch_scaling.lr_rules import LRTable
from elastic.errors import PolicyError
from tieredckpt.bounded_yaml import load_yaml

_ARGS = ("training_config", "training_args")
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class UnevenBatch:
    """``uneven_batch``: ``small_ranks`` ranks have the small number of samples, all others the large one."""

    small_ranks: int
    small: int
    large: int

    def total(self, world_size: int) -> int:
        return self.small * self.small_ranks + self.large * (world_size - self.small_ranks)

    def split(self, world_size: int) -> Counter[int]:
        """Return the number of ranks, by number of samples."""
        return +Counter({self.small: self.small_ranks}) + Counter({self.large: world_size - self.small_ranks})

    def __str__(self) -> str:
        return f"{self.small} samples on {self.small_ranks} ranks, {self.large} on the others"


@dataclass(frozen=True)
class RecipeSize:
    """Values of a recipe for one number of nodes."""

    key: int
    nodes: int
    global_batch: int
    microbatch: int | None
    """``micro_train_batch_size``; None if neither the size nor the recipe has it."""
    learning_rate: float | None
    uneven: UnevenBatch | None


@dataclass(frozen=True)
class RecipeMismatch:
    """A number of a recipe that is impossible or differs from the plan."""

    nodes: int
    field: str
    stated: object
    planned: object
    why: str

    def __str__(self) -> str:
        return f"scale_config.{self.nodes}: {self.field} is {self.stated}, planned is {self.planned}: {self.why}"


@dataclass(frozen=True)
class ScaleConfig:
    """The sizes of a recipe, by number of nodes, ascending."""

    name: str
    sizes: Mapping[int, RecipeSize]

    @property
    def max_microbatch(self) -> int | None:
        """Return the largest microbatch of any size, which is known to fit into a device."""
        return max((size.microbatch for size in self.sizes.values() if size.microbatch is not None), default=None)

    def size_for(self, nodes: int) -> RecipeSize:
        """Return the size for this number of nodes. Each size applies up to the next larger one."""
        below = [key for key in self.sizes if key <= nodes]
        if not below:
            raise PolicyError(
                f"{self.name}: scale_config has no size for {nodes} nodes, its smallest size is {min(self.sizes)}"
            )
        return self.sizes[max(below)]

    def plan(
        self, nodes: int, *, ranks_per_node: int = 8, model_parallel: int = 1, max_microbatch: int | None = None
    ) -> BatchPlan:
        """Return the plan for any number of nodes, also between two sizes.

        The batch of the table is distributed exactly. Passes have at most ``max_microbatch`` samples, by default the
        largest microbatch of the recipe, or one sample if it has none.
        """
        size = self.size_for(nodes)
        limit = self.max_microbatch or 1 if max_microbatch is None else max_microbatch
        return BatchPlan(size.global_batch, data_parallel_size(nodes, ranks_per_node, model_parallel), limit)

    def disagreements(self, *, ranks_per_node: int = 8, model_parallel: int = 1) -> list[RecipeMismatch]:
        """Return every number that is inconsistent or differs from :meth:`plan`."""
        found = []
        for size in self.sizes.values():
            world = data_parallel_size(size.nodes, ranks_per_node, model_parallel)
            found += _inconsistencies(size, world)
            try:
                plan = self.plan(size.nodes, ranks_per_node=ranks_per_node, model_parallel=model_parallel)
            except PolicyError as impossible:
                found.append(
                    RecipeMismatch(size.key, "train_batch_size", size.global_batch, "nothing", str(impossible))
                )
            else:
                found += _plan_differences(size, plan)
        return found


def data_parallel_size(nodes: int, ranks_per_node: int, model_parallel: int = 1) -> int:
    """Return the number of data-parallel ranks on these nodes."""
    ranks = nodes * ranks_per_node
    if model_parallel < 1 or ranks % model_parallel:
        raise PolicyError(
            f"model_parallel is {model_parallel}: it must divide {ranks} ranks, {ranks_per_node} on each of "
            f"{nodes} nodes"
        )
    return ranks // model_parallel


def read_scale_config(recipe: str | Path | Mapping[Any, Any]) -> ScaleConfig:
    """Read a recipe's file or content.

    Raise :class:`~elastic.errors.PolicyError` with the missing or invalid values.
    """
    if isinstance(recipe, Mapping):
        return _scale_config("recipe", recipe)
    path = Path(recipe)
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        raise PolicyError(f"{path} is not YAML: {wrong}") from wrong
    if not isinstance(content, Mapping):
        raise PolicyError(f"{path} holds no recipe: its top is to be a mapping with scale_config")
    return _scale_config(path.name, content)


def lr_table_of_recipe(
    recipe: str | Path | Mapping[Any, Any], base: float, *, ranks_per_node: int = 8, model_parallel: int = 1
) -> LRTable:
    """Return the learning rates of a recipe's ``scale_config`` by world size.

    ``base`` is the learning rate with which the optimizer was created.
    """
    config = read_scale_config(recipe)
    rates = {}
    for size in config.sizes.values():
        if size.learning_rate is None:
            raise PolicyError(f"{config.name}: scale_config.{size.key} and the recipe state no learning_rate")
        rates[data_parallel_size(size.nodes, ranks_per_node, model_parallel)] = size.learning_rate
    return LRTable(rates, base)


def _scale_config(name: str, recipe: Mapping[Any, Any]) -> ScaleConfig:
    table = recipe.get("scale_config")
    if not isinstance(table, Mapping) or not table:
        raise PolicyError(f"{name}: scale_config is missing or empty: it sets the batch at each number of nodes")
    sizes = {}
    for key, override in table.items():
        where = f"{name}: scale_config.{key}"
        if not isinstance(override, Mapping):
            raise PolicyError(f"{where} is {override!r}: it must be a mapping")
        size = _size(where, key, override, recipe)
        if size.key in sizes:
            raise PolicyError(f"{where} occurs twice")
        sizes[size.key] = size
    return ScaleConfig(name, dict(sorted(sizes.items())))


def _size(where: str, key: object, override: Mapping[Any, Any], recipe: Mapping[Any, Any]) -> RecipeSize:
    count = _whole(where, "key", key)
    nodes = _at(override, ("trainer", "num_nodes"))
    batch = _stated(override, recipe, "train_batch_size")
    if batch is None:
        raise PolicyError(f"{where}.training_config.training_args.train_batch_size is missing, and so in the recipe")
    micro = _stated(override, recipe, "micro_train_batch_size")
    rate = _stated(override, recipe, "learning_rate")
    return RecipeSize(
        key=count,
        nodes=count if nodes is None else _whole(where, "trainer.num_nodes", nodes),
        global_batch=_whole(where, "train_batch_size", batch),
        microbatch=None if micro is None else _whole(where, "micro_train_batch_size", micro),
        learning_rate=None if rate is None else _rate(where, rate),
        uneven=_uneven(where, _stated(override, recipe, "uneven_batch")),
    )


def _uneven(where: str, stated: object) -> UnevenBatch | None:
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        raise PolicyError(f"{where} uneven_batch is {stated!r}: it must be a mapping")
    if not stated.get("use_uneven_batch"):
        return None
    names = ("num_dp_groups_with_small_batch_size", "small_local_batch_size", "large_local_batch_size")
    return UnevenBatch(*(_whole(where, f"uneven_batch.{name}", stated.get(name), least=0) for name in names))


def _stated(override: Mapping[Any, Any], recipe: Mapping[Any, Any], name: str) -> object:
    own = _at(override, (*_ARGS, name))
    return _at(recipe, (*_ARGS, name)) if own is None else own


def _at(mapping: object, path: tuple[str, ...]) -> object:
    for name in path:
        mapping = mapping.get(name) if isinstance(mapping, Mapping) else None
    return mapping


def _whole(where: str, field: str, value: object, *, least: int = 1) -> int:
    number = _number(int, value)
    if number is None or number < least:
        raise PolicyError(f"{where} {field} is {value!r}: it must be a whole number, {least} or more")
    return number


def _rate(where: str, value: object) -> float:
    number = _number(float, value)
    if number is None or not math.isfinite(number) or number < 0:
        raise PolicyError(f"{where} learning_rate is {value!r}: it must be a number, 0 or more")
    return number


def _number(kind: type[_Number], value: object) -> _Number | None:
    """Return a number, or None. YAML parses ``1e-4`` and quoted keys as text, so text is accepted."""
    if isinstance(value, bool) or (isinstance(value, float) and kind is int):
        return None
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return kind(value)
    except ValueError:
        return None


def _inconsistencies(size: RecipeSize, world: int) -> list[RecipeMismatch]:
    found = []
    if size.nodes != size.key:
        found.append(RecipeMismatch(size.key, "trainer.num_nodes", size.nodes, size.key, "the size is another one"))
    if size.uneven is not None:
        if size.uneven.small_ranks > world:
            why = f"there are only {world} ranks"
            found.append(
                RecipeMismatch(size.key, "num_dp_groups_with_small_batch_size", size.uneven.small_ranks, world, why)
            )
        elif (total := size.uneven.total(world)) != size.global_batch:
            why = f"that is what the uneven batches of {world} ranks add up to"
            found.append(RecipeMismatch(size.key, "train_batch_size", size.global_batch, total, why))
    elif size.global_batch % world:
        small, why = size.global_batch // world, f"{size.global_batch} samples are not the same number on {world} ranks"
        even = UnevenBatch(world - size.global_batch % world, small, small + 1)
        found.append(RecipeMismatch(size.key, "uneven_batch", None, even, why))
    return found


def _plan_differences(size: RecipeSize, plan: BatchPlan) -> list[RecipeMismatch]:
    found = []
    if size.uneven is not None:
        planned = Counter({quota.samples: quota.ranks for quota in plan.quotas})
        if size.uneven.split(plan.world_size) != planned:
            even = UnevenBatch(planned[plan.min_rank_samples], plan.min_rank_samples, plan.max_rank_samples)
            found.append(RecipeMismatch(size.key, "uneven_batch", size.uneven, even, "no split is more even"))
    elif size.microbatch is not None and size.microbatch != plan.microbatch_size:
        why = f"of {plan.max_rank_samples} samples a rank, at most {plan.max_microbatch} in a pass"
        found.append(RecipeMismatch(size.key, "micro_train_batch_size", size.microbatch, plan.microbatch_size, why))
    return found
