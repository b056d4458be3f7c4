"""Calls to a silent node: the time limits of connecting and greeting, and early failure."""

import contextlib
import threading

import pytest

from peerstore import deadlines
from peerstore.errors import PeerStoreError, PeerUnreachableError
from peerstore.membership.topology import NodeId
from peerstore.peers.peer_client import PeerClient, PeerCredentials
from peerstore.peers.peer_messages import NodeInventory
from peerstore.testing import MemoryNetwork
from peerstore.transport.authentication import HANDSHAKE_TIMEOUT_S


class Drops:
    """A transport that never answers and records the timeouts it receives."""

    name = "drops"

    def __init__(self):
        self.waited = []

    def connect(self, address, *, timeout_s=5.0):
        self.waited.append(timeout_s)
        raise PeerUnreachableError(f"{address} cannot be reached: timed out")


def test_a_call_that_has_a_second_gives_connecting_no_more():
    drops = Drops()
    peer = PeerClient(drops, "n1:1", PeerCredentials("job", NodeId("me"), b"s" * 32))
    with pytest.raises(PeerUnreachableError):
        peer.call("node_inventory", None, NodeInventory, within_s=1.0)
    assert 0.0 < drops.waited[0] <= 1.0
    with pytest.raises(PeerUnreachableError):
        peer.call("node_inventory", None, NodeInventory)
    assert drops.waited[1] == 5.0
    with pytest.raises(PeerUnreachableError, match="in time"):
        peer.call("node_inventory", None, NodeInventory, within_s=0.0)
    assert len(drops.waited) == 2
    with deadlines.timeout_scope(0.5), pytest.raises(PeerUnreachableError):
        peer.call("node_inventory", None, NodeInventory)
    assert 0.0 < drops.waited[2] <= 0.5


class Silent:
    """A transport that accepts a connection and then stays silent."""

    name = "silent"

    def __init__(self):
        self.channels = []

    def connect(self, _address, *, timeout_s=5.0):
        self.timeout_s = timeout_s
        self.channels.append(SilentChannel())
        return self.channels[-1]


class SilentChannel:
    peer, timeout_s = "n1:1", 30.0

    def __init__(self):
        self.waited, self.closed = [], False

    def send(self, _header, _payload=()):
        self.sent_within_s = self.timeout_s

    def receive(self, *, idle_s=None, within_s=None):
        self.waited.append(within_s)
        raise PeerUnreachableError("it sends no data")

    def close(self):
        self.closed = True


def test_a_call_that_has_a_second_gives_the_greeting_no_more():
    silent = Silent()
    peer = PeerClient(silent, "n1:1", PeerCredentials("job", NodeId("me"), b"s" * 32))
    with pytest.raises(PeerUnreachableError):
        peer.call("node_inventory", None, NodeInventory, within_s=1.0)
    (channel,) = silent.channels
    assert all(0.0 < within_s <= 1.0 for within_s in [*channel.waited, channel.sent_within_s])
    assert channel.closed
    with pytest.raises(PeerUnreachableError):
        peer.call("node_inventory", None, NodeInventory)
    assert silent.channels[1].waited[0] == pytest.approx(HANDSHAKE_TIMEOUT_S, abs=1.0)


def test_waiting_greeting_fails_when_the_node_is_dropped():
    network = MemoryNetwork()
    accepted, ended = threading.Event(), threading.Event()

    def serve(channel):
        accepted.set()
        assert ended.wait(60)

    problems = []

    def call(peer):
        try:
            peer.call("node_inventory", None, NodeInventory)
        except PeerStoreError as error:
            problems.append(error)

    with contextlib.closing(network.transport("n1").listen("n1:1", serve)):
        peer = PeerClient(network.transport("me"), "n1:1", PeerCredentials("job", NodeId("me"), b"s" * 32))
        waiting = threading.Thread(target=call, args=(peer,))
        waiting.start()
        assert accepted.wait(60)
        peer.close()
        waiting.join(HANDSHAKE_TIMEOUT_S / 2)
        woken = not waiting.is_alive()
        ended.set()
        waiting.join(60)
    assert woken
    assert isinstance(problems[0], PeerUnreachableError)
