"""Writer of the current format's golden checkpoint: ``python -m tests.golden.write``.

Run it after raising the format version. Keep the folders of older versions, which must stay readable.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.agents import agent_directory
from tests.support.ranks import RankPool
from tieredckpt import Checkpointer
from tieredckpt.format.manifest import FORMAT_VERSION
from tieredckpt.settings import settings_from_mapping

HERE = Path(__file__).parent
JOB = "golden"
STORED = {7: {"compress": "none", "hashed_keys": False}, 8: {"compress": "zstd", "hashed_keys": True}}
"""Durable settings of each step."""


def counted(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor whose bytes count up from 0, modulo 256; bools alternate."""
    count = dtype.itemsize * torch.Size(shape).numel()
    data = torch.arange(count, dtype=torch.int64).to(torch.uint8)
    return (data & 1 if dtype is torch.bool else data).view(dtype).view(shape)


def state_of(step: int) -> dict[str, Any]:
    """Return a state with one value of every kind that the format supports."""
    return {
        "model": {
            "rows": torch.arange(7 * 5, dtype=torch.float32).view(7, 5) + step,
            "half": counted(torch.bfloat16, 3, 4),
            "eighth": counted(torch.float8_e4m3fn, 16),
            "complex": counted(torch.complex64, 5),
            "mask": counted(torch.bool, 9),
            "scalar": torch.tensor(step),
            "nothing": torch.empty(0, 3),
            "wide": counted(torch.int16, 64),
        },
        "sparse": torch.eye(3).to_sparse(),
        "step": step,
        "text": 'ünïcode / @ "quoted"',
        "list": [1, 2.5, None, (True, b"\x00\xff")],
    }


def save(directory: str, step: int, durable: dict[str, Any]) -> None:
    """Save a step; the ranks' shards of the rows differ in size, and all other values are replicated."""
    settings = settings_from_mapping({"agent": {"directory": os.environ["GOLDEN_AGENT"]}, "durable": durable})
    state = state_of(step)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state["model"]["rows"] = distribute_tensor(state["model"]["rows"], mesh, [Shard(0)])
    with Checkpointer(JOB, durable=f"file://{directory}", settings=settings, on_sigterm="ignore") as ckpt:
        ckpt.save(state, step).wait("durable")


def write(directory: Path, pool: RankPool) -> None:
    for step, how in STORED.items():
        with agent_directory() as agent:
            pool.run(2, save, str(directory), step, how, environ={"GOLDEN_AGENT": str(agent)})


if __name__ == "__main__":
    target = HERE / f"format-{FORMAT_VERSION}"
    shutil.rmtree(target, ignore_errors=True)
    with contextlib.closing(RankPool()) as processes:
        write(target, processes)
