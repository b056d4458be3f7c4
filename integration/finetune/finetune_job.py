"""A fine-tuning job: its options for every rank, learning-rate schedule, step log. No torch.

::

    elastic.PolicyError
    ├── DataError       unusable lines: the message names the file and the line
    └── ModelError      a model, a tokenizer or a length that does not fit

After a fault steps repeat with the same numbers; the last line of a step counts.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from elastic.batch_scaling.batch_plan import BatchPlan, common_microbatch
from elastic.batch_scaling.lr_rules import ConstantLRRule, LinearLRRule, LRRule, SqrtLRRule
from elastic.errors import PolicyError
from integration.hyperpod.recipes import Recipe, read_recipe, recipe_plan


class DataError(PolicyError):
    """Lines of the data that cannot be used for training."""


class ModelError(PolicyError):
    """A model, a tokenizer or a length that does not fit."""


ScheduleShape = Literal["cosine", "linear", "constant"]
LRScalingRule = Literal["constant", "linear", "sqrt"]
FINETUNE_EXTRA = ("fine-tuning", "'tieredckpt[finetune]'")
"""Arguments of :func:`~peerstore.optional_packages.optional_imports` for Transformers."""


class FinetuneJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fine-tuning job, stored as JSON for its ranks."""

    name: str
    data: tuple[str, ...]
    output: str
    model: str = ""
    """Folder written by ``save_pretrained``, or a name on the hub."""
    config: str = ""
    """Or a configuration, to start with random weights."""
    tokenizer: str = ""
    """Tokenizer, if it is not the model's."""

    steps: int | None = None
    epochs: int = 1
    """Passes over the data, without ``steps``."""
    batch: int | None = None
    """Samples of a step; None: the recipe's at each size."""
    microbatch: int = 1
    length: int | None = None
    """Maximum tokens of a sample; None: the model's limit, up to 4096."""
    too_long: Literal["cut", "error"] = "cut"
    exact: bool = True
    """Whether the results are bitwise equal in any world."""

    lr: float | None = None
    """Learning rate; None: the recipe's at each size."""
    schedule: ScheduleShape = "cosine"
    warmup: int = 0
    min_lr: float = 0.0
    rule: LRScalingRule = "constant"
    """Scaling of the learning rate if the batch differs between sizes."""
    rewarm: int = 0
    """Warm-up steps to a new learning rate after a resize."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0
    seed: int = 0

    lora: int = 0
    """Rank of the adapters; 0 trains all weights."""
    lora_alpha: float = 32.0
    """LoRA scaling: adapters are multiplied by alpha / rank."""
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward passes; ``auto`` is bfloat16 on a GPU.

    Weights and moments are float32.
    """
    recompute: bool = False
    """Whether the backward pass recomputes activations."""
    workers: int = 0
    """Processes of each rank that tokenize."""
    cache: str = "4GiB"
    """Memory of the node for tokenized samples."""

    every: int = 1
    durable: str = ""
    durable_every: int = 100
    keep_last: int = 0
    export: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the exported weights; ``auto``: the type of the loaded model."""
    recipe: str = ""

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @property
    def progress_file(self) -> Path:
        return self.folder / "progress.jsonl"

    @property
    def model_folder(self) -> Path:
        """Folder of the final model for ``from_pretrained``."""
        return self.folder / "model"


class SizedJob(msgspec.Struct, frozen=True):
    """Batch and learning rate of one world."""

    plan: BatchPlan
    lr: float
    """Peak learning rate of the schedule."""
    rule: LRRule


def size_job(job: FinetuneJob, *, nodes: int, world_size: int) -> SizedJob:
    """Return batch and learning rate in a world, from the job or otherwise from its recipe."""
    recipe = read_recipe(job.recipe, devices=max(1, world_size // nodes)) if job.recipe else None
    batch = job.batch or (recipe.scale.size_for(nodes).global_batch if recipe is not None else None)
    if batch is None:
        raise PolicyError("say --batch, or --recipe that says it")
    if job.exact:
        shared = BatchPlan(batch, world_size, microbatch=min(job.microbatch, batch))
    else:
        shared = BatchPlan(batch, world_size, job.microbatch)
    table = None if recipe is None or job.lr is not None else recipe_plan.learning_rate_table(recipe)
    if table is not None:
        return SizedJob(shared, table.base, table)
    if job.lr is None:
        raise PolicyError("say --lr, or --recipe that says it")
    return SizedJob(shared, job.lr, _rule(job, recipe, batch))


def largest_microbatch(recipe: Recipe, batch: int | None, sizes: tuple[int, ...], nproc: int) -> int:
    """Return the largest microbatch that is known to fit and leaves no rank idle.

    It splits the batch at the same positions at all these sizes.
    """
    most = recipe.scale.max_microbatch or 1
    worlds: dict[int, list[int]] = {}
    for nodes in sizes:
        worlds.setdefault(batch or recipe.scale.size_for(nodes).global_batch, []).append(nodes * nproc)
    return min(common_microbatch(one, sizes_of, most) for one, sizes_of in worlds.items())


def total_steps(job: FinetuneJob, *, samples: int, done: int, step: int, batch: int) -> int:
    """Return the total number of steps. ``step`` of them are done and used ``done`` samples."""
    if job.steps is not None:
        return job.steps
    left = max(0, job.epochs * samples - done)
    return step + -(-left // batch)


def _rule(job: FinetuneJob, recipe: Recipe | None, batch: int) -> LRRule:
    """Return the rule for the job's own learning rate.

    With a recipe that rate belongs to the recipe's smallest size.
    """
    base = job.batch or (batch if recipe is None else recipe.scale.size_for(recipe.policy.smallest_size).global_batch)
    if job.rule == "constant":
        return ConstantLRRule()
    return LinearLRRule(base) if job.rule == "linear" else SqrtLRRule(base)


def learning_rate_at(
    step: int, total: int, *, peak: float, shape: ScheduleShape, warmup: int = 0, least: float = 0.0
) -> float:
    """Return the learning rate of a step.

    It rises to ``peak`` in ``warmup`` steps, then falls to ``least``, which the step after the last would have.
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if shape == "constant":
        return peak
    length = max(1, total - warmup)
    part = min(1.0, (step - warmup) / length)
    if shape == "linear":
        return least + (peak - least) * (1 - part)
    return least + (peak - least) * (1 + math.cos(math.pi * part)) / 2


_POLL_S = 0.2


class StepLogWriter:
    """Writer of the step log. Only rank 0 writes.

    The line of the newest step is part of the checkpoint. A fault may interrupt rank 0 before it has written that line,
    and the next world does not repeat a completed step.
    """

    def __init__(self, path: Path, *, rank: int) -> None:
        self._path = path if rank == 0 else None
        self._newest: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"newest": dict(self._newest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._newest = dict(state["newest"])

    def recover(self) -> None:
        """Write the line of the restored step if the file has none."""
        if self._path is not None and self._newest:
            steps = {line.get("step") for line in read_step_log(self._path)[0]}
            if self._newest["step"] not in steps:
                self.write(**self._newest)

    def write_step(self, **values: Any) -> None:
        """Write the line of a completed step."""
        self._newest = values
        self.write(**values)

    def write(self, **values: Any) -> None:
        """Append one line; after a crash of the machine it is complete or missing."""
        if self._path is None:
            return
        line = (json.dumps(values) + "\n").encode()
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


def read_step_log(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines from position ``start``, and the position after them.

    A missing file has no lines.
    """
    try:
        with path.open("rb") as opened:
            opened.seek(start)
            text = opened.read()
    except FileNotFoundError:
        return [], start
    end = text.rfind(b"\n") + 1
    return [json.loads(line) for line in text[:end].splitlines()], start + end


class StepLogFollower:
    """Thread that passes new lines to a callback until the block ends, then the remaining ones."""

    def __init__(self, path: Path, heard: Callable[[dict[str, Any]], None]) -> None:
        self._path = path
        self._heard = heard
        self._at = path.stat().st_size if path.exists() else 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="finetune-progress", daemon=True)

    def __enter__(self) -> StepLogFollower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._read_new_lines()

    def _follow(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self._read_new_lines()

    def _read_new_lines(self) -> None:
        lines, self._at = read_step_log(self._path, self._at)
        for line in lines:
            self._heard(line)
