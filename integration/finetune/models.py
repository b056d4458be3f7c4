"""Models of Transformers: their configuration, their parts on this rank, and where their first weights come from.

A model is made without weights and cut up block by block, so that a rank never has more than one block in full. Weights
come from a checkpoint, or, where there is none, from the first rank, which alone reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastic.workers.world import World
from integration.finetune.adapters import adapt, first_weights
from integration.finetune.errors import ModelError
from integration.finetune.job import Job
from integration.finetune.pretrained import first_line

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def sharded(config: Any, job: Job, world: World) -> nn.Module:
    """This rank's part of the model, with whatever was in memory for weights."""
    model = _without_weights(config)
    if job.lora:
        adapt(model, job)
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


def inner(model: nn.Module) -> Any:
    """The model itself, without what wraps it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def give_first_weights(model: nn.Module, config: Any, job: Job, world: World) -> None:
    """All ranks call it; the first one reads, or makes, the weights and hands them out."""
    whole: dict[str, Any] = {}
    if world.rank == 0:
        whole = _first_weights(config, job).state_dict()
        if job.lora:
            whole = first_weights(whole, set(inner(model).state_dict()), job)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world.size > 1)
    set_model_state_dict(inner(model), whole, options=options)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All ranks call it; the first gets the weights, the others nothing."""
    found: dict[str, Any] = get_model_state_dict(inner(model), options=_WHOLE)
    return found


def plain(config: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A model of one's own with these weights."""
    model = _without_weights(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _without_weights(config: Any) -> Any:
    try:
        with torch.device("meta"):
            return _made(config)
    except ValueError as error:
        raise ModelError(f"{config.model_type} is no causal language model: {first_line(error)}") from error


def _first_weights(config: Any, job: Job) -> Any:
    from transformers import AutoModelForCausalLM

    if job.model:
        return AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        return _made(config)


def _made(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    return factory.from_config(config, dtype=torch.float32)


def _blocks(model: Any) -> Iterator[nn.Module]:
    """What Transformers itself never splits: a model's layers."""
    names = set(model._no_split_modules or ())
    found = [one for one in model.modules() if type(one).__name__ in names]
    if not found:
        raise ModelError(f"{type(model).__name__} does not say which of its modules are layers")
    yield from found


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Memory for what has none yet. One tensor in several places stays one: they are tied again afterwards."""
    for one in module.modules():
        for name, parameter in one.named_parameters(recurse=False):
            if parameter.is_meta:
                new = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                one._parameters[name] = nn.Parameter(new, requires_grad=parameter.requires_grad)
        for name, buffer in one.named_buffers(recurse=False):
            if buffer.is_meta:
                one._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _fill_unsaved(model: Any) -> None:
    """Buffers that no checkpoint has; those of rotary embeddings follow from the configuration."""
    for name, one in model.named_modules():
        unsaved = one._non_persistent_buffers_set
        if not unsaved:
            continue
        if not hasattr(one, "original_inv_freq"):
            raise ModelError(
                f"{name} keeps {', '.join(sorted(unsaved))} outside of checkpoints: it cannot be made anew"
            )
        with torch.no_grad():
            model._init_weights(one)


def _recompute(model: Any) -> None:
    """What Transformers calls it changed with its releases."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _precision(job: Job, device: torch.device) -> MixedPrecisionPolicy:
    wanted = job.precision if job.precision != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    if wanted == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
