"""Attackers that read and write a job's rendezvous store, which has no authentication."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.distributed as dist

from peerstore.membership.topology import NodeId, PeerNode, member_list
from tests.support.clusters import make_cluster
from tieredckpt import Checkpointer
from tieredckpt.errors import SettingsError, TieredCheckpointError
from tieredckpt.session.agent_discovery import _agreed_secret, _make_offer, _NodeHello
from tieredckpt.settings import PeerSettings

SECRET, OTHER = "a secret of the job's nodes", "another secret of other nodes"


class RecordingStore:
    """A store that records all writes."""

    def __init__(self, store):
        self._store = store
        self.writes = []

    def set(self, key, value):
        self.writes.append((key, value))
        self._store.set(key, value)

    def __getattr__(self, name):
        return getattr(self._store, name)


def exchange_secrets(job, secrets):
    """Save two copies with two nodes. Return the writes to the store, and the keys left in it."""
    store = RecordingStore(dist.distributed_c10d._get_default_store())
    with pytest.MonkeyPatch.context() as patch:  # later tests use the same process
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        patch.setenv("TIEREDCKPT_PEER_SECRET", secrets[dist.get_rank()])
        with Checkpointer(f"tiered://{job}") as ckpt:
            saved = ckpt.save({"weight": torch.ones(8)}, 1)
            saved.wait(copies=2)
        dist.barrier()
    left = [key for key, _ in store.writes if key.endswith(("/all", "/known")) and store.check([key])]
    return store.writes, left


@pytest.mark.e2e
def test_configured_secret_is_not_sent(ranks):
    with make_cluster(ranks, "n1", "n2") as cluster:
        found = cluster.run(["n1", "n2"], exchange_secrets, [SECRET, SECRET])
    values = [str(value) for writes, _ in found for _, value in writes]
    assert any("nonce" in value for value in values)  # the nodes used the store
    encoded = msgspec.json.encode(SECRET.encode()).decode().strip('"')  # bytes in JSON
    assert not [value for value in values if SECRET in value or encoded in value]


@pytest.mark.e2e
@pytest.mark.parametrize("secrets", [[SECRET, OTHER], [SECRET, ""], ["", SECRET]])
def test_nodes_with_different_secrets_report_it(ranks, secrets):
    with make_cluster(ranks, "n1", "n2") as cluster:
        found = cluster.run(["n1", "n2"], save_and_report, secrets)
    assert all("peer.secret" in text for text in found)


def save_and_report(job, secrets):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIEREDCKPT_PEER_SECRET", secrets[dist.get_rank()])
        with Checkpointer(f"tiered://{job}") as ckpt:
            try:
                ckpt._saver.join()
            except TieredCheckpointError as error:
                return str(error)
    return ""


@pytest.mark.e2e
def test_shared_secret_does_not_stay_in_the_store(ranks):
    with make_cluster(ranks, "n1", "n2") as cluster:
        found = cluster.run(["n1", "n2"], exchange_secrets, ["", ""])
    assert [left for _, left in found] == [[], []]


def peer_node(name):
    return PeerNode(NodeId(name), f"10.0.0.{name[1:]}:7070")


def invite_members(peer, *names):
    return _make_offer(
        [_NodeHello(peer_node(name), None) for name in names], None, peer, "job", restoring=False, outside=()
    )


def test_tampered_member_list_is_refused():
    peer = PeerSettings(secret=SECRET)
    invitation = invite_members(peer, "n1", "n2")
    assert invitation.secret == b""
    assert _agreed_secret(invitation, peer, "job") == SECRET.encode()
    changed = member_list(invitation.member_list.version, [peer_node("n1"), peer_node("n9")])
    for wrong in (
        msgspec.structs.replace(invitation, member_list=changed),
        msgspec.structs.replace(invitation, proof=b"", secret=b"a secret that is known to others"),
        msgspec.structs.replace(invite_members(PeerSettings(secret=OTHER), "n1", "n2")),
    ):
        with pytest.raises(SettingsError, match=r"peer\.secret: this node's secret differs from rank 0's"):
            _agreed_secret(wrong, peer, "job")
    with pytest.raises(SettingsError, match=r"peer\.secret"):
        _agreed_secret(invitation, peer, "another")


def test_node_without_the_secret_of_the_others_is_refused():
    with pytest.raises(SettingsError, match=r"peer\.secret: the first rank's node has one, and this node has none"):
        _agreed_secret(invite_members(PeerSettings(secret=SECRET), "n1", "n2"), PeerSettings(), "job")


def test_missing_secret_warns_once(caplog, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    peer = PeerSettings()
    for _ in range(2):
        assert _agreed_secret(invite_members(peer, "n1", "n2"), peer, "a job of its own")
    assert caplog.text.count("A client that reads that exchange can read and replace") == 1
