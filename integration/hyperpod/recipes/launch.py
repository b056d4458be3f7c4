"""How a recipe's job is started: words for ``elastic run`` and for ``hyperpodrun``, and the files they name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from elastic.world.policy import ScalingPolicy
from integration.hyperpod.recipes.recipe import Recipe

POLICY_FILE, SETTINGS_FILE = "policy.yaml", "tieredckpt.yaml"
_LOGS = "/tmp/hyperpod"  # noqa: S108 - where HyperPod's log agent reads


def policy_tree(policy: ScalingPolicy) -> dict[str, Any]:
    """A file for ``elastic run --policy``: the sizes, and what is not as it would be anyway."""
    said, usual = msgspec.structs.asdict(policy), msgspec.structs.asdict(ScalingPolicy())
    tree = {
        name: value for name, value in said.items() if name in ("min_replicas", "max_replicas") or value != usual[name]
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in tree.items()}


def settings_tree(recipe: Recipe) -> dict[str, Any]:
    """A file for ``$TIEREDCKPT_CONFIG``."""
    return recipe.checkpoints.settings(recipe.recovery)


def environ_for(recipe: Recipe) -> dict[str, str]:
    """What a rank's environment has to say besides."""
    environ = {"TIEREDCKPT_CONFIG": SETTINGS_FILE, **recipe.environ}
    if recipe.ahead is not None and recipe.ahead.directory:
        environ["ELASTIC_PREPARED_DIR"] = recipe.ahead.directory
    return environ


def elastic_run(recipe: Recipe, policy: ScalingPolicy, script: Sequence[str]) -> list[str]:
    """On one machine; on several with ``--coordinator`` and ``--secret`` besides."""
    return [
        "elastic",
        "run",
        "--nnodes",
        nodes_word(policy),
        "--nproc",
        str(recipe.devices),
        "--policy",
        POLICY_FILE,
        "--job",
        recipe.name,
        *script,
    ]


def hyperpodrun(recipe: Recipe, script: Sequence[str]) -> list[str]:
    """In a pod: how many there are is the operator's to say, by ``$NNODES`` and by what it sends the agent."""
    restart = ["--inprocess-restart"] if recipe.recovery.in_process else []
    ranks = f"--nproc-per-node={recipe.devices}"
    return ["hyperpodrun", "--nnodes=$(NNODES)", ranks, "--tee=3", f"--log-dir={_LOGS}", *restart, *script]


def nodes_word(policy: ScalingPolicy) -> str:
    least, most = policy.least, max(policy.sizes)
    return str(least) if least == most else f"{least}:{most}"
