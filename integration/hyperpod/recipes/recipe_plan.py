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
_MAX_NODE_COUNTS = 4096


class PlanAtSize(NamedTuple):
    """Plan for one number of nodes."""

    nodes: int
    plan: BatchPlan
    learning_rate: float | None
    stated: bool
    """Whether the recipe has this size. Between two sizes the batch of the smaller one is distributed."""


def plans_at_sizes(
    recipe: Recipe, nodes: Sequence[int] = (), max_microbatch: int | None = None
) -> tuple[PlanAtSize, ...]:
    """Return the plans at these numbers of nodes, or at all sizes that the recipe's policy allows.

    Raise :class:`~elastic.errors.PolicyError` with the limit if one of them is impossible.
    """
    return tuple(_plan_at(recipe, count, max_microbatch) for count in nodes or recipe.policy.sizes)


def disagreements(recipe: Recipe, nodes: Sequence[int] = ()) -> list[RecipeMismatch]:
    """Return the differences between the recipe and the plan, at these sizes or at all."""
    found = recipe.scale.disagreements(ranks_per_node=recipe.devices, model_parallel=recipe.model_parallel)
    wanted = set(nodes or recipe.policy.sizes)
    return [mismatch for mismatch in found if mismatch.nodes in wanted]


def learning_rate_table(recipe: Recipe) -> LRTable | None:
    """Return learning rates by world size, relative to the recipe's at its smallest size.

    None if the recipe has none.
    """
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
    """Parse ``2``, ``1,2,4`` or ``1:16``, once or several times."""
    found: list[int] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        ends = _RANGE.fullmatch(part)
        if not part.isdecimal() and ends is None:
            raise PolicyError(f"--nodes {part!r}: write a number, a list as 1,2,4 or a range as 1:16")
        least, most = (int(ends[1]), int(ends[2])) if ends else (int(part), int(part))
        if not 1 <= least <= most or most - least >= _MAX_NODE_COUNTS:
            raise PolicyError(
                f"--nodes {part!r}: 1 or more, the smaller number first, {_MAX_NODE_COUNTS} at once at the most"
            )
        found += range(least, most + 1)
    return tuple(dict.fromkeys(found))


def _plan_at(recipe: Recipe, nodes: int, max_microbatch: int | None) -> PlanAtSize:
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
    return PlanAtSize(
        nodes, plan, size.learning_rate, nodes in {stated_size.nodes for stated_size in recipe.scale.sizes.values()}
    )


POLICY_FILE, SETTINGS_FILE = "policy.yaml", "tieredckpt.yaml"
_LOGS = "/tmp/hyperpod"  # noqa: S108 - where HyperPod's log agent reads


def policy_document(policy: ScalingPolicy) -> dict[str, Any]:
    """Return a file for ``elastic run --policy``: the sizes, and values other than the defaults."""
    values, defaults = msgspec.structs.asdict(policy), msgspec.structs.asdict(ScalingPolicy())
    tree = {
        name: value
        for name, value in values.items()
        if name in ("min_replicas", "max_replicas") or value != defaults[name]
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in tree.items()}


def settings_document(recipe: Recipe) -> dict[str, Any]:
    """Return a file for ``$TIEREDCKPT_CONFIG``."""
    return recipe.checkpoints.settings_document(recipe.recovery)


def recipe_environ(recipe: Recipe) -> dict[str, str]:
    """Return further variables of a rank's environment."""
    environ = {"TIEREDCKPT_CONFIG": SETTINGS_FILE, **recipe.environ}
    if recipe.prefetch is not None and recipe.prefetch.directory:
        environ["ELASTIC_BATCH_CACHE_DIRECTORY"] = recipe.prefetch.directory
    return environ


def elastic_run_command(recipe: Recipe, policy: ScalingPolicy, script: Sequence[str]) -> list[str]:
    """Return the command for one machine. Several also need ``--coordinator`` and ``--secret``."""
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
    """Return the command of a pod.

    The operator sets the number of nodes, by ``$NNODES`` and its requests to the agent.
    """
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
    """Return the job. ``script`` is for ``hyperpodrun``: a file, or ``-m`` and a module, with arguments.

    With ``memory_size`` each pod has a memory tier of that size; otherwise the node agent's is used. ``pods`` are
    further fields of the job that a recipe lacks.
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
