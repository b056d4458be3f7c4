"""``TieredCheckpointManager``: torchtitan's checkpoint manager with its checkpoints in the tiers.

Checkpoints between the first and the last step are steps of a job. All that leaves the training stays torchtitan's
own: the last checkpoint, exports for Hugging Face, seed checkpoints and initial loads use ``checkpoint.folder``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import DATALOADER, MODEL, AsyncMode, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config.override import derive
from torchtitan.tools import filesystem

from tieredckpt import Checkpointer, CheckpointNotFoundError, TieredCheckpointError, UsageError
from tieredckpt.checkpointer.preemption import PreemptionHandler, last_step_agreement
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.location import TIERED_SCHEME

log = logging.getLogger(__name__)
_FOLDER = "checkpoint"
"""torchtitan's default of ``checkpoint.folder``, for the checkpoints that stay files."""


class TieredCheckpointManager(CheckpointManager):
    """torchtitan's :class:`CheckpointManager` that saves to node memory, replicas and a durable tier.

    ``checkpoint.interval`` is the number of steps between two saves, and ``keep_latest_k`` the number of steps in the
    durable tier. A save returns as soon as the training may continue, so ``async_mode`` has no effect.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        url: str
        """Job of the steps, as ``tiered://JOB``."""

        durable: str | None = None
        """URL of the durable tier; without one ``durable.url`` of the settings."""

        durable_every: int | None = None
        """Number of steps between two uploads, a multiple of ``interval``."""

        grace_s: float = 25.0
        """Seconds after SIGTERM for the last step and its upload."""

    def __init__(self, config: Config, **parts: Any) -> None:
        self._ckpt: Checkpointer | None = None
        self._sigterm: PreemptionHandler | None = None
        super().__init__(config, **parts)
        if not self.enable:
            return
        self.async_mode = AsyncMode.DISABLED
        self._grace_s = config.grace_s
        self._ckpt = Checkpointer(
            config.url,
            every=config.interval,
            durable=config.durable,
            durable_every=config.durable_every,
            keep_last=config.keep_latest_k or None,
            on_sigterm="ignore",  # all ranks have to stop, not only those with the signal
        )
        if not self.load_only:
            ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            agreement = last_step_agreement(self._ckpt.job, *ranks)
            self._sigterm = PreemptionHandler(self._flush, self._grace_s, agreement)
        log.info("steps are saved to %s, the last checkpoint to %s", config.url, self.folder)

    @property
    def checkpointer(self) -> Checkpointer:
        """Checkpointer of the steps. Raise :class:`UsageError` if checkpoints are disabled or closed."""
        if self._ckpt is None:
            raise UsageError("this checkpoint manager is closed, or checkpoints are disabled: pass --checkpoint.enable")
        return self._ckpt

    def _load(self, step: int = -1) -> bool:
        """Restore the newest complete step, or ``step``.

        If the job has no such step, load a checkpoint of the folder or ``initial_load_path``, as torchtitan does.
        """
        try:
            restored = self._restore(None if step == -1 else step)
        except CheckpointNotFoundError:
            if step == -1 or not filesystem.isdir(self._create_checkpoint_id(step)):
                raise
            restored = -1
        if restored < 0:
            return bool(super()._load(step))
        newer = self._find_load_step()
        if step == -1 and newer > restored:
            log.warning(
                "Resuming from step %d of job %r. %s has step %d, which is newer and not used: pass "
                "--checkpoint.load_step %d to load it",
                *(restored, self.checkpointer.job, self.folder, newer, newer),
            )
        return True

    @torch.no_grad()
    def _restore(self, step: int | None) -> int:
        states = self._states_to_load(model_only=False)
        if isinstance(states.get(DATALOADER), ParallelAwareDataloader):
            states[DATALOADER] = _LoadedPositions(states[DATALOADER])
        # The saved step has the excluded states too, and a strict restore would miss them here.
        restored = self.checkpointer.restore(states, step, strict=not self.exclude_from_loading)
        if restored >= 0:
            self.states[MODEL].load_state_dict(states)  # tensors that a hook of the model made are copies
        return restored

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT002 - torchtitan's signature
        """Save ``curr_step`` if it is due, or if SIGTERM made it the last one of all ranks.

        The last step of the training is saved to ``checkpoint.folder`` as well, in torchtitan's own format.
        """
        if self.load_only:
            return False
        is_due = self._should_save(curr_step, last_step)
        if last_step and curr_step == 0:  # a seed checkpoint has no training state
            self._save_last_step(curr_step)
            return True
        states = cast("dict[str, Any]", _LazyStates(self._flattened_model_states_sd))  # any mapping is a state
        if self._sigterm is not None and self._sigterm.is_last(curr_step):
            self._stop(states, curr_step, self._sigterm)
            return True
        durable = last_step and bool(self.checkpointer.settings.durable.url)
        saved = self.checkpointer.save(states, curr_step, force=is_due, durable=durable)
        if last_step:
            self._save_last_step(curr_step)
            saved.wait()
        return saved.state not in (SaveState.NOT_DUE, SaveState.SKIPPED, SaveState.FAILED)

    def _stop(self, states: dict[str, Any], step: int, sigterm: PreemptionHandler) -> None:
        """Seal the step on all ranks, and end each by SIGTERM or by the handler that was installed before."""
        job = self.checkpointer.job
        try:
            self.checkpointer.seal(states, step, durable=True, timeout_s=self._grace_s)
            log.warning("SIGTERM: step %d of job %r is saved, training ends", step, job)
        except TieredCheckpointError as error:
            log.error("SIGTERM: step %d of job %r is not safe: %s", step, job, error)
        sigterm.exit_on_all_ranks()

    def _flush(self, timeout_s: float) -> None:
        ckpt = self.checkpointer
        ckpt.wait("durable" if ckpt.settings.durable.url else "memory", timeout_s=timeout_s)

    def _close(self) -> None:
        super()._close()
        sigterm, self._sigterm = self._sigterm, None
        ckpt, self._ckpt = self._ckpt, None
        if ckpt is None:
            return
        ckpt.close()
        if sigterm is not None:
            sigterm.close()


class _LoadedPositions:
    """torchtitan's data loader during a restore, which reads the positions of all data-parallel ranks."""

    def __init__(self, loader: ParallelAwareDataloader) -> None:
        self._loader = loader
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        # Before the load: only what every checkpoint has, so that the wrong number of ranks has its own error. After
        # it: the loader forgets the other ranks' positions, and with workers it describes its own in another form.
        return self._loaded or {"world_size": self._loader.dp_world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, size = state.get("world_size"), self._loader.dp_world_size
        if saved != size:
            raise UsageError(
                f"torchtitan's data loader was saved by {saved} data-parallel ranks and cannot continue on {size}. Use "
                "another loader, or restart the data with --checkpoint.exclude_from_loading dataloader"
            )
        self._loader.load_state_dict(state)
        self._loaded = dict(state)


class _LazyStates(Mapping[str, Any]):
    """All states by name, collected on the first use: most steps are not due."""

    def __init__(self, collect: Callable[[], dict[str, Any]]) -> None:
        self._collect = collect
        self._states: dict[str, Any] | None = None

    @property
    def _found(self) -> dict[str, Any]:
        if self._states is None:
            self._states = self._collect()
        return self._states

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def tiered_config(
    config: CheckpointManager.Config, url: str, durable: str | None, durable_every: int | None
) -> TieredCheckpointManager.Config:
    """Return ``config`` as that of a :class:`TieredCheckpointManager`.

    Raise :class:`UsageError` if neither ``url`` nor ``checkpoint.folder`` names a job.
    """
    folder = config.folder
    if folder.startswith(f"{TIERED_SCHEME}://"):
        url, folder = url or folder, _FOLDER
    if not url:
        raise UsageError(
            "the override 'integration.torchtitan.tiered' needs a job: pass --override.imports "
            """'integration.torchtitan.tiered={"url":"tiered://JOB"}', or --checkpoint.folder tiered://JOB"""
        )
    return derive(
        config, TieredCheckpointManager.Config, url=url, folder=folder, durable=durable, durable_every=durable_every
    )
