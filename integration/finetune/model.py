"""The model: loading, sharding, LoRA adapters, and export for from_pretrained.

A model is created without weights and sharded block by block, so a rank never holds more than one full block. Weights
come from a checkpoint, otherwise from rank 0, which alone reads them.

::

    y = W x + (alpha / rank) · B (A x)      W is frozen; A starts random, B zero, so the model is unchanged at first
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic.workers.world_handle import World
from integration.finetune.finetune_job import FINETUNE_EXTRA, FinetuneJob, ModelError
from integration.finetune.inputs import first_line_of
from peerstore.optional_packages import optional_imports

_FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard_model(config: Any, job: FinetuneJob, world: World) -> nn.Module:
    """Return this rank's shard of the model, with uninitialized weights."""
    model = _without_weights(config)
    if job.lora:
        add_lora(model, job)
    if job.recompute:
        _recompute(model)
    options: dict[str, Any] = {"mesh": world.mesh(), "mp_policy": _precision(job, world.device)}
    wraps = job.parallel == "fsdp"
    for block in _blocks(model):
        _materialise(block, world.device)
        if wraps:
            fully_shard(block, **options)
    _materialise(model, world.device)
    model.tie_weights()
    _fill_unsaved(model)
    model.train()
    if wraps:
        fully_shard(model, **options)
        return model
    return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)


def unwrap_model(model: nn.Module) -> Any:
    """Return the model without its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def load_initial_weights(model: nn.Module, config: Any, job: FinetuneJob, world: World) -> None:
    """Load the initial weights on all ranks. Rank 0 reads or creates them and broadcasts them."""
    whole: dict[str, Any] = {}
    if world.rank == 0:
        whole = _first_weights(config, job).state_dict()
        if job.lora:
            whole = initial_lora_weights(whole, set(unwrap_model(model).state_dict()), job)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world.size > 1)
    set_model_state_dict(unwrap_model(model), whole, options=options)


def gather_full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all weights on rank 0, and an empty dict on the others. All ranks must call it."""
    found: dict[str, Any] = get_model_state_dict(unwrap_model(model), options=_FULL_STATE)
    return found


def unsharded_model(config: Any, weights: dict[str, torch.Tensor]) -> Any:
    """Return an unsharded model with these weights."""
    model = _without_weights(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _without_weights(config: Any) -> Any:
    try:
        with torch.device("meta"):
            return _build_model(config)
    except ValueError as error:
        raise ModelError(f"{config.model_type} is not a causal language model: {first_line_of(error)}") from error


def _first_weights(config: Any, job: FinetuneJob) -> Any:
    with optional_imports(*FINETUNE_EXTRA):
        from transformers import AutoModelForCausalLM

    if job.model:
        return AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        return _build_model(config)


def _build_model(config: Any) -> Any:
    with optional_imports(*FINETUNE_EXTRA):
        from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    return factory.from_config(config, dtype=torch.float32)


def _blocks(model: Any) -> Iterator[nn.Module]:
    """Yield the modules that Transformers never splits: a model's layers."""
    names = set(model._no_split_modules or ())
    found = [one for one in model.modules() if type(one).__name__ in names]
    if not found:
        raise ModelError(f"{type(model).__name__} does not say which of its modules are layers")
    yield from found


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate memory for meta tensors. Tied tensors become separate; the caller ties them again."""
    for one in module.modules():
        for name, parameter in one.named_parameters(recurse=False):
            if parameter.is_meta:
                new = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                one._parameters[name] = nn.Parameter(new, requires_grad=parameter.requires_grad)
        for name, buffer in one.named_buffers(recurse=False):
            if buffer.is_meta:
                one._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _fill_unsaved(model: Any) -> None:
    """Compute buffers that no checkpoint has, like those of rotary embeddings, from the configuration."""
    for name, one in model.named_modules():
        unsaved = one._non_persistent_buffers_set
        if not unsaved:
            continue
        if not hasattr(one, "original_inv_freq"):
            raise ModelError(
                f"{name} keeps {', '.join(sorted(unsaved))} outside of checkpoints: they cannot be computed again"
            )
        with torch.no_grad():
            model._init_weights(one)


def _recompute(model: Any) -> None:
    """Enable activation checkpointing, by the method name of the installed Transformers release."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _precision(job: FinetuneJob, device: torch.device) -> MixedPrecisionPolicy:
    wanted = job.precision if job.precision != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    if wanted == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


_FROZEN, _A, _B = "frozen.weight", "adapter_a", "adapter_b"


class LoRALinear(nn.Module):
    """A frozen linear layer with trainable adapters."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen = layer
        self.adapter_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.adapter_b = nn.Parameter(layer.weight.new_empty(layer.out_features, rank))
        self._scale = alpha / rank

    @property
    def weight(self) -> torch.Tensor:
        """Return the frozen weight: models read its type."""
        return self.frozen.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = nn.functional.linear(nn.functional.linear(x, self.adapter_a), self.adapter_b)
        whole: torch.Tensor = self.frozen(x) + beside * self._scale
        return whole


def add_lora(model: Any, job: FinetuneJob) -> None:
    """Add adapters to all linear layers except the output layer, and freeze all other weights."""
    model.requires_grad_(False)
    last = model.get_output_embeddings()
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not last]
    if not found:
        raise ModelError(f"{type(model).__name__} has no linear layers to add adapters to")
    for name, layer in found:
        above, _, own = name.rpartition(".")
        setattr(model.get_submodule(above), own, LoRALinear(layer, job.lora, job.lora_alpha))


def initial_lora_weights(
    weights: dict[str, torch.Tensor], names: set[str], job: FinetuneJob
) -> dict[str, torch.Tensor]:
    """Rename a model's weights for adapters, and add the adapters' initial weights."""
    found = dict(weights)
    made = torch.Generator().manual_seed(job.seed)
    for name in sorted(_lora_layers(names)):
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in found:
                found[f"{name}.frozen.{kind}"] = found.pop(f"{name}.{kind}")
        out, into = found[f"{name}.{_FROZEN}"].shape
        bound = 1 / math.sqrt(into)
        found[f"{name}.{_A}"] = (torch.rand(job.lora, into, generator=made) * 2 - 1) * bound
        found[f"{name}.{_B}"] = torch.zeros(out, job.lora)
    return found


def merge_lora(weights: dict[str, torch.Tensor], job: FinetuneJob) -> dict[str, torch.Tensor]:
    """Return the weights of an equivalent model without adapters."""
    found = dict(weights)
    for name in list(_lora_layers(set(weights))):
        added = found.pop(f"{name}.{_B}") @ found.pop(f"{name}.{_A}") * (job.lora_alpha / job.lora)
        found[f"{name}.weight"] = found.pop(f"{name}.{_FROZEN}") + added
        if f"{name}.frozen.bias" in found:
            found[f"{name}.bias"] = found.pop(f"{name}.frozen.bias")
    return found


def _lora_layers(names: set[str]) -> Iterator[str]:
    return (name.removesuffix(f".{_A}") for name in names if name.endswith(f".{_A}"))


def export_model(model: nn.Module, config: Any, tokenizer: Any, job: FinetuneJob, *, rank: int) -> None:
    """Write the model on rank 0. All ranks must call it. ``from_pretrained`` reads the same bits."""
    weights = gather_full_weights(model)
    if rank == 0:
        weights = merge_lora(weights, job) if job.lora else weights
        dtype = export_dtype(job, config)
        found = unsharded_model(config, {name: _cast(one, dtype) for name, one in weights.items()})
        with _replaced(job.model_folder) as folder:
            found.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    dist.barrier()


def export_dtype(job: FinetuneJob, config: Any) -> torch.dtype:
    """Return the type of exported weights: the model's own type unless the job sets one."""
    if job.export != "auto":
        found: torch.dtype = getattr(torch, job.export)
        return found
    came: Any = getattr(config, "dtype", None) if job.model else None
    if isinstance(came, str):
        came = getattr(torch, came, None)
    return came if isinstance(came, torch.dtype) and came.is_floating_point else torch.float32


def _cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if weight.is_floating_point() else weight


@contextlib.contextmanager
def _replaced(place: Path) -> Iterator[Path]:
    """Yield a new folder that replaces ``place`` when the block succeeds."""
    new, old = place.with_name(f"{place.name}.new"), place.with_name(f"{place.name}.old")
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)
