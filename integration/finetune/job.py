"""What is to be trained, on what, and how: everything a rank is told. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from elastic.batch.plan import BatchPlan, common_microbatch
from elastic.errors import PolicyError
from elastic.rates.rules import Constant, Linear, Rule, Sqrt
from integration.hyperpod.recipes import Recipe, plan, read_recipe

Shape = Literal["cosine", "linear", "constant"]
Law = Literal["constant", "linear", "sqrt"]


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fine-tuning; written down as JSON for its ranks."""

    name: str
    data: tuple[str, ...]
    output: str
    model: str = ""
    """A folder that ``save_pretrained`` wrote, or a name on the hub."""
    config: str = ""
    """Or a configuration, to begin with random weights."""
    tokenizer: str = ""
    """Where that is not the model's."""

    steps: int | None = None
    epochs: int = 1
    """Of the data; without ``steps``."""
    batch: int | None = None
    """Samples of a step; without, the recipe's at each size."""
    microbatch: int = 1
    length: int | None = None
    """Tokens of a sample at the most; without, what the model can, up to 4096."""
    too_long: Literal["cut", "error"] = "cut"
    exact: bool = True
    """Every bit of what is learned is the same in any world."""

    lr: float | None = None
    """Without, the recipe's at each size."""
    schedule: Shape = "cosine"
    warmup: int = 0
    min_lr: float = 0.0
    rule: Law = "constant"
    """How the learning rate follows the batch, where that is not the same at all sizes."""
    rewarm: int = 0
    """Steps to a new learning rate after a resize."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0
    seed: int = 0

    lora: int = 0
    """Rank of adapters; 0: all weights are trained."""
    lora_alpha: float = 32.0
    """Over the rank: how much adapters count."""
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward and backward passes; weights and moments are float32. ``auto``: bfloat16 on a GPU."""
    recompute: bool = False
    """Activations are computed again in the backward pass."""
    workers: int = 0
    """Processes of each rank that tokenise."""
    cache: str = "4GiB"
    """Memory of the node for what is tokenised."""

    every: int = 1
    durable: str = ""
    durable_every: int = 100
    keep_last: int = 0
    export: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights written in the end; ``auto``: the one the model came in."""
    recipe: str = ""

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @property
    def progress_file(self) -> Path:
        return self.folder / "progress.jsonl"

    @property
    def model_folder(self) -> Path:
        """What ``from_pretrained`` reads in the end."""
        return self.folder / "model"


class Sized(msgspec.Struct, frozen=True):
    """What holds in one world."""

    plan: BatchPlan
    lr: float
    """The schedule is drawn for this one."""
    rule: Rule


def sized(job: Job, *, nodes: int, world_size: int) -> Sized:
    """Batch and learning rate in a world, by the job's own words or else by its recipe's."""
    recipe = read_recipe(job.recipe, devices=max(1, world_size // nodes)) if job.recipe else None
    batch = job.batch or (recipe.scale.size_for(nodes).global_batch if recipe is not None else None)
    if batch is None:
        raise PolicyError("say --batch, or --recipe that says it")
    if job.exact:
        shared = BatchPlan(batch, world_size, microbatch=min(job.microbatch, batch))
    else:
        shared = BatchPlan(batch, world_size, job.microbatch)
    table = None if recipe is None or job.lr is not None else plan.rates(recipe)
    if table is not None:
        return Sized(shared, table.base, table)
    if job.lr is None:
        raise PolicyError("say --lr, or --recipe that says it")
    return Sized(shared, job.lr, _rule(job, recipe, batch))


def microbatch_for(recipe: Recipe, batch: int | None, sizes: tuple[int, ...], nproc: int) -> int:
    """The largest that cuts the batch of all these sizes in the same places, idles no rank, and is known to fit."""
    most = recipe.scale.max_microbatch or 1
    worlds: dict[int, list[int]] = {}
    for nodes in sizes:
        worlds.setdefault(batch or recipe.scale.size_for(nodes).global_batch, []).append(nodes * nproc)
    return min(common_microbatch(one, sizes_of, most) for one, sizes_of in worlds.items())


def total_steps(job: Job, *, samples: int, done: int, step: int, batch: int) -> int:
    """How many steps there are in all, of which ``step`` are done and took ``done`` samples."""
    if job.steps is not None:
        return job.steps
    left = max(0, job.epochs * samples - done)
    return step + -(-left // batch)


def _rule(job: Job, recipe: Recipe | None, batch: int) -> Rule:
    """Beside the job's own learning rate, which is for the recipe's smallest size where there is a recipe."""
    base = job.batch or (batch if recipe is None else recipe.scale.size_for(recipe.policy.least).global_batch)
    if job.rule == "constant":
        return Constant()
    return Linear(base) if job.rule == "linear" else Sqrt(base)
