"""Small matrices beside frozen layers (LoRA): what is trained, and how it gets into the model's own weights in the end.

::

    y = W x + (alpha / rank) · B (A x)      W is frozen; A begins at random, B at zero: nothing has changed yet
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from integration.finetune.errors import ModelError
from integration.finetune.job import Job

_FROZEN, _A, _B = "frozen.weight", "adapter_a", "adapter_b"


class Adapted(nn.Module):
    """A linear layer that stays as it is, with what is learned beside it."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen = layer
        self.adapter_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.adapter_b = nn.Parameter(layer.weight.new_empty(layer.out_features, rank))
        self._scale = alpha / rank

    @property
    def weight(self) -> torch.Tensor:
        """Models look at its type."""
        return self.frozen.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = nn.functional.linear(nn.functional.linear(x, self.adapter_a), self.adapter_b)
        whole: torch.Tensor = self.frozen(x) + beside * self._scale
        return whole


def adapt(model: Any, job: Job) -> None:
    """All linear layers but the last one; everything else is frozen."""
    model.requires_grad_(False)
    last = model.get_output_embeddings()
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not last]
    if not found:
        raise ModelError(f"{type(model).__name__} has no linear layers that adapters could be beside")
    for name, layer in found:
        above, _, own = name.rpartition(".")
        setattr(model.get_submodule(above), own, Adapted(layer, job.lora, job.lora_alpha))


def first_weights(weights: dict[str, torch.Tensor], names: set[str], job: Job) -> dict[str, torch.Tensor]:
    """A model's own weights by the names they have beside adapters, and what those begin with."""
    found = dict(weights)
    made = torch.Generator().manual_seed(job.seed)
    for name in sorted(_adapted(names)):
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in found:
                found[f"{name}.frozen.{kind}"] = found.pop(f"{name}.{kind}")
        out, into = found[f"{name}.{_FROZEN}"].shape
        bound = 1 / math.sqrt(into)
        found[f"{name}.{_A}"] = (torch.rand(job.lora, into, generator=made) * 2 - 1) * bound
        found[f"{name}.{_B}"] = torch.zeros(out, job.lora)
    return found


def merged(weights: dict[str, torch.Tensor], job: Job) -> dict[str, torch.Tensor]:
    """What a model without adapters needs to do the same."""
    found = dict(weights)
    for name in list(_adapted(set(weights))):
        added = found.pop(f"{name}.{_B}") @ found.pop(f"{name}.{_A}") * (job.lora_alpha / job.lora)
        found[f"{name}.weight"] = found.pop(f"{name}.{_FROZEN}") + added
        if f"{name}.frozen.bias" in found:
            found[f"{name}.bias"] = found.pop(f"{name}.frozen.bias")
    return found


def _adapted(names: set[str]) -> Iterator[str]:
    return (name.removesuffix(f".{_A}") for name in names if name.endswith(f".{_A}"))
