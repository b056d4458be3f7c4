"""Tiny model under Lightning's Trainer: dropout, shuffled resumable batches, AdamW."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from integration.lightning import TieredCallback, TieredCheckpointIO, TieredModelParallel
from tests.support.bits import tensor_bytes
from tieredckpt.session.session import close_sessions

URL = "tiered://lightning"
BATCHES = 6


class TinyModule(LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(width, 8)
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[0].flip(1)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", (self.net(batch[0]) - batch[0].flip(1)).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}]


class ShardedModule(TinyModule):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def batches(seed: int = 1) -> StatefulDataLoader:
    data = torch.randn(4 * BATCHES, 8, generator=torch.Generator().manual_seed(seed))
    return StatefulDataLoader(TensorDataset(data), batch_size=4, shuffle=True)


class Reporter(Callback):
    """Callback that reports each loss and runs ``at[step]`` after that step and its saves."""

    def __init__(self, say: Callable[[str], None], at: dict[int, Callable[[], object]]) -> None:
        self._say = say
        self._at = at

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step in self._at:
            self._at[step]()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self._say(f"loss {trainer.global_step} {float(outputs['loss']).hex()}")


def digest(trainer: Trainer) -> str:
    total, model = hashlib.sha256(), trainer.strategy.model
    whole = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=whole)
    moments = get_optimizer_state_dict(model, trainer.optimizers, options=whole)["state"]
    for name in sorted(state):
        total.update(tensor_bytes(state[name]))
    for name in sorted(moments):
        for entry in sorted(moments[name]):
            total.update(tensor_bytes(moments[name][entry]))
    return total.hexdigest() if trainer.is_global_zero else ""


def fit(
    say: Callable[[str], None],
    folder: Path,
    *,
    strategy: str = "plugin",
    epochs: int = 2,
    ckpt_path: str | None = URL,
    every: int | None = 1,
    callbacks: Callable[[], list[Callback]] = list,
    at: Callable[[], dict[int, Callable[[], object]]] = dict,
    inspect: Callable[[Trainer], Any] | None = None,
    validates: bool = False,
) -> Any:
    """Train and return a digest of the final state, or the result of ``inspect(trainer)``."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    seed_everything(1, verbose=False)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if strategy == "lightning":  # without this project
        place: dict[str, Any] = {"strategy": ModelParallelStrategy(world, 1) if world > 1 else "auto"}
    elif strategy == "sharded":
        place = {"strategy": TieredModelParallel(URL, data_parallel_size=world, tensor_parallel_size=1)}
    else:
        place = {"strategy": "ddp" if world > 1 else "auto", "plugins": [TieredCheckpointIO(URL)]}
    module = ShardedModule() if strategy == "sharded" or "ParallelStrategy" in str(place) else TinyModule()
    chosen = [TieredCallback(every)] if every else []
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=world // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(own := callbacks()),
        use_distributed_sampler=False,
        limit_val_batches=None if validates else 0,
        num_sanity_val_steps=0,
        callbacks=[*chosen, *own, Reporter(say, at())],
        **place,
    )
    found: Any = None

    class AtEnd(Callback):
        def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
            nonlocal found
            found = digest(trainer)

    trainer.callbacks.append(AtEnd())
    try:
        trainer.fit(module, batches(), batches(2) if validates else None, ckpt_path=ckpt_path)
    except SIGTERMException as ended:
        found = ended.code
    found = found if inspect is None else inspect(trainer)
    close_sessions()
    return found


def as_rank(say: Callable[[str], None], *args: Any, nodes: int = 1, **how: Any) -> Any:
    """Run :func:`fit` as a rank of the process group that this process is in, as torchrun would start it."""
    import torch.distributed as dist

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    local, local_world, group = (rank, world, "0") if nodes == 1 else ("0", "1", rank)
    os.environ.update(
        RANK=rank, LOCAL_RANK=local, WORLD_SIZE=world, LOCAL_WORLD_SIZE=local_world, GROUP_RANK=group,
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="lightning",
    )  # fmt: skip
    return fit(say, *args, **how)
