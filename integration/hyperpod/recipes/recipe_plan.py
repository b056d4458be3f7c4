"""The plan of a recipe: batch and learning rate at every size, launch arguments, job resource. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from elastic.batch_scaling.batch_plan import BatchPlan
from elastic.batch_scaling.lr_rules import LRTable
from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.job_manifest import MemoryLocation, TrainingJob
from integration.hyperpod.recipes import recipe as recipe_module
from integration.hyperpod.recipes.recipe import Recipe
from integration.hyperpod.recipes.scale_config import RecipeMismatch, data_parallel_size
from tieredckpt.settings import settings_from_mapping

_RANGE = re.compile(r"([0-9]{1,6}):([0-9]{1,6})", re.ASCII)
_MOST = 4096


class PlanAtSize(NamedTuple):
    """What holds at one number of nodes."""

    nodes: int
    plan: BatchPlan
    learning_rate: float | None
    stated: bool
    """Whether the recipe has this size; between two, the batch of the smaller one is shared out."""


def plans_at_sizes(
    recipe: Recipe, nodes: Sequence[int] = (), max_microbatch: int | None = None
) -> tuple[PlanAtSize, ...]:
    """Return the plans at these numbers of nodes, or at all sizes that the recipe's policy allows.

    Raises :class:`~elastic.errors.PolicyError`, which names the limit, where one of them is impossible.
    """
    return tuple(_at(recipe, one, max_microbatch) for one in nodes or recipe.policy.sizes)


def disagreements(recipe: Recipe, nodes: Sequence[int] = ()) -> list[RecipeMismatch]:
    """What the recipe states otherwise than it is planned, at these sizes or at all."""
    found = recipe.scale.disagreements(ranks_per_node=recipe.devices, model_parallel=recipe.model_parallel)
    wanted = set(nodes or recipe.policy.sizes)
    return [one for one in found if one.nodes in wanted]


def learning_rate_table(recipe: Recipe) -> LRTable | None:
    """Learning rates by world, on top of the recipe's at its smallest size; ``None`` where it states none at all."""
    stated = {size.nodes: size.learning_rate for size in recipe.scale.sizes.values()}
    if all(rate is None for rate in stated.values()):
        return None
    missing = [nodes for nodes, rate in stated.items() if rate is None]
    if missing:
        raise PolicyError(f"{recipe.file}: scale_config.{missing[0]} and the recipe state no learning_rate")
    by_world = {
        data_parallel_size(nodes, recipe.devices, recipe.model_parallel): rate
        for nodes, rate in stated.items()
        if rate is not None
    }
    base = by_world[min(by_world)]
    try:
        return LRTable(by_world, base)
    except PolicyError as error:
        raise PolicyError(f"{recipe.file}: learning_rate: {error}") from error


def parse_node_counts(texts: Sequence[str]) -> tuple[int, ...]:
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


def _at(recipe: Recipe, nodes: int, max_microbatch: int | None) -> PlanAtSize:
    try:
        size = recipe.scale.size_for(nodes)
        plan = recipe.scale.plan(
            nodes,
            ranks_per_node=recipe.devices,
            model_parallel=recipe.model_parallel,
            max_microbatch=max_microbatch,
        )
    except PolicyError as error:
        text = str(error)
        raise PolicyError(text if text.startswith(recipe.file) else f"{recipe.file}: {nodes} nodes: {text}") from error
    return PlanAtSize(nodes, plan, size.learning_rate, nodes in {one.nodes for one in recipe.scale.sizes.values()})


POLICY_FILE, SETTINGS_FILE = "policy.yaml", "tieredckpt.yaml"
_LOGS = "/tmp/hyperpod"  # noqa: S108 - where HyperPod's log agent reads


def policy_document(policy: ScalingPolicy) -> dict[str, Any]:
    """A file for ``elastic run --policy``: the sizes, and what is not as it would be anyway."""
    said, usual = msgspec.structs.asdict(policy), msgspec.structs.asdict(ScalingPolicy())
    tree = {
        name: value for name, value in said.items() if name in ("min_replicas", "max_replicas") or value != usual[name]
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in tree.items()}


def settings_document(recipe: Recipe) -> dict[str, Any]:
    """A file for ``$TIEREDCKPT_CONFIG``."""
    return recipe.checkpoints.settings_document(recipe.recovery)


def recipe_environ(recipe: Recipe) -> dict[str, str]:
    """What a rank's environment has to say besides."""
    environ = {"TIEREDCKPT_CONFIG": SETTINGS_FILE, **recipe.environ}
    if recipe.prefetch is not None and recipe.prefetch.directory:
        environ["ELASTIC_BATCH_CACHE_DIRECTORY"] = recipe.prefetch.directory
    return environ


def elastic_run_command(recipe: Recipe, policy: ScalingPolicy, script: Sequence[str]) -> list[str]:
    """On one machine; on several with ``--coordinator`` and ``--secret`` besides."""
    return [
        "elastic",
        "run",
        "--nnodes",
        nodes_option(policy),
        "--nproc",
        str(recipe.devices),
        "--policy",
        POLICY_FILE,
        "--job",
        recipe.name,
        *script,
    ]


def hyperpodrun_command(recipe: Recipe, script: Sequence[str]) -> list[str]:
    """In a pod: how many there are is the operator's to say, by ``$NNODES`` and by what it sends the agent."""
    restart = ["--inprocess-restart"] if recipe.recovery.in_process else []
    ranks = f"--nproc-per-node={recipe.devices}"
    return ["hyperpodrun", "--nnodes=$(NNODES)", ranks, "--tee=3", f"--log-dir={_LOGS}", *restart, *script]


def nodes_option(policy: ScalingPolicy) -> str:
    least, most = policy.smallest_size, max(policy.sizes)
    return str(least) if least == most else f"{least}:{most}"


_GPU = "nvidia.com/gpu"


def recipe_training_job(
    recipe: Recipe, policy: ScalingPolicy, script: Sequence[str], *, elastic: bool, memory_size: str = "", **pods: Any
) -> TrainingJob:
    """``script`` is for ``hyperpodrun``: a file, or ``-m`` and a module, and its arguments.

    ``memory_size``: the memory tier is in the pods, and so large in each; else it is the node agent's. ``pods`` are
    other fields of the job that a recipe knows nothing of.
    """
    if not elastic:
        policy = recipe_module.limit_nodes(policy, recipe.nodes, recipe.nodes, where=recipe.file)
    ahead = recipe.prefetch.directory if recipe.prefetch is not None else ""
    return TrainingJob(
        **{"name": recipe.name, **{name: value for name, value in pods.items() if value}},
        command=hyperpodrun_command(recipe, script),
        policy=policy,
        settings=settings_from_mapping(settings_document(recipe)),
        memory=MemoryLocation.EMBEDDED if memory_size else MemoryLocation.NODE,
        memory_size=memory_size,
        nproc=str(recipe.devices),
        resources={_GPU: recipe.devices},
        environment={"ELASTIC_BATCH_CACHE_DIRECTORY": ahead} if ahead else {},
    )
