"""A rank is lost during communicator setup; the other process survives only nonblocking setup."""

from __future__ import annotations

import pytest

from tests.support.elastic_runs import elastic_job

pytestmark = pytest.mark.e2e

TRAINER = """
import os, signal, sys
import torch
import torch.distributed as dist
from elastic import recoverable
from elastic.workers.train_loop import RecoveryPolicy
from tests.support import nccl_like

nccl_like.register()


@recoverable(policy=RecoveryPolicy(backend=nccl_like.NAME, peer_loss_wait_s=1.0))
def train(world):
    print(f"entered {world.epoch} {world.rank} {os.getpid()}", flush=True)
    if world.epoch == 0 and world.rank == 1:
        dist.group.WORLD._store.get("here/0")  # the other one is in it
        os.kill(os.getpid(), signal.SIGKILL)
    ones = torch.ones(4)
    dist.all_reduce(ones)
    print(f"sum {world.epoch} {int(ones[0])}", flush=True)


train()
"""


@pytest.fixture
def job():
    with elastic_job() as one:
        yield one


@pytest.mark.parametrize("mode", ["blocking", "nonblocking"])
def test_communicator_setup_with_a_lost_rank_ends(job, mode):
    script = job.folder / "trainer.py"
    script.write_text(TRAINER)
    policy = job.folder / "policy.yaml"
    policy.write_text("abort_timeout_s: 3\nrestart_timeout_s: 90\n")
    if mode == "nonblocking":
        job.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "1"
    run = job.start(
        *("run", "-v", "--no-agent", "--job", job.name, "--policy", str(policy), "--log-dir", str(job.folder / "logs")),
        *("--nnodes", "2", "--simulate-nodes", "2", "--nproc", "1", "--max-restarts", "5", str(script)),
    )
    assert run.wait(timeout=200) == 0, job.output()
    said = [line.split() for log in (job.folder / "logs").glob("*/*.log") for line in log.read_text().splitlines()]
    pids = {(int(line[1]), int(line[2])): int(line[3]) for line in said if line[:1] == ["entered"]}
    newest = max(epoch for epoch, _ in pids)
    assert {line[2] for line in said if line[:2] == ["sum", str(newest)]} == {"2"}
    stayed = pids[0, 0] in (pids[newest, 0], pids[newest, 1])
    assert stayed is (mode == "nonblocking"), job.output()
