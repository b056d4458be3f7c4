"""Training that goes on when ranks come, go, or die, and learns the same to the last bit whatever their number.

elastic run --nnodes 1:4 --simulate-nodes 4 examples/elastic_loop.py     then, beside it: elastic resize --nodes 2
torchrun --nproc-per-node 2 examples/elastic_loop.py                     and again with any other number of ranks

SIGTERM: all ranks stop at the same step, seal it, and end; the next start goes on from there.
"""

import torch
from torch.distributed.fsdp import fully_shard

import elastic
from tieredckpt import Checkpointer

EACH_TIME, BATCH, SEED = 20, 24, 0  # steps of one start; samples of a step, for all ranks together


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return x, x.sum().unsqueeze(0)


@elastic.recoverable
def train(world: elastic.World) -> int:
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    fully_shard(model, mesh=world.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = elastic.BatchPlan(BATCH, world.size, microbatch=2)  # who computes what; the same samples in any world
    data = elastic.ElasticDataLoader(Data(), elastic.RankShare(plan, world.rank), seed=SEED)
    gradients = elastic.ExactGradients(model, tree=True)
    state = {"model": model, "optim": optimizer, "data": data}
    with Checkpointer("tiered://example-elastic") as ckpt, data:
        first = ckpt.restore(state) + 1  # in the second world and later: from memory, each rank its new share
        last = (first // EACH_TIME + 1) * EACH_TIME
        for step in world.steps(first, last, checkpoint=(ckpt, state)):
            work = next(iter(data))
            mine = [batch.data for batch in work]
            for turn in gradients.step(plan):
                x, y = (one.to(world.device) for one in mine[turn.position])
                with elastic.seeded(SEED, step, turn.id):  # dropout, had it any, would not depend on the rank
                    turn.backward((model(x) - y).square().sum(), weight=len(x))
            total = gradients.finish(clip=1.0)
            optimizer.step()
            work.commit()
            ckpt.save(state, step)
        if world.rank == 0:
            print(f"{world.size} ranks did steps {first} to {step}: loss {total.loss:.4f}")
    return step


if __name__ == "__main__":
    print(train())
