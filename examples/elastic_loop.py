"""Training that continues when ranks come, go or die, with equal bits for any number of ranks.

::

    python examples/elastic_loop.py                                          one rank
    torchrun --nproc-per-node 2 examples/elastic_loop.py                     or any other number of ranks
    elastic run --nnodes 1:4 --simulate-nodes 4 examples/elastic_loop.py     then: elastic resize --nodes 2

On SIGTERM all ranks stop at the same step, seal it, and end; the next start continues from there.
"""

import os

import torch
from torch.distributed.fsdp import fully_shard

import elastic

STEPS = int(os.environ.get("STEPS", "100"))


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return x, x.sum().unsqueeze(0)


def train(world: elastic.World) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    fully_shard(model, mesh=world.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    target = "tiered://example-elastic"  # in memory; durable="s3://bucket/prefix" keeps it beyond the machines
    loop = elastic.Loop(world, model, optimizer, Data(), global_batch=24, microbatch=2, clip=1.0, checkpoint=target)
    for step in loop.until(STEPS):
        for x, y in step:  # this rank's microbatches, on its device
            step.backward((model(x) - y).square().sum(), weight=len(x))
        if world.rank == 0:
            print(f"step {step.number} on {world.size} ranks: loss {step.loss}")


if __name__ == "__main__":
    print(elastic.run(train))
