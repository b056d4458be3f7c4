"""Nodes counted as gone: no unseen node before the grace time has passed."""

from __future__ import annotations

import contextlib

from peerstore.membership.swim import GossipMessage, MemberState, MemberUpdate
from peerstore.membership.topology import NodeId, PeerNode, member_list
from peerstore.peers.heartbeat_loop import HeartbeatLoop
from peerstore.peers.peer_client import PeerCredentials
from peerstore.peers.peer_messages import PingMessage
from peerstore.testing import MemoryNetwork, memory_store


def node(name):
    return PeerNode(NodeId(name), f"{name}:7070")


@contextlib.contextmanager
def tending(now):
    """A loop for n0, n8 and n16 without a thread: the test supplies time and messages."""
    with memory_store("1MiB") as store:
        network = MemoryNetwork()
        made = HeartbeatLoop(
            node("n0"),
            PeerCredentials("job", NodeId("n0"), b"s" * 32),
            network.transport("n0"),
            store.replicas,
            clock=lambda: now[0],
        )
        try:
            made.set_member_list(member_list(1, [node("n0"), node("n8"), node("n16")]))
            yield made
        finally:
            made.close()


def says(tended, sender, about, standing, number=1):
    rumour = MemberUpdate(node(about), number, standing)
    tended.handle_ping(NodeId(sender), PingMessage(GossipMessage((rumour,), None, (0, ""))))


def test_unseen_node_is_not_gone_during_the_grace_time():
    now = [100.0]
    with tending(now) as tended:
        says(tended, "n8", "n8", MemberState.ALIVE)
        assert set(tended.alive) == {"n0", "n8", "n16"}
        now[0] += 3600
        assert set(tended.alive) == {"n0", "n8"}


def test_node_seen_alive_and_then_dead_is_gone_at_once():
    now = [100.0]
    with tending(now) as tended:
        says(tended, "n16", "n16", MemberState.ALIVE)
        says(tended, "n16", "n8", MemberState.ALIVE)
        assert set(tended.alive) == {"n0", "n8", "n16"}
        says(tended, "n16", "n8", MemberState.DEAD)
        assert set(tended.alive) == {"n0", "n16"}
