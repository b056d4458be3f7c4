"""One connection with several users: no message is lost, and no wait lasts forever."""

from __future__ import annotations

import os
import struct
import threading

import pytest

from elastic.errors import ControlDeadlineError, ControlPlaneUnavailableError
from integration.hyperpod.elastic_agent import ipc
from integration.hyperpod.elastic_agent import ipc as connection_module
from integration.hyperpod.elastic_agent.environment import AGENT_SOCKET_ENV
from integration.hyperpod.elastic_agent.ipc import (
    MAX_QUEUED_MESSAGES,
    AgentConnection,
    DamagedFrameError,
    encode_agent_frame,
    shared_agent_connection,
)
from tests.support.hyperpod_socket import agent_listener

PATIENCE_S = 60.0


@pytest.fixture
def both():
    with agent_listener() as listener:
        connection = AgentConnection(listener.path, 8)
        worker = listener.accept()
        yield connection, worker
        connection.close()
        worker.close()


def test_channels_introduce_themselves_and_sign_their_messages(both):
    connection, worker = both
    one, other = connection.open_channel(ipc.RESTART_MESSAGES), connection.open_channel(ipc.CHECKPOINT_MESSAGES)
    one.send(ipc.MSG_AT_BARRIER)
    other.send(ipc.MSG_CHECKPOINT_UPDATE, step=4, path="s3://b/4")
    heard = [worker.receive() for _ in range(4)]
    assert [(m["type"], m["client_id"], m["local_rank"]) for m in heard] == [
        ("init", one.client, 8),
        ("init", other.client, 8),
        ("at_rcb_barrier", one.client, 8),
        ("ckpt_info_update", other.client, 8),
    ]
    assert heard[3]["step"] == 4


def test_fault_before_any_listener_is_received(both):
    connection, worker = both
    worker.send(ipc.MSG_JOB_FAULT, restart_count=0)
    worker.send(ipc.MSG_JOB_START, client_id="of an earlier user")
    worker.send("something new")
    first = connection.open_channel([ipc.MSG_CHECKPOINT_GET])
    with pytest.raises(ControlDeadlineError, match="ckpt_info_get"):
        first.receive(timeout_s=0.05)
    channel = connection.open_channel(ipc.RESTART_MESSAGES)
    assert channel.receive(timeout_s=PATIENCE_S)["restart_count"] == 0
    assert channel.receive(timeout_s=PATIENCE_S)["type"] == ipc.MSG_JOB_START


def test_other_message_types_are_queued(both):
    connection, worker = both
    channel = connection.open_channel(ipc.RESTART_MESSAGES)
    for number in range(3):
        worker.send(ipc.MSG_JOB_FAULT, restart_count=number)
    worker.send(ipc.MSG_JOB_START, client_id=channel.client)
    assert channel.receive(ipc.MSG_JOB_START, timeout_s=PATIENCE_S)
    assert [channel.receive(ipc.MSG_JOB_FAULT, timeout_s=PATIENCE_S)["restart_count"] for _ in range(3)] == [0, 1, 2]


def test_answers_reach_the_requesting_channel(both):
    connection, worker = both
    users = [connection.open_channel(ipc.CHECKPOINT_MESSAGES) for _ in range(2)]
    for user in users:
        user.send(ipc.MSG_CHECKPOINT_GET)
    asked = [m for m in (worker.receive() for _ in range(4)) if m["type"] == ipc.MSG_CHECKPOINT_GET]
    for message in reversed(asked):
        worker.send(ipc.MSG_CHECKPOINT_GET, client_id=message["client_id"], path=message["client_id"])
    assert [user.receive(timeout_s=PATIENCE_S)["path"] for user in users] == [user.client for user in users]


def test_unaddressed_message_reaches_all_subscribers(both):
    connection, worker = both
    users = [connection.open_channel(ipc.RESTART_MESSAGES) for _ in range(2)]
    worker.send(ipc.MSG_JOB_FAULT, restart_count=3)
    assert [user.receive(timeout_s=PATIENCE_S)["restart_count"] for user in users] == [3, 3]


def test_concurrent_frames_are_not_interleaved(both):
    connection, worker = both
    channel = connection.open_channel(ipc.RESTART_MESSAGES)
    assert worker.receive()["type"] == ipc.MSG_INIT
    talk = "x" * 100_000
    speakers = [
        threading.Thread(target=lambda n=n: [channel.send(ipc.MSG_JOB_DATA, rank=n, data=talk) for _ in range(20)])
        for n in range(4)
    ]
    for speaker in speakers:
        speaker.start()
    heard = [worker.receive() for _ in range(80)]
    for speaker in speakers:
        speaker.join()
    assert {len(m["data"]) for m in heard} == {100_000}
    assert sorted(m["rank"] for m in heard) == sorted([0, 1, 2, 3] * 20)


def test_messages_sent_before_closing_are_delivered(both):
    connection, worker = both
    channel = connection.open_channel(ipc.RESTART_MESSAGES)
    channel.send(ipc.MSG_JOB_FAULT, rank=8, reason="its loss is not finite")
    connection.close()
    assert [worker.receive()["type"] for _ in range(2)] == [ipc.MSG_INIT, ipc.MSG_JOB_FAULT]
    assert worker.receive() is None


def test_closed_agent_connection_stays_lost(both):
    connection, worker = both
    channel = connection.open_channel(ipc.RESTART_MESSAGES)
    assert worker.receive()["type"] == ipc.MSG_INIT
    waiting = threading.Thread(target=worker.close)
    waiting.start()
    with pytest.raises(ControlPlaneUnavailableError, match="the agent closed it"):
        channel.receive(timeout_s=PATIENCE_S)
    with pytest.raises(ControlPlaneUnavailableError):
        channel.send(ipc.MSG_AT_BARRIER)
    waiting.join()


def test_messages_before_the_end_are_received_after_it(both):
    connection, worker = both
    channel = connection.open_channel(ipc.RESTART_MESSAGES)
    assert worker.receive()["type"] == ipc.MSG_INIT
    worker.send(ipc.MSG_JOB_FAULT, restart_count=1)
    worker.close()
    with pytest.raises(ControlPlaneUnavailableError):
        channel.receive(ipc.MSG_JOB_START, timeout_s=PATIENCE_S)
    assert channel.receive(ipc.MSG_JOB_FAULT, timeout_s=PATIENCE_S)["restart_count"] == 1


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (struct.pack(">I", 1 << 30), "1073741824 bytes was announced"),
        (struct.pack(">I", 2) + b"[]", "not an object with a type"),
        (struct.pack(">I", 4) + b"\xff\xfe\x00\x00", "not JSON in UTF-8"),
        (struct.pack(">I", 9) + b'{"type":"', "not JSON in UTF-8"),
    ],
)
def test_damaged_frame_closes_the_connection_with_a_reason(both, stream, said):
    connection, worker = both
    channel = connection.open_channel(ipc.RESTART_MESSAGES)
    worker.sock.sendall(encode_agent_frame({"type": ipc.MSG_JOB_FAULT, "restart_count": 2}) + stream)
    with pytest.raises(ControlPlaneUnavailableError, match=said):
        channel.receive(ipc.MSG_JOB_START, timeout_s=PATIENCE_S)
    assert channel.receive(ipc.MSG_JOB_FAULT, timeout_s=PATIENCE_S)["restart_count"] == 2


def test_truncated_frame_differs_from_a_close(both):
    connection, worker = both
    channel = connection.open_channel(ipc.RESTART_MESSAGES)
    assert worker.receive()["type"] == ipc.MSG_INIT
    worker.sock.sendall(encode_agent_frame({"type": ipc.MSG_JOB_FAULT})[:-1])
    worker.close()
    with pytest.raises(ControlPlaneUnavailableError, match="within a frame"):
        channel.receive(timeout_s=PATIENCE_S)


def test_agent_that_does_not_read_blocks_no_sender(both):
    connection, _worker = both
    channel = connection.open_channel(ipc.RESTART_MESSAGES)

    def talk():
        for _ in range(2 * MAX_QUEUED_MESSAGES):
            channel.send(ipc.MSG_JOB_DATA, rank=8, data="x" * 1000)

    with pytest.raises(ControlPlaneUnavailableError, match="has not read"):
        talk()


def test_flooding_agent_is_disconnected_and_its_messages_are_kept(both):
    connection, worker = both
    channel = connection.open_channel(ipc.RESTART_MESSAGES)

    def flood():
        for number in range(2 * MAX_QUEUED_MESSAGES):
            worker.send(ipc.MSG_JOB_FAULT, restart_count=number)
        while worker.receive() is not None:
            pass
        raise BrokenPipeError

    with pytest.raises(OSError):
        flood()
    with pytest.raises(ControlPlaneUnavailableError, match="were not taken"):
        channel.send(ipc.MSG_AT_BARRIER)
    assert channel.receive(timeout_s=0)["restart_count"] == 0


def test_missing_socket_is_named_in_the_error(tmp_path):
    with pytest.raises(ControlPlaneUnavailableError, match=r"nobody\.sock"):
        AgentConnection(tmp_path / "nobody.sock", 0)
    assert issubclass(DamagedFrameError, ControlPlaneUnavailableError)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hold_the_connection_open(both):
    connection, worker = both
    connection.open_channel(ipc.RESTART_MESSAGES)
    assert worker.receive()["type"] == ipc.MSG_INIT
    asks, answers = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(asks, 1)
        os._exit(0)
    try:
        connection.close()
        assert worker.receive() is None
    finally:
        os.write(answers, b"x")
        os.waitpid(child, 0)
        os.close(asks)
        os.close(answers)


def test_process_shares_one_connection(monkeypatch):
    monkeypatch.setattr(connection_module, "_shared", [])
    with agent_listener() as listener:
        environ = {AGENT_SOCKET_ENV: str(listener.path)}
        one = shared_agent_connection(environ)
        assert shared_agent_connection(environ) is one
        one.close()
        other = shared_agent_connection(environ)
        assert other is not one
        other.close()
    with pytest.raises(ControlPlaneUnavailableError, match=AGENT_SOCKET_ENV):
        shared_agent_connection({})
