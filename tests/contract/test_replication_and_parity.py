"""Contract of both ways to protect shards in other nodes' memory: copies and parities."""

from __future__ import annotations

import pytest

from peerstore.membership.swim import MembershipSettings
from peerstore.settings import ReplicationSettings
from peerstore.shard_records import CHUNK_BYTES, VersionId
from tests.support.local_store_nodes import JOB, PATIENT, store_nodes, wait_until
from tests.support.stores import MIB, flip_byte, save_shard, shard_content, shard_key, write_slot

NAMES = ("n0", "n16", "n24", "n8")
SETTINGS = {
    "mirror": ReplicationSettings(copies=2, levels=("rack",)),
    "parity": ReplicationSettings(mode="parity", parity_group_size=3, levels=("rack",)),
}
SIZES = (3 * MIB + 17, 5 * MIB, 1, 4 * MIB - 1)


@pytest.fixture(params=["mirror", "parity"])
def mode(request):
    return request.param


@pytest.fixture
def nodes(mode):
    """Four nodes in four racks."""
    with store_nodes(SETTINGS[mode], *NAMES) as made:
        yield made


def save_everywhere(nodes, version, *, sizes=SIZES, epoch=1, name="a"):
    """One part per living node."""
    records = []
    for part, (node, size) in enumerate(zip(nodes.live_nodes, sizes, strict=False)):
        of = shard_key(version, part, epoch=epoch, name=name)
        records.append(save_shard(node.store, of, size, parts=len(nodes.live_nodes), meta=f"meta {part}".encode()))
    return records


def assert_readable(nodes, records):
    for record in records:
        assert nodes.read(record) == shard_content(record.key, record.size_bytes)


def test_saved_version_is_replicated_on_every_node(nodes):
    records = save_everywhere(nodes, 1)
    wait_until(lambda: nodes.is_replicated(1))
    wait_until(nodes.has_no_pending_copies)
    for node, record in zip(nodes.live_nodes, records, strict=True):
        assert [one.missing + one.unplaceable for one in node.job_peers.replicator.statuses() if one.is_owner] == [0]
        assert node.job_peers.replicator.redundancy(record.key, "rack") == (2, 2)
        assert node.job_peers.replicator.last_errors(record.key) == ""


@pytest.mark.parametrize(
    "lost", [pytest.param(name, marks=() if name in ("n0", "n16") else pytest.mark.nightly) for name in NAMES]
)
def test_any_single_node_may_be_lost(nodes, lost):
    records = save_everywhere(nodes, 1)
    wait_until(lambda: nodes.is_replicated(1))
    nodes.lose(lost)
    wait_until(lambda: all(nodes.holders(record.key) for record in records))
    assert_readable(nodes, records)


def test_remaining_nodes_replicate_again_and_survive_the_next_loss(nodes):
    records = save_everywhere(nodes, 1)
    wait_until(lambda: nodes.is_replicated(1))
    for lost in ("n8", "n0"):
        nodes.lose(lost)
        wait_until(lambda: all(nodes.holders(record.key) for record in records))
        wait_until(nodes.has_no_pending_copies)
        assert not any(
            one.unplaceable for node in nodes.live_nodes for one in node.job_peers.replicator.statuses() if one.is_owner
        )
    assert_readable(nodes, records)


def test_lost_shard_gets_exactly_one_new_owner(nodes):
    records = save_everywhere(nodes, 1)
    wait_until(lambda: nodes.is_replicated(1))
    lost = records[NAMES.index("n8")].key

    def owners():
        facts = [(node.name, fact) for node in nodes.live_nodes for fact in node.store.list_shards(JOB)]
        return [name for name, fact in facts if fact.key == lost and not fact.holders]

    nodes.lose("n8")
    wait_until(lambda: len(owners()) == 1)


def test_similar_versions_are_replicated_in_order_and_old_ones_removed(nodes):
    data = bytearray(shard_content(shard_key(), 4 * MIB))
    for version in range(1, 6):
        data[version * 1000] ^= 0xFF
        records = []
        for part, node in enumerate(nodes.live_nodes):
            lease = node.store.lease(shard_key(version, part), len(data), len(nodes.live_nodes), wait_s=30)
            write_slot(lease, bytes(data))
            records.append(node.store.seal(lease.id, len(data)))
        wait_until(lambda version=version: nodes.is_replicated(version))
    nodes.lose("n24")
    wait_until(lambda: all(nodes.holders(record.key) for record in records))
    assert [nodes.read(record) for record in records] == [bytes(data)] * 4
    assert all({of.version for of in node.shards()} <= {4, 5} for node in nodes.live_nodes)


def test_version_in_doubt_at_a_new_incarnation_is_replicated(nodes):
    """A new incarnation continues from the last replicated version of a past one."""
    records = save_everywhere(nodes, 1)
    wait_until(lambda: nodes.is_replicated(1))
    wait_until(nodes.has_no_pending_copies)
    nodes.lose("n16")
    nodes.claim_job("b", 7)
    wait_until(lambda: all(nodes.holders(record.key) for record in records))
    wait_until(nodes.has_no_pending_copies)
    assert not any(
        one.unplaceable for node in nodes.live_nodes for one in node.job_peers.replicator.statuses() if one.is_owner
    )
    nodes.lose("n24")
    wait_until(lambda: all(nodes.holders(record.key) for record in records))
    assert_readable(nodes, records)


def test_full_node_blocks_no_other(mode):
    room = {"mirror": 14 * MIB, "parity": 11 * MIB}[mode]  # too small for the copies of two versions for other nodes
    with store_nodes(SETTINGS[mode], *NAMES, budgets={"n16": str(room)}) as nodes:
        for version in range(1, 5):
            here = list(enumerate(nodes.live_nodes))
            leases = [node.store.lease(shard_key(version, part), 4 * MIB, 4, wait_s=30) for part, node in here]
            for (_, node), lease in zip(here, leases, strict=True):
                write_slot(lease, shard_content(lease.key, 4 * MIB))
                node.store.seal(lease.id, 4 * MIB)
            wait_until(lambda version=version: nodes.is_replicated(version))
        wait_until(nodes.has_no_pending_copies)
        short = {
            node.name: one
            for node in nodes.live_nodes
            for one in node.job_peers.replicator.statuses()
            if one.unplaceable
        }
        assert bool(short) is (mode == "parity")  # another node stands in for a mirror; a group stays as it is
        assert all("n16" in nodes[name].job_peers.replicator.last_errors(one.key) for name, one in short.items())
        assert "n16" not in short


@pytest.mark.parametrize("empty", ["n0", pytest.param("n16", marks=pytest.mark.nightly)])
def test_empty_node_that_rejoins_at_once_gets_its_data_back(mode, empty):
    with store_nodes(SETTINGS[mode], *NAMES, membership=PATIENT) as nodes:
        records = save_everywhere(nodes, 1)
        wait_until(lambda: nodes.is_replicated(1))
        wait_until(nodes.has_no_pending_copies)
        nodes[empty].lose()
        nodes[empty].start()
        nodes.join_all()
        wait_until(lambda: all(nodes.holders(record.key) for record in records))
        wait_until(nodes.has_no_pending_copies)
        wait_until(lambda: protected_keys(nodes[empty]))
        assert [
            one.missing + one.unplaceable for node in nodes.live_nodes for one in node.job_peers.replicator.statuses()
        ] == [0] * (8 if mode == "mirror" else 4)
        assert_readable(nodes, records)


@pytest.mark.parametrize("lost", ["n0", pytest.param("n8", marks=pytest.mark.nightly)])
def test_restarted_agent_continues_with_its_shards(nodes, lost):
    records = save_everywhere(nodes, 1)
    wait_until(lambda: nodes.is_replicated(1))
    nodes["n16"].stop()
    nodes["n16"].start()
    wait_until(lambda: nodes["n16"].store.status().verifying == 0)
    wait_until(nodes.has_no_pending_copies)
    nodes.lose(lost)
    wait_until(lambda: all(nodes.holders(record.key) for record in records))
    wait_until(nodes.has_no_pending_copies)
    assert_readable(nodes, records)


def test_restarted_agent_reports_nothing_before_it_knows_the_other_nodes(mode, monkeypatch):
    waiting = MembershipSettings(heartbeat_s=0.2, ping_timeout_s=100.0)
    with store_nodes(SETTINGS[mode], *NAMES, membership=waiting) as nodes:
        save_everywhere(nodes, 1)
        wait_until(lambda: nodes.is_replicated(1))
        nodes["n0"].stop()
        for other in NAMES[1:]:
            nodes.network.cut("n0", other)
        nodes["n0"].start()
        team, reports = nodes["n0"].job_peers, []
        monkeypatch.setattr(team.replicator.commit_tracker, "report", lambda *report: reports.append(report) or True)
        wait_until(lambda: nodes["n0"].store.status().verifying == 0)
        save_shard(nodes["n0"].store, shard_key(2), MIB)
        team.replicator._report_to_leader()
        assert not team.membership.is_converged
        assert reports == []
        for other in NAMES[1:]:
            nodes.network.heal("n0", other)
        wait_until(lambda: reports)
        assert team.membership.is_converged


def test_damaged_shard_is_found_and_restored(nodes):
    records = save_everywhere(nodes, 1)
    wait_until(lambda: nodes.is_replicated(1))
    wait_until(nodes.has_no_pending_copies)
    store, record = nodes["n16"].store, records[1]
    flip_byte(store.reader.hold(record.key, "test") and store.reader.shard_path(record.key), CHUNK_BYTES + 3)
    store.reader.release_hold(record.key, "test")
    assert store.verify(record.key) == (1,)
    wait_until(lambda: record.key in nodes["n16"].shards())
    assert_readable(nodes, records)
    assert nodes["n16"].job_peers.repaired == 1


def protected_keys(node):
    """Return the keys of the copies or parities that a node holds for others."""
    copies = [fact.key for fact in node.store.replicas.list_shards(JOB) if fact.holders]
    return copies + [record.key for record in node.store.replicas.list_parities(JOB)]


def test_damaged_replica_is_repaired(nodes):
    records = save_everywhere(nodes, 1, sizes=(4 * MIB,) * 4)
    wait_until(lambda: nodes.is_replicated(1))
    wait_until(nodes.has_no_pending_copies)
    store = nodes["n24"].store
    (kept,) = protected_keys(nodes["n24"])
    flip_byte(store.reader.shard_path(kept), 5)
    assert store.verify(kept) == (0,)
    assert [damage.what for damage in store.status().damage_reports] == [str(kept)]
    wait_until(lambda: protected_keys(nodes["n24"]) == [kept])
    wait_until(nodes.has_no_pending_copies)
    nodes.lose("n0")
    wait_until(lambda: all(nodes.holders(record.key) for record in records))
    assert_readable(nodes, records)


def test_bytes_changed_in_transit_are_detected(nodes):
    for name in NAMES:
        for other in NAMES:
            for payload in range(3):
                nodes.network.flip_bit(name, other, payload=payload, byte=0)
    records = save_everywhere(nodes, 1)
    wait_until(
        lambda: nodes.is_replicated(1), within_s=120
    )  # a node that sent damaged data twice is skipped for a while
    wait_until(nodes.has_no_pending_copies)
    for name in NAMES:
        for other in NAMES:
            nodes.network.heal(name, other)
    for node in nodes.live_nodes:
        for record in node.store.reader.records(JOB, VersionId(1, 1, 0, "a")):
            assert node.store.verify(record.key) == ()
    nodes.lose("n8")
    wait_until(lambda: all(nodes.holders(record.key) for record in records))
    assert_readable(nodes, records)


def test_memory_use_matches_the_documented_amount(nodes, mode):
    save_everywhere(nodes, 1, sizes=(6 * MIB,) * 4)
    wait_until(lambda: nodes.is_replicated(1))
    wait_until(nodes.has_no_pending_copies)
    assert nodes.sealed_bytes() == 4 * 6 * MIB * {"mirror": 2, "parity": 1 + 1 / 3}[mode]


def test_late_parts_are_protected_too(nodes):
    """Two parts are on one node, none on another: the nodes do not know the counts beforehand."""
    first = [
        save_shard(nodes[name].store, shard_key(1, part), 2 * MIB, parts=4) for part, name in enumerate(("n0", "n8"))
    ]
    wait_until(nodes.has_no_pending_copies)
    late = [
        save_shard(nodes["n0"].store, shard_key(1, 3), 3 * MIB, parts=4),
        save_shard(nodes["n24"].store, shard_key(1, 2), MIB, parts=4),
    ]
    wait_until(lambda: nodes.is_replicated(1))
    wait_until(nodes.has_no_pending_copies)
    nodes.lose("n0")
    wait_until(lambda: all(nodes.holders(record.key) for record in first + late))
    assert_readable(nodes, first + late)


def test_parity_is_hidden_from_part_counts(nodes):
    records = save_everywhere(nodes, 1, sizes=(4 * MIB,) * 4)
    wait_until(lambda: nodes.is_replicated(1))
    wait_until(nodes.has_no_pending_copies)
    group = VersionId(1, 1, 0, "a")
    keys = {record.key for record in records}
    for node in nodes.live_nodes:
        assert {fact.key for fact in node.store.list_shards(JOB)} <= keys
        assert {record.key for record in node.store.reader.records(JOB, group)} <= keys
        assert {fact.key for fact in node.job_peers.local_inventory().shards} <= keys
        assert node.store.status().jobs[0].newest_committed == 1  # from the caller: the node does not have all parts
        shown = len(node.store.list_shards(JOB))
        assert node.store.versions.delete(JOB, [group]) == shown
    assert nodes.sealed_bytes() == 0
