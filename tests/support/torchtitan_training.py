"""A small training with torchtitan's own parts on gloo ranks, called in the order of its ``Trainer``.

The ``Trainer`` itself needs an accelerator. Optimizers, learning rates, the data loader and the checkpoint manager are
torchtitan's. The override replaces the manager as on the command line.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

from tests.support.bits import tensor_bytes
from tests.support.transformers_training import enter_rank

JOB, STEPS, BATCH, WIDTH = "torchtitan", 8, 8, 16
URL = f"tiered://{JOB}"
OVERRIDE = f'integration.torchtitan.tiered={{"url": "{URL}"}}'


@dataclass(kw_only=True, slots=True)
class JobConfig(Configurable.Config):
    """Subset of the configuration of torchtitan's ``Trainer``."""

    checkpoint: CheckpointManager.Config = field(default_factory=CheckpointManager.Config)
    optimizer: OptimizersContainer.Config = field(default_factory=lambda: default_adamw(1e-2))
    lr_scheduler: LRSchedulersContainer.Config = field(
        default_factory=lambda: LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8)
    )


class NumberedSamples(torch.utils.data.IterableDataset, Stateful):
    """Every ``size``-th of an endless row of samples, which continues where it was."""

    def __init__(self, rank: int, size: int) -> None:
        self._at, self._size = rank, size

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self._at += self._size
            yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(self._at - self._size))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


class Training(Stateful):
    """The loop of torchtitan's ``Trainer``, whose step and tokens are part of a checkpoint."""

    def __init__(self, config: JobConfig, folder: str, steps: int, workers: int) -> None:
        self.step, self.ntokens_seen, self.steps = 0, 0, steps
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 64), torch.nn.LayerNorm(64), torch.nn.ReLU(), torch.nn.Linear(64, WIDTH)
        )
        if size > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (size,)))
        self.loader = ParallelAwareDataloader(
            NumberedSamples(rank, size), rank, size, batch_size=BATCH // size, num_workers=workers
        )
        self.optimizers = config.optimizer.build(model_parts=[self.model])
        self.lr_schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=STEPS)
        self.checkpointer = config.checkpoint.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=folder,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, say: Any, load_step: int, signals: dict[str, int]) -> None:
        say(f"loaded {self.checkpointer.load(step=load_step)}")
        say(f"state {self.step} {self.digest()}")
        batches = iter(self.loader)
        while self.step < self.steps:
            self.step += 1
            self.optimizers.zero_grad()
            batch = next(batches)
            self.ntokens_seen += batch.numel()
            loss = (self.model(batch) - batch).pow(2).mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            say(f"loss {self.step} {loss.item().hex()}")
            self._send(signals, f"before {self.step}")
            self.checkpointer.save(self.step, last_step=self.step == self.steps)
            say(f"state {self.step} {self.digest()}")
            self._send(signals, f"after {self.step}")

    def _send(self, signals: dict[str, int], moment: str) -> None:
        if moment in signals:
            if hasattr(self.checkpointer, "checkpointer"):
                self.checkpointer.checkpointer.wait()  # so that the test knows which steps are complete
            os.kill(os.getpid(), signals[moment])

    def digest(self) -> str:
        """Return a digest of the model, the optimizers, the learning rates and the counters of all ranks."""
        states = {**self.model.state_dict(), **self.optimizers.state_dict()}
        total = hashlib.sha256(repr([self.state_dict(), self.lr_schedulers.state_dict()]).encode())
        for name, value in sorted(states.items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            total.update(name.encode())
            total.update(tensor_bytes(whole) if isinstance(whole, torch.Tensor) else repr(whole).encode())
        return total.hexdigest()


def configured(imports: list[str], **checkpoint: Any) -> JobConfig:
    """Return a configuration after the overrides that ``--override.imports`` names."""
    defaults = {"enable": True, "interval": 2, "keep_latest_k": 3}
    config = JobConfig(checkpoint=CheckpointManager.Config(**{**defaults, **checkpoint}))
    apply_overrides(OverrideConfig(imports=parse_cli_imports(imports)), config)
    return config


def train(
    say: Any,
    base_folder: str,
    signals: dict[int, dict[str, int]] | None = None,
    imports: tuple[str, ...] = (OVERRIDE,),
    load_step: int = -1,
    steps: int = STEPS,
    urls: bool = False,
    workers: int = 0,
    **checkpoint: Any,
) -> str:
    """Train and return a digest of the final state; ``signals`` are by rank and moment."""
    rank = enter_rank()
    if urls:
        import tieredckpt

        tieredckpt.enable_urls()
    training = Training(configured(list(imports), **checkpoint), base_folder, steps, workers)
    try:
        training.train(say, load_step, (signals or {}).get(rank, {}))
    finally:
        training.checkpointer.close()
    return training.digest()


def save_seed_checkpoint(say: Any, base_folder: str) -> str:
    """Save a model with changed weights as step 0, and return the digest that a training begins with."""
    training = Training(configured([OVERRIDE]), base_folder, STEPS, 0)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(2)
    training.checkpointer.save(0, last_step=True)
    training.checkpointer.close()
    return training.digest()


def saved_folders(folder: str | Path) -> set[str]:
    """Return the names of the checkpoints that torchtitan wrote to its folder."""
    return {one.name for one in (Path(folder) / "checkpoint").glob("step-*")}
