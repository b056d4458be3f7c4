"""The ``HyperPodPyTorchJob`` of a recipe: its sizes, settings and launcher, in the pods that somebody says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.world.policy import ScalingPolicy
from integration.hyperpod.job import TrainingJob
from integration.hyperpod.memory import Memory
from integration.hyperpod.recipes import launch, sizes
from integration.hyperpod.recipes.recipe import Recipe
from tieredckpt.settings import settings_from

_GPU = "nvidia.com/gpu"


def training_job(
    recipe: Recipe, policy: ScalingPolicy, script: Sequence[str], *, elastic: bool, memory_size: str = "", **pods: Any
) -> TrainingJob:
    """``script`` is for ``hyperpodrun``: a file, or ``-m`` and a module, and its arguments.

    ``memory_size``: the memory tier is in the pods, and so large in each; else it is the node agent's. ``pods`` are
    other fields of the job that a recipe knows nothing of.
    """
    if not elastic:
        policy = sizes.within(policy, recipe.nodes, recipe.nodes, where=recipe.file)
    ahead = recipe.ahead.directory if recipe.ahead is not None else ""
    return TrainingJob(
        **{"name": recipe.name, **{name: value for name, value in pods.items() if value}},
        command=launch.hyperpodrun(recipe, script),
        policy=policy,
        settings=settings_from(launch.settings_tree(recipe)),
        memory=Memory.EMBEDDED if memory_size else Memory.NODE,
        memory_size=memory_size,
        nproc=str(recipe.devices),
        resources={_GPU: recipe.devices},
        environment={"ELASTIC_PREPARED_DIR": ahead} if ahead else {},
    )
