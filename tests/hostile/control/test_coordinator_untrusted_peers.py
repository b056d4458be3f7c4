"""Refusal of unauthorized and malformed connections to coordinators and supervisors."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import msgspec
import pytest

from elastic.control.control_messages import (
    RANK_PROTOCOL,
    ExitReason,
    NodeCodec,
    NodeDesired,
    NodeStatus,
    RankDesired,
    RankHello,
    RankPhase,
    StatusRequest,
    SupervisorEndpoint,
    WorldSpec,
)
from elastic.control.control_plane import NoticeKind
from elastic.control.coordinator_client import call_coordinator, connect_to_coordinator
from elastic.control.supervisor_client import SupervisorClient
from elastic.coordinator.coordinator import Coordinator
from elastic.coordinator.job_snapshot import CoordinatorSettings
from elastic.errors import ControlPlaneRefusedError, ControlPlaneUnavailableError
from elastic.supervisor.supervisor import Supervisor, SupervisorSettings
from elastic.world.scaling_policy import ScalingPolicy
from peerstore.errors import PeerRefusedError, PeerStoreError
from peerstore.membership.topology import NodeId
from peerstore.message_codec import decode_message
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION
from tests.support.control_planes import PATIENCE_S, SECRET, supervised_job, wait_all_assigned, wanted_notice
from tests.support.local_nodes import wait_until
from tests.support.raw_messages import receive_message, send_message

encode = msgspec.msgpack.Encoder().encode


@pytest.fixture
def coordinator():
    settings = CoordinatorSettings("job", ScalingPolicy(max_replicas=2), 1, store="nowhere:1")
    one = Coordinator(settings, SECRET, farewell_s=1.0)
    thread = threading.Thread(target=one.run)
    thread.start()
    yield one
    one.request_stop()
    thread.join()


def is_serving(coordinator) -> bool:
    return call_coordinator(coordinator.address, StatusRequest(), job="job", secret=SECRET).job == "job"


def connect_raw(coordinator) -> socket.socket:
    host, _, port = coordinator.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


GARBAGE = {
    "nothing": b"",
    "a web browser": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "another version": FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION + 1, 4, 0) + b"abcd",
    "a huge header": FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, 0xFFFFFFFF, 0),
    "a huge payload": FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, 1, 1 << 60) + b"\x80",
    "no message": FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, 5, 0) + b"\xc1\xc1\xc1\xc1\xc1",
    "a message of another kind": FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, 1, 0) + b"\x80",
    "half a message": FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, 100, 0) + b"abc",
}


@pytest.mark.parametrize("bytes_sent", GARBAGE.values(), ids=GARBAGE)
def test_garbage_does_not_stop_the_coordinator(coordinator, bytes_sent):
    with connect_raw(coordinator) as sock:
        sock.sendall(bytes_sent)
        with contextlib.suppress(OSError):  # the connection may be closed
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    assert is_serving(coordinator)


MESSAGES = {
    "no map": [1, 2, 3],
    "no such kind": {"type": "king", "number": 1},
    "a field too many": {"type": "node", "number": 1, "node": "n1", "generation": 1, "local_ranks": 1, "more": 1},
    "a number that is none": {"type": "node", "number": "one", "node": "n1", "generation": 1, "local_ranks": 1},
    "another node's name": {"type": "node", "number": 1, "node": "n2", "generation": 1, "local_ranks": 1},
    "deep nesting": {"type": "node", "number": [[[[[[[[[[1]]]]]]]]]]},
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_malformed_messages_of_an_authenticated_node_are_rejected(coordinator, message):
    channel = connect_to_coordinator(coordinator.address, job="job", me=NodeId("n1"), secret=SECRET)
    channel.send(encode(message))
    with contextlib.suppress(PeerStoreError):
        assert channel.receive(within_s=10) is None
    channel.close()
    assert is_serving(coordinator)
    assert coordinator.snapshot.nodes == {}


def test_another_secret_and_another_job(coordinator):
    for job, secret in (("job", b"quite another secret, long enough"), ("jobs", SECRET)):
        with pytest.raises(ControlPlaneRefusedError):
            call_coordinator(coordinator.address, StatusRequest(), job=job, secret=secret)
        with pytest.raises(PeerRefusedError):
            connect_to_coordinator(coordinator.address, job=job, me=NodeId("n1"), secret=secret)
    assert is_serving(coordinator)


def test_older_of_two_supervisors_of_a_node_is_dismissed(coordinator):
    def send_status(life):
        channel = connect_to_coordinator(coordinator.address, job="job", me=NodeId("n1"), secret=SECRET)
        channel.send(encode(NodeStatus(1, "n1", life, 1, spawn_count=1)))
        end = NodeCodec()
        return channel, end, end.decode(channel.receive(within_s=10).header)

    first, end, desired = send_status(5)
    assert desired.exit is None
    second, _, desired = send_status(6)
    assert desired.exit is None
    assert end.decode(first.receive(within_s=10).header).exit is ExitReason.REFUSED
    third, _, desired = send_status(4)
    assert (desired.exit, "newer supervisor" in desired.reason) == (ExitReason.REFUSED, True)
    for channel in (first, second, third):
        channel.close()
    assert is_serving(coordinator)


CHANGED = {
    "an unknown world": {"type": "changed", "number": 2, "world": {"type": "told", "number": 7}},
    "another node's name": {"type": "changed", "number": 2, "node": "n2"},
    "a field too many": {"type": "changed", "number": 2, "more": 1},
    "another whole report": {"type": "node", "number": 2, "node": "n1", "generation": 1, "local_ranks": 1},
    "a number that is none": {"type": "changed", "number": "two"},
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_garbage_after_a_report_ends_only_its_connection(coordinator, changed):
    channel = connect_to_coordinator(coordinator.address, job="job", me=NodeId("n1"), secret=SECRET)
    channel.send(encode(NodeStatus(1, "n1", 1, 1, spawn_count=1)))
    channel.send(encode(changed))
    with contextlib.suppress(PeerStoreError):
        while channel.receive(within_s=10) is not None:
            pass
    channel.close()
    assert is_serving(coordinator)
    assert coordinator.snapshot.nodes.keys() <= {"n1"}


def test_changes_without_a_base_report_are_refused(coordinator):
    channel = connect_to_coordinator(coordinator.address, job="job", me=NodeId("n1"), secret=SECRET)
    channel.send(encode({"type": "changed", "number": 2}))
    with contextlib.suppress(PeerStoreError):
        assert channel.receive(within_s=10) is None
    channel.close()
    assert is_serving(coordinator)


def test_supervisor_with_a_slow_clock_receives_the_minimum_generation(coordinator):
    def send_status(channel, life):
        channel.send(encode(NodeStatus(1, "n1", life, 1, spawn_count=1)))
        return decode_message(channel.receive(within_s=10).header, NodeDesired)

    def connect():
        return connect_to_coordinator(coordinator.address, job="job", me=NodeId("n1"), secret=SECRET)

    first = connect()
    assert send_status(first, 3_600_000).exit is None
    first.close()
    wait_until(lambda: not coordinator.snapshot.nodes.get("n1") or not coordinator.snapshot.nodes["n1"].connected)
    second = connect()
    desired = send_status(second, 5)
    assert (desired.exit, desired.superseded, desired.min_generation) == (None, True, 3_600_000)
    third = connect()
    desired = send_status(third, desired.min_generation + 1)
    assert (desired.exit, desired.superseded, desired.generation) == (None, False, 3_600_001)
    second.close()
    third.close()
    assert is_serving(coordinator)


def test_supervisor_starts_above_the_required_generation(tmp_path):
    settings = SupervisorSettings("job", "n1", "127.0.0.1:1", ("true",), tmp_path / "n1", tmp_path / "logs")
    one = Supervisor(settings, SECRET)
    try:
        one.state.start()
        later = one.state.generation + 3_600_000
        one._apply_orders(NodeDesired("c", one.state.generation, superseded=True, min_generation=later))
        assert one.state.generation == later + 1
    finally:
        one._server.close()


@pytest.mark.parametrize(
    "formed",
    [
        {"epoch": 1 << 62, "ranked_nodes": [], "restarts": 0, "reason": ""},
        {"epoch": 1, "ranked_nodes": [], "restarts": (1 << 64) - 1, "reason": ""},
    ],
    ids=["epoch", "restarts"],
)
def test_oversized_number_closes_its_own_connection(coordinator, formed):
    message = {"type": "node", "number": 1, "node": "n1", "generation": 1, "local_ranks": 1, "world": formed}
    channel = connect_to_coordinator(coordinator.address, job="job", me=NodeId("n1"), secret=SECRET)
    channel.send(encode(message))
    with contextlib.suppress(PeerStoreError):
        assert channel.receive(within_s=10) is None
    channel.close()
    assert is_serving(coordinator)
    assert coordinator.snapshot.nodes == {}


def test_impossible_world_is_refused(coordinator):
    """Its number would be the last one, and no world could follow it."""
    channel = connect_to_coordinator(coordinator.address, job="job", me=NodeId("n1"), secret=SECRET)
    formed = WorldSpec((1 << 62) - 1, ("n1",), 0, "")
    channel.send(encode(NodeStatus(1, "n1", 1, 1, spawn_count=1, world=formed)))
    desired = decode_message(channel.receive(within_s=10).header, NodeDesired)
    assert (desired.exit, "refers to world" in desired.reason) == (ExitReason.REFUSED, True)
    channel.close()
    assert is_serving(coordinator)
    assert coordinator.snapshot.world.epoch < 10


def test_coordinator_that_cannot_record_a_world_waits_and_continues(tmp_path):
    """The disk may be full. An unrecorded epoch could be used twice, so no node may receive the world."""
    epoch_file = tmp_path / "later" / "epoch"
    settings = CoordinatorSettings("job", ScalingPolicy(max_replicas=1), 1, store="nowhere:1")
    one = Coordinator(settings, SECRET, farewell_s=1.0, epoch_file=epoch_file)
    thread = threading.Thread(target=one.run)
    thread.start()
    channel = connect_to_coordinator(one.address, job="job", me=NodeId("n1"), secret=SECRET)
    try:
        channel.send(encode(NodeStatus(1, "n1", 1, 1, spawn_count=1, ready=True)))
        wait_until(lambda: one._epoch_write_failed)
        assert is_serving(one)
        epoch_file.parent.mkdir()
        wait_until(epoch_file.exists)
        assert decode_message(channel.receive(within_s=10).header, NodeDesired).world is not None
    finally:
        channel.close()
        one.request_stop()
        thread.join()


# -- supervisors --------------------------------------------------------------------------------------------------


@pytest.fixture
def job():
    with supervised_job(1) as one:
        yield one


def connect_to_rank_socket(job) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(str(job.planes[0].supervisor.settings.directory / "rank.sock"))
    return sock


def test_rank_socket_is_accessible_only_to_its_user(job):
    path = job.planes[0].supervisor.settings.directory / "rank.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "greeting",
    [
        RankHello(RANK_PROTOCOL, "an unknown token"),
        RankHello(RANK_PROTOCOL + 1, "an unknown token"),
    ],
)
def test_process_with_an_unknown_token_or_protocol_is_refused(job, greeting):
    with connect_to_rank_socket(job) as sock:
        send_message(sock, greeting)
        assert receive_message(sock, RankDesired).exit is ExitReason.REFUSED
    assert wait_all_assigned(job.planes)[0].world_size == 1


def test_second_process_of_a_rank_is_refused(job):
    seat = job.planes[0]
    wait_all_assigned(job.planes)
    supervisor = seat.supervisor
    (token,) = supervisor.state.processes
    other = SupervisorClient(SupervisorEndpoint(supervisor.settings.directory / "rank.sock", token))
    with pytest.raises((ControlPlaneRefusedError, ControlPlaneUnavailableError)):
        other.wait_for_assignment(timeout_s=PATIENCE_S)
    other.close()
    assert seat.notice() is None
    job.resize(1)
    job.stop()
    wait_until(lambda: wanted_notice(seat) is NoticeKind.STOP)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 9) + b"abc",
        struct.pack(">I", 1) + b"\x80",
    ],
)
def test_garbage_does_not_stop_the_supervisor(job, sent):
    with connect_to_rank_socket(job) as sock:
        sock.sendall(sent)
        with contextlib.suppress(OSError):  # the connection may be closed
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    assert wait_all_assigned(job.planes)[0].world_size == 1


def test_reports_about_a_past_world_are_ignored(job):
    seat = job.planes[0]
    (before,) = wait_all_assigned(job.planes)
    seat.report_fault("a fault")
    wait_until(lambda: wanted_notice(seat) is NoticeKind.RESTART)
    (after,) = wait_all_assigned(job.planes)
    with seat._changed:  # like a rank that does not know the new world
        seat._send_status(epoch=before.epoch, paused=99, sealed=99, phase=RankPhase.IN_WORLD)
        number = seat._sent
    wait_until(lambda: seat._desired.acknowledged >= number)
    nodes = job.coordinator.snapshot.nodes
    wait_until(lambda: nodes["n0"].status is not None and nodes["n0"].status.world.epoch == after.epoch)
    assert (nodes["n0"].status.paused, nodes["n0"].status.sealed) == (None, None)
    assert seat.notice() is None
