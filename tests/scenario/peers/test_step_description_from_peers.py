"""Layouts, tables and records of a step, fetched by a node that holds no part of it."""

import contextlib
from collections import Counter

import pytest
import xxhash

from peerstore.errors import PeerUnreachableError
from tests.support.local_nodes import JOB, local_nodes, wait_until
from tests.support.stores import flip_byte, save_shard, shard_key
from tieredckpt.agent.agent_api import LAYOUT_BLOB_PREFIX, TABLE_BLOB_PREFIX
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.agent.peer_tier import PeerTier
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format.manifest import ShardMeta, encode_meta, pack_blob, unpack_blob

NAMES = ("n1", "n2", "n3", "n4", "n5")
WRITERS = NAMES[1:]
GROUP = shard_key(1).version_id


TEXT_OF_TABLE = b"table"


def text(part):
    return f"layout {part}".encode()


def layout(part):
    return xxhash.xxh3_128_hexdigest(text(part))


TABLE_OF_ALL = xxhash.xxh3_128_hexdigest(TEXT_OF_TABLE)


@pytest.fixture
def nodes():
    with local_nodes(*NAMES, copies=1) as nodes:
        for part, name in enumerate(WRITERS):
            store = nodes[name].store
            store.blobs.put(JOB, LAYOUT_BLOB_PREFIX + layout(part), pack_blob(text(part)))
            store.blobs.put(JOB, TABLE_BLOB_PREFIX + TABLE_OF_ALL, pack_blob(TEXT_OF_TABLE))
            meta = encode_meta(ShardMeta(layout(part), (), table=TABLE_OF_ALL))
            save_shard(store, shard_key(1, part), 4096, parts=len(WRITERS), meta=meta)
        yield nodes


@pytest.fixture
def requests(nodes, monkeypatch):
    """Count the requests of n1 by operation and node."""
    requests = Counter()
    membership = nodes["n1"].job_peers.membership
    honest = membership.client_for

    def peer(node):
        found = honest(node)

        class Counted:
            address = found.address

            def call(self, op, body, *args, **options):
                requests[op, node] += op in ("blobs", "shard_records")
                return found.call(op, body, *args, **options)

        return Counted()

    monkeypatch.setattr(membership, "client_for", peer)
    return requests


def test_layouts_are_fetched_once_from_their_holders(nodes, requests):
    others = PeerTier(nodes["n1"].node_peers)
    found, complete = others.blobs(JOB, [LAYOUT_BLOB_PREFIX + layout(part) for part in range(len(WRITERS))])
    assert found == {LAYOUT_BLOB_PREFIX + layout(part): text(part) for part in range(len(WRITERS))}
    assert complete
    assert +requests == Counter({("blobs", writer): 1 for writer in WRITERS})


def test_oversized_blob_reply_is_continued(nodes, requests, monkeypatch):
    monkeypatch.setattr("peerstore.server.peer_server._MAX_BLOBS_BYTES", 4)
    many = [f"{LAYOUT_BLOB_PREFIX}{number:032x}" for number in range(100, 105)]
    for name in many:
        nodes["n2"].store.blobs.put(JOB, name, name.encode())
    found = nodes["n1"].job_peers.fetch_blobs("n2", [*many[:2], LAYOUT_BLOB_PREFIX + layout(9), *many[2:]])
    assert found == {name: name.encode() for name in many}


def test_blob_without_a_known_holder_is_requested_from_others(nodes, requests):
    nodes["n4"].store.blobs.put(JOB, LAYOUT_BLOB_PREFIX + layout(7), pack_blob(text(7)))
    others = PeerTier(nodes["n1"].node_peers)
    wanted = [LAYOUT_BLOB_PREFIX + layout(7), LAYOUT_BLOB_PREFIX + layout(8)]
    assert others.blobs(JOB, wanted) == ({wanted[0]: text(7)}, True)


@pytest.mark.parametrize("bad", [b"not even packed", pack_blob(b"another layout")])
def test_mislabeled_layout_is_requested_from_the_next_node(nodes, requests, bad):
    """Node n2 has a shard with this layout, so it receives the first request."""
    name = LAYOUT_BLOB_PREFIX + layout(0)
    nodes["n2"].store.blobs.put(JOB, name, bad)
    nodes["n4"].store.blobs.put(JOB, name, pack_blob(text(0)))
    assert PeerTier(nodes["n1"].node_peers).blobs(JOB, [name]) == ({name: text(0)}, True)
    assert requests["blobs", "n2"] == 1


def test_layout_damaged_everywhere_is_damage(nodes):
    nodes["n2"].store.blobs.put(JOB, LAYOUT_BLOB_PREFIX + layout(0), pack_blob(b"another layout"))
    node = nodes["n1"]
    service = NodeAgentService(node.store, node_peers=node.node_peers)
    with contextlib.closing(service), pytest.raises(CheckpointDamagedError, match=layout(0)):
        service.steps.layouts(JOB, GROUP, [layout(0)], [])


@pytest.mark.parametrize("kind", ["layout", "table"])
def test_damaged_local_blob_is_fetched_from_another_node(nodes, kind):
    name, good = (
        (LAYOUT_BLOB_PREFIX + layout(0), text(0))
        if kind == "layout"
        else (TABLE_BLOB_PREFIX + TABLE_OF_ALL, TEXT_OF_TABLE)
    )
    node = nodes["n1"]
    node.store.blobs.put(JOB, name, pack_blob(good))
    (file,) = (path for path in node.directory.rglob(f"*{name}*") if path.is_file())
    flip_byte(file, file.stat().st_size - 1)
    with contextlib.closing(NodeAgentService(node.store, node_peers=node.node_peers)) as service:
        found = service.steps.layouts(JOB, GROUP, [layout(0)], [TABLE_OF_ALL])
    blob = found.layouts[layout(0)] if kind == "layout" else found.tables[TABLE_OF_ALL]
    assert unpack_blob(blob) == good


def test_unresponsive_node_leaves_the_answer_unknown(nodes, monkeypatch):
    others = PeerTier(nodes["n1"].node_peers)

    def silent(node, names):
        raise PeerUnreachableError(f"{node} does not answer")

    monkeypatch.setattr(nodes["n1"].job_peers, "fetch_blobs", silent)
    assert others.blobs(JOB, [LAYOUT_BLOB_PREFIX + layout(0)]) == ({}, False)


def test_shared_table_is_fetched_from_different_nodes(nodes):
    """Each node queries the others in its own order."""
    first = {
        next(iter(PeerTier(node.node_peers)._holders(node.job_peers, TABLE_BLOB_PREFIX + TABLE_OF_ALL)))
        for node in nodes
    }
    assert len(first) > 1


def test_records_are_fetched_once_from_each_node_without_silent_ones(nodes, requests, monkeypatch):
    others = PeerTier(nodes["n1"].node_peers)
    facts, sources = others.holders_of_parts(JOB, GROUP)
    assert sorted(facts) == sorted(sources)
    assert {part: [holder.node for holder in holders] for part, holders in sources.items()} == {
        part: [name] for part, name in enumerate(WRITERS)
    }
    found = others.records(JOB, GROUP, sources)
    assert {part: record.key for part, record in found.items()} == {
        part: shard_key(1, part) for part in range(len(WRITERS))
    }
    assert +requests == Counter({("shard_records", name): 1 for name in WRITERS})
    peers, honest = nodes["n1"].job_peers, nodes["n1"].job_peers.fetch_records

    def records(node, group, parts):
        if node == "n3":
            raise PeerUnreachableError("n3 does not answer")
        assert list(parts) == [WRITERS.index(node)]
        return honest(node, group, parts)

    monkeypatch.setattr(peers, "fetch_records", records)
    assert set(others.records(JOB, GROUP, sources)) == {0, 2, 3}


def test_single_node_commits_a_step_and_is_replaced_when_lost(nodes):
    others = [PeerTier(node.node_peers) for node in nodes]
    assert {one.committer_of(JOB, GROUP) for one in others} == {WRITERS[0]}
    nodes.network.kill_node(WRITERS[0])
    rest = [one for one in others if one.node_peers.node_id != WRITERS[0]]
    wait_until(lambda: {one.committer_of(JOB, GROUP) for one in rest} == {WRITERS[1]})
