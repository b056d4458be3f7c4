"""A restore right after a save finds the saved step, including parts on other nodes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.bits import assert_same_bits, zeros_like_state
from tieredckpt import Checkpointer


def state_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(3 << 10).view(-1, 4) + step
    return {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}


def save_and_go_on(job):
    found = []
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        for step in (1, 2, 3):
            found.append(ckpt.restore(zeros_like_state(state_of(0))))  # queries all nodes just before the next save
            ckpt.save(state_of(step), step).wait()
            dist.barrier()
            state = zeros_like_state(state_of(0))
            found.append(ckpt.restore(state))
            assert_same_bits(state_of(step), state)
    return found


def test_a_restore_right_after_a_save_sees_that_save(cluster):
    assert cluster.run(["n1", "n2", "n3"], save_and_go_on) == [[-1, 1, 1, 2, 2, 3]] * 3
