"""A small engine of DeepSpeed on CPUs; run as a program, it loads a folder without tieredckpt."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.support.bits import tensor_bytes

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():  # its optional packages, and torch's own warnings
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def make_engine(stage: int, seed: int = 1, *, universal: bool = False) -> Any:
    """Return an engine whose nodes write to their own disks."""
    os.environ["LOCAL_RANK"] = "0"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": True},
        "checkpoint": {"use_node_local_storage": True, "load_universal": universal},
    }
    torch.manual_seed(seed)
    made, *_ = deepspeed.initialize(model=torch.nn.Linear(16, 16), config=config, dist_init_required=False)
    return made


def train_steps(engine: Any, steps: int) -> None:
    for _ in range(steps):
        inputs = torch.full((4, 16), 1.0 + engine.global_steps + dist.get_rank(), dtype=torch.bfloat16)
        engine.backward(engine(inputs).float().pow(2).mean())
        engine.step()


def own_tensors(engine: Any) -> list[torch.Tensor]:
    """Return copies of this rank's parameters and optimizer states in order."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        parameters: Any = [one.ds_tensor for one in engine.module.parameters()]
        masters = optimizer.fp32_partitioned_groups_flat
    else:
        parameters, masters = engine.module.state_dict(), optimizer.single_partition_of_fp32_groups
    values = [parameters, list(masters), optimizer.state_dict()]
    return [one.detach().clone() for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def digest_of_whole_state(engine: Any) -> str:
    """Return a digest of the master parameters and moments, equal for any number of ranks."""
    whole = _gather_stage_3(engine) if engine.zero_optimization_stage() == 3 else _gather_partitions(engine)
    return hashlib.sha256(b"".join(map(tensor_bytes, whole))).hexdigest()


def _gather_stage_3(engine: Any) -> list[torch.Tensor]:
    found = []
    for parameter in engine.module.parameters():
        moments = [safe_get_full_optimizer_state(parameter, name) for name in ("exp_avg", "exp_avg_sq")]
        found += [safe_get_full_fp32_param(parameter), *moments]
    return found


def _gather_partitions(engine: Any) -> list[torch.Tensor]:
    """Return the flat tensors of stages 1 and 2 without their padding."""
    (own,) = engine.optimizer.single_partition_of_fp32_groups
    moments = engine.optimizer.optimizer.state[own]
    size = sum(one.numel() for one in engine.module.parameters())
    found = []
    for tensor in (own.detach(), moments["exp_avg"], moments["exp_avg_sq"]):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        found.append(torch.cat(parts)[:size])
    return found


def node_folder(root: str | Path) -> Path:
    """Return the folder of this rank's node."""
    return Path(root, f"node{dist.get_rank()}")


def load_folder(folder: str, stage: str, rank: str, size: str, store: str) -> None:
    """Load a folder on one of ``size`` ranks, and print its step, its digest and any import of tieredckpt."""
    dist.init_process_group("gloo", store=dist.FileStore(store, int(size)), rank=int(rank), world_size=int(size))
    engine = make_engine(int(stage), seed=9)
    engine.load_checkpoint(folder)
    print(f"loaded {engine.global_steps} {digest_of_whole_state(engine)} {'tieredckpt' in sys.modules}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    load_folder(*sys.argv[1:])
