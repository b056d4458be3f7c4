"""Training that goes on when ranks come, go, or die.

torchrun --nproc-per-node 2 examples/elastic_loop.py     and again with any other number of ranks

SIGUSR1 or SIGTERM to any rank: all of them stop at the same step, seal it, and end; the next start goes on from there.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from elastic.workers.loop import recoverable
from elastic.workers.world import World
from tieredckpt import Checkpointer

BATCH, TOTAL = 12, 20  # samples of a step, for all ranks together


@recoverable
def train(world: World) -> int:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    fully_shard(model, mesh=world.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optim": optimizer}
    with Checkpointer("tiered://example-elastic") as ckpt:
        first = ckpt.restore(state) + 1  # in the second world and later: from memory, each rank its new share
        for step in world.steps(first, first + TOTAL, checkpoint=(ckpt, state)):
            batch = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
            mine = batch.chunk(world.size)[world.rank].to(world.device)
            loss = (model(mine) - mine.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.save(state, step)
        dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.SUM)
        if world.rank == 0:
            print(f"{world.size} ranks did steps {first} to {step}: loss {loss.item() / world.size:.4f}")
    return step


if __name__ == "__main__":
    print(train())
