"""The trained model as others read it: a folder of safetensors, all of it or the one that was there before."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from integration.finetune.adapters import merged
from integration.finetune.job import Job
from integration.finetune.models import plain, whole_weights


def export(model: nn.Module, config: Any, tokenizer: Any, job: Job, *, rank: int) -> None:
    """All ranks call it; the first writes. ``from_pretrained`` reads back these very bits."""
    weights = whole_weights(model)
    if rank == 0:
        weights = merged(weights, job) if job.lora else weights
        dtype = exported_dtype(job, config)
        found = plain(config, {name: _as(one, dtype) for name, one in weights.items()})
        with _replaced(job.model_folder) as folder:
            found.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    dist.barrier()


def exported_dtype(job: Job, config: Any) -> torch.dtype:
    """Weights that came in bfloat16 leave so."""
    if job.export != "auto":
        found: torch.dtype = getattr(torch, job.export)
        return found
    came: Any = getattr(config, "dtype", None) if job.model else None
    if isinstance(came, str):
        came = getattr(torch, came, None)
    return came if isinstance(came, torch.dtype) and came.is_floating_point else torch.float32


def _as(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if weight.is_floating_point() else weight


@contextlib.contextmanager
def _replaced(place: Path) -> Iterator[Path]:
    """A new folder that takes the old one's place when it is complete."""
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
