"""Malformed frames, to which an agent replies with a typed error or a closed connection."""

import contextlib
import re
import socket
import struct
import threading
from pathlib import Path

import pytest

from peerstore import message_codec
from peerstore.errors import AgentUnreachableError
from peerstore.message_codec import AGENT_PROTOCOL_VERSION, AgentHello, AgentRequest, AgentResponse
from peerstore.server.store_client import connect_to_agent
from tests.hostile.peerstore.make import CLOSED, FILES, hostile_frames
from tests.support.stores import MIB, load_shard, save_shard, shard_content, shard_key, store_agent, store_directory

HOSTILE = sorted(FILES.iterdir())
VICTIM = shard_key(1, job="victim")


@pytest.fixture(scope="module")
def agent():
    with store_directory() as directory, store_agent(directory, "--budget", "64MiB") as one:
        with one.client(retry_s=20) as client:
            save_shard(client, VICTIM)
        yield one
        assert one.end() == 0


@pytest.fixture
def raw_connection(agent):
    """Open raw connections to the agent, after a greeting or without one."""
    with contextlib.ExitStack() as stack:

        def connect(*, greet: bool = True) -> socket.socket:
            sock = stack.enter_context(connect_to_agent(agent.place.socket, timeout_s=20))
            if greet:
                message_codec.send_frame(sock, AgentHello(AGENT_PROTOCOL_VERSION, ""))
                assert not message_codec.receive_frame(sock, AgentHello).refused
            return sock

        yield connect


def assert_still_serves(agent):
    with agent.client(retry_s=0) as client:
        status = client.status()
        assert status.damage_reports == ()
        assert (status.arena.leases, status.arena.slots, status.arena.pins) == (0, 1, 0)
        assert [job.job for job in status.jobs] == ["victim"]
        assert status.jobs[0].epoch == 1
        assert load_shard(client, VICTIM) == shard_content(VICTIM, MIB)


def peak_bytes(agent):
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10


def test_stored_cases_match_the_generator_script():
    assert {path.stem: path.read_bytes() for path in HOSTILE} == {
        name: case.data for name, case in hostile_frames().items()
    }


@pytest.mark.parametrize("file", HOSTILE, ids=lambda path: path.stem)
def test_hostile_frame_gets_a_typed_error_and_leaks_nothing(agent, raw_connection, file):
    expected = hostile_frames()[file.stem].answer
    before = peak_bytes(agent)
    sock = raw_connection(greet=file.stem.startswith("request-"))
    sock.sendall(file.read_bytes())
    sock.shutdown(socket.SHUT_WR)
    if expected == CLOSED:
        assert sock.recv(1) == b""
    elif expected == "refused":
        assert message_codec.receive_frame(sock, AgentHello).refused
        assert sock.recv(1) == b""
    else:
        answer = message_codec.receive_frame(sock, AgentResponse)
        assert answer.error == expected
        assert len(message_codec.decode_message(answer.body, str)) < 200_000
        assert sock.recv(1) == b""
    assert peak_bytes(agent) < before + 32 * MIB
    assert_still_serves(agent)


def test_wrong_request_does_not_close_the_connection(agent, raw_connection):
    sock = raw_connection()
    for _ in range(3):
        sock.sendall((FILES / "request-op-unknown.frame").read_bytes())
        assert message_codec.receive_frame(sock, AgentResponse).error == "RequestError"
        sock.sendall((FILES / "request-lease-nothing.frame").read_bytes())
        assert message_codec.receive_frame(sock, AgentResponse).error == "ProtocolError"
    message_codec.send_frame(sock, AgentRequest("epoch", message_codec.encode_raw_message({"job": "victim"})))
    assert message_codec.decode_message(message_codec.receive_frame(sock, AgentResponse).body, int) == 1


def test_fields_of_a_newer_client_are_ignored(raw_connection):
    sock = raw_connection(greet=False)
    message_codec.send_frame(sock, {"protocol": AGENT_PROTOCOL_VERSION, "job": "", "colour": "green"})
    assert not message_codec.receive_frame(sock, AgentHello).refused
    message_codec.send_frame(
        sock, AgentRequest("epoch", message_codec.encode_raw_message({"job": "victim", "colour": "green"}))
    )
    assert message_codec.decode_message(message_codec.receive_frame(sock, AgentResponse).body, int) == 1


def test_many_silent_connections_do_not_keep_others_out(agent, raw_connection):
    """Half greetings, half frames and nothing at all, two hundred of each, all at once."""
    for number in range(200):
        sock = raw_connection(greet=number % 3 == 0)
        sock.sendall((b"", b"\0", struct.pack(">I", 64 << 20))[number % 3])
    before = peak_bytes(agent)
    assert_still_serves(agent)
    assert peak_bytes(agent) < before + 32 * MIB


def test_excess_connections_are_refused_until_others_close(agent):
    with contextlib.ExitStack() as crowd:
        for _ in range(1024):
            crowd.enter_context(connect_to_agent(agent.place.socket, timeout_s=20))
        with pytest.raises((AgentUnreachableError, OSError)):
            crowd.enter_context(agent.client(retry_s=0))
    with agent.client(retry_s=20) as client:
        assert client.epoch("victim") == 1


def test_client_that_never_reads_does_not_stop_the_others(agent, raw_connection):
    deaf = raw_connection()
    deaf.settimeout(0.2)
    ask = AgentRequest("list_shards", message_codec.encode_raw_message({"job": None}))
    with contextlib.suppress(TimeoutError):
        while True:
            message_codec.send_frame(deaf, ask)
    assert_still_serves(agent)


def test_concurrent_misbehaving_clients_do_not_stop_the_agent(agent):
    """Threads throw every file at the agent in their own order; a client works all the time."""
    threads = [threading.Thread(target=send_all_hostile, args=(agent, step)) for step in (1, 3, 7)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert_serves_data(agent)
    for thread in threads:
        thread.join()
    assert_still_serves(agent)


def send_all_hostile(agent, step):
    for number in range(len(HOSTILE)):
        file = HOSTILE[number * step % len(HOSTILE)]
        with connect_to_agent(agent.place.socket, timeout_s=20) as sock, contextlib.suppress(ConnectionError):
            if file.stem.startswith("request-"):
                message_codec.send_frame(sock, AgentHello(AGENT_PROTOCOL_VERSION, ""))
            sock.sendall(file.read_bytes())


def assert_serves_data(agent):
    with agent.client(retry_s=20) as client:
        assert load_shard(client, VICTIM) == shard_content(VICTIM, MIB)
