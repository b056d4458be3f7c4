"""A process that reads a job's steps during training changes nothing for the ranks."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist

from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer

_EVALUATION = """
import sys, torch, torch.distributed.checkpoint as dcp
from tieredckpt import TieredReader
state = {"w": torch.zeros(1 << 10), "r": torch.zeros(1 << 10)}
reader = TieredReader(sys.argv[1], int(sys.argv[2]))
dcp.load(state, storage_reader=reader)
assert state["r"][0] == int(sys.argv[2])
"""


def state_of(step):
    shared = torch.arange(1 << 10, dtype=torch.float32) + step
    return {"w": shared, "r": torch.full((1 << 10,), float(step))}


def read_while_training(job, read):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(state_of(0))
        for step in range(6):
            saved = ckpt.save(state_of(step), step)
            saved.wait(copies=2, timeout_s=30)
            if step == 2 and dist.get_rank() == 0:
                subprocess.run([sys.executable, "-W", "ignore", "-c", _EVALUATION, job, str(read)], check=True)
            dist.barrier()
        wait_until(
            lambda: ckpt.session.agent.cluster_status(job).protected.step == 5, "the last step is replicated", 30
        )
        dist.barrier()
        return ckpt.restore(state_of(0))


def test_saves_keep_their_copies_while_an_older_step_is_read(cluster):
    assert cluster.run(["n1", "n2"], read_while_training, 1) == [5, 5]
