"""``tiered`` and ``TieredTrainerMixin``: a ``Trainer`` that saves to the tiers and resumes from them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from integration.transformers.trainer_parts import TrainerParts
from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.preemption import PreemptionHandler, last_step_agreement
from tieredckpt.errors import TieredCheckpointError, UsageError

log = logging.getLogger(__name__)
T = TypeVar("T")


class _EpochBoundary(TrainerCallback):
    """Tells the mixin where the loop is, and sets the sums that the loop resets before ``on_train_begin``."""

    def __init__(self, trainer: TieredTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._resume_sums()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._epoch_ended = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._epoch_ended = True


class TieredTrainerMixin:
    """A base class before ``Trainer`` or a class of it: ``class T(TieredTrainerMixin, SFTTrainer)``.

    ``tiered`` is a dict with ``url`` and the options of :func:`tiered`.
    """

    args: Any
    state: Any
    control: Any
    callback_handler: Any

    def __init__(self, *args: Any, tiered: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._use_tiers(**tiered)

    def _use_tiers(self, url: str | os.PathLike[str], **options: Any) -> None:
        trainer: Any = self
        _refuse_unsupported(trainer)
        self._options = {"target": url, "grace_s": 25.0, "on_sigterm": "save", **options}
        self._per_epoch = 1
        """Steps in an epoch."""
        self._epoch_ended = False
        self._seen_step = 0
        """The last step that was saved, or was not due."""
        self._parts: TrainerParts | None = None
        self._remove_jit_checkpoint()
        self.callback_handler.add_callback(_EpochBoundary(self))

    def _remove_jit_checkpoint(self) -> None:
        for callback in [one for one in self.callback_handler.callbacks if isinstance(one, JITCheckpointCallback)]:
            self.callback_handler.remove_callback(callback)
            manager: Any = callback.jit_manager
            signal.signal(signal.SIGTERM, manager._original_sigterm_handler or signal.SIG_DFL)
            log.warning(
                "enable_jit_checkpoint is turned off: its ranks do not agree on a step. On SIGTERM all ranks save the "
                "same step to %s",
                self._options["target"],
            )

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        """Train as ``Trainer.train`` does, from the newest complete step in the tiers, if any."""
        if trial is not None:
            raise UsageError("Cannot use tiers in a hyperparameter search: its trials would resume from each other.")
        options = self._options | {"on_sigterm": "ignore"}  # all ranks have to stop, not only those with the signal
        given = None if resume_from_checkpoint is True else resume_from_checkpoint
        inherited: Any = super()
        with contextlib.ExitStack() as stack:
            self._checkpointer = stack.enter_context(Checkpointer(**options))
            self._sigterm: PreemptionHandler | None = None
            if self._options["on_sigterm"] == "save":
                rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
                agreement = last_step_agreement(self._checkpointer.job, rank, size)
                self._sigterm = PreemptionHandler(self._flush, self._options["grace_s"], agreement)
                stack.callback(self._sigterm.close)
            return inherited.train(resume_from_checkpoint=given, **kwargs)

    # -- restoring --------------------------------------------------------------------------------------------

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Restore everything at once, before the loop calculates where it starts."""
        inherited: Any = super()
        trainer: Any = self
        where = inherited._init_training_state(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
        self._prepared, _ = inherited._prepare_for_training(max_steps, None, resume_from_checkpoint)
        self._per_epoch = per_epoch
        self._parts = parts = TrainerParts(trainer, trainable_only=hasattr(trainer.model, "peft_config"))
        step = self._checkpointer.restore(parts.state())
        parts.finish_restore(step)
        if step >= 0:
            if resume_from_checkpoint is not None:
                log.warning("step %d in the tiers is used instead of %s", step, resume_from_checkpoint)
            where = self._resume_progress(parts, step, (max_steps, per_epoch, epochs), trial)
        self._seen_step = self.state.global_step
        return where

    def _resume_progress(
        self, parts: TrainerParts, step: int, sizes: tuple[int, int, int], trial: Any
    ) -> tuple[int, int]:
        loaded: dict[str, Any] = parts.progress.loaded or {}
        was, now = loaded["global_batch"], parts.progress.global_batch
        if was != now and not self.args.ignore_data_skip:
            raise UsageError(
                f"Cannot resume step {step}: it was saved with {was} samples in a step and this run has {now}. "
                f"Samples would be skipped or read twice. Make per_device_train_batch_size * "
                f"gradient_accumulation_steps * ranks {was}, or set ignore_data_skip=True."
            )
        inherited: Any = super()
        with tempfile.TemporaryDirectory(prefix="tieredckpt-") as folder:
            (Path(folder) / TRAINER_STATE_NAME).write_text(loaded["trainer"], encoding="utf-8")
            where: tuple[int, int] = inherited._init_training_state(*sizes, folder, trial)
        log.info("resumed from step %d of %s", step, self._options["target"])
        return where

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self.callback_handler.train_dataloader = train_dataloader
        return self._prepared, train_dataloader

    def _resume_sums(self) -> None:
        parts, trainer = self._parts, self
        if parts is not None and parts.progress.loaded is not None and parts.loss.loaded is not None:
            sums: Any = trainer
            sums._tr_loss = parts.loss.loaded.to(self.args.device)
            sums._globalstep_last_logged = parts.progress.loaded["last_logged"]
            sums._total_loss_scalar = -sums._tr_loss.item()  # the mean of this call leaves out steps before it

    def _run_epoch(self, **kwargs: Any) -> None:
        if 0 < self.state.max_steps <= self.state.global_step:  # a finished run; the loop would run one step more
            self.control.should_training_stop = True
            return
        if self._parts is not None and self._parts.progress.loaded is not None:
            kwargs["resume_from_checkpoint"] = str(self._options["target"])
        inherited: Any = super()
        inherited._run_epoch(**kwargs)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self._parts is None or not self._parts.set_generators():
            inherited: Any = super()
            inherited._load_rng_state(checkpoint)

    # -- saving -----------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Save after the step's log entry, evaluation and export.

        If the step ends an epoch, save after those of the epoch.
        """
        inherited: Any = super()
        inherited._maybe_log_save_evaluate(*args, **kwargs)
        step, control = self.state.global_step, self.control
        ends = step % self._per_epoch == 0 or control.should_epoch_stop or control.should_training_stop
        if step == self._seen_step or self._parts is None or (ends and not self._epoch_ended):
            return
        self._seen_step = step
        state = self._parts.state_to_save()
        if self._sigterm is not None and self._sigterm.is_last(step):
            self._stop(state, step, self._sigterm)
        else:
            self._checkpointer.save(state, step, force=control.should_training_stop)

    def _flush(self, seconds: float) -> None:
        durable = bool(self._checkpointer.settings.durable.url)
        self._checkpointer.wait("durable" if durable else "memory", timeout_s=seconds)

    def _stop(self, state: dict[str, Any], step: int, sigterm: PreemptionHandler) -> None:
        """Seal the step on all ranks, then end each by SIGTERM or by the caller's handler of it."""
        try:
            self._checkpointer.seal(state, step, durable=True, timeout_s=self._options["grace_s"])
        except TieredCheckpointError as error:
            log.error("step %d of %s is not safe: %s", step, self._options["target"], error)
        sigterm.exit_on_all_ranks()
        self.control.should_training_stop = True  # the caller's handler has returned


def _refuse_unsupported(trainer: Any) -> None:
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    found = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "auto_find_batch_size": trainer.args.auto_find_batch_size,
        "FSDP1": trainer.is_fsdp_enabled and getattr(fsdp, "fsdp_version", 1) != 2,
    }
    refused = [name for name, used in found.items() if used]
    if refused:
        raise UsageError(f"Cannot save a Trainer with {' and '.join(refused)} to the tiers; use DDP or FSDP2.")


def tiered(trainer: T, url: str | os.PathLike[str], *, every: int = 1, **options: Any) -> T:
    """Make ``trainer.train()`` resume from the tiers and save to them at every ``every``-th step.

    ``options`` are those of :class:`tieredckpt.Checkpointer`. The trainer itself is changed and returned. Raises
    :class:`UsageError` for a trainer with DeepSpeed, FSDP1 or ``auto_find_batch_size``.
    """
    kind: Any = type(trainer)
    changed: Any = trainer
    changed.__class__ = type(f"Tiered{kind.__name__}", (TieredTrainerMixin, kind), {})
    changed._use_tiers(url, every=every, **options)
    return trainer
