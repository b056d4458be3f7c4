"""A training loop that resumes after its newest complete step. Start it twice, or kill it in between."""

import torch

from tieredckpt import Checkpointer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optim": optimizer}  # anything with state_dict() and load_state_dict(), tensors, numbers

with Checkpointer("tiered://example-loop") as ckpt:  # durable="s3://bucket/prefix", durable_every=100
    first = ckpt.restore(state) + 1  # restore returns -1 if there is no step yet
    print(f"starting at step {first}")
    for step in range(first, first + 20):
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        saved = ckpt.save(state, step)  # returns when the state is copied; checksums and uploads happen elsewhere
    saved.wait()
    print(f"step {step}: loss {loss.item():.4f}, saved in memory")
