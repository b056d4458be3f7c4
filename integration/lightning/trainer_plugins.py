"""Lightning's interfaces for checkpoints: a CheckpointIO plugin and a strategy for sharded models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from integration.lightning.trainer_steps import CheckpointParts, NoCheckpoint, PathLike, TrainerSteps, read_reference
from tieredckpt import TieredCheckpointError


class TieredCheckpointIO(CheckpointIO):
    """Plugin that saves a trainer's checkpoints as steps of a job.

    Use it as ``Trainer(plugins=[TieredCheckpointIO("tiered://job")])``.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.steps = TrainerSteps(url, options, is_shared=False)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        state = {"checkpoint": CheckpointParts(checkpoint)}
        is_full = "optimizer_states" in checkpoint
        self.steps.save(state, checkpoint["global_step"], path, storage_options, is_full=is_full)

    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        location = read_reference(path)
        if location is None:
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        parts, trusts = CheckpointParts(), weights_only is False
        # Rank 0 continues the job and chooses the step. The other ranks read the same step.
        told: list[Any] = [None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                told = [self.steps.load({"checkpoint": parts}, location, trusts=trusts)]
            except TieredCheckpointError as error:
                told = [error]
        if dist.is_initialized():
            dist.broadcast_object_list(told)
        (chosen,) = told
        if isinstance(chosen, TieredCheckpointError):
            raise chosen
        if chosen is None:
            return NoCheckpoint()
        if dist.is_initialized() and dist.get_rank() > 0:
            parts.load_state_dict(self.steps.load_alone(chosen, trusts=trusts)["checkpoint"])
        return parts.joined()

    def remove_checkpoint(self, path: PathLike) -> None:
        self.steps.remove(path)

    def teardown(self) -> None:
        self.steps.close()


class _ModelState:
    """A sharded model as a ``Stateful``."""

    def __init__(self, model: torch.nn.Module, *, strict: bool) -> None:
        self._model = model
        self._strict = strict

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state, options=StateDictOptions(strict=self._strict))


class _OptimizerState:
    """An optimizer of a sharded model as a ``Stateful``, with parameters by name."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self._optimizer, state)


class TieredModelParallel(ModelParallelStrategy):
    """FSDP2 and tensor parallelism whose ranks save their shards as parts of a step.

    ``options`` are arguments of the ``Checkpointer``, ``strategy`` those of ``ModelParallelStrategy``.
    """

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None, **strategy: Any) -> None:
        super().__init__(**strategy)
        self.steps = TrainerSteps(url, options or {}, is_shared=True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(cast("torch.nn.Module", self.model))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model = cast("torch.nn.Module", self.model)
        return get_optimizer_state_dict(model, getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any | None = None
    ) -> None:
        is_full = "optimizer_states" in checkpoint
        state: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
        for at, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{at}"] = optimizer
        if self.is_global_zero:
            state["checkpoint"] = CheckpointParts(checkpoint)
        path = self.broadcast(filepath)
        self.steps.save(state, checkpoint["global_step"], path, storage_options, is_full=is_full)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        location = self.broadcast(read_reference(path) if self.is_global_zero else None)
        if location is None:
            return super().load_checkpoint(path, weights_only)
        model, parts = cast("torch.nn.Module", self.model), CheckpointParts()
        strict = self.lightning_module.strict_loading
        state: dict[str, Any] = {"state_dict": _ModelState(model, strict=strict), "checkpoint": parts}
        for at, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{at}"] = _OptimizerState(model, optimizer)
        # Without optimizers the trainer evaluates, and leaves their saved states alone.
        strict = strict and bool(self.optimizers)
        chosen = self.steps.load(state, location, trusts=weights_only is False, strict=strict)
        return NoCheckpoint() if chosen is None else parts.joined()

    def remove_checkpoint(self, filepath: PathLike) -> None:
        if self.is_global_zero:
            self.steps.remove(filepath)

    def teardown(self) -> None:
        self.steps.close()
        super().teardown()
