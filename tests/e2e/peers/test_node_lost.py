"""A node is lost with its memory, and the job continues from replicas, without any storage."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer
from tieredckpt.errors import CheckpointLostError

ROWS = 1 << 12


def full(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(ROWS, 64, generator=generator),
        "v": torch.randn(96, 33, generator=generator).bfloat16(),
    }


def sharded(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        **{name: distribute(tensor, mesh) for name, tensor in full(step).items()},
        "same": torch.arange(100) * step,
        "step": step,
    }


def distribute(tensor, mesh):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


def save(job, steps, copies=2):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeros_like_state(sharded(0)))
        for step in steps:
            saved = ckpt.save(sharded(step), step)
            saved.wait(copies=copies, domains=copies, timeout_s=60)
        return saved.durability


def restore(job, expected):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        state = zeros_like_state(sharded(expected))
        found = ckpt.restore(state)
        assert found == expected
        assert_same_bits(sharded(expected), state)
        return ckpt.last_restore.bytes_by_tier, ckpt.last_restore.bytes_by_node


def test_lost_node_is_restored_from_peer_memory(cluster):
    said = cluster.run(["n1", "n2", "n3"], save, [5, 6, 7])
    assert said == ["2 copies in 2 racks"] * 3
    cluster["n2"].lose()
    cluster.add("n4", "rack=r4")
    where = ["n1", "n4", "n3"]
    for node, (tiers, nodes) in zip(where, cluster.run(where, restore, 7), strict=True):
        assert set(tiers) <= {"memory", "peer"}  # n4 received replicas meanwhile, so they are local
        if node == "n4":
            assert "n4" not in nodes
        else:
            assert "memory" in tiers


def refused(job):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        state = zeros_like_state(sharded(0))
        try:
            return ckpt.restore(state)
        except CheckpointLostError as error:
            assert ckpt.restore(state, on_lost="start_fresh") == -1
            return str(error)


def test_steps_lost_with_too_many_nodes_are_reported(cluster):
    cluster.run(["n1", "n2", "n3"], save, [5, 6])
    for name in ("n1", "n2"):
        cluster[name].lose()
    with cluster["n3"].agent(cluster.job) as agent:
        wait_until(lambda: [one.state for one in agent.cluster_status(cluster.job).nodes] == ["dead", "dead", "alive"])
    for name in ("n4", "n5"):
        cluster.add(name, f"rack=r{name[1:]}")
    for said in cluster.run(["n4", "n5", "n3"], refused):
        assert "step 6" in str(said)
        assert "was complete once, saved 20" in said
        assert "missing part" in said
        assert "of 3" in said
