"""Whether a succeeded job still needs the steps in a node's memory."""

from types import SimpleNamespace

import msgspec
import pytest

from elastic.supervisor import memory_tier
from elastic.supervisor.memory_tier import JobMemory, reason_to_keep
from peerstore.membership.topology import NodeId, PeerNode
from peerstore.shard_records import ShardInfo, ShardKey, VersionId
from tieredckpt.agent.agent_api import ClusterNode, ClusterStatus, DrainStatus
from tieredckpt.format.manifest import ShardMeta
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import DurableSettings
from tieredckpt.step_inventory import StepInventory, StepStatus

DURABLE = DurableSettings(url="/somewhere")


def group(step, epoch=1):
    return VersionId(epoch, step, 0, "a")


def survey(*durable, **changed):
    views = tuple(StepStatus(group(step), 2, {}, durable=step in durable) for step in range(6))
    return msgspec.structs.replace(StepInventory(views, durable=DURABLE), **changed)


HELD = JobMemory([group(3), group(4)], [], used=False)


@pytest.mark.parametrize(
    ("held", "seen", "why"),
    [
        (HELD, survey(4), ""),
        (HELD, survey(5), ""),
        (HELD, survey(3), "step 4 is not in the durable tier"),
        (HELD, survey(), "step 4 is not in the durable tier"),
        (HELD._replace(pinned=[group(3)]), survey(4), "step 3 is pinned"),
        (HELD._replace(used=True), survey(4), "it has been started again"),
        (HELD, survey(4, durable=None), "it has no durable tier"),
        (HELD, survey(4, unreachable={Tier.DURABLE: "timed out"}), "the durable tier does not answer: timed out"),
        (HELD, survey(4, unreachable={Tier.PEER: "n2 is silent"}), ""),
        (HELD._replace(versions=[group(3), group(7, epoch=2)]), survey(4), "step 7 is not in the durable tier"),
    ],
)
def test_memory_is_released_only_if_durable(held, seen, why):
    assert reason_to_keep(held, seen) == why


def test_quarantined_durable_step_does_not_release_memory():
    bad = StepStatus(group(4), 2, {}, durable=True, quarantined="it is damaged")
    assert reason_to_keep(HELD, StepInventory((bad,), durable=DURABLE)) == "step 4 is not in the durable tier"


def written(step, *, durable=False, holders=(), meta=b""):
    """Return a shard on the node that wrote it, or a replica on one of ``holders``."""
    meta = meta or msgspec.msgpack.encode(ShardMeta("", (), durable=durable))
    return ShardInfo(ShardKey("job", step, 1, "a", 0, 0), 2, 10, meta, 1, False, holders)


class SpareNodeAgent:
    """An agent with replicas that another node deletes after ``deleted_after`` queries."""

    def __init__(self, *peers, deleted_after):
        self.store = self.versions = self
        self._left = deleted_after
        nodes = [
            ClusterNode(PeerNode(NodeId(name), ""), "alive", tuple(shards), unreachable=why)
            for name, why, *shards in peers
        ]
        self._cluster = ClusterStatus("job", "n2", (*nodes, ClusterNode(PeerNode(NodeId("n2"), ""), "alive")))

    def list_shards(self, job):
        return [SimpleNamespace(key=SimpleNamespace(version_id=group(3)))] if self._left > 0 else []

    def retained(self, job):
        return set()

    def status(self):
        return SimpleNamespace(jobs=())

    def cluster_status(self, job):
        self._left -= 1
        return self._cluster

    def list_steps(self, job, *, fresh):
        self._left -= 1
        return survey(4, unreachable={Tier.PEER: "n0 cannot be reached"})


class UploadingAgent(SpareNodeAgent):
    """An agent whose upload of step 3 does not finish, because nodes with other parts have left."""

    place = SimpleNamespace(directory="/run/agent")

    def __init__(self, *durable):
        super().__init__(deleted_after=9)
        self.blobs, self._durable, self.deleted = self, durable, []

    def list_shards(self, job):
        return [SimpleNamespace(key=SimpleNamespace(version_id=group(3), part=1), sealed_ns=1, holders=())]

    def get(self, *_):
        return b""

    def drain_status(self, job):
        return [DrainStatus(group(3), "waiting"), DrainStatus(group(4), "done")]

    def list_steps(self, job, *, fresh):
        return survey(*self._durable)

    def delete(self, job, versions):
        self.deleted += versions


def test_unfinished_upload_keeps_memory_only_without_a_newer_durable_step(monkeypatch, caplog):
    monkeypatch.setattr(memory_tier, "_POLL_S", 0.0)
    newer = UploadingAgent(4)
    memory_tier._release(newer, "job", 0, deadline=0.0)
    assert newer.deleted == [group(3)]
    assert "the upload of step 3 did not finish; a newer step is durable" in caplog.text
    caplog.clear()
    committed_elsewhere = UploadingAgent(3)
    memory_tier._release(committed_elsewhere, "job", 0, deadline=0.0)
    assert (committed_elsewhere.deleted, caplog.text) == ([group(3)], "")
    older = UploadingAgent(2)
    memory_tier._release(older, "job", 0, deadline=0.0)
    assert older.deleted == []
    assert "the checkpoints of job remain in /run/agent: it is being uploaded still" in caplog.text


@pytest.mark.parametrize(
    ("peers", "deleted"),
    [
        ([("n0", "cannot be reached"), ("n1", "")], True),
        ([("n0", "cannot be reached")], False),
        ([], False),
        ([("n0", "", written(2), written(3, durable=True)), ("n1", "", written(3, durable=True))], True),
        ([("n0", "", written(2, durable=True), written(3)), ("n1", "", written(3))], False),
        ([("n0", "", written(2, durable=True)), ("n1", "", written(3))], False),
        ([("n0", "", written(3, durable=True)), ("n1", "", written(4, holders=("n3", "n1")))], True),
        ([("n0", "", written(3, meta=b"of another release"))], True),
    ],
    ids=[
        "another node answers",
        "no node answers",
        "no other node",
        "the newest step will be durable",
        "the newest step will not be durable",
        "the newest step of another node will not be durable",
        "only a replica is newer",
        "unknown",
    ],
)
def test_spare_node_waits_for_the_nodes_that_still_answer(monkeypatch, peers, deleted):
    monkeypatch.setattr(memory_tier, "_POLL_S", 0.0)
    agent = SpareNodeAgent(*peers, deleted_after=3)
    assert memory_tier._wait_deleted_elsewhere(agent, "job", HELD) == deleted
