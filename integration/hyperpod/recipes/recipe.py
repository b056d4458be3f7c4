"""Recipe: sizes, checkpointless keys, batches and methods of a recipe file, parsed and checked. Pure.

HyperPod stores a second copy of the optimizer on the devices. This system stores copies of every shard in the memory of
nodes instead, one for each such instance.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.elastic_policy import RECIPE_POLICY_KEYS, policy_from_keys
from integration.hyperpod.recipes.scale_config import RecipeSize, ScaleConfig, read_scale_config
from integration.hyperpod.recipes.yaml_document import RecipeDocument, open_recipe_document


class RecipeKind(enum.Enum):
    """HyperPod's way of training for which the recipe was written."""

    ELASTIC = "elastic"
    CHECKPOINTLESS = "checkpointless"


@dataclass(frozen=True)
class RecipeCheckpoints:
    """Location and frequency of checkpoints. All are in memory; a few are in the durable tier."""

    every: int = 1
    durable_every: int = 100
    durable: str = ""
    keep_last: int = 0

    def settings_document(self, recovery: RecipeRecovery) -> dict[str, Any]:
        """Return the content of a ``$TIEREDCKPT_CONFIG`` file. Some defaults are omitted."""
        durable: dict[str, Any] = {"every": self.durable_every}
        if self.durable:
            durable["url"] = self.durable
        if self.keep_last:
            durable["keep_last"] = self.keep_last
        memory: dict[str, Any] = {"every": self.every}
        if not recovery.live:
            memory["live"] = False
        return {"memory": memory, "peer": {"copies": recovery.copies}, "durable": durable}


@dataclass(frozen=True)
class RecipeRecovery:
    """Recovery from a fault."""

    in_process: bool = True
    """Whether surviving processes continue without a restart."""
    live: bool = True
    """Whether new processes first receive the state of surviving ones."""
    copies: int = 2
    """Copies of every shard in the memory of nodes."""


@dataclass(frozen=True)
class RecipeTraining:
    """Options of a training loop besides batch and learning rate; None if the recipe has no value."""

    method: str = "full"
    """``full`` or ``lora``."""
    lora: int | None = None
    """Rank of the adapters."""
    lora_alpha: float | None = None
    algorithm: str = "sft"
    """``sft``, ``dpo`` or ``pretrain``."""
    steps: int | None = None
    length: int | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    clip: float | None = None
    warmup: int | None = None
    min_rate: float | None = None


@dataclass(frozen=True)
class RecipePrefetch:
    """Batches prepared in advance."""

    batches: int
    directory: str = ""


@dataclass(frozen=True)
class Recipe:
    """One recipe with consistent, valid values."""

    file: str
    """Name of the file."""
    name: str
    """Name of the job."""
    title: str
    kind: RecipeKind
    model: str
    """Name or path of the pretrained model; "" if the recipe has none."""
    devices: int
    """Ranks of a node."""
    model_parallel: int
    """Ranks that share samples."""
    scale: ScaleConfig
    policy: ScalingPolicy
    elastic: bool
    """Whether the recipe itself enables elasticity."""
    nodes: int
    """Number of nodes if the job is not elastic."""
    checkpoints: RecipeCheckpoints = field(default_factory=RecipeCheckpoints)
    recovery: RecipeRecovery = field(default_factory=RecipeRecovery)
    training: RecipeTraining = field(default_factory=RecipeTraining)
    prefetch: RecipePrefetch | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Differences from the recipe author's likely expectations."""
    unread_keys: tuple[str, ...] = ()
    """Ignored keys, by their topmost name."""


ELASTIC_SWITCHES = ("is_elastic", "use_graceful_shutdown")


class RecipeScaling(NamedTuple):
    policy: ScalingPolicy
    elastic: bool
    notes: tuple[str, ...]


def parse_scaling(doc: RecipeDocument, scale: ScaleConfig) -> RecipeScaling:
    """Return the scaling policy.

    Sizes are the recipe's stated sizes or its step, within its limits.
    """
    stated = doc.section("elastic_policy")
    known = {key: value for key, value in stated.items() if key in RECIPE_POLICY_KEYS or key in ELASTIC_SWITCHES}
    doc.mark_read(*(f"elastic_policy.{key}" for key in known))
    notes = [f"elastic_policy.{key} is unknown and has no effect" for key in stated if key not in known]
    sizes = [size.nodes for size in scale.sizes.values()]
    elastic = doc.boolean("elastic_policy.is_elastic") or False
    if not known:
        return RecipeScaling(
            _policy(doc, {"min_nodes": min(sizes), "max_nodes": max(sizes)}, sizes), elastic, tuple(notes)
        )
    least = doc.integer("elastic_policy.min_nodes") or min(sizes)
    most = doc.integer("elastic_policy.max_nodes") or max(sizes)
    if known.get("replica_increment_step") is not None:
        sizes = []
    elif beyond := [size for size in sizes if not least <= size <= most]:
        sizes = [size for size in sizes if least <= size <= most]
        if not sizes and least <= most:
            raise doc.error(
                "elastic_policy",
                f"allows {least} to {most} nodes (min_nodes, max_nodes), but scale_config is for {_list(beyond)} only",
            )
        notes.append(f"scale_config.{_list(beyond)} is beyond min_nodes {least} and max_nodes {most}: never used")
    if least < min(scale.sizes):
        raise doc.error(
            "elastic_policy.min_nodes",
            f"is {least}, but the smallest size of scale_config is {min(scale.sizes)}",
        )
    ends = {"min_nodes": least, "max_nodes": most}
    return RecipeScaling(_policy(doc, {**known, **ends}, sizes), elastic, tuple(notes))


def limit_nodes(policy: ScalingPolicy, least: int, most: int, *, where: str) -> ScalingPolicy:
    """Return the policy limited to ``least`` to ``most`` nodes.

    Raise :class:`~elastic.errors.PolicyError` if no size remains.
    """
    import msgspec

    sizes = [size for size in policy.sizes if least <= size <= most]
    if not sizes:
        raise PolicyError(f"{where}: of {least} to {most} nodes none is a size; there are {_list(policy.sizes)}")
    return msgspec.structs.replace(
        policy,
        min_replicas=min(sizes),
        max_replicas=max(sizes),
        replica_increment_step=None,
        replica_discrete_values=tuple(sizes) if len(sizes) > 1 else (),
        replicas=None,
    )


def single_size(nodes: int, batch: int, microbatch: int | None, rate: float | None) -> RecipeSize:
    return RecipeSize(nodes, nodes, batch, microbatch, rate, None)


def _policy(doc: RecipeDocument, stated: Mapping[Any, Any], sizes: list[int]) -> ScalingPolicy:
    others: dict[str, Any] = {"replica_discrete_values": tuple(sizes)} if len(sizes) > 1 else {}
    try:
        return policy_from_keys(stated, **others)
    except PolicyError as error:
        raise PolicyError(f"{doc.name}: elastic_policy: {error}") from error


def _list(numbers: Any) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


_CALLBACK = "CheckpointlessCallback"
_RESUME = "CheckpointlessAutoResume"
_TYPE = "hyperpod_checkpointless"
_KEPT = ("enable_inprocess", "enable_checkpointless", "enable_checksum", "clean_tensor_hook", "clean_lightning_module")
_MOST_COPIES = 3
_TARGET = "_target_"


def is_checkpointless(doc: RecipeDocument) -> bool:
    resume = doc.section("resume").get(_TARGET)
    return (
        (doc.string("run.model_type") or "").startswith(_TYPE)
        or str(resume).endswith(_RESUME)
        or _callback(doc) is not None
    )


def parse_recovery(doc: RecipeDocument) -> tuple[RecipeRecovery, tuple[str, ...]]:
    """Return the recovery, and notes on differences from the recipe author's likely expectations."""
    switches = {name: _switch(doc, name) for name in _KEPT}
    instances = doc.integer("strategy.num_distributed_optimizer_instances") or 1
    doc.mark_read("callbacks", "resume", "run.model_type")
    if switches["enable_checkpointless"] and not switches["enable_inprocess"]:
        raise doc.error(
            f"callbacks.{_CALLBACK}",
            "has enable_checkpointless: true and enable_inprocess: false: state can only be taken from processes "
            "that are still there",
        )
    notes = []
    if not switches["enable_checksum"]:
        notes.append("enable_checksum is false: shards are compared with their checksums here all the same")
    if instances > _MOST_COPIES:
        notes.append(f"num_distributed_optimizer_instances is {instances}: {_MOST_COPIES} copies are kept at the most")
    if instances > 1:
        notes.append("copies are in the memory of nodes: num_distributed_optimizer_instances may be 1 on the devices")
    copies = min(max(instances, 2), _MOST_COPIES)
    return RecipeRecovery(switches["enable_inprocess"], switches["enable_checkpointless"], copies), tuple(notes)


def parse_checkpoints(doc: RecipeDocument) -> RecipeCheckpoints:
    frequency = doc.integer("log.ckpt.every_n_train_steps")
    own = doc.integer("mmap.checkpoint_frequency")
    if frequency is not None and own is not None and frequency != own:
        raise doc.error(
            "mmap.checkpoint_frequency",
            f"is {own}, but log.ckpt.every_n_train_steps is {frequency}: batches would be discarded before their step "
            "is safe, or kept without use",
        )
    keep = doc.get("log.ckpt.save_top_k")
    by = doc.string("log.ckpt.monitor")
    newest = isinstance(keep, int) and not isinstance(keep, bool) and keep > 0 and by in (None, "step")
    return RecipeCheckpoints(
        durable_every=frequency or RecipeCheckpoints.durable_every,
        durable=doc.string("log.ckpt.dirpath") or "",
        keep_last=keep if newest else 0,
    )


def parse_training(doc: RecipeDocument) -> RecipeTraining:
    model = str(doc.get("run.name") or "") + str(doc.get("display_name") or "")
    return RecipeTraining(
        method="lora" if "lora" in model.lower() else "full",
        algorithm="pretrain" if "pre-training" in model.lower() else "sft",
        steps=doc.integer("trainer.max_steps"),
        length=doc.integer("data.seq_length"),
        weight_decay=doc.number("optim.config.weight_decay"),
        beta1=doc.number("optim.config.adam_beta1"),
        beta2=doc.number("optim.config.adam_beta2"),
        eps=doc.number("optim.config.adam_eps"),
        clip=doc.number("optim.config.clip_grad"),
        warmup=doc.integer("optim.lr_scheduler.warmup_steps", least=0),
        min_rate=doc.number("optim.lr_scheduler.min_lr"),
    )


def parse_prefetch(doc: RecipeDocument) -> RecipePrefetch | None:
    batches = doc.integer("mmap.prefetch_length")
    return None if batches is None else RecipePrefetch(batches, doc.string("mmap.cache_dir") or "")


def recovery_environ(recovery: RecipeRecovery) -> dict[str, str]:
    """Return the environment of a rendezvous without a root, which such recipes use."""
    return {"ELASTIC_ROOTLESS": "1"} if recovery.in_process else {}


def _callback(doc: RecipeDocument) -> Mapping[Any, Any] | None:
    return next(
        (callback for callback in doc.mappings("callbacks") if str(callback.get(_TARGET)).endswith(_CALLBACK)), None
    )


def _switch(doc: RecipeDocument, name: str) -> bool:
    """Return a switch of the callback; False if it is absent."""
    value = (_callback(doc) or {}).get(name, False)
    if not isinstance(value, bool):
        raise PolicyError(f"{doc.name}: callbacks.{_CALLBACK}.{name} is {value!r}: it must be true or false")
    return value


DEFAULT_DEVICES = 8
"""Default ranks of a node, for which HyperPod's sizes are made."""
_ARGS = "training_config.training_args"
_MODEL = "training_config.model_config"
_CONTRADICTIONS = ("trainer.num_nodes", "num_dp_groups_with_small_batch_size", "train_batch_size")
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def read_recipe(path: str | Path, *, devices: int | None = None) -> Recipe:
    """Read a recipe's file.

    Raise :class:`~elastic.errors.PolicyError` with the file, the key and the problem. ``devices`` overrides the
    recipe's ranks of a node.
    """
    doc = open_recipe_document(path)
    doc.mark_read("display_name", "run.name", "defaults")
    if is_checkpointless(doc):
        return _checkpointless(doc, devices)
    return _elastic(doc, Path(path), devices)


def _elastic(doc: RecipeDocument, path: Path, devices: int | None) -> Recipe:
    stated = doc.integer("trainer.devices")
    scale = _scale(doc, path)
    _refuse_contradictions(doc, scale, stated or DEFAULT_DEVICES, given=devices)
    policy, elastic, notes = parse_scaling(doc, scale)
    own = doc.integer("trainer.num_nodes")
    if own is not None and own < min(scale.sizes):
        raise doc.error("trainer.num_nodes", f"is {own}, but scale_config begins with {min(scale.sizes)}")
    training = _method(doc)
    if training.algorithm == "dpo":
        notes = (*notes, "the loop is yours: a batch counts preference pairs, and `elastic finetune` has no DPO")
    return Recipe(
        file=doc.name,
        name=_job(doc),
        title=doc.string("display_name") or _job(doc),
        kind=RecipeKind.ELASTIC,
        model=doc.string(f"{_MODEL}.model_name_or_path") or "",
        devices=devices or stated or DEFAULT_DEVICES,
        model_parallel=1,
        scale=scale,
        policy=policy,
        elastic=elastic,
        nodes=own or policy.smallest_size,
        checkpoints=RecipeCheckpoints(),
        training=training,
        notes=notes,
        unread_keys=doc.unread_keys(),
    )


def _checkpointless(doc: RecipeDocument, devices: int | None) -> Recipe:
    nodes, own = doc.integer("trainer.num_nodes"), doc.integer("trainer.devices")
    batch, micro = doc.integer("data.global_batch_size"), doc.integer("data.micro_batch_size")
    rate = doc.number("optim.config.lr")
    if nodes is None:
        raise doc.error("trainer.num_nodes", "is missing: a checkpointless recipe has one size, and that is it")
    if batch is None:
        raise doc.error("data.global_batch_size", "is missing")
    model_parallel = 1
    for name in _PARALLEL:
        model_parallel *= doc.integer(f"strategy.{name}") or 1
    ranks = devices or own or DEFAULT_DEVICES
    if nodes * ranks % model_parallel:
        raise doc.error(
            "strategy",
            f"has {model_parallel} ranks for one model ({', '.join(_PARALLEL)}): they must divide the {nodes * ranks} "
            "ranks of trainer.num_nodes and trainer.devices",
        )
    scale = ScaleConfig(doc.name, {nodes: single_size(nodes, batch, micro, rate)})
    try:
        scale.plan(nodes, ranks_per_node=ranks, model_parallel=model_parallel)
    except PolicyError as error:
        raise PolicyError(f"{doc.name}: data.global_batch_size: {error}") from error
    policy, elastic, notes = parse_scaling(doc, scale)
    recovery, more = parse_recovery(doc)
    return Recipe(
        file=doc.name,
        name=_job(doc),
        title=doc.string("display_name") or _job(doc),
        kind=RecipeKind.CHECKPOINTLESS,
        model="",
        devices=ranks,
        model_parallel=model_parallel,
        scale=scale,
        policy=policy,
        elastic=elastic,
        nodes=nodes,
        checkpoints=parse_checkpoints(doc),
        recovery=recovery,
        training=parse_training(doc),
        prefetch=parse_prefetch(doc),
        environ=recovery_environ(recovery),
        notes=(*notes, *more),
        unread_keys=doc.unread_keys(),
    )


def _scale(doc: RecipeDocument, path: Path) -> ScaleConfig:
    """Return the table of sizes, or a single size if the recipe has only a batch."""
    doc.mark_read("scale_config", *(f"{_ARGS}.{name}" for name in ("train_batch_size", "micro_train_batch_size")))
    doc.mark_read(f"{_ARGS}.learning_rate", f"{_ARGS}.uneven_batch")
    if doc.tree.get("scale_config") is not None:
        return read_scale_config(path)
    batch = doc.integer(f"{_ARGS}.train_batch_size")
    if batch is None:
        raise doc.error(
            "scale_config",
            f"is missing, and so is {_ARGS}.train_batch_size: nothing here says what the batch is at which size",
        )
    nodes = doc.integer("elastic_policy.min_nodes") or doc.integer("trainer.num_nodes") or 1
    micro, rate = doc.integer(f"{_ARGS}.micro_train_batch_size"), doc.number(f"{_ARGS}.learning_rate")
    return ScaleConfig(doc.name, {nodes: single_size(nodes, batch, micro, rate)})


def _refuse_contradictions(doc: RecipeDocument, scale: ScaleConfig, stated: int, *, given: int | None) -> None:
    """Raise :class:`~elastic.errors.PolicyError` for contradictory values.

    For other devices than the recipe's own its uneven batches have no meaning.
    """
    fields = _CONTRADICTIONS if given in (None, stated) else _CONTRADICTIONS[:1]
    wrong = [mismatch for mismatch in scale.disagreements(ranks_per_node=stated) if mismatch.field in fields]
    if wrong:
        raise PolicyError("; ".join(f"{doc.name}: {mismatch}" for mismatch in wrong))


def _method(doc: RecipeDocument) -> RecipeTraining:
    """Return the method and algorithm from the recipe's keys, otherwise from the names of its parts."""
    parts = " ".join(doc.strings("defaults"))
    peft = doc.string(f"{_MODEL}.peft_config.peft_type") or ""
    doc.section(f"{_MODEL}.peft_config")
    lora = peft.lower() == "lora" or "/peft/lora" in parts
    algorithm = "dpo" if "/algorithm/dpo" in parts else "sft"
    return RecipeTraining(
        method="lora" if lora else "full",
        lora=doc.integer(f"{_MODEL}.peft_config.r"),
        lora_alpha=doc.number(f"{_MODEL}.peft_config.lora_alpha"),
        algorithm=algorithm,
        steps=doc.integer(f"{_ARGS}.max_steps"),
        length=doc.integer(f"{_ARGS}.max_len"),
    )


def _job(doc: RecipeDocument) -> str:
    name = doc.string("run.name") or Path(doc.name).stem
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:63] or "recipe"
