"""A partitioned node neither sends nor receives until the time has passed."""

from __future__ import annotations

import contextlib

import pytest

from peerstore.errors import PeerUnreachableError
from peerstore.testing import MemoryNetwork
from peerstore.transport.base import PartitionableTransport

TIMEOUT_S = 20.0


def echo(channel):
    while (incoming := channel.receive()) is not None:
        channel.send(incoming.header)


@pytest.fixture
def two():
    """Two echoing nodes, the first of which can be partitioned, and the time."""
    now = [100.0]
    network = MemoryNetwork()
    cut = PartitionableTransport(network.transport("n1", timeout_s=TIMEOUT_S), clock=lambda: now[0])
    other = network.transport("n2", timeout_s=TIMEOUT_S)
    with contextlib.closing(cut.listen("n1:0", echo)) as mine, contextlib.closing(other.listen("n2:0", echo)) as theirs:
        yield cut, other, mine.address, theirs.address, now


def asks(transport, address):
    with contextlib.closing(transport.connect(address, timeout_s=TIMEOUT_S)) as channel:
        channel.send(b"are you there?")
        incoming = channel.receive(idle_s=TIMEOUT_S)
        return incoming is not None and incoming.header == b"are you there?"


def test_partitioned_node_sends_and_receives_nothing_until_the_end(two):
    cut, other, mine, theirs, now = two
    assert asks(cut, theirs)
    assert asks(other, mine)
    cut.partition(5.0)
    with pytest.raises(PeerUnreachableError, match="on purpose"):
        asks(cut, theirs)
    with contextlib.suppress(PeerUnreachableError):
        assert not asks(other, mine)
    assert asks(other, theirs)
    now[0] += 5.0
    assert asks(cut, theirs)
    assert asks(other, mine)


def test_partition_closes_open_channels(two):
    cut, other, mine, theirs, _ = two
    out = cut.connect(theirs, timeout_s=TIMEOUT_S)
    into = other.connect(mine, timeout_s=TIMEOUT_S)
    into.send(b"here")
    assert into.receive(idle_s=TIMEOUT_S).header == b"here"
    cut.partition(5.0)
    with pytest.raises(PeerUnreachableError):
        out.send(b"more")
    with contextlib.suppress(PeerUnreachableError):
        assert into.receive(idle_s=TIMEOUT_S) is None
    out.close()
    into.close()
