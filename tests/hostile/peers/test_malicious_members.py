"""Somebody who knows the job's secret and means no good: refused, dropped, and nobody else suffers from it."""

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
    PeerRequest,
    PingMessage,
    PutPeerBlob,
    RangeDigests,
    ReadRanges,
    ReplicaChunk,
    UpdateHolders,
    VerifyChunks,
)
from peerstore.shard_records import CHUNK_BYTES, ResumePoint, ShardRecord, VersionId
from peerstore.transport.authentication import authenticate_to_server
from tests.support.chunk_sums import chunk_checksums
from tests.support.local_nodes import JOB, SECRET, Neighbours, until
from tests.support.stores import MIB, content, key, load
from tieredckpt.agent.agent_api import (
    DAMAGED_BLOB_PREFIX,
    DURABLE_SETTINGS_BLOB,
    LAYOUT_BLOB_PREFIX,
    QUARANTINE_BLOB_PREFIX,
)
from tieredckpt.memory_service_options import REGISTRY_BLOB_PREFIX

SIZE = 3 * MIB + 17
CHUNKS = 4
HERE = key(1)
OTHERS_SECRET = b"a secret that another job has, also long"


@pytest.fixture
def nodes():
    """One honest agent with a shard of the job, and one of another job."""
    with contextlib.closing(Neighbours(capacity_bytes=64 << 10)) as made:
        made.add("n2")
        made.meet()
        made["n2"].write(HERE, SIZE)
        made["n2"].node_peers.join("other", made.plan(secret=OTHERS_SECRET), wait_s=0.0)
        save_for_other(made["n2"])
        yield made


def save_for_other(node):
    until(lambda: node.node_peers.job_peers("other").membership.has_quorum)
    node.write(key(1, job="other"), MIB)


@pytest.fixture
def line(nodes):
    """Member n1 of the job, by hand."""
    with connected(nodes) as made:
        yield made


@contextlib.contextmanager
def connected(nodes, *, me="n1", job=JOB, secret=SECRET, via="n1"):
    channel = nodes.network.transport(via).connect(nodes["n2"].node_peers._listener.address)
    with contextlib.closing(PeerConnection(channel)) as line:
        authenticate_to_server(channel, job=job, me=me, secret=secret)
        yield line


def record_of(of=None, size_bytes=SIZE, **changes):
    of = of or key(2)
    data = content(of, size_bytes)
    sums = chunk_checksums(memoryview(data))
    record = ShardRecord(of, 2, size_bytes, CHUNK_BYTES, sums, b"", 0)
    return msgspec.structs.replace(record, **changes)


def chunk_of(record, number):
    return content(record.key, record.size_bytes)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def offer(line, record, **more):
    return line.call(
        "offer_replica", OfferReplica(record, **{"holders": ("n1", "n2"), "committed": False, **more}), OfferReply
    )


def send(line, wanted, number, data):
    line.send("replica_chunk", ReplicaChunk(wanted.transfer, number), [memoryview(data)])


def send_and_flush(line, wanted, number, data):
    send(line, wanted, number, data)
    return line.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...])


def lives_on(nodes):
    """The agent serves an honest member, has what it had, and holds nothing for anybody who left."""
    n2 = nodes["n2"]
    with connected(nodes, me="n3", via="n3") as line:
        found = line.call("node_inventory", GetNodeInventory(), NodeInventory)
        assert HERE in {fact.key for fact in found.shards}
        record = record_of(key(77, 1))  # the other part never comes, so nothing becomes superfluous
        wanted = offer(line, record)
        for number in range(CHUNKS):
            send(line, wanted, number, chunk_of(record, number))
        assert line.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...]) == ()
        line.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert n2.is_good(HERE)
    assert n2.is_good(key(77, 1))
    until(lambda: not n2.node_peers.server.replica_receiver._transfers, "no transfer is left")
    until(lambda: n2.store.status().arena.leases == 0, "no slot is held")


# -- who gets in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "secret"),
    [(JOB, OTHERS_SECRET), ("other", SECRET), ("nobodys", SECRET), (JOB, bytes(32))],
    ids=["another secret", "another job", "a job that is not there", "zeros"],
)
def test_peer_without_the_secret_is_refused(nodes, job, secret):
    with pytest.raises(PeerRefusedError), connected(nodes, job=job, secret=secret):
        """Not reached."""
    until(lambda: nodes["n2"].node_peers.server.rejected >= 1, "it is counted")
    lives_on(nodes)


FOREIGN = key(1, job="other")
READ = ReadRanges(FOREIGN, 0, ((0, 10),))


@pytest.mark.parametrize(
    ("op", "body"),
    [
        ("read_ranges", READ),
        ("verify_chunks", VerifyChunks(FOREIGN, ((0, 1),))),
        ("update_holders", UpdateHolders(FOREIGN, ("n1",))),
        ("offer_replica", OfferReplica(record_of(key(5, job="other")), ("n1", "n2"), committed=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_member_of_a_job_cannot_access_another_job(nodes, line, op, body):
    with pytest.raises(RequestError, match="on a connection of job job"):
        line.call(op, body, object)
    records = line.call("shard_records", GetShardRecords(FOREIGN.version_id), list[ShardRecord])
    assert {record.key.job for record in records} == {JOB}
    lives_on(nodes)


def test_blobs_of_another_job_are_inaccessible(nodes, line):
    nodes["n2"].store.put_blob("other", "private", b"x")
    for name in ("private", "../other/private", "other/private", ""):
        with pytest.raises(PeerStoreError):
            line.call("blob", GetPeerBlob(name), bytes)
    lives_on(nodes)


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
    "a part outside": {"key": key(2, 2)},
    "a negative version": {"key": key(-1)},
    "an epoch of 2^62": {"key": key(2, epoch=1 << 62)},
    "an incarnation that is a path": {"key": key(2, name="../../x")},
}


@pytest.mark.parametrize("name", ABSURD)
def test_records_of_impossible_shards_are_refused(nodes, line, name):
    record = msgspec.structs.replace(record_of(), **ABSURD[name])
    slots = nodes["n2"].store.status().arena.slots
    tracemalloc.start()
    try:
        with pytest.raises((RequestError, ArenaFullError)):
            offer(line, record)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(message_codec.encode_raw_message(record)) + 8 * MIB
    finally:
        tracemalloc.stop()
    assert nodes["n2"].store.status().arena.slots == slots
    lives_on(nodes)


@pytest.mark.parametrize("more", [{"holders": ("n",) * 9}, {"blobs": ("b",) * 65}], ids=["holders", "blobs"])
def test_an_offer_with_endless_lists_is_refused(nodes, line, more):
    with pytest.raises(RequestError):
        offer(line, record_of(), **more)
    lives_on(nodes)


def test_offer_with_other_checksums_for_an_existing_shard_is_refused(nodes, line):
    with pytest.raises(ShardDamagedError, match="other checksums"):
        offer(line, record_of(HERE, checksums=bytes(8 * CHUNKS)))
    assert nodes["n2"].is_good(HERE)
    lives_on(nodes)


def test_unlimited_offers_stay_in_the_budget_and_are_released(nodes, line):
    taken = 0
    with contextlib.suppress(ArenaFullError, RequestError, PeerStoreError):
        for part in range(400):
            offer(line, record_of(key(2, part), MIB, parts=400))
            taken += 1
    arena = nodes["n2"].store.status().arena
    assert taken > 0
    assert arena.allocated_bytes <= arena.budget_bytes
    line.close()
    until(lambda: nodes["n2"].store.status().arena.leases == 0, "all that was offered is given up")
    lives_on(nodes)


# -- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, CHUNKS, 1 << 40])
def test_a_chunk_outside_of_the_shard_ends_the_connection(nodes, line, number):
    wanted = offer(line, record_of())
    with pytest.raises((ProtocolError, PeerUnreachableError)):
        send_and_flush(line, wanted, number, bytes(CHUNK_BYTES))
    lives_on(nodes)


@pytest.mark.parametrize(("number", "size"), [(0, 1), (0, CHUNK_BYTES - 1), (0, CHUNK_BYTES + 1), (3, CHUNK_BYTES)])
def test_a_chunk_of_another_length_ends_the_connection(nodes, line, number, size):
    wanted = offer(line, record_of())
    with pytest.raises((ProtocolError, PeerUnreachableError)):
        send_and_flush(line, wanted, number, bytes(size))
    lives_on(nodes)


def test_a_commit_without_chunks_is_refused(nodes, line):
    wanted = offer(line, record_of())
    with pytest.raises(ShardDamagedError, match="chunks are missing"):
        line.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert not nodes["n2"].holds(key(2))
    line.close()
    lives_on(nodes)


def test_wrong_bytes_are_named_and_never_sealed(nodes, line):
    record = record_of()
    wanted = offer(line, record)
    for number in range(CHUNKS):
        data = bytearray(chunk_of(record, number))
        data[0] ^= number == 2
        send(line, wanted, number, data)
    assert line.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...]) == (2,)
    with pytest.raises(ShardDamagedError, match="1 chunks are missing or damaged"):
        line.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert not nodes["n2"].holds(record.key)
    line.close()
    lives_on(nodes)


def test_unordered_and_repeated_chunks_make_a_good_copy(nodes, line):
    record = record_of()
    wanted = offer(line, record)
    for number in [3, 2, 2, 1, 3, 0, 0]:
        send(line, wanted, number, chunk_of(record, number))
    send(line, wanted, 1, bytes(CHUNK_BYTES))  # after the right one: nobody looks at it
    assert line.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...]) == ()
    line.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert load(nodes["n2"].store, record.key) == content(record.key, SIZE)
    lives_on(nodes)


def test_repeated_chunk_cannot_change_verified_data(nodes, line):
    """One connection stops in the middle of a chunk of rubbish, another one sends the right one, and commits."""
    record = record_of()
    wanted = offer(line, record)
    with connected(nodes, via="n1b") as slow:
        rubbish = halfway(nodes, slow, wanted)
        for number in range(CHUNKS):
            send(line, wanted, number, chunk_of(record, number))
        line.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...])
        with contextlib.suppress(ShardDamagedError):  # not while somebody else is at it
            line.call("commit_replica", CommitReplica(wanted.transfer), type(None))
        finish(nodes, slow, rubbish)
    if nodes["n2"].holds(record.key):
        assert nodes["n2"].is_good(record.key)
    line.close()
    lives_on(nodes)


def test_slot_with_an_active_writer_is_not_reused(nodes, line):
    record = record_of()
    wanted = offer(line, record)
    with connected(nodes, via="n1b") as slow:
        rubbish = halfway(nodes, slow, wanted)
        line.call("abort_replica", AbortReplica(wanted.transfer), type(None))
        n2 = nodes["n2"]
        for part, version in ((0, 3), (0, 4)):
            with contextlib.suppress(PeerStoreError):
                n2.write(key(version, part), SIZE, parts=2)
        finish(nodes, slow, rubbish)
    for of in n2.facts():
        if of.job == JOB:
            assert n2.store.verify(of) == ()
    line.close()
    lives_on(nodes)


def halfway(nodes, line, wanted):
    """The first part of a wrong chunk 0 is in the slot, the rest waits on the way."""
    (transfer,) = nodes["n2"].node_peers.server.replica_receiver._transfers.values()
    assert transfer.view[0] != 0xAA
    sending = threading.Thread(target=send, args=(line, wanted, 0, b"\xaa" * CHUNK_BYTES), name="hostile")
    nodes.network.delay("n1b", "n2", 0.2)  # a piece at a time
    sending.start()
    until(lambda: transfer.view[0] == 0xAA, "the first bytes have come")
    nodes.network.stall("n1b", "n2")
    return sending


def finish(nodes, line, sending):
    nodes.network.heal("n1b", "n2")
    sending.join()
    with contextlib.suppress(PeerStoreError):
        line.call("node_inventory", GetNodeInventory(), NodeInventory)


def test_only_the_initiator_continues_a_transfer(nodes, line):
    record = record_of()
    wanted = offer(line, record)
    with connected(nodes, me="n5", via="n5") as other:
        for number in range(CHUNKS):
            send(other, wanted, number, bytes(len(chunk_of(record, number))))
        assert other.call("flush_chunks", FlushChunks(wanted.transfer), tuple[int, ...]) == ()
        with pytest.raises(LeaseLostError):
            other.call("commit_replica", CommitReplica(wanted.transfer), type(None))
        other.call("abort_replica", AbortReplica(wanted.transfer), type(None))
    for number in range(CHUNKS):
        send(line, wanted, number, chunk_of(record, number))
    line.call("commit_replica", CommitReplica(wanted.transfer), type(None))
    assert nodes["n2"].is_good(record.key)
    lives_on(nodes)


# -- reads ------------------------------------------------------------------------------------------------------------


def read(line, nodes, ranges, into=()):
    (record,) = nodes["n2"].store.shard_records(JOB, HERE.version_id)
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
def test_ranges_that_are_too_many_or_outside_are_refused(nodes, line, ranges):
    with pytest.raises(RequestError):
        read(line, nodes, ranges)
    assert nodes["n2"].store.status().arena.pins == 0
    lives_on(nodes)


def test_overlapping_ranges_are_answered(nodes, line):
    ranges = [(0, 100), (50, 150), (0, CHUNK_BYTES), (50, 150), (SIZE - 17, SIZE)]
    buffers = [bytearray(stop - start) for start, stop in ranges]
    read(line, nodes, ranges, [memoryview(buffer) for buffer in buffers])
    whole = content(HERE, SIZE)
    assert [bytes(buffer) for buffer in buffers] == [whole[start:stop] for start, stop in ranges]
    lives_on(nodes)


def test_reader_that_disconnects_midway_holds_no_pins(nodes):
    with connected(nodes) as line:
        (record,) = nodes["n2"].store.shard_records(JOB, HERE.version_id)
        line.send("read_ranges", ReadRanges(HERE, checksums.chunk_checksum(record.checksums), ((0, SIZE),)))
    until(lambda: nodes["n2"].store.status().arena.pins == 0, "the shard is not pinned any more")
    lives_on(nodes)


# -- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", ["", "no such thing", "__init__", "offer_replica", "ping", "report_parts", "seal", "x" * 100_000]
)
def test_garbage_ends_at_most_its_own_connection(nodes, line, op):
    with pytest.raises(PeerStoreError):
        line.call(op, {"nonsense": [1, 2, 3]}, object)
    lives_on(nodes)


def test_unexpected_bytes_end_the_connection(nodes, line):
    with pytest.raises((ProtocolError, PeerUnreachableError)):
        line.call("node_inventory", GetNodeInventory(), NodeInventory, payload=[memoryview(bytes(MIB))])
    lives_on(nodes)


def test_oversized_blob_is_refused(nodes, line):
    with pytest.raises(RequestError):
        line.call(
            "put_blob", PutPeerBlob(LAYOUT_BLOB_PREFIX + "b16"), type(None), payload=[memoryview(bytes(49 * MIB))]
        )
    assert LAYOUT_BLOB_PREFIX + "b16" not in nodes["n2"].store.list_blobs(JOB)
    lives_on(nodes)


def test_past_incarnation_cannot_send_its_copies(nodes, line):
    nodes["n2"].store.claim(JOB, "b")
    with pytest.raises(FencedError):
        offer(line, record_of())


def test_requests_are_frames_of_this_protocol():
    """What the tests here send by hand is what agents send."""
    assert (
        message_codec.decode_message(
            message_codec.encode_message(
                PeerRequest("node_inventory", message_codec.encode_raw_message(GetNodeInventory()))
            ),
            PeerRequest,
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
def test_private_blobs_are_neither_read_nor_replaced_by_others(nodes, line, name):
    """The durable tier's URL and its options, marks of quarantine, notes of the drain; and whatever comes later."""
    store = nodes["n2"].store
    if name != "peers":
        store.put_blob(JOB, name, b"mine")
    before = store.get_blob(JOB, name)
    with pytest.raises(RequestError, match="own"):
        line.call("blob", GetPeerBlob(name), bytes)
    with pytest.raises(RequestError, match="own"):
        line.call("blobs", GetPeerBlobs((name,)), dict[str, bytes])
    with pytest.raises(RequestError, match="not for node n1 to change"):
        line.call("put_blob", PutPeerBlob(name), type(None), payload=[memoryview(b"theirs")])
    assert store.get_blob(JOB, name) == before
    lives_on(nodes)


def test_existing_layout_is_not_replaced(nodes, line):
    store = nodes["n2"].store
    for data in (b"first", b"other"):
        line.call("put_blob", PutPeerBlob(LAYOUT_BLOB_PREFIX + "abc"), type(None), payload=[memoryview(data)])
    assert store.get_blob(JOB, LAYOUT_BLOB_PREFIX + "abc") == b"first"
    assert line.call("blob", GetPeerBlob(LAYOUT_BLOB_PREFIX + "abc"), bytes) == b"first"


def test_a_registry_is_changed_by_its_own_node_alone(nodes, line):
    store = nodes["n2"].store
    for data in (b"first", b"second"):
        line.call("put_blob", PutPeerBlob(REGISTRY_BLOB_PREFIX + "n1"), type(None), payload=[memoryview(data)])
    assert store.get_blob(JOB, REGISTRY_BLOB_PREFIX + "n1") == b"second"
    with pytest.raises(RequestError, match="not for node n1"):
        line.call("put_blob", PutPeerBlob(REGISTRY_BLOB_PREFIX + "n2"), type(None), payload=[memoryview(b"not mine")])
    assert REGISTRY_BLOB_PREFIX + "n2" not in store.list_blobs(JOB)


# -- numbers that nobody counts to ------------------------------------------------------------------------------------

LAST = (1 << 62) - 1


def test_impossible_incarnation_fences_no_job(nodes, line):
    """It would be the last one: nothing could be saved after it."""
    store = nodes["n2"].store
    before = store.claim(JOB, "a")
    with pytest.raises(RequestError, match="cannot have come so far"):
        offer(line, record_of(key(9, epoch=LAST, name="z")))
    base = ResumePoint(LAST, "z", 0, VersionId(1, 1, 0, "z"))
    line.call("ping", PingMessage(GossipMessage((), None, (LAST, "z")), resume_point=base), PingMessage)
    assert store.replicas.resume_point(JOB) is None
    assert store.replicas.current_incarnation(JOB) == (before, "a")
    assert store.claim(JOB, "b") == before + 1
    assert store.lease(key(10, epoch=before + 1, name="b"), MIB, 1).size_bytes == MIB


@pytest.mark.parametrize("number", [1 << 62, (1 << 64) - 1, -1])
def test_oversized_number_is_refused(nodes, line, number):
    with pytest.raises((ProtocolError, PeerUnreachableError)):
        line.call("shard_records", {"version_id": [number, 1, 0, "a"], "parts": []}, object)
    lives_on(nodes)
