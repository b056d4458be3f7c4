"""Malicious members of a job that know its secret: refused or dropped, without harm to honest nodes."""

import contextlib
import threading
import tracemalloc

import msgspec
import pytest

from peerstore import checksums, message_codec
from peerstore.errors import (
    ArenaFullError,
    FencedError,
    LeaseLostError,
    PeerRefusedError,
    PeerStoreError,
    PeerUnreachableError,
    ProtocolError,
    RequestError,
    ShardDamagedError,
)
from peerstore.membership.swim import GossipMessage
from peerstore.peers.peer_client import PeerConnection
from peerstore.peers.peer_messages import (
    AbortReplica,
    CommitReplica,
    FlushChunks,
    GetNodeInventory,
    GetPeerBlob,
    GetPeerBlobs,
    GetShardRecords,
    NodeInventory,
    OfferReplica,
    OfferReply,
    PingMessage,
    PutPeerBlob,
    RangeDigests,
    ReadRanges,
    ReplicaChunk,
    UpdateHolders,
    VerifyChunks,
)
from peerstore.rpc import Request
from peerstore.shard_records import CHUNK_BYTES, ResumePoint, ShardRecord, VersionId
from peerstore.transport.authentication import authenticate_to_server
from tests.support.chunk_sums import chunk_checksums
from tests.support.local_nodes import JOB, SECRET, LocalNodes, wait_until
from tests.support.stores import MIB, load_shard, shard_content, shard_key
from tieredckpt.agent.agent_api import (
    DAMAGED_BLOB_PREFIX,
    DURABLE_SETTINGS_BLOB,
    LAYOUT_BLOB_PREFIX,
    QUARANTINE_BLOB_PREFIX,
)
from tieredckpt.memory_service_options import REGISTRY_BLOB_PREFIX

SIZE = 3 * MIB + 17
CHUNKS = 4
HERE = shard_key(1)
OTHERS_SECRET = b"a secret that another job has, also long"


@pytest.fixture
def nodes():
    """Create an honest agent with a shard of the job and a shard of another job."""
    with contextlib.closing(LocalNodes(capacity_bytes=64 << 10)) as made:
        made.add("n2")
        made.join_all()
        made["n2"].write(HERE, SIZE)
        made["n2"].node_peers.join("other", made.peers_config(secret=OTHERS_SECRET), wait_s=0.0)
        save_for_other(made["n2"])
        yield made


def save_for_other(node):
    wait_until(lambda: node.node_peers.job_peers("other").membership.has_quorum)
    node.write(shard_key(1, job="other"), MIB)


@pytest.fixture
def member_connection(nodes):
    """Connect as member n1 of the job."""
    with connect_as(nodes) as made:
        yield made


@contextlib.contextmanager
def connect_as(nodes, *, me="n1", job=JOB, secret=SECRET, via="n1"):
    channel = nodes.network.transport(via).connect(nodes["n2"].node_peers._listener.address)
    with contextlib.closing(PeerConnection(channel)) as line:
        authenticate_to_server(channel, job=job, me=me, secret=secret)
        yield line


def make_record(of=None, size_bytes=SIZE, **changes):
    of = of or shard_key(2)
    data = shard_content(of, size_bytes)
    sums = chunk_checksums(memoryview(data))
    record = ShardRecord(of, 2, size_bytes, CHUNK_BYTES, sums, b"", 0)
    return msgspec.structs.replace(record, **changes)


def chunk_of(record, number):
    return shard_content(record.key, record.size_bytes)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def offer_replica(line, record, **more):
    return line.call(
        "offer_replica", OfferReplica(record, **{"holders": ("n1", "n2"), "committed": False, **more}), OfferReply
    )


def send_chunk(line, wanted, number, data):
    line.send("replica_chunk", ReplicaChunk(wanted.transfer, number), [memoryview(data)])


def send_and_flush(line, wanted, number, data):
    send_chunk(line, wanted, number, data)
    return line.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...])


def assert_unharmed(nodes):
    """Check that the agent serves an honest member, has its shards, and holds no unused slot."""
    n2 = nodes["n2"]
    with connect_as(nodes, me="n3", via="n3") as line:
        found = line.call("node_inventory", GetNodeInventory(), NodeInventory)
        assert HERE in {fact.key for fact in found.shards}
        record = make_record(shard_key(77, 1))  # the other part never arrives, so no older version is evicted
        wanted = offer_replica(line, record)
        for number in range(CHUNKS):
            send_chunk(line, wanted, number, chunk_of(record, number))
        assert line.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...]) == ()
        line.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert n2.has_intact_shard(HERE)
    assert n2.has_intact_shard(shard_key(77, 1))
    wait_until(lambda: not n2.node_peers.server.replica_receiver._transfers, "no transfer is left")
    wait_until(lambda: n2.store.status().arena.leases == 0, "no slot is held")


# -- authentication ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "secret"),
    [(JOB, OTHERS_SECRET), ("other", SECRET), ("nobodys", SECRET), (JOB, bytes(32))],
    ids=["another secret", "another job", "a job that is not there", "zeros"],
)
def test_peer_without_the_secret_is_refused(nodes, job, secret):
    with pytest.raises(PeerRefusedError), connect_as(nodes, job=job, secret=secret):
        """Not reached."""
    wait_until(lambda: nodes["n2"].node_peers.server.rejected >= 1, "it is counted")
    assert_unharmed(nodes)


FOREIGN = shard_key(1, job="other")
READ = ReadRanges(FOREIGN, 0, ((0, 10),))


@pytest.mark.parametrize(
    ("op", "body"),
    [
        ("read_ranges", READ),
        ("verify_chunks", VerifyChunks(FOREIGN, ((0, 1),))),
        ("update_holders", UpdateHolders(FOREIGN, ("n1",))),
        ("offer_replica", OfferReplica(make_record(shard_key(5, job="other")), ("n1", "n2"), committed=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_member_of_a_job_cannot_access_another_job(nodes, member_connection, op, body):
    with pytest.raises(RequestError, match="on a connection of job job"):
        member_connection.call(op, body, object)
    records = member_connection.call("shard_records", GetShardRecords(FOREIGN.version_id), list[ShardRecord])
    assert {record.key.job for record in records} == {JOB}
    assert_unharmed(nodes)


def test_blobs_of_another_job_are_inaccessible(nodes, member_connection):
    nodes["n2"].store.blobs.put("other", "private", b"x")
    for name in ("private", "../other/private", "other/private", ""):
        with pytest.raises(PeerStoreError):
            member_connection.call("blob", GetPeerBlob(name), bytes)
    assert_unharmed(nodes)


# -- offers -----------------------------------------------------------------------------------------------------------


ABSURD = {
    "an exabyte": {"size_bytes": 1 << 60},
    "less than nothing": {"size_bytes": -1},
    "281 terabytes in large chunks": {"size_bytes": 1 << 48, "chunk_bytes": 64 << 20, "checksums": bytes(8 << 22)},
    "no chunks": {"chunk_bytes": 0},
    "chunks of a terabyte": {"chunk_bytes": 1 << 40},
    "one checksum too few": {"checksums": bytes(8 * 3)},
    "one checksum too many": {"checksums": bytes(8 * 5)},
    "half a checksum": {"checksums": bytes(8 * 4 - 1)},
    "no parts": {"parts": 0},
    "two billion parts": {"parts": 1 << 31},
    "17 MiB of meta": {"meta": bytes(17 * MIB)},
    "a part outside": {"key": shard_key(2, 2)},
    "a negative version": {"key": shard_key(-1)},
    "an epoch of 2^62": {"key": shard_key(2, epoch=1 << 62)},
    "an incarnation that is a path": {"key": shard_key(2, name="../../x")},
}


@pytest.mark.parametrize("name", ABSURD)
def test_records_of_impossible_shards_are_refused(nodes, member_connection, name):
    record = msgspec.structs.replace(make_record(), **ABSURD[name])
    slots = nodes["n2"].store.status().arena.slots
    tracemalloc.start()
    try:
        with pytest.raises((RequestError, ArenaFullError)):
            offer_replica(member_connection, record)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(message_codec.encode_raw_message(record)) + 8 * MIB
    finally:
        tracemalloc.stop()
    assert nodes["n2"].store.status().arena.slots == slots
    assert_unharmed(nodes)


@pytest.mark.parametrize("more", [{"holders": ("n",) * 9}, {"blobs": ("b",) * 65}], ids=["holders", "blobs"])
def test_offer_with_oversized_lists_is_refused(nodes, member_connection, more):
    with pytest.raises(RequestError):
        offer_replica(member_connection, make_record(), **more)
    assert_unharmed(nodes)


def test_offer_with_other_checksums_for_an_existing_shard_is_refused(nodes, member_connection):
    with pytest.raises(ShardDamagedError, match="other checksums"):
        offer_replica(member_connection, make_record(HERE, checksums=bytes(8 * CHUNKS)))
    assert nodes["n2"].has_intact_shard(HERE)
    assert_unharmed(nodes)


def test_unlimited_offers_stay_in_the_budget_and_are_released(nodes, member_connection):
    taken = 0
    with contextlib.suppress(ArenaFullError, RequestError, PeerStoreError):
        for part in range(400):
            offer_replica(member_connection, make_record(shard_key(2, part), MIB, parts=400))
            taken += 1
    arena = nodes["n2"].store.status().arena
    assert taken > 0
    assert arena.allocated_bytes <= arena.budget_bytes
    member_connection.close()
    wait_until(lambda: nodes["n2"].store.status().arena.leases == 0, "all that was offered is given up")
    assert_unharmed(nodes)


# -- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, CHUNKS, 1 << 40])
def test_chunk_outside_of_the_shard_closes_the_connection(nodes, member_connection, number):
    wanted = offer_replica(member_connection, make_record())
    with pytest.raises((ProtocolError, PeerUnreachableError)):
        send_and_flush(member_connection, wanted, number, bytes(CHUNK_BYTES))
    assert_unharmed(nodes)


@pytest.mark.parametrize(("number", "size"), [(0, 1), (0, CHUNK_BYTES - 1), (0, CHUNK_BYTES + 1), (3, CHUNK_BYTES)])
def test_chunk_of_a_wrong_length_closes_the_connection(nodes, member_connection, number, size):
    wanted = offer_replica(member_connection, make_record())
    with pytest.raises((ProtocolError, PeerUnreachableError)):
        send_and_flush(member_connection, wanted, number, bytes(size))
    assert_unharmed(nodes)


def test_commit_without_chunks_is_refused(nodes, member_connection):
    wanted = offer_replica(member_connection, make_record())
    with pytest.raises(ShardDamagedError, match="chunks are missing"):
        member_connection.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert not nodes["n2"].holds(shard_key(2))
    member_connection.close()
    assert_unharmed(nodes)


def test_wrong_bytes_are_named_and_never_sealed(nodes, member_connection):
    record = make_record()
    wanted = offer_replica(member_connection, record)
    for number in range(CHUNKS):
        data = bytearray(chunk_of(record, number))
        data[0] ^= number == 2
        send_chunk(member_connection, wanted, number, data)
    assert member_connection.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...]) == (2,)
    with pytest.raises(ShardDamagedError, match="1 chunks are missing or damaged"):
        member_connection.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert not nodes["n2"].holds(record.key)
    member_connection.close()
    assert_unharmed(nodes)


def test_unordered_and_repeated_chunks_make_a_good_copy(nodes, member_connection):
    record = make_record()
    wanted = offer_replica(member_connection, record)
    for number in [3, 2, 2, 1, 3, 0, 0]:
        send_chunk(member_connection, wanted, number, chunk_of(record, number))
    send_chunk(member_connection, wanted, 1, bytes(CHUNK_BYTES))  # ignored, because the right chunk has arrived
    assert member_connection.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...]) == ()
    member_connection.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert load_shard(nodes["n2"].store, record.key) == shard_content(record.key, SIZE)
    assert_unharmed(nodes)


def test_repeated_chunk_cannot_change_verified_data(nodes, member_connection):
    """One connection stops within a wrong chunk. Another one sends the right chunk and commits."""
    record = make_record()
    wanted = offer_replica(member_connection, record)
    with connect_as(nodes, via="n1b") as slow:
        rubbish = send_half_chunk(nodes, slow, wanted)
        for number in range(CHUNKS):
            send_chunk(member_connection, wanted, number, chunk_of(record, number))
        member_connection.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...])
        with contextlib.suppress(ShardDamagedError):  # refused while another connection writes
            member_connection.call("commit_replica", CommitReplica(wanted.transfer), type(None))
        finish_sending(nodes, slow, rubbish)
    if nodes["n2"].holds(record.key):
        assert nodes["n2"].has_intact_shard(record.key)
    member_connection.close()
    assert_unharmed(nodes)


def test_slot_with_an_active_writer_is_not_reused(nodes, member_connection):
    record = make_record()
    wanted = offer_replica(member_connection, record)
    with connect_as(nodes, via="n1b") as slow:
        rubbish = send_half_chunk(nodes, slow, wanted)
        member_connection.call("abort_replica", AbortReplica(wanted.transfer), type(None))
        n2 = nodes["n2"]
        for part, version in ((0, 3), (0, 4)):
            with contextlib.suppress(PeerStoreError):
                n2.write(shard_key(version, part), SIZE, parts=2)
        finish_sending(nodes, slow, rubbish)
    for of in n2.shard_infos():
        if of.job == JOB:
            assert n2.store.verify(of) == ()
    member_connection.close()
    assert_unharmed(nodes)


def send_half_chunk(nodes, line, wanted):
    """Send a wrong chunk 0, and stall the network once its first bytes are in the slot."""
    (transfer,) = nodes["n2"].node_peers.server.replica_receiver._transfers.values()
    assert transfer.view[0] != 0xAA
    sending = threading.Thread(target=send_chunk, args=(line, wanted, 0, b"\xaa" * CHUNK_BYTES), name="hostile")
    nodes.network.delay("n1b", "n2", 0.2)  # a piece at a time
    sending.start()
    wait_until(lambda: transfer.view[0] == 0xAA, "the first bytes have arrived")
    nodes.network.stall("n1b", "n2")
    return sending


def finish_sending(nodes, line, sending):
    nodes.network.heal("n1b", "n2")
    sending.join()
    with contextlib.suppress(PeerStoreError):
        line.call("node_inventory", GetNodeInventory(), NodeInventory)


def test_only_the_initiator_continues_a_transfer(nodes, member_connection):
    record = make_record()
    wanted = offer_replica(member_connection, record)
    with connect_as(nodes, me="n5", via="n5") as other:
        for number in range(CHUNKS):
            send_chunk(other, wanted, number, bytes(len(chunk_of(record, number))))
        assert other.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...]) == ()
        with pytest.raises(LeaseLostError):
            other.call("commit_replica", CommitReplica(wanted.transfer), type(None))
        other.call("abort_replica", AbortReplica(wanted.transfer), type(None))
    for number in range(CHUNKS):
        send_chunk(member_connection, wanted, number, chunk_of(record, number))
    member_connection.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert nodes["n2"].has_intact_shard(record.key)
    assert_unharmed(nodes)


# -- reads ------------------------------------------------------------------------------------------------------------


def read_ranges(line, nodes, ranges, into=()):
    (record,) = nodes["n2"].store.reader.records(JOB, HERE.version_id)
    return line.call(
        "read_ranges",
        ReadRanges(HERE, checksums.chunk_checksum(record.checksums), tuple(ranges)),
        RangeDigests,
        into=into,
    )


@pytest.mark.parametrize(
    "ranges",
    [
        [(n, n + 1) for n in range(10_000)],
        [(0, SIZE)] * 200,
        [(0, SIZE + 1)],
        [(-1, 5)],
        [(5, 5)],
        [(9, 3)],
        [(0, 1 << 62)],
    ],
    ids=["10,000", "more than a message holds", "past the end", "before", "empty", "backwards", "endless"],
)
def test_ranges_that_are_too_many_or_outside_are_refused(nodes, member_connection, ranges):
    with pytest.raises(RequestError):
        read_ranges(member_connection, nodes, ranges)
    assert nodes["n2"].store.status().arena.pins == 0
    assert_unharmed(nodes)


def test_overlapping_ranges_are_answered(nodes, member_connection):
    ranges = [(0, 100), (50, 150), (0, CHUNK_BYTES), (50, 150), (SIZE - 17, SIZE)]
    buffers = [bytearray(stop - start) for start, stop in ranges]
    read_ranges(member_connection, nodes, ranges, [memoryview(buffer) for buffer in buffers])
    whole = shard_content(HERE, SIZE)
    assert [bytes(buffer) for buffer in buffers] == [whole[start:stop] for start, stop in ranges]
    assert_unharmed(nodes)


def test_reader_that_disconnects_midway_holds_no_pins(nodes):
    with connect_as(nodes) as line:
        (record,) = nodes["n2"].store.reader.records(JOB, HERE.version_id)
        line.send("read_ranges", ReadRanges(HERE, checksums.chunk_checksum(record.checksums), ((0, SIZE),)))
    wait_until(lambda: nodes["n2"].store.status().arena.pins == 0, "the shard is not pinned any more")
    assert_unharmed(nodes)


# -- other requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", ["", "no such thing", "__init__", "offer_replica", "ping", "report_parts", "seal", "x" * 100_000]
)
def test_garbage_ends_at_most_its_own_connection(nodes, member_connection, op):
    with pytest.raises(PeerStoreError):
        member_connection.call(op, {"nonsense": [1, 2, 3]}, object)
    assert_unharmed(nodes)


def test_unexpected_bytes_end_the_connection(nodes, member_connection):
    with pytest.raises((ProtocolError, PeerUnreachableError)):
        member_connection.call("node_inventory", GetNodeInventory(), NodeInventory, payload=[memoryview(bytes(MIB))])
    assert_unharmed(nodes)


def test_oversized_blob_is_refused(nodes, member_connection):
    with pytest.raises(RequestError):
        member_connection.call(
            "put_blob", PutPeerBlob(LAYOUT_BLOB_PREFIX + "b16"), type(None), payload=[memoryview(bytes(49 * MIB))]
        )
    assert LAYOUT_BLOB_PREFIX + "b16" not in nodes["n2"].store.blobs.list_names(JOB)
    assert_unharmed(nodes)


def test_past_incarnation_cannot_send_its_copies(nodes, member_connection):
    nodes["n2"].store.claim(JOB, "b")
    with pytest.raises(FencedError):
        offer_replica(member_connection, make_record())


def test_requests_are_frames_of_this_protocol():
    """The requests of these tests have the format that agents use."""
    assert (
        message_codec.decode_message(
            message_codec.encode_message(
                Request("node_inventory", message_codec.encode_raw_message(GetNodeInventory()))
            ),
            Request,
        ).op
        == "node_inventory"
    )


@pytest.mark.parametrize(
    "name",
    [
        DURABLE_SETTINGS_BLOB,
        QUARANTINE_BLOB_PREFIX + "s",
        DAMAGED_BLOB_PREFIX + "s.0",
        "drained.s",
        "journal.s",
        "peers",
        "new",
    ],
)
def test_private_blobs_are_neither_read_nor_replaced_by_others(nodes, member_connection, name):
    """Private blobs are the durable settings, quarantine marks, drain records and all unknown names."""
    store = nodes["n2"].store
    if name != "peers":
        store.blobs.put(JOB, name, b"mine")
    before = store.blobs.get(JOB, name)
    with pytest.raises(RequestError, match="own"):
        member_connection.call("blob", GetPeerBlob(name), bytes)
    with pytest.raises(RequestError, match="own"):
        member_connection.call("blobs", GetPeerBlobs((name,)), dict[str, bytes])
    with pytest.raises(RequestError, match="not for node n1 to change"):
        member_connection.call("put_blob", PutPeerBlob(name), type(None), payload=[memoryview(b"theirs")])
    assert store.blobs.get(JOB, name) == before
    assert_unharmed(nodes)


def test_existing_layout_is_not_replaced(nodes, member_connection):
    store = nodes["n2"].store
    for data in (b"first", b"other"):
        member_connection.call(
            "put_blob", PutPeerBlob(LAYOUT_BLOB_PREFIX + "abc"), type(None), payload=[memoryview(data)]
        )
    assert store.blobs.get(JOB, LAYOUT_BLOB_PREFIX + "abc") == b"first"
    assert member_connection.call("blob", GetPeerBlob(LAYOUT_BLOB_PREFIX + "abc"), bytes) == b"first"


def test_registry_is_changed_only_by_its_own_node(nodes, member_connection):
    store = nodes["n2"].store
    for data in (b"first", b"second"):
        member_connection.call(
            "put_blob", PutPeerBlob(REGISTRY_BLOB_PREFIX + "n1"), type(None), payload=[memoryview(data)]
        )
    assert store.blobs.get(JOB, REGISTRY_BLOB_PREFIX + "n1") == b"second"
    with pytest.raises(RequestError, match="not for node n1"):
        member_connection.call(
            "put_blob", PutPeerBlob(REGISTRY_BLOB_PREFIX + "n2"), type(None), payload=[memoryview(b"not mine")]
        )
    assert REGISTRY_BLOB_PREFIX + "n2" not in store.blobs.list_names(JOB)


# -- implausible numbers ----------------------------------------------------------------------------------------------

LAST = (1 << 62) - 1


def test_impossible_incarnation_fences_no_job(nodes, member_connection):
    """No job could save anything after the largest incarnation."""
    store = nodes["n2"].store
    before = store.claim(JOB, "a")
    with pytest.raises(RequestError, match="is implausible"):
        offer_replica(member_connection, make_record(shard_key(9, epoch=LAST, name="z")))
    base = ResumePoint(LAST, "z", 0, VersionId(1, 1, 0, "z"))
    member_connection.call("ping", PingMessage(GossipMessage((), None, (LAST, "z")), resume_point=base), PingMessage)
    assert store.jobs.versions(JOB).resume_point is None
    assert store.jobs.versions(JOB).owner == (before, "a")
    assert store.claim(JOB, "b") == before + 1
    assert store.lease(shard_key(10, epoch=before + 1, name="b"), MIB, 1).size_bytes == MIB


@pytest.mark.parametrize("number", [1 << 62, (1 << 64) - 1, -1])
def test_oversized_number_is_refused(nodes, member_connection, number):
    with pytest.raises((ProtocolError, PeerUnreachableError)):
        member_connection.call("shard_records", {"version_id": [number, 1, 0, "a"], "parts": []}, object)
    assert_unharmed(nodes)
