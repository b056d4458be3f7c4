"""Megatron-Core's strategies that save and load sharded states as steps of a job."""

from __future__ import annotations

import dataclasses
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import CheckpointingException, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveHandle, SaveState
from tieredckpt.dcp.rank_group import unwrap_load_error
from tieredckpt.dcp.tiered_reader import TieredReader
from tieredckpt.errors import MismatchError, UsageError

COMMON = "common_state"
"""Name of the object with all values that are not sharded, as Megatron-Core 0.19 names it."""
_ITERATION = re.compile(r"iter_(\d+)")


def common_object(data: Any, rank: int = 0) -> ShardedObject:
    """Return the entry of a step for the values that are not sharded, which rank 0 saves."""
    return ShardedObject(COMMON, data, (1,), (0,), replica_id=rank)


class TieredSaveStrategy(torch_dist.TorchDistSaveShardedStrategy):
    """Strategy of ``dist_checkpointing.save`` that saves a sharded state as a step of the job of ``ckpt``.

    The step is ``step``, or the iteration in the name of the checkpoint folder (``iter_0000120``). Rank 0 still writes
    Megatron's small files to that folder.
    """

    def __init__(
        self, ckpt: Checkpointer, step: int | None = None, *, keep: bool = False, durable: bool = False
    ) -> None:
        super().__init__("torch_dist", 1)
        self._ckpt, self._step = ckpt, step
        self._keep, self._durable = keep, durable

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], async_strategy: str = "mcore"
    ) -> AsyncRequest:
        """Copy the parts of all ranks, and return a request that only waits for their seals."""
        step = _step_of(checkpoint_dir) if self._step is None else self._step
        if step is None:
            raise UsageError(
                f"Which step is {os.fspath(checkpoint_dir)}? Name the folder iter_N, or pass TieredSaveStrategy(step=N)"
            )
        saved = self.save_step(_with_common(sharded_state_dict, Path(checkpoint_dir)), step)

        def finalize() -> None:
            if saved.wait() in (SaveState.SKIPPED, SaveState.FAILED):
                raise CheckpointingException(f"Step {step} of job {self._ckpt.job!r} was not saved: {saved.error}")

        return AsyncRequest(None, (), [finalize])

    def save_step(self, sharded_state_dict: Any, step: int) -> SaveHandle:
        """Save the parts of all ranks as ``step``; the caller may change its tensors at once."""
        flat, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        tensors = {name: shards for name, shards in flat.items() if isinstance(shards[0], ShardedTensor)}
        objects = {name: _ObjectShards([one.data for one in flat[name]]) for name in flat.keys() - tensors.keys()}
        state = {**torch_dist.mcore_to_pyt_state_dict(tensors), **objects}
        return self._ckpt.save(state, step, force=True, keep=self._keep, durable=self._durable)


class TieredLoadStrategy(torch_dist.TorchDistLoadShardedStrategy):
    """Strategy of ``dist_checkpointing.load`` that loads a step on which all ranks agree.

    The step of the job of ``ckpt`` is ``step``, or the iteration in the name of the folder, or else the newest.
    """

    def __init__(self, ckpt: Checkpointer, step: int | None = None) -> None:
        super().__init__()
        self.stream_ckpt_dequant = False  # Megatron converts quantized tensors before the load
        self._ckpt, self._step = ckpt, step
        self.loaded_step = -1
        """Step of the last load."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], async_strategy: str = "") -> Any:
        """Load into the tensors of ``sharded_state_dict``, and return it with values in place of its entries."""
        tensors = [one for one in nested_values(sharded_state_dict) if isinstance(one, ShardedTensor)]
        flat, paths, names = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = torch_dist.mcore_to_pyt_state_dict(flat, is_loading=True)
        planner = _LoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        try:
            with closing(self._reader(checkpoint_dir)) as reader:
                dcp.load(state, storage_reader=reader, planner=planner)
                self.loaded_step = reader.restored_step
        except CheckpointException as failure:
            raise self._load_error(failure) from failure
        values = {name: torch_dist._unwrap_pyt_sharded_tensor(value) for name, value in state.items()}
        loaded = torch_dist._replace_sharded_keys_with_state_dict_keys(values, paths, names)
        torch_dist._restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str], metadata: Metadata | None = None) -> Any:
        """Return the tensors of the step, without data. All ranks call this."""
        return super().load_tensors_metadata(checkpoint_dir, metadata or self._reader(checkpoint_dir).read_metadata())

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Return the tensors and objects of the step, without data. All ranks call this."""
        metadata = self._reader(checkpoint_dir).read_metadata()
        tensors = self.load_tensors_metadata(checkpoint_dir, metadata)
        objects = (name for name in metadata.state_dict_metadata if name not in tensors)
        return {**{name: ShardedObject.empty_from_unique_key(name) for name in objects}, **tensors}

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Raise :class:`UsageError`, because a step never changes."""
        raise UsageError(f"A step of job {self._ckpt.job!r} never changes: save the state without {key_prefix!r}")

    def _load_error(self, failure: CheckpointException) -> BaseException:
        first = next(iter(failure.failures.values()))[0]
        if isinstance(first, KeyError | CheckpointingException):  # from Megatron's planner
            return MismatchError(f"The state and the step of job {self._ckpt.job!r} do not match: {first.args[0]}")
        return unwrap_load_error(failure)

    def _reader(self, checkpoint_dir: str | os.PathLike[str]) -> TieredReader:
        """Return a reader, after the nodes know each other and have answered."""
        self._ckpt.loadable_versions()
        step = _step_of(checkpoint_dir) if self._step is None else self._step
        return TieredReader(self._ckpt.job, step, settings=self._ckpt.settings)


class _ObjectShards:
    """Data of sharded objects with one name. It is pickled as a list, which DCP would take apart."""

    def __init__(self, data: list[Any]) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._data,)


class _LoadPlanner(torch_dist.MCoreLoadPlanner):
    """Megatron's load planner, which changes entries of the metadata for tensors of another shape."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:  # noqa: FBT002 - torch's own signature
        if metadata is not None and self.allow_shape_mismatch_sharded_tensors:
            entries = {name: metadata.state_dict_metadata[name] for name in metadata.state_dict_metadata}
            metadata = dataclasses.replace(metadata, state_dict_metadata=entries)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _step_of(folder: str | os.PathLike[str]) -> int | None:
    found = _ITERATION.fullmatch(Path(folder).name)
    return None if found is None else int(found[1])


def _with_common(state: Any, folder: Path) -> Any:
    """Return ``state`` with the values of ``common.pt``, which Megatron-Core 0.16 writes first."""
    file = folder / COMMON_STATE_FNAME
    if COMMON in state or dist.get_rank() != 0 or not file.is_file():
        return state
    return {**state, COMMON: common_object(torch.load(file, map_location="cpu", weights_only=True))}
