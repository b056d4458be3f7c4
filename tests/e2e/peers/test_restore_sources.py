"""Restores of steps from other nodes: other world sizes, several sources at once, all tiers."""

import pytest
import torch

from tests.e2e.peers.test_node_lost import full, restore, save, sharded
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.clusters import make_cluster
from tests.support.jobs import durable_settings
from tests.support.stores import flip_byte, pinned_file
from tieredckpt import Checkpointer

NAMES = ["n1", "n2", "n3"]


def bytes_of(state):
    return sum(tensor.nbytes for tensor in state.values() if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("where", [["n1", "n2", "n3", "n4"], ["n4", "n2"]], ids=["3 to 4", "3 to 2"])
def test_a_rank_on_a_new_node_reads_its_ranges_from_the_others(cluster, where):
    """With another world size and an empty arena, every rank reads little more than its own rows."""
    cluster.run(NAMES, save, [5], 3, environ={"TIEREDCKPT_PEER_COPIES": "3"})
    if "n3" not in where:
        cluster["n3"].lose()
    cluster.add("n4", "rack=r4")
    reports = cluster.run(where, restore, 5, environ={"TIEREDCKPT_PEER_COPIES": "3"})
    tiers, nodes = reports[where.index("n4")]
    assert tiers.keys() <= {"peer", "memory"}
    assert tiers.get("peer", 0) == sum(nodes.values())  # n4 received replicas meanwhile, so they are local
    needed = bytes_of(full(5)) / len(where) + bytes_of({"same": torch.arange(100)})
    assert tiers.get("peer", 0) <= 1.05 * needed + 4096
    assert "n4" not in nodes


def test_job_continues_after_two_of_four_nodes_are_lost(ranks):
    names = ["n1", "n2", "n3", "n4"]
    environ = {"TIEREDCKPT_PEER_COPIES": "3"}
    with make_cluster(ranks, *names) as cluster:
        said = cluster.run(names, save, [5, 6], 3, environ=environ)
        assert said == ["3 copies in 3 nodes"] * 4
        cluster["n1"].lose()  # the leader
        cluster["n3"].lose()
        for name in ("n5", "n6"):
            cluster.add(name)
        for tiers, _ in cluster.run(["n5", "n2", "n6", "n4"], restore, 6, environ=environ):
            assert set(tiers) <= {"memory", "peer"}


def save_durably(job, step):
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        ckpt.restore(zeros_like_state(sharded(0)))
        saved = ckpt.save(sharded(step), step)
        saved.wait(copies=2, timeout_s=60)
        saved.wait("durable", timeout_s=60)
        return saved.durability


def restore_alone(job, step):
    """Restore the unsharded state in one process."""
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        expected = {**full(step), "same": torch.arange(100) * step, "step": step}
        state = zeros_like_state(expected)
        assert ckpt.restore(state) == step
        assert_same_bits(expected, state)
        return ckpt.last_restore.bytes_by_tier, ckpt.last_restore.bytes_by_node


def test_step_is_restored_from_memory_a_peer_and_storage(cluster, rclone):
    durable = durable_settings(rclone)
    options = ",".join(f"{name}={value}" for name, value in durable.options.items())
    environ = {"TIEREDCKPT_DURABLE_URL": durable.url, "TIEREDCKPT_DURABLE_OPTIONS": options}
    said = cluster.run(NAMES, save_durably, 5, environ=environ)
    assert said == ["2 copies in 2 racks, durable"] * 3
    with cluster["n1"].agent(cluster.job) as agent:
        (copy,) = [fact.key for fact in agent.store.list_shards(cluster.job) if fact.holders]
    for name in NAMES:  # now no node has an intact copy of this shard in memory
        with cluster[name].agent(cluster.job) as agent:
            if copy in {fact.key for fact in agent.store.list_shards(cluster.job)}:
                pin = agent.store.pin(copy)
                for at in range(0, pin.record.size_bytes, 4096):
                    flip_byte(pinned_file(pin), at)
                agent.store.unpin(pin.id)
    ((tiers, nodes),) = cluster.run(["n1"], restore_alone, 5, environ=environ)
    assert tiers.keys() == {"memory", "peer", "durable"}
    assert all(tiers.values())
    assert sum(nodes.values()) == tiers["peer"]
    assert "n1" not in nodes
