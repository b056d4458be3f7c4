"""Whole sharded states of Megatron-Core as steps, without a folder."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

from integration.megatron.sharded_strategies import COMMON, TieredLoadStrategy, TieredSaveStrategy, common_object
from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveHandle
from tieredckpt.errors import UsageError
from tieredckpt.export.step_source import without_torch_warnings

_NO_FOLDER = ""


def save_sharded_state(
    sharded_state_dict: dict[str, Any],
    ckpt: Checkpointer,
    step: int,
    *,
    validate_access_integrity: bool = True,
    preprocess_common: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    keep: bool = False,
    durable: bool = False,
) -> SaveHandle:
    """Save a sharded state as ``step`` of the job of ``ckpt``.

    Training may continue as soon as it returns. All ranks call this. ``validate_access_integrity`` is the option of
    ``dist_checkpointing.save``, and ``preprocess_common`` its ``preprocess_common_before_consistancy_check``.
    """
    sharded, common = save_preprocess(sharded_state_dict, validate_access_integrity, preprocess_common)
    strategy = TieredSaveStrategy(ckpt, keep=keep, durable=durable)
    return strategy.save_step({**sharded, COMMON: common_object(common, dist.get_rank())}, step)


def load_sharded_state(
    sharded_state_dict: dict[str, Any],
    ckpt: Checkpointer,
    step: int | None = None,
    *,
    validate_access_integrity: bool = True,
) -> dict[str, Any]:
    """Return the state of the newest complete step, or of ``step``, as ``dist_checkpointing.load`` does.

    All ranks call this, and load the same step. Any number of ranks and any sharding may have saved it. Raise
    :class:`~tieredckpt.errors.CheckpointNotFoundError` if nothing was ever saved, or the other errors of a load.
    """
    force_all_tensors_to_non_fp8(sharded_state_dict)
    state, nonpersistent, factories = load_preprocess(sharded_state_dict)
    sharded, _ = extract_sharded_base(state)
    if validate_access_integrity:
        validate_sharding_integrity(determine_global_metadata(sharded)[1])
    loaded = TieredLoadStrategy(ckpt, step).load({**sharded, COMMON: common_object(None)}, _NO_FOLDER)
    merged = loaded.pop(COMMON)
    merge(merged, nonpersistent)
    merge(merged, loaded)
    found: dict[str, Any] = apply_factory_merges(merged, factories)
    return found


def complete_exported_folder(folder: str | os.PathLike[str]) -> None:
    """Add Megatron's own files to a folder of ``tieredckpt export --format dcp``.

    ``dist_checkpointing.load`` of each version then loads the folder. One process calls this.
    """
    name = common_object(None).unique_key
    reader = dcp.FileSystemReader(folder)
    if name not in reader.read_metadata().state_dict_metadata:
        raise UsageError(f"{os.fspath(folder)} has no entry {name}: no step of Megatron-Core was exported to it")
    state: dict[str, Any] = {name: io.BytesIO()}
    with without_torch_warnings():
        dcp.load(state, storage_reader=reader, no_dist=True)
    torch.save(state[name][0], Path(folder) / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), os.fspath(folder))
