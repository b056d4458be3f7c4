"""A small training loop with Accelerate, for runs in processes of their own."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from integration.accelerate import restore_state, save_state
from tests.support.bits import tensor_bytes
from tests.support.transformers_training import enter_rank
from tieredckpt import Checkpointer

URL = "tiered://accelerate"
STEPS = 8


class _Warnings(logging.Handler):
    """Reports warnings as lines of the process."""

    def __init__(self, say: Any) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"warning {record.getMessage()}")


def train(
    say: Any,
    kill: dict[int, int] | None = None,
    options: dict[str, Any] | None = None,
    terminate: dict[int, int] | None = None,
) -> str:
    """Train; return a digest of the weights.

    After the save of a step, SIGKILL or SIGTERM is sent to a rank. ``kill``, ``terminate``: this step, by rank.
    """
    rank = enter_rank()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0, device_specific=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    with Checkpointer(URL, **(options or {})) as ckpt:
        logging.getLogger("integration.accelerate").addHandler(_Warnings(say))
        first = restore_state(accelerator, ckpt) + 1
        say(f"first {first} {digest_of(accelerator.unwrap_model(model), optimizer)}")
        for step in range(first, STEPS):
            for _ in range(2):
                with accelerator.accumulate(model):
                    loss = model(torch.randn(4, 8)).pow(2).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            say(f"loss {step} {loss.item().hex()}")
            say(f"state {step} {digest_of(accelerator.unwrap_model(model), optimizer)}")
            save_state(accelerator, ckpt, step).wait()
            if (kill or {}).get(rank) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if (terminate or {}).get(rank) == step:
                os.kill(os.getpid(), signal.SIGTERM)
    return digest_of(accelerator.unwrap_model(model), optimizer)


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of the weights and of the optimizer's state."""
    digest = hashlib.sha256()
    moments = [one for state in optimizer.state_dict()["state"].values() for one in state.values()]
    for tensor in [*model.state_dict().values(), *moments]:
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
