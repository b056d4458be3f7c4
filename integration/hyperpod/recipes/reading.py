"""From a file to a :class:`~integration.hyperpod.recipes.recipe.Recipe`."""

from __future__ import annotations

import re
from pathlib import Path

from elastic.batch.recipes import ScaleConfig, read_scale_config
from elastic.errors import PolicyError
from integration.hyperpod.recipes import checkpointless, sizes
from integration.hyperpod.recipes.document import Document, open_document
from integration.hyperpod.recipes.recipe import Checkpoints, Kind, Recipe, Training

DEVICES = 8
"""Of a node, where a recipe does not say: what HyperPod's own sizes are for."""
_ARGS = "training_config.training_args"
_MODEL = "training_config.model_config"
_CONTRADICTIONS = ("trainer.num_nodes", "num_dp_groups_with_small_batch_size", "train_batch_size")
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def read_recipe(path: str | Path, *, devices: int | None = None) -> Recipe:
    """A recipe's file; or :class:`~elastic.errors.PolicyError` that names the file, the key and what is wrong.

    ``devices`` are the ranks of a node, where they are not those that the recipe was written for.
    """
    doc = open_document(path)
    doc.claim("display_name", "run.name", "defaults")
    if checkpointless.is_one(doc):
        return _checkpointless(doc, devices)
    return _elastic(doc, Path(path), devices)


def _elastic(doc: Document, path: Path, devices: int | None) -> Recipe:
    stated = doc.whole("trainer.devices")
    scale = _scale(doc, path)
    _refuse_contradictions(doc, scale, stated or DEVICES, given=devices)
    policy, elastic, notes = sizes.scaling_of(doc, scale)
    own = doc.whole("trainer.num_nodes")
    if own is not None and own < min(scale.sizes):
        raise doc.wrong("trainer.num_nodes", f"is {own}, but scale_config begins with {min(scale.sizes)}")
    training = _method(doc)
    if training.algorithm == "dpo":
        notes = (*notes, "the loop is yours: a batch counts preference pairs, and `elastic finetune` has no DPO")
    return Recipe(
        file=doc.name,
        name=_job(doc),
        title=doc.text("display_name") or _job(doc),
        kind=Kind.ELASTIC,
        model=doc.text(f"{_MODEL}.model_name_or_path") or "",
        devices=devices or stated or DEVICES,
        model_parallel=1,
        scale=scale,
        policy=policy,
        elastic=elastic,
        nodes=own or policy.least,
        checkpoints=Checkpoints(),
        training=training,
        notes=notes,
        left_alone=doc.left_alone(),
    )


def _checkpointless(doc: Document, devices: int | None) -> Recipe:
    nodes, own = doc.whole("trainer.num_nodes"), doc.whole("trainer.devices")
    batch, micro = doc.whole("data.global_batch_size"), doc.whole("data.micro_batch_size")
    rate = doc.number("optim.config.lr")
    if nodes is None:
        raise doc.wrong("trainer.num_nodes", "is missing: a checkpointless recipe has one size, and that is it")
    if batch is None:
        raise doc.wrong("data.global_batch_size", "is missing")
    model_parallel = 1
    for name in _PARALLEL:
        model_parallel *= doc.whole(f"strategy.{name}") or 1
    ranks = devices or own or DEVICES
    if nodes * ranks % model_parallel:
        raise doc.wrong(
            "strategy",
            f"has {model_parallel} ranks for one model ({', '.join(_PARALLEL)}): they must divide the {nodes * ranks} "
            "ranks of trainer.num_nodes and trainer.devices",
        )
    scale = ScaleConfig(doc.name, {nodes: sizes.one_size(nodes, batch, micro, rate)})
    try:
        scale.plan(nodes, ranks_per_node=ranks, model_parallel=model_parallel)
    except PolicyError as error:
        raise PolicyError(f"{doc.name}: data.global_batch_size: {error}") from error
    policy, elastic, notes = sizes.scaling_of(doc, scale)
    recovery, more = checkpointless.recovery_of(doc)
    return Recipe(
        file=doc.name,
        name=_job(doc),
        title=doc.text("display_name") or _job(doc),
        kind=Kind.CHECKPOINTLESS,
        model="",
        devices=ranks,
        model_parallel=model_parallel,
        scale=scale,
        policy=policy,
        elastic=elastic,
        nodes=nodes,
        checkpoints=checkpointless.checkpoints_of(doc),
        recovery=recovery,
        training=checkpointless.training_of(doc),
        ahead=checkpointless.ahead_of(doc),
        environ=checkpointless.environ_of(recovery),
        notes=(*notes, *more),
        left_alone=doc.left_alone(),
    )


def _scale(doc: Document, path: Path) -> ScaleConfig:
    """The table, or one size where a recipe has only a batch of its own."""
    doc.claim("scale_config", *(f"{_ARGS}.{name}" for name in ("train_batch_size", "micro_train_batch_size")))
    doc.claim(f"{_ARGS}.learning_rate", f"{_ARGS}.uneven_batch")
    if doc.tree.get("scale_config") is not None:
        return read_scale_config(path)
    batch = doc.whole(f"{_ARGS}.train_batch_size")
    if batch is None:
        raise doc.wrong(
            "scale_config",
            f"is missing, and so is {_ARGS}.train_batch_size: nothing here says what the batch is at which size",
        )
    nodes = doc.whole("elastic_policy.min_nodes") or doc.whole("trainer.num_nodes") or 1
    micro, rate = doc.whole(f"{_ARGS}.micro_train_batch_size"), doc.number(f"{_ARGS}.learning_rate")
    return ScaleConfig(doc.name, {nodes: sizes.one_size(nodes, batch, micro, rate)})


def _refuse_contradictions(doc: Document, scale: ScaleConfig, stated: int, *, given: int | None) -> None:
    """What cannot be true at once. For other machines than the recipe's own its uneven batches say nothing."""
    fields = _CONTRADICTIONS if given in (None, stated) else _CONTRADICTIONS[:1]
    wrong = [one for one in scale.disagreements(ranks_per_node=stated) if one.field in fields]
    if wrong:
        raise PolicyError("; ".join(f"{doc.name}: {one}" for one in wrong))


def _method(doc: Document) -> Training:
    """By its own keys where it has them, else by the parts that it is put together from."""
    parts = " ".join(doc.texts("defaults"))
    peft = doc.text(f"{_MODEL}.peft_config.peft_type") or ""
    doc.section(f"{_MODEL}.peft_config")
    lora = peft.lower() == "lora" or "/peft/lora" in parts
    algorithm = "dpo" if "/algorithm/dpo" in parts else "sft"
    return Training(
        method="lora" if lora else "full",
        lora=doc.whole(f"{_MODEL}.peft_config.r"),
        lora_alpha=doc.number(f"{_MODEL}.peft_config.lora_alpha"),
        algorithm=algorithm,
        steps=doc.whole(f"{_ARGS}.max_steps"),
        length=doc.whole(f"{_ARGS}.max_len"),
    )


def _job(doc: Document) -> str:
    said = doc.text("run.name") or Path(doc.name).stem
    return re.sub(r"[^a-z0-9-]+", "-", said.lower()).strip("-")[:63] or "recipe"
