"""FSDP2 with plain ``dcp.save`` and ``dcp.load``: only the storage changes.

torchrun --nproc-per-node 2 examples/fsdp2.py     and again with any other number of ranks
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tieredckpt import CheckpointNotFoundError, TieredReader, TieredWriter

JOB = "tiered://example-fsdp2"


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "step": -1}
    reader = TieredReader(JOB)  # the newest complete step; TieredReader(JOB, step=7) for that one
    try:
        found = f"step {reader.check_choice().step}"
    except CheckpointNotFoundError:  # and only then: damaged and not reachable are other errors
        found = "nothing saved yet"
    else:
        dcp.load(state, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    first = int(state["step"]) + 1
    for step in range(first, first + 5):
        torch.manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        writer = TieredWriter(JOB, step, finite=True)  # NaN does not replace the last finite step
        dcp.save({"model": weights, "optim": moments, "step": step}, storage_writer=writer)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks found {found}; now steps up to {step} are in memory")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
