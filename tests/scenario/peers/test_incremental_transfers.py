"""Transfers of only the needed bytes, and replacement of a lost source."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadTarget
from peerstore.server.peer_server import PeerSession
from peerstore.shard_records import CHUNK_BYTES
from tests.support.local_nodes import local_nodes, wait_until
from tests.support.stores import MIB, flip_byte, load_shard, shard_content, shard_key, write_slot

CHUNKS = 6
SIZE = CHUNKS * CHUNK_BYTES


def write_version(node, of, changed):
    """Write a version in which only these chunks differ from version 0, and return its bytes."""
    data = bytearray(shard_content(shard_key(0), SIZE))
    for chunk in changed:
        data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES] = shard_content(of, CHUNK_BYTES)
    lease = node.store.lease(of, SIZE, 1, wait_s=60)
    write_slot(lease, bytes(data))
    node.store.seal(lease.id, SIZE)
    return bytes(data)


def test_chunks_that_did_not_change_are_not_sent_again():
    with local_nodes("n1", "n2", copies=2) as nodes:
        n1, totals = nodes["n1"], nodes["n1"].job_peers.replicator.totals
        write_version(n1, shard_key(1), ())
        nodes.wait_replicated(1)
        assert (totals.sent_bytes, totals.skipped_bytes) == (SIZE, 0)
        data = write_version(n1, shard_key(2), (1, 4))
        nodes.wait_replicated(2)
        assert (totals.sent_bytes, totals.skipped_bytes) == (SIZE + 2 * CHUNK_BYTES, SIZE - 2 * CHUNK_BYTES)
        assert load_shard(nodes["n2"].store, shard_key(2)) == data
        assert nodes["n2"].store.verify(shard_key(2)) == ()
        write_version(n1, shard_key(3), (1, 4))  # these two chunks differ in every version
        nodes.wait_replicated(3)
        assert totals.sent_bytes == SIZE + 4 * CHUNK_BYTES


def test_damage_of_an_older_version_is_not_copied_into_the_next():
    with local_nodes("n1", "n2", copies=2) as nodes:
        n1, n2, totals = nodes["n1"], nodes["n2"], nodes["n1"].job_peers.replicator.totals
        write_version(n1, shard_key(1), ())
        nodes.wait_replicated(1)
        flip_byte(n2.path(shard_key(1)), 3 * CHUNK_BYTES + 5)
        data = write_version(n1, shard_key(2), (0,))
        nodes.wait_replicated(2)
        assert load_shard(n2.store, shard_key(2)) == data
        assert n2.store.verify(shard_key(2)) == ()
        assert totals.sent_bytes == SIZE + 2 * CHUNK_BYTES  # the changed chunk and the damaged one


def test_reader_switches_to_the_other_source_when_one_dies():
    with local_nodes("n1", "n2", "n3", copies=2) as nodes:
        nodes["n1"].write(shard_key(1), 32 * MIB + 5)
        nodes.wait_replicated(1)
        (other,) = nodes.holders(shard_key(1)) - {"n1"}
        reader = next(node for node in nodes if node.name not in ("n1", other))
        nodes.network.stall("n1", reader.name)  # n1 sends no data until the other source is lost
        record = nodes[other].store.reader.records("job", shard_key(1).version_id)[0]
        data = bytearray(record.size_bytes)
        request = ReadRequest(record, [ReadTarget(0, len(data), memoryview(data))], [other, "n1"])
        with ThreadPoolExecutor(1) as executor:
            nodes.network.drop_after(other, reader.name, 6 * MIB)
            pulling = executor.submit(RangeReader(reader.job_peers.membership.client_for, streams=1).read, [request])
            wait_until(lambda: nodes.network._way(other, reader.name).drop_after is None, "the transfer was cut")
            nodes.lose(other)
            nodes.network.heal("n1", reader.name)
            pulled = pulling.result(120)
        assert pulled.failed == {}
        assert data == shard_content(shard_key(1), 32 * MIB + 5)
        assert pulled.bytes_from["n1"] + pulled.bytes_from[other] == len(data)
        assert pulled.bytes_from["n1"] > pulled.bytes_from[other] > 0


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_reader_receives_only_its_ranges(count):
    with local_nodes("n1", "n2", copies=2) as nodes:
        nodes["n1"].write(shard_key(1), SIZE)
        nodes.wait_replicated(1)
        (record,) = nodes["n1"].store.reader.records("job", shard_key(1).version_id)
        step = SIZE // count
        targets = [(at * step, at * step + min(step, 1000)) for at in range(count)]
        buffers = [bytearray(stop - start) for start, stop in targets]
        request = ReadRequest(
            record,
            [
                ReadTarget(start, stop, memoryview(buffer))
                for (start, stop), buffer in zip(targets, buffers, strict=True)
            ],
            ["n1"],
        )
        before = nodes["n1"].node_peers.server.range_server.sent_bytes
        pulled = RangeReader(nodes["n2"].job_peers.membership.client_for).read([request])
        assert pulled.failed == {}
        content = shard_content(shard_key(1), SIZE)
        assert [bytes(buffer) for buffer in buffers] == [content[start:stop] for start, stop in targets]
        sent = nodes["n1"].node_peers.server.range_server.sent_bytes - before
        assert sent == pulled.bytes_from["n1"] == sum(stop - start for start, stop in targets)


def test_connection_drops_finished_transfers():
    """A connection lasts as long as the job, so its records of transfers must not accumulate."""
    with local_nodes("n1", "n2", copies=2) as nodes:
        for version in range(5):
            nodes["n1"].write(shard_key(version), MIB)
            nodes.wait_replicated(version)
        peers = {id(nodes[name].job_peers) for name in ("n1", "n2")}
        sessions = [one for one in gc.get_objects() if type(one) is PeerSession and id(one.job_peers) in peers]
        assert sessions
        wait_until(lambda: not any(one.transfers for one in sessions), "no session remembers a transfer")
