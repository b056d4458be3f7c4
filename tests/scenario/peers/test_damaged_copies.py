"""Copies damaged in memory, in transit or by a false record: never used, and repaired."""

import threading

import msgspec
import pytest

from peerstore.errors import PeerUnreachableError, UnavailableError
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadTarget
from peerstore.shard_records import CHUNK_BYTES
from tests.support.local_nodes import local_nodes, wait_until
from tests.support.stores import MIB, flip_byte, shard_content, shard_key

SIZE = 6 * MIB + 1234
V1 = shard_key(1)


@pytest.fixture
def nodes():
    """Create three nodes that all hold a copy of n1's shard."""
    with local_nodes("n1", "n2", "n3", copies=3) as made:
        made["n1"].write(V1, SIZE)
        made.wait_replicated(1)
        assert made.holders(V1) == {"n1", "n2", "n3"}
        yield made


def wait_repaired(node, count=1):
    wait_until(lambda: node.job_peers.repaired >= count, f"{node.name} has repaired its copy")
    assert node.has_intact_shard(V1)
    assert node.store.verify(V1) == ()


def test_flipped_byte_of_a_copy_is_refused_dropped_reported_and_repaired(nodes):
    flip_byte(nodes["n2"].path(V1), 3 * MIB)
    _, alone = nodes["n1"].read(V1, sources=["n2"])
    assert alone.failed.keys() == {V1}
    assert {node for node, _, _ in alone.rejected_replicas} == {"n2"}
    wait_repaired(nodes["n2"])
    assert any("changed after it was sealed" in reason for reason in nodes["n2"].damage_reports())
    assert nodes["n3"].damage_reports() == nodes["n1"].damage_reports() == []
    # The repair does not change the holders: n1, which wrote the shard, stays the first.
    assert nodes["n2"].shard_infos()[V1].holders == nodes["n3"].shard_infos()[V1].holders
    assert nodes["n2"].shard_infos()[V1].holders[0] == "n1"


def test_flipped_byte_of_the_original_is_repaired_from_a_copy(nodes):
    flip_byte(nodes["n1"].path(V1), 5 * MIB)
    _, alone = nodes["n3"].read(V1, sources=["n1"])
    assert {node for node, _, _ in alone.rejected_replicas} == {"n1"}
    wait_repaired(nodes["n1"])
    assert nodes["n1"].shard_infos()[V1].holders == ()
    assert nodes["n1"].job_peers.replicator.statuses()[0].is_owner


def test_holder_verifies_the_chunk_of_a_slice_before_sending(nodes):
    """The reader of a slice cannot compute the checksum of its chunk."""
    flip_byte(nodes["n2"].path(V1), CHUNK_BYTES + 10)
    peers = nodes["n1"].job_peers
    (record,) = peers.fetch_records("n3", V1.version_id)
    start = CHUNK_BYTES + 500
    data = bytearray(100)
    target = ReadTarget(start, start + 100, memoryview(data))

    def read_from_n2():
        found = RangeReader(peers.membership.client_for).read([ReadRequest(record, [target], ["n2"])])
        return None if isinstance(found.failed.get(V1), PeerUnreachableError) else found

    alone = wait_until(read_from_n2, "n2 answers")
    assert {node for node, _, _ in alone.rejected_replicas} == {"n2"}, alone.failed
    assert data == bytes(100)
    both = RangeReader(peers.membership.client_for).read([ReadRequest(record, [target], ["n2", "n3"])])
    assert both.failed == {}
    assert data == shard_content(V1, SIZE)[start : start + 100]
    wait_repaired(nodes["n2"])


def test_reader_continues_with_the_next_copy(nodes):
    """All pieces of one copy are damaged, so every piece comes from the other copy."""
    for at in range(0, SIZE, MIB):
        flip_byte(nodes["n2"].path(V1), at)
    data, pulled = nodes["n1"].read(V1, sources=["n2", "n3"], streams=1)
    assert data == shard_content(V1, SIZE)
    assert pulled.failed == {}
    assert dict(pulled.bytes_from) == {"n3": SIZE}


def test_data_damaged_in_every_copy_is_never_used(nodes):
    for node in nodes:
        flip_byte(node.path(V1), 2 * MIB)
    _, pulled = nodes["n1"].read(V1, sources=["n2", "n3"])
    assert pulled.failed.keys() == {V1}
    assert "does not match its checksum" in str(pulled.failed[V1])
    wait_until(lambda: not nodes["n2"].holds(V1) and not nodes["n3"].holds(V1), "the damaged copies are dropped")


def test_bit_flipped_in_transit_is_read_again_and_the_copy_stays(nodes):
    nodes.network.flip_bit("n2", "n1", payload=0, byte=77)
    data, pulled = nodes["n1"].read(V1, sources=["n2"], streams=1)
    assert data == shard_content(V1, SIZE)
    assert pulled.failed == {}
    assert pulled.rejected_replicas == []
    assert nodes["n2"].has_intact_shard(V1)
    assert nodes["n2"].damage_reports() == []


def test_persistently_damaging_path_is_abandoned(nodes):
    for payload in range(8):
        nodes.network.flip_bit("n2", "n1", payload=payload, byte=77)
    _, alone = nodes["n1"].read(V1, sources=["n2"], streams=1)
    assert alone.failed.keys() == {V1}
    assert {node for node, _, _ in alone.rejected_replicas} == {"n2"}
    assert nodes["n2"].has_intact_shard(V1)
    assert nodes["n2"].damage_reports() == []


def test_pooled_connection_closed_by_the_peer_is_reopened(nodes):
    """The other agent has restarted, and its copy is intact."""
    peers = nodes["n1"].job_peers
    (record,) = peers.fetch_records("n2", V1.version_id)
    peer = peers.membership.client_for("n2")
    with peer.connection(), peer.connection(fresh=True):
        pass
    for line in peer._pool._idle:
        line.close()
    data = bytearray(SIZE)
    pulled = RangeReader(lambda _: peer).read([ReadRequest(record, [ReadTarget(0, SIZE, memoryview(data))], ["n2"])])
    assert pulled.failed == {}
    assert data == shard_content(V1, SIZE)


def test_damaged_copy_does_not_stop_reads_of_other_shards_from_its_node(nodes):
    """The holder detects the damage before it sends a slice, and drops the copy itself."""
    other = shard_key(1, 1)
    nodes["n2"].write(other, SIZE, parts=2)
    flip_byte(nodes["n2"].path(V1), 5)
    peers = nodes["n3"].job_peers
    records = {record.key: record for record in peers.fetch_records("n2", V1.version_id)}
    slice_of, data = bytearray(100), bytearray(SIZE)
    requests = [
        ReadRequest(records[V1], [ReadTarget(10, 110, memoryview(slice_of))], ["n2"]),
        ReadRequest(records[other], [ReadTarget(0, SIZE, memoryview(data))], ["n2"]),
    ]
    pulled = RangeReader(peers.membership.client_for, streams=1).read(requests)
    assert pulled.failed.keys() == {V1}
    assert data == shard_content(other, SIZE)


def test_bit_flipped_during_replication_is_sent_again(nodes):
    for payload in (0, 3):
        nodes.network.flip_bit("n1", "n2", payload=payload, byte=5)
    nodes["n1"].write(shard_key(2), SIZE)
    nodes.wait_replicated(2)
    assert nodes["n2"].node_peers.server.replica_receiver.damaged_chunks == 2
    assert all(node.holds(shard_key(2)) for node in nodes)
    assert nodes["n2"].store.verify(shard_key(2)) == ()


def test_path_that_damages_everything_makes_no_copy_and_is_reported(nodes):
    for payload in range(1000):
        nodes.network.flip_bit("n1", "n2", payload=payload, byte=5)
    nodes["n1"].write(shard_key(2), SIZE)
    errors = wait_until(lambda: nodes["n1"].job_peers.replicator.last_errors(shard_key(2)), "a copy was refused")
    assert "arrived damaged twice" in errors
    wait_until(lambda: nodes.holders(shard_key(2)) == {"n1", "n3"}, "the other partner has its copy")
    wait_until(lambda: nodes["n1"].job_peers.replicator.statuses()[-1].unplaceable == 1, "one copy is missing")
    assert not nodes["n2"].holds(shard_key(2))


def falsify_checksums(node):
    """Replace the checksums in a node's record of its copy."""
    with node.store.table.lock:
        slot, record = node.store.table.slots.find_shard(V1)
        sums = bytes(byte ^ 0x55 for byte in record.checksums)
        slot.record = msgspec.structs.replace(record, checksums=sums)


@pytest.mark.parametrize("liar", ["n2", "n3"])
def test_false_record_of_one_of_two_holders_is_outvoted_by_the_data(liar):
    """The two holders' records disagree, so the data decides."""
    with local_nodes("n1", "n2", "n3", "n4", copies=2) as nodes:
        writer = next(node for node in nodes if liar in node.job_peers.replicator.partners)
        of = shard_key(1)
        writer.write(of, SIZE)
        nodes.wait_replicated(1)
        assert nodes.holders(of) == {writer.name, liar}
        falsify_checksums(nodes[liar])
        reader = next(node for node in nodes if node.name not in (writer.name, liar))
        data, pulled = reader.read(of)
        assert pulled.failed == {}
        assert data == shard_content(of, SIZE)
        # The liar's data is intact, so it may serve reads as soon as its record is replaced.
        assert set(pulled.bytes_from) <= {writer.name, liar}
        wait_until(nodes[liar].damage_reports, "the wrong record is dropped")
        wait_until(lambda: nodes[liar].holds(of) and nodes[liar].store.verify(of) == (), "the liar's copy is repaired")
        assert nodes[liar].has_intact_shard(of)


def test_writer_with_a_false_record_is_repaired_from_its_copies(nodes):
    falsify_checksums(nodes["n1"])
    data, pulled = nodes["n3"].read(V1)
    assert data == shard_content(V1, SIZE)
    assert set(pulled.bytes_from) == {"n2"}
    wait_repaired(nodes["n1"])
    assert nodes["n1"].shard_infos()[V1].holders == ()


def test_damage_of_one_shard_does_not_affect_another(nodes):
    nodes["n2"].write(shard_key(1, 1), MIB, parts=2)
    wait_until(lambda: nodes.holders(shard_key(1, 1)) == {"n1", "n2", "n3"})
    for node in nodes:
        flip_byte(node.path(V1), 0)
    data, pulled = nodes["n3"].read(shard_key(1, 1), sources=["n1", "n2"])
    assert pulled.failed == {}
    assert data == shard_content(shard_key(1, 1), MIB)


def test_copy_with_a_false_record_is_found_when_offered_again():
    with local_nodes("n1", "n2", copies=2) as nodes:
        nodes["n1"].write(V1, SIZE)
        nodes.wait_replicated(1)
        falsify_checksums(nodes["n2"])
        nodes.restart("n1")  # which offers its copies again
        wait_until(nodes["n2"].damage_reports, "n2 has verified its copy")
        wait_until(lambda: nodes["n2"].holds(V1), "n2 has an intact copy again")
        assert nodes["n2"].has_intact_shard(V1)
        assert nodes["n2"].store.verify(V1) == ()
        assert nodes["n2"].shard_infos()[V1].holders == ("n1", "n2")
        assert nodes["n1"].has_intact_shard(V1)


def test_copy_is_repaired_when_a_holder_becomes_reachable():
    with local_nodes("n1", "n2", copies=2) as nodes:
        nodes["n1"].write(V1, SIZE)
        nodes.wait_replicated(1)
        queried = threading.Event()

        def raise_unavailable():
            queried.set()
            raise UnavailableError("try again")

        nodes["n1"].job_peers.local_inventory = raise_unavailable
        flip_byte(nodes["n2"].path(V1), 0)
        assert nodes["n2"].store.verify(V1) == (0,)
        assert queried.wait(60)
        del nodes["n1"].job_peers.local_inventory
        wait_repaired(nodes["n2"])
