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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tieredckpt.dcp.rank_group import unwrap_load_error, unwrap_save_error
from tieredckpt.dcp.tiered_reader import TieredReader
from tieredckpt.dcp.tiered_writer import TieredWriter
from tieredckpt.settings import Settings
from tieredckpt.tensors.nested_state import nested_state


def load(
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    durable: str | None = None,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Return the state of the newest step of ``target``, or of ``step``, nested as it was saved.

    ``target`` is a job's name, ``tiered://JOB`` or ``tiered://JOB/step-N``. All tensors are complete and on ``device``,
    for any number of ranks that saved them. The order of keys may differ. This process loads without other ranks, and
    the job does not resume from the load. To resume training, use ``Checkpointer.restore`` or ``dcp.load``. Raise
    :class:`~tieredckpt.errors.CheckpointNotFoundError` if the step does not exist, or the other errors of a load.
    """
    reader = TieredReader(target, step, durable=durable, settings=settings)
    metadata = reader.read_metadata()
    # DCP reads the metadata again, when a newer step may exist.
    reader = TieredReader(target, reader.chosen_step, durable=durable, settings=settings)
    reader.resumes_job = False
    state = _empty_state(metadata, torch.device(device))
    planner = _TemplateFreeLoadPlanner()
    try:
        with _without_warning(), closing(reader):
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as failure:
        raise unwrap_load_error(failure) from failure
    state = {**state, **{name: tensor.to(device) for name, tensor in planner.taken.items()}}
    paths = metadata.planner_data
    if not isinstance(paths, Mapping) or not state.keys() <= paths.keys():  # saved flat
        return state
    return nested_state(state, paths)


def save(
    target: str | os.PathLike[str],
    state: dict[str, Any],
    step: int | None = None,
    *,
    durable: str | None = None,
    start_over: bool = False,
    settings: Settings | None = None,
) -> None:
    """Save ``state`` as ``step`` of ``target``.

    ``target`` is a job's name, ``tiered://JOB`` or ``tiered://JOB/step-N``.

    Return when the step is sealed in this node's memory. If ``torch.distributed`` is initialized, all ranks call this
    with their parts, as with ``dcp.save``. Raise :class:`~tieredckpt.errors.MissingStepError` without a step number,
    :class:`~tieredckpt.errors.UsageError` if the job has a newer step, or the other errors of a save. ``start_over``:
    abandon the job's earlier steps, unless this process has loaded or saved a step.
    """
    writer = TieredWriter(target, step, durable=durable, start_over=start_over, settings=settings)
    try:
        with _without_warning():
            dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as failure:
        raise unwrap_save_error(failure) from failure


class _TemplateFreeLoadPlanner(DefaultLoadPlanner):
    """Load planner for empty tensors; tensors that it cannot create (sparse, subclasses) arrive as saved."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.taken: dict[str, torch.Tensor] = {}

    def take_tensor(self, fqn: str, tensor: torch.Tensor) -> None:
        self.taken[fqn] = tensor


def _empty_state(metadata: Metadata, device: torch.device) -> dict[str, Any]:
    """Return a flat state with uninitialized tensors, and ``None`` for objects."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


@contextmanager
def _without_warning() -> Iterator[None]:
    """Suppress DCP's warning that it runs without other ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        yield
