"""A node that stops reading delays no other node and is disconnected after a while."""

from __future__ import annotations

import contextlib
import socket

import msgspec
import pytest

from elastic.cli.scaling_options import load_scaling_policy
from elastic.control.control_messages import MAX_NODES, CoordinatorCodec, NodeCodec, NodeDesired, NodeStatus, WorldSpec
from elastic.coordinator.coordinator import STALL_TIMEOUT_S, NodeConnection, NodeConnections
from elastic.errors import PolicyError
from peerstore.errors import PeerUnreachableError, ProtocolError
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION

LARGE = WorldSpec(1, tuple(f"node-{place:0100d}" for place in range(MAX_NODES)), 0, "")


@pytest.fixture
def line():
    """A connection and its other end."""
    ours, theirs = socket.socketpair()
    connections = NodeConnections()
    connection = NodeConnection(ours, "there", "n0", CoordinatorCodec(NodeStatus(1, "n0", 1, 1)))
    connections.add(connection)
    with contextlib.closing(theirs):
        yield connections, connection, theirs
    connections.close(0.0)


def framed(body: bytes) -> bytes:
    return FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, len(body), 0) + body


def test_node_that_does_not_read_is_dropped_although_it_reports(line):
    connections, connection, theirs = line
    connection.send(NodeDesired("c", 1, 1, world=LARGE), 0.0)
    connections.update_interest(connection)
    assert connection.is_sending
    end = NodeCodec()
    end.encode(NodeStatus(1, "n0", 1, 1))
    for number in range(2, 20):
        theirs.sendall(framed(end.encode(NodeStatus(number, "n0", 1, 1))))
        assert [says.number for says in connection.read(float(number))] == [number]
        connections.update_interest(connection)
        assert connections.stalled(float(number)) == ([connection] if number > STALL_TIMEOUT_S else [])


def test_slow_reader_receives_everything(line):
    _, connection, theirs = line
    connection.send(NodeDesired("c", 1, 1, world=LARGE), 0.0)
    arrived = bytearray()
    while connection.is_sending:
        arrived += theirs.recv(1 << 16)
        connection.flush(1000.0)
    assert not connection.is_stalled(1e9)
    theirs.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            arrived += theirs.recv(1 << 16)
    assert NodeCodec().decode(bytes(arrived[FRAME_PREFIX.size :])).world == LARGE


def test_incomplete_report_times_out(line):
    connections, connection, theirs = line
    end = NodeCodec()
    end.encode(NodeStatus(1, "n0", 1, 1))
    data = framed(end.encode(NodeStatus(2, "n0", 1, 1, spawn_count=3)))
    theirs.sendall(data[:-1])
    assert list(connection.read(0.0)) == []
    connections.update_interest(connection)
    assert connections.stalled(STALL_TIMEOUT_S) == []
    assert connections.stalled(STALL_TIMEOUT_S + 0.1) == [connection]
    theirs.sendall(data[-1:])
    assert [says.spawn_count for says in connection.read(STALL_TIMEOUT_S + 0.1)] == [3]
    connections.update_interest(connection)
    assert connections.stalled(1e9) == []


def test_malformed_message_or_hangup_drops_the_node(line):
    _, connection, theirs = line
    theirs.sendall(FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, 0xFFFFFFFF, 0))
    with pytest.raises(ProtocolError, match="announced a header"):
        list(connection.read(0.0))
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerUnreachableError, match="closed"):
        list(connection.read(0.0))


def test_another_thread_wakes_the_waiting_coordinator(line):
    connections, _, _ = line
    connections.wake()
    assert connections.wait(60.0) == []


def test_more_nodes_than_a_job_can_have_are_refused_at_the_start():
    with pytest.raises(PolicyError, match="16384"):
        load_scaling_policy(f"1:{MAX_NODES + 1}", None)
    assert load_scaling_policy(f"1:{MAX_NODES}", None).max_replicas == MAX_NODES


def test_first_message_to_a_node_is_complete():
    """The first message contains every field that differs from :data:`NOTHING_HEARD`."""
    body = CoordinatorCodec(NodeStatus(1, "n0", 1, 1)).encode(NodeDesired("c", 7, 1))
    assert msgspec.msgpack.decode(body) == {"type": "hears", "coordinator": "c", "generation": 7, "acknowledged": 1}
