"""Malformed frames, to which an agent replies with a typed error or a closed connection."""

import contextlib
import re
import socket
import threading
from pathlib import Path

import pytest

from peerstore.errors import AgentUnreachableError
from peerstore.message_codec import decode_message
from peerstore.rpc import Response
from peerstore.transport.authentication import HANDSHAKE_VERSION, Hello, Welcome
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION
from peerstore.transport.unix import connect_to_agent
from tests.hostile.peerstore.make import CLOSED, FILES, hostile_frames
from tests.support.raw_messages import receive_message, send_message, send_request
from tests.support.stores import MIB, load_shard, save_shard, shard_content, shard_key, store_agent, store_directory

HOSTILE = sorted(FILES.iterdir())
VICTIM = shard_key(1, job="victim")
HELLO = Hello(HANDSHAKE_VERSION, "")


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
                send_message(sock, HELLO)
                assert not receive_message(sock, Welcome).refused
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
        assert receive_message(sock, Welcome).refused
        assert sock.recv(1) == b""
    else:
        answer = receive_message(sock, Response)
        assert answer.error == expected
        assert len(decode_message(answer.body, str)) < 200_000
        assert sock.recv(1) == b""
    assert peak_bytes(agent) < before + 32 * MIB
    assert_still_serves(agent)


def test_wrong_request_does_not_close_the_connection(agent, raw_connection):
    sock = raw_connection()
    for _ in range(3):
        sock.sendall((FILES / "request-op-unknown.frame").read_bytes())
        assert receive_message(sock, Response).error == "RequestError"
        sock.sendall((FILES / "request-lease-nothing.frame").read_bytes())
        assert receive_message(sock, Response).error == "ProtocolError"
    send_request(sock, "epoch", {"job": "victim"})
    assert decode_message(receive_message(sock, Response).body, int) == 1


def test_fields_of_a_newer_client_are_ignored(raw_connection):
    sock = raw_connection(greet=False)
    send_message(sock, {"protocol": HANDSHAKE_VERSION, "job": "", "colour": "green"})
    assert not receive_message(sock, Welcome).refused
    send_request(sock, "epoch", {"job": "victim", "colour": "green"})
    assert decode_message(receive_message(sock, Response).body, int) == 1


def test_many_silent_connections_do_not_keep_others_out(agent, raw_connection):
    """Half greetings, half frames and nothing at all, two hundred of each, all at once."""
    for number in range(200):
        sock = raw_connection(greet=number % 3 == 0)
        sock.sendall((b"", FRAME_MAGIC[:1], FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, 64 << 20, 0))[number % 3])
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
    with contextlib.suppress(TimeoutError):
        while True:
            send_request(deaf, "list_shards", {"job": None})
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
                send_message(sock, HELLO)
            sock.sendall(file.read_bytes())


def assert_serves_data(agent):
    with agent.client(retry_s=20) as client:
        assert load_shard(client, VICTIM) == shard_content(VICTIM, MIB)
