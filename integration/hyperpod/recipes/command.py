"""``elastic recipe``: what a HyperPod recipe comes to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from elastic.cli.options import pass_screen
from elastic.cli.screen import ElasticScreen
from elastic.errors import PolicyError
from elastic.world.policy import ScalingPolicy
from integration.hyperpod.job import as_yaml, resource
from integration.hyperpod.recipes import launch, plan, show, sizes
from integration.hyperpod.recipes.reading import read_recipe
from integration.hyperpod.recipes.recipe import Recipe
from integration.hyperpod.recipes.resource import training_job
from tieredckpt.cli.options import printing

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group("recipe", short_help="What a HyperPod recipe comes to.")
def recipe() -> None:
    """Read HyperPod's recipe files as they are."""


def _reads(command: _Command) -> _Command:
    for option in reversed(
        (
            click.argument("file", type=click.Path(path_type=Path)),
            click.option("--nproc", type=click.IntRange(1, 1024), help="Ranks of a node. [what the recipe says, or 8]"),
            click.option("--nodes", multiple=True, metavar="N[:MAX]", help="Other numbers of nodes than the recipe's."),
        )
    ):
        command = option(command)
    return printing(command)


@recipe.command("show")
@_reads
@click.option("--elastic", is_flag=True, help="Elastic, though the recipe leaves it switched off.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Also write policy.yaml and tieredckpt.yaml there.")
@pass_screen
def show_command(
    screen: ElasticScreen, /, *, file: Path, nproc: int | None, nodes: tuple[str, ...], elastic: bool, out: Path | None
) -> int:
    """Show FILE in this system's terms: sizes, batches, learning rates, settings, and how to start it."""
    found, policy, on = _sized(file, nproc, nodes, elastic=elastic)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _write(out / launch.POLICY_FILE, launch.policy_tree(policy))
        _write(out / launch.SETTINGS_FILE, launch.settings_tree(found))
    screen.result(show.as_json(found, policy, elastic=on), lambda c: show.as_text(c, found, policy, elastic=on))
    _remarks(screen, found)
    return 0


@recipe.command("plan")
@_reads
@pass_screen
def plan_command(screen: ElasticScreen, /, *, file: Path, nproc: int | None, nodes: tuple[str, ...]) -> int:
    """Show who computes what at every size of FILE, or at --nodes; sizes between the stated ones have a star.

    What FILE states otherwise than it is planned is said below, and the exit code is then 1.
    """
    found = read_recipe(file, devices=nproc)
    wanted = plan.numbers_of_nodes(nodes)
    plans = plan.at_sizes(found, wanted)
    wrong = [str(one) for one in plan.disagreements(found, wanted)]
    value = {"file": found.file, "plans": show.plans_json(plans), "disagreements": wrong}
    screen.result(value, lambda out: out.print(show.plans_table(plans)))
    for text in wrong:
        screen.note(text)
    return 1 if wrong else 0


@recipe.command("job", context_settings={"ignore_unknown_options": True})
@_reads
@click.option("--elastic", is_flag=True, help="Elastic, though the recipe leaves it switched off.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write it there. [default: standard output]")
@click.option("--image", required=True, help="With torch, this system and hyperpod-elastic-agent.")
@click.option("--name", default="", help="Of the job. [the recipe's]")
@click.option("--namespace", default="default", show_default=True)
@click.option("--queue", default="", help="Kueue's local queue.")
@click.option("--instance", default="", metavar="TYPE", help="Only on nodes of this type, as ml.p5.48xlarge.")
@click.option("--memory", default="", metavar="SIZE", help="The memory tier in each pod. [the node agent's]")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, required=True)
@pass_screen
def job_command(
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
    made = resource(
        training_job(
            found,
            policy,
            script,
            elastic=on,
            memory_size=asked["memory"],
            image=image,
            name=asked["name"],
            namespace=asked["namespace"],
            queue=asked["queue"],
            instance_type=asked["instance"],
        )
    )
    if screen.as_json:
        screen.result(made, lambda _: None)
    elif out is None:
        sys.stdout.write(as_yaml(made))
    if out is not None:
        out.write_text(as_yaml(made), encoding="utf-8")
    _remarks(screen, found)
    return 0


def _sized(file: Path, nproc: int | None, nodes: Sequence[str], *, elastic: bool) -> tuple[Recipe, ScalingPolicy, bool]:
    """The recipe, kept to the numbers of nodes that were asked for; and whether it is elastic then."""
    found = read_recipe(file, devices=nproc)
    wanted = plan.numbers_of_nodes(nodes)
    policy = found.policy
    if wanted:
        policy = sizes.within(policy, min(wanted), max(wanted), where=f"{found.file}: --nodes")
    if elastic and len(policy.sizes) == 1:
        raise PolicyError(f"{found.file}: --elastic: it has one size, {policy.least} nodes")
    on = elastic or found.elastic or len(wanted) > 1
    if not on:
        size = wanted[0] if wanted else found.nodes
        if not found.policy.allows(size):
            raise PolicyError(f"{found.file}: {size} nodes is none of its sizes {list(found.policy.sizes)}")
    plan.at_sizes(found, policy.sizes)
    return found, policy, on


def _remarks(screen: ElasticScreen, found: Recipe) -> None:
    if screen.as_json:
        return
    for note in found.notes:
        screen.note(note)
    if found.left_alone:
        screen.err.print(f"left alone, as others' concern: {', '.join(found.left_alone)}", markup=False)


def _write(path: Path, tree: Any) -> None:
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
