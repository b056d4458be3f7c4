"""The parts of a ``Trainer`` that a checkpoint contains, each one a ``Stateful``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers.trainer_callback import ExportableState

from elastic.samples.rng import RNGState
from tieredckpt.tensors.optimizer_placeholders import init_optimizer_state


class NamedParameters:
    """The model's parameters by name, without wrappers. With ``trainable_only``, only the trainable ones."""

    def __init__(self, model: torch.nn.Module, *, trainable_only: bool) -> None:
        self._model = model
        self._options = StateDictOptions(ignore_frozen_params=trainable_only, strict=not trainable_only)

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._model, options=self._options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state, options=self._options)


class NamedOptimizer:
    """The optimizer by its parameters' names, so that another number of ranks can load it."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate's
        self._was_empty = not self._optimizer.state

    def state_dict(self) -> dict[str, Any]:
        init_optimizer_state(self._optimizer)
        return get_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self._optimizer, state)

    def clear_placeholders(self) -> None:
        """Remove the state that was made for a restore that found no step."""
        if self._was_empty:
            self._optimizer.state.clear()


class LoopProgress:
    """Progress of the loop: ``TrainerState``, callbacks, learning rate, scaler and batch size."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded: dict[str, Any] | None = None
        """State that the last restore read."""

    @property
    def global_batch(self) -> int:
        """Samples in a step of all ranks."""
        return int(self._trainer.get_total_train_batch_size(self._trainer.args))

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "trainer": _trainer_json(trainer) if self.loaded is None else self.loaded["trainer"],
            "global_batch": self.global_batch if self.loaded is None else self.loaded["global_batch"],
            "last_logged": self._last_logged() if self.loaded is None else self.loaded["last_logged"],
            "lr_scheduler": (trainer.lr_scheduler.state_dict(),),  # DCP takes a tuple as one object
            "scaler": (None if scaler is None else scaler.state_dict(),),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = dict(state)
        self._trainer.lr_scheduler.load_state_dict(state["lr_scheduler"][0])
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is not None and state["scaler"][0] is not None:
            scaler.load_state_dict(state["scaler"][0])

    def _last_logged(self) -> int:
        return int(getattr(self._trainer, "_globalstep_last_logged", 0))


def _trainer_json(trainer: Any) -> str:
    """``trainer_state.json`` as the ``Trainer`` writes it, without the fields in which ranks differ."""
    fields = dataclasses.asdict(trainer.state) | {"is_local_process_zero": True, "is_world_process_zero": True}
    states: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    fields["stateful_callbacks"] = {name: found[0] if len(found) == 1 else found for name, found in states.items()}
    return json.dumps(fields)


class UnloggedLoss:
    """Each rank's sum of the losses since the last log entry."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._saved: list[str] | None = None
        self._loaded: dict[str, torch.Tensor] = {}

    @property
    def loaded(self) -> torch.Tensor | None:
        """This rank's restored sum; ``None`` if another number of ranks saved."""
        return self._loaded.get(f"rank{self._rank}") if len(self._loaded) == self._size else None

    def state_dict(self) -> dict[str, Any]:
        if self._saved is not None:
            return {name: self._loaded.get(name, torch.zeros(())) for name in self._saved}
        total = getattr(self._trainer, "_tr_loss", None)
        return {f"rank{self._rank}": torch.zeros(()) if total is None else total.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = {name: value.clone() for name, value in state.items()}

    def before_restore(self, saved: Collection[str]) -> None:
        self._saved = sorted(saved)


class TrainerParts:
    """The whole state of a prepared ``Trainer``."""

    def __init__(self, trainer: Any, *, trainable_only: bool) -> None:
        model = trainer.model_wrapped
        self.progress = LoopProgress(trainer)
        self.loss = UnloggedLoss(trainer)
        self._optimizer = NamedOptimizer(model, trainer.optimizer)
        self._rng = RNGState()
        self._rng_loaded: dict[str, Any] | None = None
        self._always = {
            "model": NamedParameters(model, trainable_only=trainable_only),
            "optim": self._optimizer,
            "rng": self._rng,
        }
        self._trainer = trainer

    def state(self) -> dict[str, Any]:
        """Return the state for ``Checkpointer.restore``."""
        return {**self._always, "progress": self.progress, "loss": self.loss}

    def state_to_save(self) -> dict[str, Any]:
        """Return the state for ``Checkpointer.save``."""
        return {**self._always, "progress": LoopProgress(self._trainer), "loss": UnloggedLoss(self._trainer)}

    def finish_restore(self, step: int) -> None:
        """Remove placeholders if no step was restored; else remember the generators until the data is skipped."""
        if step < 0:
            self._optimizer.clear_placeholders()
        else:
            self._rng_loaded = self._rng.state_dict()

    def set_generators(self) -> bool:
        """Set this rank's random generators as the restored step had them; return whether a step was restored."""
        if self._rng_loaded is not None:
            self._rng.load_state_dict(self._rng_loaded)
        return self._rng_loaded is not None
