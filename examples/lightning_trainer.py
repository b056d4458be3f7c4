"""PyTorch Lightning: save every tenth step in memory, and resume from the newest one.

Run it, then run it with a larger number of steps: python examples/lightning_trainer.py 120
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from integration.lightning import TieredCallback, TieredCheckpointIO


class Reverse(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[0].flip(1)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_start(self) -> None:
        print(f"starting after step {self.trainer.global_step}")


url = "tiered://example-lightning"
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 60,
    plugins=[TieredCheckpointIO(url)],  # durable="s3://bucket/prefix", durable_every=100
    callbacks=[TieredCallback(every=10)],
    enable_checkpointing=False,  # or a ModelCheckpoint: its files then name steps
    logger=False,
    enable_progress_bar=False,
)
data = torch.randn(640, 16, generator=torch.Generator().manual_seed(0))
trainer.fit(Reverse(), DataLoader(TensorDataset(data), batch_size=32), ckpt_path=url)
print(f"trained to step {trainer.global_step}: loss {trainer.callback_metrics['loss']:.4f}")
