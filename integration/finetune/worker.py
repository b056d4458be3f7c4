"""One rank of a fine-tuning job: ``python -m integration.finetune.worker``, and its options.

::

    torchrun --nproc-per-node 8 -m integration.finetune.worker --model ... --data ...
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from elastic.errors import PolicyError
from integration.finetune.finetune_job import FINETUNE_EXTRA, FinetuneJob, largest_microbatch
from integration.hyperpod.recipes import Recipe, read_recipe
from peerstore.errors import MissingPackageError
from peerstore.message_codec import from_json
from peerstore.optional_packages import optional_imports

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULT_BATCH, _DEFAULT_LR = 16, 1e-5
_DEFAULT_LORA_RANK = 16
"""Default rank of adapters if a recipe has it in another file."""
_POSITIVE, _NOT_NEGATIVE = click.IntRange(1), click.IntRange(0)
_ANY_LR = click.FloatRange(0)
_OPTIONS = (
    click.option("--model", metavar="FOLDER|NAME", help="Causal language model that Transformers can load."),
    click.option("--config", metavar="FILE", help="Model configuration, to start from random weights."),
    click.option("--tokenizer", metavar="FOLDER|NAME", help="Tokenizer (default the model's)."),
    click.option("--data", multiple=True, metavar="FILE|FOLDER", help="Training data, lines of JSON; may be repeated."),
    click.option("--output", metavar="FOLDER", help="Folder for model, progress and logs (default finetuned-JOB)."),
    click.option(
        "--job",
        "name",
        metavar="NAME",
        help="Name of the job, by which it resumes (default the name of OUTPUT, else of the recipe or model).",
    ),
    click.option(
        "--recipe", metavar="FILE", help="HyperPod recipe with sizes, batches, learning rates and other options."
    ),
    click.option("--steps", type=_POSITIVE, help="Optimizer steps (default from --epochs)."),
    click.option("--epochs", type=_POSITIVE, help="Passes over the data (default 1)."),
    click.option("--batch", type=_POSITIVE, help="Samples in a step, over all ranks (default 16)."),
    click.option(
        "--microbatch", type=_POSITIVE, help="Samples in a forward pass, for every number of ranks (default 1)."
    ),
    click.option("--length", type=_POSITIVE, help="Longest sample in tokens (default the model's limit, up to 4096)."),
    click.option("--too-long", type=click.Choice(["cut", "error"]), help="Cut longer samples, or fail (default cut)."),
    click.option(
        "--exact/--fast",
        default=None,
        help="Bitwise equal results for every number of ranks, or faster (default exact).",
    ),
    click.option("--lr", type=_ANY_LR, help="Learning rate (default 1e-5)."),
    click.option(
        "--schedule",
        type=click.Choice(["cosine", "linear", "constant"]),
        help="Learning-rate schedule (default cosine).",
    ),
    click.option("--warmup", type=_NOT_NEGATIVE, help="Warm-up steps (default 0)."),
    click.option("--min-lr", type=_ANY_LR, help="Final learning rate (default 0)."),
    click.option(
        "--rule",
        type=click.Choice(["constant", "linear", "sqrt"]),
        help="How to scale the learning rate when the batch size changes (default constant).",
    ),
    click.option("--rewarm", type=_NOT_NEGATIVE, help="Warm-up steps after a resize (default 0)."),
    click.option("--weight-decay", type=_ANY_LR, help="Weight decay (default 0)."),
    click.option("--clip", type=_ANY_LR, help="Largest norm of the gradients (default 1)."),
    click.option("--seed", type=_NOT_NEGATIVE, help="Random seed (default 0)."),
    click.option(
        "--lora", type=_NOT_NEGATIVE, help="Train LoRA adapters of this rank; 0 trains all weights (default 0)."
    ),
    click.option(
        "--lora-alpha",
        type=click.FloatRange(0),
        help="LoRA scaling: adapters are multiplied by alpha / rank (default 32).",
    ),
    click.option("--parallel", type=click.Choice(["fsdp", "ddp"]), help="Parallelism (default fsdp)."),
    click.option(
        "--precision",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        help="Precision of forward and backward passes (default auto).",
    ),
    click.option("--recompute", is_flag=True, default=None, help="Use activation checkpointing."),
    click.option("--workers", type=_NOT_NEGATIVE, help="Tokenizer processes per rank (default 0)."),
    click.option("--cache", metavar="SIZE", help="Node memory for tokenized samples (default 4GiB)."),
    click.option("--every", type=_POSITIVE, help="Steps between checkpoints in memory (default 1)."),
    click.option("--durable", metavar="URL", help="Durable tier, s3://bucket/prefix or /path."),
    click.option("--durable-every", type=_POSITIVE, help="Steps between durable checkpoints (default 100)."),
    click.option("--keep-last", type=_NOT_NEGATIVE, help="Durable checkpoints to keep; 0 keeps all (default 0)."),
    click.option(
        "--export",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        help="Precision of the final model (default auto).",
    ),
)


def training_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def job_from_options(
    options: Mapping[str, Any], *, sizes: tuple[int, ...] = (), nproc: int | None = None
) -> FinetuneJob:
    """Return the job: options first, then the recipe's values, then defaults.

    ``sizes`` are the possible numbers of nodes.
    """
    stated = {name: value for name, value in options.items() if value is not None and value != ()}
    if not stated.get("data"):
        raise PolicyError("say where the data is: --data FILE or FOLDER")
    recipe = read_recipe(stated["recipe"], devices=nproc) if "recipe" in stated else None
    defaults = (
        _options_from_recipe(recipe, stated) if recipe is not None else {"batch": _DEFAULT_BATCH, "lr": _DEFAULT_LR}
    )
    if recipe is not None and "microbatch" not in stated and stated.get("exact", True):
        defaults["microbatch"] = largest_microbatch(
            recipe, stated.get("batch"), sizes or recipe.policy.sizes, recipe.devices
        )
    tree = {**defaults, **stated}
    tree["name"] = _name(stated, recipe)
    tree["output"] = str(Path(stated.get("output") or f"finetuned-{tree['name']}").absolute())
    tree["data"] = [str(Path(path).absolute()) for path in stated["data"]]
    for name in ("model", "config", "tokenizer", "recipe"):
        if name in tree and Path(tree[name]).exists():
            tree[name] = str(Path(tree[name]).absolute())
    if "config" in stated and "model" not in stated:
        tree.pop("model", None)
    try:
        return msgspec.convert(tree, FinetuneJob)
    except msgspec.ValidationError as error:
        raise PolicyError(f"the job: {error}") from error


def _options_from_recipe(recipe: Recipe, stated: Mapping[str, Any]) -> dict[str, Any]:
    training, checkpoints = recipe.training, recipe.checkpoints
    if training.algorithm == "dpo":
        raise PolicyError(f"{recipe.file} is for preference optimisation; this is supervised fine-tuning")
    if recipe.model_parallel > 1:
        raise PolicyError(f"{recipe.file} splits a model over {recipe.model_parallel} ranks; here each batch is split")
    found = {
        "model": recipe.model or None,
        "steps": None if "epochs" in stated else training.steps,
        "length": training.length,
        "lora": (training.lora or _DEFAULT_LORA_RANK) if training.method == "lora" else None,
        "lora_alpha": training.lora_alpha,
        "weight_decay": training.weight_decay,
        "beta1": training.beta1,
        "beta2": training.beta2,
        "eps": training.eps,
        "clip": training.clip,
        "warmup": training.warmup,
        "min_lr": training.min_rate,
        "every": checkpoints.every,
        "durable": checkpoints.durable or None,
        "durable_every": checkpoints.durable_every,
        "keep_last": checkpoints.keep_last,
    }
    return {name: value for name, value in found.items() if value is not None}


def _name(stated: Mapping[str, Any], recipe: Recipe | None) -> str:
    if "name" in stated:
        return str(stated["name"])
    if "output" in stated:
        text = Path(stated["output"]).name
    elif recipe is not None:
        text = recipe.name
    else:
        text = Path(stated.get("model") or stated.get("config") or "model").stem
    return re.sub(r"[^a-zA-Z0-9-]+", "-", text).strip("-")[:63] or "finetune"


@click.command("worker")
@training_options
@click.option("--from", "job_file", type=click.Path(path_type=Path), hidden=True, help="A job that is written down.")
def worker_command(*, job_file: Path | None, **options: Any) -> int:
    """Be one rank of a fine-tuning."""
    job = read_job_file(job_file) if job_file is not None else job_from_options(options)
    print(run_rank(job), flush=True)
    return 0


def run_rank(job: FinetuneJob) -> object:
    """Run this rank and return its result.

    Imports, tokenizer and data are ready before the rank joins a world.
    """
    with optional_imports(*FINETUNE_EXTRA):
        from transformers.utils.logging import disable_progress_bar

    from elastic.workers.train_loop import run
    from integration.finetune.inputs import open_job_inputs
    from integration.finetune.training import train_finetune

    quiet: Any = disable_progress_bar
    quiet()
    inputs = open_job_inputs(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    return run(lambda world: train_finetune(world, job, inputs))


def read_job_file(path: Path) -> FinetuneJob:
    try:
        return from_json(path.read_bytes(), FinetuneJob)
    except (OSError, msgspec.DecodeError) as error:
        raise PolicyError(f"{path} is not a job file: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        return int(worker_command.main(args=None if argv is None else list(argv), standalone_mode=False) or 0)
    except click.exceptions.Exit as status:
        return int(status.exit_code)
    except click.ClickException as error:
        error.show()
        return int(error.exit_code)
    except (PolicyError, MissingPackageError) as error:
        print(f"finetune: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
