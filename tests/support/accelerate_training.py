"""A small training loop with Accelerate, for runs in processes of their own."""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from integration.accelerate import restore_state, save_state
from tests.support.transformers_training import enter_rank
from tieredckpt import Checkpointer

URL = "tiered://accelerate"
STEPS = 8


def train(say: Any, kill: dict[int, int] | None = None, options: dict[str, Any] | None = None) -> str:
    """Train; return a digest of the state. ``kill``: the step after whose save a rank dies, by rank."""
    rank = enter_rank()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0, device_specific=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    with Checkpointer(URL, **(options or {})) as ckpt:
        first = restore_state(accelerator, ckpt) + 1
        say(f"first {first}")
        for step in range(first, STEPS):
            for _ in range(2):
                with accelerator.accumulate(model):
                    loss = model(torch.randn(4, 8)).pow(2).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            say(f"loss {step} {loss.item().hex()}")
            save_state(accelerator, ckpt, step).wait()
            if (kill or {}).get(rank) == step:
                os.kill(os.getpid(), signal.SIGKILL)
    digest = hashlib.sha256()
    for tensor in accelerator.unwrap_model(model).state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
