"""Recipes for checkpointless training: what their keys mean here.

What HyperPod does with a second copy of the optimizer on the devices, this system does with copies of every shard in
the memory of nodes: as many as there would be instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.errors import PolicyError
from integration.hyperpod.recipes.document import Document
from integration.hyperpod.recipes.recipe import Ahead, Checkpoints, Recovery, Training

_CALLBACK = "CheckpointlessCallback"
_RESUME = "CheckpointlessAutoResume"
_TYPE = "hyperpod_checkpointless"
_KEPT = ("enable_inprocess", "enable_checkpointless", "enable_checksum", "clean_tensor_hook", "clean_lightning_module")
_MOST_COPIES = 3
_TARGET = "_target_"


def is_one(doc: Document) -> bool:
    resume = doc.section("resume").get(_TARGET)
    return (
        (doc.text("run.model_type") or "").startswith(_TYPE)
        or str(resume).endswith(_RESUME)
        or _callback(doc) is not None
    )


def recovery_of(doc: Document) -> tuple[Recovery, tuple[str, ...]]:
    """What happens after a fault, and what of it is different from what the recipe's author would expect."""
    switches = {name: _switch(doc, name) for name in _KEPT}
    instances = doc.whole("strategy.num_distributed_optimizer_instances") or 1
    doc.claim("callbacks", "resume", "run.model_type")
    if switches["enable_checkpointless"] and not switches["enable_inprocess"]:
        raise doc.wrong(
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
    return Recovery(switches["enable_inprocess"], switches["enable_checkpointless"], copies), tuple(notes)


def checkpoints_of(doc: Document) -> Checkpoints:
    frequency = doc.whole("log.ckpt.every_n_train_steps")
    own = doc.whole("mmap.checkpoint_frequency")
    if frequency is not None and own is not None and frequency != own:
        raise doc.wrong(
            "mmap.checkpoint_frequency",
            f"is {own}, but log.ckpt.every_n_train_steps is {frequency}: batches would be given up before their step "
            "is safe, or kept for nothing",
        )
    keep = doc.get("log.ckpt.save_top_k")
    by = doc.text("log.ckpt.monitor")
    newest = isinstance(keep, int) and not isinstance(keep, bool) and keep > 0 and by in (None, "step")
    return Checkpoints(
        durable_every=frequency or Checkpoints.durable_every,
        durable=doc.text("log.ckpt.dirpath") or "",
        keep_last=keep if newest else 0,
    )


def training_of(doc: Document) -> Training:
    model = str(doc.get("run.name") or "") + str(doc.get("display_name") or "")
    return Training(
        method="lora" if "lora" in model.lower() else "full",
        algorithm="pretrain" if "pre-training" in model.lower() else "sft",
        steps=doc.whole("trainer.max_steps"),
        length=doc.whole("data.seq_length"),
        weight_decay=doc.number("optim.config.weight_decay"),
        beta1=doc.number("optim.config.adam_beta1"),
        beta2=doc.number("optim.config.adam_beta2"),
        eps=doc.number("optim.config.adam_eps"),
        clip=doc.number("optim.config.clip_grad"),
        warmup=doc.whole("optim.lr_scheduler.warmup_steps", least=0),
        min_rate=doc.number("optim.lr_scheduler.min_lr"),
    )


def ahead_of(doc: Document) -> Ahead | None:
    batches = doc.whole("mmap.prefetch_length")
    return None if batches is None else Ahead(batches, doc.text("mmap.cache_dir") or "")


def environ_of(recovery: Recovery) -> dict[str, str]:
    """Where ranks meet without a root, as such recipes are launched."""
    return {"ELASTIC_ROOTLESS": "1"} if recovery.in_process else {}


def _callback(doc: Document) -> Mapping[Any, Any] | None:
    return next((one for one in doc.items("callbacks") if str(one.get(_TARGET)).endswith(_CALLBACK)), None)


def _switch(doc: Document, name: str) -> bool:
    """As the callback has it: off where it does not say."""
    value = (_callback(doc) or {}).get(name, False)
    if not isinstance(value, bool):
        raise PolicyError(f"{doc.name}: callbacks.{_CALLBACK}.{name} is {value!r}: it must be true or false")
    return value
