"""Restores of steps from other nodes: other world sizes, several sources at once, all tiers."""

from unittest import mock

import pytest
import torch

from tests.e2e.peers.test_node_lost import full, restore, save, sharded
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.clusters import make_cluster
from tests.support.jobs import durable_settings
from tests.support.stores import flip_byte, pinned_file
from tieredckpt import Checkpointer
from tieredckpt.errors import RestoreProofError
from tieredckpt.restore import proof
from tieredckpt.session.peer_reader import PeerReader

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


class LateWrite:
    """A ``Stateful`` whose load changes one bit of a tensor that was restored before it."""

    def __init__(self, tensor):
        self.tensor = tensor

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.tensor.view(torch.uint8)[-1, -1] ^= 1


def restore_and_count_hashed_bytes(job, step, delivered):
    """Restore once as usual, and once with a late write, which must be detected."""
    hashed = []
    digests, read = proof.tensor_digests, PeerReader.read

    def counting(tensors, copier):
        hashed.append(sum(tensor.nbytes for tensor in tensors))
        return digests(tensors, copier)

    def reading(self, wanted, *how):
        return read(self, wanted, *how) if delivered else (list(wanted), {})

    with (
        mock.patch.object(proof, "tensor_digests", counting),
        mock.patch.object(PeerReader, "read", reading),
        Checkpointer(job, on_sigterm="ignore") as ckpt,
    ):
        state = zeros_like_state({**full(step), "same": torch.arange(100) * step, "step": step})
        assert ckpt.restore(state) == step
        report, count = ckpt.last_restore, sum(hashed)
        with pytest.raises(RestoreProofError, match=r"1 entry differs from the saved state: w\."):
            ckpt.restore(state | {"zz": LateWrite(state["w"])}, strict=False)
        return report.bytes_by_tier, report.proof.size_bytes, count


@pytest.mark.parametrize("delivered", [True, False], ids=["from other nodes", "left to the durable tier"])
def test_bytes_that_other_nodes_delivered_are_hashed_once(cluster, tmp_path, delivered):
    environ = {"TIEREDCKPT_DURABLE_URL": f"file://{tmp_path}/durable"}
    cluster.run(NAMES, save_durably, 5, environ=environ)
    ((tiers, compared, hashed),) = cluster.run(["n1"], restore_and_count_hashed_bytes, 5, delivered, environ=environ)
    assert compared == bytes_of(full(5)) + 800
    assert hashed == (tiers["peer"] if delivered else 2 * tiers["durable"])
