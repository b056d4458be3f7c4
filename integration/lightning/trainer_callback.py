"""Saves between a trainer's own checkpoints, a common last step on SIGTERM, and RNG states per rank."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from integration.lightning.trainer_steps import TrainerSteps
from tieredckpt import UsageError

log = logging.getLogger(__name__)
_RNG_KEY = "tieredckpt_rng_states"


class TieredCallback(Callback):
    """Saves every N optimizer steps; on SIGTERM to any rank all ranks save the same step and end."""

    def __init__(self, every: int = 1, *, grace_s: float = 25.0) -> None:
        self._every = every
        self._grace_s = grace_s
        self._is_requested = False
        self._handler_before: Any = None
        self._is_installed = False
        self._step = 0
        self._is_due = False
        self._ends = False
        self._rng_states: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _steps_of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._is_requested = self._ends = self._is_due = False
        # Lightning's own handler has a collective in it, and the other ranks may be in another one.
        self._handler_before = signal.signal(signal.SIGTERM, self._receive)
        self._is_installed = True
        if self._rng_states is not None and trainer.fit_loop.restarted_mid_epoch:
            _set_rng_states(self._rng_states)  # again: the iterator of the batches has drawn numbers since

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if step == self._step:  # gradients are accumulated, and no checkpoint has them
            return
        self._step = step
        self._ends |= trainer.strategy.reduce_boolean_decision(self._is_requested, all=False)
        self._is_due |= self._ends or step % self._every == 0
        # An epoch's last step is saved with the next one. A loader that resumes at the end of an epoch would train
        # nothing in the next one, or repeat its order.
        if self._is_due and not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ends:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._is_due = False
        steps = _steps_of(trainer)
        becomes_durable = self._ends and steps.has_durable_tier
        options = {"durable": True} if becomes_durable else None
        trainer.save_checkpoint(f"tiered://{steps.job}/step-{self._step}", False, storage_options=options)
        if not self._ends:
            return
        if steps.last_save is not None:
            steps.last_save.wait("durable" if becomes_durable else "memory", timeout_s=self._grace_s)
        trainer.strategy.barrier("tieredckpt: the last step is sealed")
        log.warning("SIGTERM: step %d of tiered://%s is saved, training ends", self._step, steps.job)
        raise SIGTERMException(128 + signal.SIGTERM)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_due:
            self._save(trainer)
        self._give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        own = _collect_rng_states()
        if "numpy" in own:  # a list, for loads that accept plain data only
            name, keys, *rest = own["numpy"]
            own["numpy"] = (name, keys.tolist(), *rest)
        states: list[Any] = [own] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(states, own)
        checkpoint[_RNG_KEY] = states

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get(_RNG_KEY)
        if states is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if len(states) != trainer.world_size:
            log.warning("%d ranks saved RNG states, %d ranks resume: none is restored", len(states), trainer.world_size)
            return
        self._rng_states = states[trainer.global_rank]
        _set_rng_states(self._rng_states)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True

    def _give_back(self) -> None:
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGTERM, self._handler_before or signal.SIG_DFL)
            if self._is_requested:
                log.warning("SIGTERM arrived after the last step, or training failed first: nothing more is saved")


def _steps_of(trainer: Trainer) -> TrainerSteps:
    owner = trainer.strategy if hasattr(trainer.strategy, "steps") else trainer.strategy.checkpoint_io
    steps = getattr(owner, "steps", None)
    if not isinstance(steps, TrainerSteps):
        raise UsageError(
            "TieredCallback saves through the trainer's plugin or strategy: add TieredCheckpointIO to plugins=, or use "
            "strategy=TieredModelParallel(...)"
        )
    return steps
