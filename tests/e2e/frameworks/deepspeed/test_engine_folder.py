"""DeepSpeed's checkpoint folders as steps: lost nodes with their own disks, and damage."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():  # its optional packages, and torch's own warnings
    warnings.simplefilter("ignore")
    deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from tests.e2e.peers.test_export_from_peers import flip_shard_bits
from tests.support.bits import assert_same_bits
from tieredckpt import Checkpointer

pytestmark = pytest.mark.e2e

WHERE = ["n1", "n2"]


def engine(stage, seed=1):
    """Return an engine of DeepSpeed whose nodes write to their own disks."""
    os.environ["LOCAL_RANK"] = "0"
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": True},
        "checkpoint": {"use_node_local_storage": True},
    }
    torch.manual_seed(seed)
    made, *_ = deepspeed.initialize(model=torch.nn.Linear(16, 16), config=config, dist_init_required=False)
    return made


def train(of, steps):
    for _ in range(steps):
        inputs = torch.full((4, 16), 1.0 + of.global_steps + dist.get_rank(), dtype=torch.bfloat16)
        of.backward(of(inputs).float().pow(2).mean())
        of.step()


def end(of, file):
    """Write all values of this rank and kill it, as DeepSpeed's groups stay in a process."""
    values = [of.module.state_dict(), list(of.optimizer.single_partition_of_fp32_groups), of.optimizer.state_dict()]
    torch.save(bytes_of_all(values), file)
    os.kill(os.getpid(), signal.SIGKILL)


def bytes_of_all(values):
    """Return the tensors of ``values`` in order."""
    return [one.detach().clone() for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def disk(root):
    """Return the folder of this rank's node."""
    return Path(root, f"node{dist.get_rank()}")


def train_and_save(job, root, stage):
    of = engine(stage)
    train(of, 2)
    of.save_checkpoint(str(disk(root)))
    with Checkpointer(job) as ckpt:
        ckpt.save_directory(disk(root), of.global_steps).wait(copies=2, domains=2, timeout_s=60)
    train(of, 2)
    end(of, f"{root}/end{dist.get_rank()}.pt")


def restore_and_train(job, root, stage):
    of = engine(stage, seed=9)
    with Checkpointer(job) as ckpt:
        assert ckpt.restore_directory(disk(root)) == 2
    of.load_checkpoint(str(disk(root)))
    assert of.global_steps == 2
    train(of, 2)
    end(of, f"{root}/resumed{dist.get_rank()}.pt")


def run_to_the_end(nodes, where, function, root, stage):
    with pytest.raises(AssertionError, match="died"):
        nodes.run(where, function, str(root), stage)


def assert_resumed(root):
    for rank in range(2):
        whole, resumed = (torch.load(root / f"{name}{rank}.pt") for name in ("end", "resumed"))
        assert len(whole) > 4
        assert_same_bits(whole, resumed)


@pytest.mark.parametrize("stage", [1, 2])
def test_lost_folders_and_a_lost_node_resume_bit_for_bit(nodes, tmp_path, stage):
    run_to_the_end(nodes, WHERE, train_and_save, tmp_path, stage)
    nodes["n2"].lose()
    nodes.add("n3", "rack=r3")
    for number in range(2):
        shutil.rmtree(tmp_path / f"node{number}")
    run_to_the_end(nodes, ["n1", "n3"], restore_and_train, tmp_path, stage)
    assert_resumed(tmp_path)


def test_damaged_copy_of_a_folder_is_replaced(nodes, tmp_path):
    run_to_the_end(nodes, WHERE, train_and_save, tmp_path, 1)
    flip_shard_bits(nodes["n1"], nodes.job)
    for number in range(2):
        shutil.rmtree(tmp_path / f"node{number}")
    run_to_the_end(nodes, WHERE, restore_and_train, tmp_path, 1)
    assert_resumed(tmp_path)
