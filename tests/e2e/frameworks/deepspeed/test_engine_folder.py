"""DeepSpeed's checkpoint folders as steps: lost nodes with their own disks, and damage."""

from __future__ import annotations

import os
import shutil
import signal
import warnings

import pytest
import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():  # its optional packages, and torch's own warnings
    warnings.simplefilter("ignore")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from tests.e2e.peers.test_export_from_peers import flip_shard_bits
from tests.support.bits import assert_same_bits
from tests.support.deepspeed_engine import make_engine, node_folder, own_tensors, train_steps
from tieredckpt import Checkpointer

pytestmark = pytest.mark.e2e

WHERE = ["n1", "n2"]


def end(of, file):
    """Write all values of this rank and kill it, as DeepSpeed's groups stay in a process."""
    torch.save(own_tensors(of), file)
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_save(job, root, stage):
    of = make_engine(stage)
    train_steps(of, 2)
    of.save_checkpoint(str(node_folder(root)))
    with Checkpointer(job) as ckpt:
        ckpt.save_directory(node_folder(root), of.global_steps).wait(copies=2, domains=2, timeout_s=60)
    train_steps(of, 2)
    end(of, f"{root}/end{dist.get_rank()}.pt")


def restore_and_train(job, root, stage):
    of = make_engine(stage, seed=9)
    with Checkpointer(job) as ckpt:
        assert ckpt.restore_directory(node_folder(root)) == 2
    of.load_checkpoint(str(node_folder(root)))
    assert of.global_steps == 2
    train_steps(of, 2)
    end(of, f"{root}/resumed{dist.get_rank()}.pt")


def run_to_the_end(nodes, where, function, root, stage):
    with pytest.raises(AssertionError, match="died"):
        nodes.run(where, function, str(root), stage)


def assert_resumed(root):
    for rank in range(2):
        whole, resumed = (torch.load(root / f"{name}{rank}.pt") for name in ("end", "resumed"))
        assert len(whole) > 4
        assert_same_bits(whole, resumed)


@pytest.mark.parametrize("stage", [1, 2, 3])
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
