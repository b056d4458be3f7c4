"""What ``elastic recipe`` prints, as values and for people."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from elastic.batch import show
from elastic.world.policy import ScalingPolicy
from integration.hyperpod.recipes import launch, plan
from integration.hyperpod.recipes.plan import AtSize
from integration.hyperpod.recipes.recipe import Recipe
from tieredckpt.cli.screen import table

SCRIPT = ("train.py",)


def as_json(recipe: Recipe, policy: ScalingPolicy, *, elastic: bool) -> dict[str, Any]:
    rates = plan.rates(recipe)
    return {
        "file": recipe.file,
        "job": recipe.name,
        "title": recipe.title,
        "kind": recipe.kind.value,
        "model": recipe.model,
        "ranks_per_node": recipe.devices,
        "model_parallel": recipe.model_parallel,
        "elastic": elastic,
        "nodes": recipe.nodes,
        "sizes": list(policy.sizes),
        "policy": launch.policy_tree(policy),
        "settings": launch.settings_tree(recipe),
        "recovery": dataclasses.asdict(recipe.recovery),
        "training": dataclasses.asdict(recipe.training),
        "rates_by_world": None if rates is None else {str(world): rate for world, rate in rates.rates.items()},
        "ahead": None if recipe.ahead is None else dataclasses.asdict(recipe.ahead),
        "environ": launch.environ_for(recipe),
        "launch": {
            "elastic": launch.elastic_run(recipe, policy, SCRIPT),
            "hyperpodrun": launch.hyperpodrun(recipe, SCRIPT),
        },
        "notes": list(recipe.notes),
        "left_alone": list(recipe.left_alone),
    }


def as_text(out: Console, recipe: Recipe, policy: ScalingPolicy, *, elastic: bool) -> None:
    out.print(f"[bold]{escape(recipe.title)}[/]")
    switch = "elastic" if elastic else f"{recipe.nodes} nodes (elastic with --elastic, or with --nodes MIN:MAX)"
    rows = [
        ("job", recipe.name),
        ("model", recipe.model or "said elsewhere"),
        ("kind", f"{recipe.kind.value}, {recipe.training.algorithm}, {recipe.training.method}"),
        ("sizes", f"{', '.join(map(str, policy.sizes))} nodes of {recipe.devices} ranks; {switch}"),
    ]
    if recipe.model_parallel > 1:
        rows.append(("one model", f"{recipe.model_parallel} ranks"))
    out.print(table(("", " "), [(name, escape(value)) for name, value in rows]))
    out.print()
    out.print(plans_table(plan.at_sizes(recipe, policy.sizes)))
    for name, tree in (
        (launch.POLICY_FILE, launch.policy_tree(policy)),
        (launch.SETTINGS_FILE, launch.settings_tree(recipe)),
    ):
        out.print(f"\n[bold]{name}[/]")
        out.print(escape(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None).rstrip()))
    environ = " ".join(f"{name}={shlex.quote(value)}" for name, value in launch.environ_for(recipe).items())
    out.print("\n[bold]start[/]")
    out.print(escape(f"{environ} {shlex.join(launch.elastic_run(recipe, policy, SCRIPT))}"))
    out.print(escape(" ".join(launch.hyperpodrun(recipe, SCRIPT))))


def plans_json(plans: Sequence[AtSize]) -> list[dict[str, Any]]:
    return [
        {"nodes": one.nodes, "stated": one.stated, "learning_rate": one.learning_rate, **show.as_json(one.plan)}
        for one in plans
    ]


def plans_table(plans: Sequence[AtSize]) -> Any:
    numbers = ("NODES", "RANKS", "BATCH", "PASSES", "LEARNING RATE")
    rows = [
        (
            str(one.nodes) + ("" if one.stated else " *"),
            str(one.plan.world_size),
            str(one.plan.global_batch),
            str(one.plan.accumulation),
            "" if one.learning_rate is None else f"{one.learning_rate:g}",
            " + ".join(f"{quota.ranks} x {quota.samples}" for quota in one.plan.quotas),
        )
        for one in plans
    ]
    return table((*numbers, "SAMPLES OF A RANK"), rows, right=numbers)
