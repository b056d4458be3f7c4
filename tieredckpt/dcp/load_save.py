"""``tieredckpt.load`` and ``tieredckpt.save``: a whole state in one call, without a template."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tieredckpt.dcp.rank_group import unwrap_load_error, unwrap_save_error
from tieredckpt.dcp.tiered_reader import TieredReader
from tieredckpt.dcp.tiered_writer import TieredWriter
from tieredckpt.settings import Settings


def load(
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    durable: str | None = None,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """The whole state of the newest step of ``target`` (or of ``step``), nested as it was saved (keys in any order).

    ``target`` is a job's name, ``tiered://JOB`` or ``tiered://JOB/step-N``. All tensors are on ``device``, whole,
    however many ranks saved them. This process loads alone, whatever others do, and no job goes on from it: to resume
    training use ``Checkpointer.restore`` or ``dcp.load``. Raises :class:`~tieredckpt.errors.CheckpointNotFoundError`
    when there is no such step, and the other errors of a load.
    """
    reader = TieredReader(target, step, durable=durable, settings=settings)
    found = reader.read_metadata()
    # DCP reads the metadata once more: by then there may be a newer step.
    reader = TieredReader(target, reader.chosen_step, durable=durable, settings=settings)
    reader.resumes_job = False
    state = _blank(found, torch.device(device))
    planner = _TemplateFreeLoadPlanner()
    try:
        with _quiet(), closing(reader):
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as failure:
        raise unwrap_load_error(failure) from failure
    state = {**state, **{name: tensor.to(device) for name, tensor in planner.taken.items()}}
    paths = found.planner_data
    if not isinstance(paths, Mapping) or not state.keys() <= paths.keys():  # saved flat
        return state
    nested: dict[str, Any] = unflatten_state_dict(state, {name: paths[name] for name in state})
    return nested


def save(
    target: str | os.PathLike[str],
    state: dict[str, Any],
    step: int | None = None,
    *,
    durable: str | None = None,
    start_over: bool = False,
    settings: Settings | None = None,
) -> None:
    """Save ``state`` as ``step`` of ``target``, which is a job's name, ``tiered://JOB`` or ``tiered://JOB/step-N``.

    Returns when it is sealed in this node's memory. Where ``torch.distributed`` is initialised all ranks call it, each
    with its part, as with ``dcp.save``. Raises :class:`~tieredckpt.errors.MissingStepError` when nothing says which
    step this is, :class:`~tieredckpt.errors.UsageError` when the job has a newer step, and the other errors of a save.
    ``start_over``: unless this process has loaded or saved a step, the job's earlier steps stay behind.
    """
    writer = TieredWriter(target, step, durable=durable, start_over=start_over, settings=settings)
    try:
        with _quiet():
            dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as failure:
        raise unwrap_save_error(failure) from failure


class _TemplateFreeLoadPlanner(DefaultLoadPlanner):
    """Fills tensors made after the metadata; takes those it cannot make (sparse, subclasses) as they were saved."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.taken: dict[str, torch.Tensor] = {}

    def take_tensor(self, fqn: str, tensor: torch.Tensor) -> None:
        self.taken[fqn] = tensor


def _blank(metadata: Metadata, device: torch.device) -> dict[str, Any]:
    """A flat state of that form: tensors without values, and nothing where objects will be."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's remark that it works alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        yield
