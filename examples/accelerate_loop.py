"""A training loop with Accelerate that resumes. Kill it at any time and start it again."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from integration.accelerate import restore_state, save_state
from tieredckpt import Checkpointer

set_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)

with Checkpointer("tiered://example-accelerate") as ckpt:  # durable="s3://bucket/prefix", durable_every=100
    first = restore_state(accelerator, ckpt) + 1
    accelerator.print(f"starting at step {first}")
    for step in range(first, first + 20):
        loss = model(torch.randn(8, 16)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            save_state(accelerator, ckpt, step)
accelerator.print(f"step {step}: loss {loss.item():.6f}")
