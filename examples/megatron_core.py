"""A tensor-parallel layer of Megatron-Core on CPUs: run it twice, and the second run continues."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

from integration.megatron import load_sharded_state, save_sharded_state
from tieredckpt import Checkpointer, CheckpointNotFoundError

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
config = TransformerConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=size,
    tensor_model_parallel_size=size,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
)
layer = ColumnParallelLinear(16, 32, config=config, init_method=torch.nn.init.normal_)
sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def sharded_state(iteration: int) -> dict:
    model = layer.sharded_state_dict(metadata=groups)
    model.pop("_extra_state", None)  # only Transformer Engine has some
    rng = ShardedObject("rng", torch.get_rng_state(), (size,), (rank,))
    return {"model": model, "rng": rng, "iteration": iteration}


with Checkpointer("megatron-core") as ckpt:
    last = 0
    try:
        state = load_sharded_state(sharded_state(0), ckpt)
        layer.load_state_dict(state["model"], strict=False)
        torch.set_rng_state(state["rng"])
        last = state["iteration"]
    except CheckpointNotFoundError:
        pass
    print(f"rank {rank}: continues after step {last}")
    for iteration in range(last + 1, last + 4):
        sgd.zero_grad()
        out, _ = layer(torch.rand(4, 16))
        out.pow(2).mean().backward()
        sgd.step()
        save_sharded_state(sharded_state(iteration), ckpt, iteration)
    print(f"rank {rank}: saved step {iteration}")
dist.destroy_process_group()
