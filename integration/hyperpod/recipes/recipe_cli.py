"""``elastic recipe``: show, plan, job."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml
from rich.console import Console
from rich.markup import escape

from elastic.cli import plan
from elastic.cli.common import ElasticScreen, pass_elastic_screen
from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.job_manifest import job_manifest, manifest_yaml
from integration.hyperpod.recipes import recipe, recipe_plan
from integration.hyperpod.recipes.recipe import Recipe, read_recipe
from integration.hyperpod.recipes.recipe_plan import PlanAtSize, recipe_training_job
from tieredckpt.cli.command_output import text_table
from tieredckpt.cli.common_options import output_options
from tieredckpt.cli.help_format import SuggestingGroup

EXAMPLE_SCRIPT = ("train.py",)


def recipe_json(recipe: Recipe, policy: ScalingPolicy, *, elastic: bool) -> dict[str, Any]:
    rates = recipe_plan.learning_rate_table(recipe)
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
        "policy": recipe_plan.policy_document(policy),
        "settings": recipe_plan.settings_document(recipe),
        "recovery": dataclasses.asdict(recipe.recovery),
        "training": dataclasses.asdict(recipe.training),
        "rates_by_world": None if rates is None else {str(world): rate for world, rate in rates.rates.items()},
        "ahead": None if recipe.prefetch is None else dataclasses.asdict(recipe.prefetch),
        "environ": recipe_plan.recipe_environ(recipe),
        "launch": {
            "elastic": recipe_plan.elastic_run_command(recipe, policy, EXAMPLE_SCRIPT),
            "hyperpodrun": recipe_plan.hyperpodrun_command(recipe, EXAMPLE_SCRIPT),
        },
        "notes": list(recipe.notes),
        "left_alone": list(recipe.unread_keys),
    }


def print_recipe(out: Console, recipe: Recipe, policy: ScalingPolicy, *, elastic: bool) -> None:
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
    out.print(text_table(("", " "), [(name, escape(value)) for name, value in rows]))
    out.print()
    out.print(plans_table(recipe_plan.plans_at_sizes(recipe, policy.sizes)))
    for name, tree in (
        (recipe_plan.POLICY_FILE, recipe_plan.policy_document(policy)),
        (recipe_plan.SETTINGS_FILE, recipe_plan.settings_document(recipe)),
    ):
        out.print(f"\n[bold]{name}[/]")
        out.print(escape(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None).rstrip()))
    environ = " ".join(f"{name}={shlex.quote(value)}" for name, value in recipe_plan.recipe_environ(recipe).items())
    out.print("\n[bold]start[/]")
    out.print(escape(f"{environ} {shlex.join(recipe_plan.elastic_run_command(recipe, policy, EXAMPLE_SCRIPT))}"))
    out.print(escape(" ".join(recipe_plan.hyperpodrun_command(recipe, EXAMPLE_SCRIPT))))


def plans_json(plans: Sequence[PlanAtSize], rank: int | None = None) -> list[dict[str, Any]]:
    return [
        {
            "nodes": size.nodes,
            "stated": size.stated,
            "learning_rate": size.learning_rate,
            **plan.batch_plan_json(size.plan),
        }
        | ({} if rank is None else {"share": plan.rank_plan_json(size.plan.for_rank(rank))})
        for size in plans
    ]


def plans_table(plans: Sequence[PlanAtSize]) -> Any:
    numbers = ("NODES", "RANKS", "BATCH", "PASSES", "LEARNING RATE")
    rows = [
        (
            str(size.nodes) + ("" if size.stated else " *"),
            str(size.plan.world_size),
            str(size.plan.global_batch),
            str(size.plan.accumulation_steps),
            "" if size.learning_rate is None else f"{size.learning_rate:g}",
            " + ".join(f"{quota.ranks} x {quota.samples}" for quota in size.plan.quotas),
        )
        for size in plans
    ]
    return text_table((*numbers, "SAMPLES OF A RANK"), rows, right=numbers)


_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group("recipe", cls=SuggestingGroup, short_help="Inspect HyperPod recipes, convert them to jobs.")
def recipe_group() -> None:
    """Inspect HyperPod recipe files and convert them to jobs."""


def _reads(command: _Command) -> _Command:
    for option in reversed(
        (
            click.argument("file", type=click.Path(path_type=Path)),
            click.option("--nproc", type=click.IntRange(1, 1024), help="Ranks of a node (default the recipe's, or 8)."),
            click.option("--nodes", multiple=True, metavar="N[:MAX]", help="Numbers of nodes (default the recipe's)."),
        )
    ):
        command = option(command)
    return output_options(command)


@recipe_group.command("show", short_help="Show sizes, batches and learning rates of FILE.")
@_reads
@click.option("--elastic", is_flag=True, help="Make the job elastic even if the recipe does not.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Directory for policy.yaml and tieredckpt.yaml.")
@pass_elastic_screen
def recipe_show_command(
    screen: ElasticScreen, /, *, file: Path, nproc: int | None, nodes: tuple[str, ...], elastic: bool, out: Path | None
) -> int:
    """Show FILE in this system's terms: sizes, batches, learning rates, settings, and how to start it."""
    found, policy, on = _sized(file, nproc, nodes, elastic=elastic)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _write(out / recipe_plan.POLICY_FILE, recipe_plan.policy_document(policy))
        _write(out / recipe_plan.SETTINGS_FILE, recipe_plan.settings_document(found))
    screen.result(recipe_json(found, policy, elastic=on), lambda c: print_recipe(c, found, policy, elastic=on))
    _remarks(screen, found)
    return 0


@recipe_group.command("plan", short_help="Show how every size of FILE splits the batch.")
@_reads
@click.option("--max-microbatch", type=int, help="Largest number of samples in a forward pass (default the recipe's).")
@click.option("--rank", type=int, help="Show every pass of this rank.")
@pass_elastic_screen
def recipe_plan_command(
    screen: ElasticScreen,
    /,
    *,
    file: Path,
    nproc: int | None,
    nodes: tuple[str, ...],
    max_microbatch: int | None,
    rank: int | None,
) -> int:
    """Show how ranks share the batch at every size of FILE, or at --nodes.

    Sizes that FILE does not state have a star. If FILE states another plan, the differences follow and the exit code
    is 1.
    """
    found = read_recipe(file, devices=nproc)
    wanted = recipe_plan.parse_node_counts(nodes)
    plans = recipe_plan.plans_at_sizes(found, wanted, max_microbatch)
    wrong = [str(one) for one in recipe_plan.disagreements(found, wanted)]
    value = {"file": found.file, "plans": plans_json(plans, rank), "disagreements": wrong}
    screen.result(value, lambda out: _print_plans(out, plans, rank))
    for text in wrong:
        screen.info(text)
    return 1 if wrong else 0


def _print_plans(out: Console, plans: Sequence[PlanAtSize], rank: int | None) -> None:
    out.print(plans_table(plans))
    if rank is not None:
        plan.print_rank_plans(out, [one.plan for one in plans], rank)


@recipe_group.command(
    "job", short_help="Write the HyperPodPyTorchJob of FILE.", context_settings={"ignore_unknown_options": True}
)
@_reads
@click.option("--elastic", is_flag=True, help="Make the job elastic even if the recipe does not.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="File to write (default standard output).")
@click.option(
    "--image", required=True, help="Container image; must contain torch, tieredckpt and hyperpod-elastic-agent."
)
@click.option("--name", default="", help="Name of the job (default the recipe's).")
@click.option("--namespace", default="default", show_default=True, help="Kubernetes namespace.")
@click.option("--queue", default="", help="Local queue of Kueue.")
@click.option("--instance", default="", metavar="TYPE", help="Instance type to run on, e.g. ml.p5.48xlarge.")
@click.option(
    "--secret", default="", metavar="NAME", help="Kubernetes Secret whose key `secret` authenticates the job's nodes."
)
@click.option(
    "--memory", default="", metavar="SIZE", help="Memory budget of each pod's agent (default the node agent's)."
)
@click.argument("script", nargs=-1, type=click.UNPROCESSED, required=True)
@pass_elastic_screen
def recipe_job_command(
    screen: ElasticScreen,
    /,
    *,
    file: Path,
    nproc: int | None,
    nodes: tuple[str, ...],
    elastic: bool,
    out: Path | None,
    image: str,
    script: tuple[str, ...],
    **asked: str,
) -> int:
    """Write the HyperPodPyTorchJob of FILE, whose pods run SCRIPT (or `-- -m MODULE`) with its arguments."""
    found, policy, on = _sized(file, nproc, nodes, elastic=elastic)
    made = job_manifest(
        recipe_training_job(
            found,
            policy,
            script,
            elastic=on,
            memory_size=asked["memory"],
            image=image,
            name=asked["name"],
            namespace=asked["namespace"],
            secret=asked["secret"],
            queue=asked["queue"],
            instance_type=asked["instance"],
        )
    )
    if screen.as_json:
        screen.result(made, lambda _: None)
    elif out is None:
        sys.stdout.write(manifest_yaml(made))
    if out is not None:
        out.write_text(manifest_yaml(made), encoding="utf-8")
    _remarks(screen, found)
    return 0


def _sized(file: Path, nproc: int | None, nodes: Sequence[str], *, elastic: bool) -> tuple[Recipe, ScalingPolicy, bool]:
    """Return the recipe, its policy for the requested nodes, and whether the job is elastic."""
    found = read_recipe(file, devices=nproc)
    wanted = recipe_plan.parse_node_counts(nodes)
    policy = found.policy
    if wanted:
        policy = recipe.limit_nodes(policy, min(wanted), max(wanted), where=f"{found.file}: --nodes")
    if elastic and len(policy.sizes) == 1:
        raise PolicyError(f"{found.file}: --elastic: it has one size, {policy.smallest_size} nodes")
    on = elastic or found.elastic or len(wanted) > 1
    if not on:
        size = wanted[0] if wanted else found.nodes
        if not found.policy.allows(size):
            raise PolicyError(f"{found.file}: {size} nodes is none of its sizes {list(found.policy.sizes)}")
    recipe_plan.plans_at_sizes(found, policy.sizes)
    return found, policy, on


def _remarks(screen: ElasticScreen, found: Recipe) -> None:
    if screen.as_json:
        return
    for note in found.notes:
        screen.info(note)
    if found.unread_keys:
        screen.err.print(f"left alone, as others' concern: {', '.join(found.unread_keys)}", markup=False)


def _write(path: Path, tree: Any) -> None:
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
