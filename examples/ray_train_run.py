"""A run of Ray Train whose worker is killed: the next one resumes from the memory of its node."""

import os
import signal
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from integration.ray_train import load_checkpoint, report, restore


def make_state() -> dict:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def train(config: dict) -> None:
    state = make_state()
    first = restore(state) + 1
    model, optimizer = prepare_model(state["model"]), state["optimizer"]
    rank = ray.train.get_context().get_world_rank()
    for step in range(first, 6):
        torch.manual_seed(1000 * step + rank)
        loss = model(torch.randn(8, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step == first == 0:
            Path(config["killed"]).touch()
        if rank == 1 and step == 3 and Path(config["killed"]).exists():
            Path(config["killed"]).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        report({"loss": loss.item(), "step": step, "first": first}, state, step)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config={"killed": f"{storage}/killed"},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name="example-ray",
                storage_path=storage,
                failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )
        result = trainer.fit()
        print(f"resumed at step {result.metrics['first']}, ended at step {result.metrics['step']}")
        print(f"restored step {load_checkpoint(result.checkpoint, make_state())} from its checkpoint")
    ray.shutdown()
