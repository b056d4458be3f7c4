"""The client's connections: pooled while the client is open, closed with it."""

import contextlib
import os
import socket
import threading
import time

import pytest

from peerstore import deadlines
from peerstore.client.store_client import Client
from peerstore.client.store_methods import JobRequest, StoreStatusRequest
from peerstore.errors import AgentUnreachableError, ProtocolError, RequestError
from peerstore.rpc import Request
from peerstore.transport.authentication import HANDSHAKE_VERSION, Hello, Welcome
from peerstore.transport.unix import connect_to_agent
from tests.support.local_nodes import wait_until
from tests.support.raw_messages import receive_message, send_message, send_response


class ScriptedAgent:
    """The other end of a client's connections, moved one step at a time by the test."""

    def __init__(self):
        self.ends = []
        self.greeting = Welcome(version="1.0", arena_id="arena")

    def connect(self):
        here, there = socket.socketpair()
        there.settimeout(10)
        self.ends.append(there)
        send_message(there, self.greeting)
        return here

    def request(self, end=0):
        assert receive_message(self.ends[end], Hello).protocol == HANDSHAKE_VERSION
        return receive_message(self.ends[end], Request)

    def answer(self, value, end=0):
        send_response(self.ends[end], value)

    def close(self):
        for end in self.ends:
            end.close()


@pytest.fixture
def agent():
    one = ScriptedAgent()
    yield one
    one.close()


def test_a_connection_in_the_middle_of_a_call_is_closed_with_the_client(agent):
    client = Client(agent.connect, retry_s=0)
    answers = []
    caller = threading.Thread(target=lambda: answers.append(client.epoch("job")))
    caller.start()
    assert agent.request().op == "epoch"
    client.close()
    agent.answer(7)
    caller.join(200)
    assert answers == [7]
    assert agent.ends[0].recv(1) == b"", "the connection was kept by a closed client"


def test_successive_calls_share_a_connection(agent):
    client = Client(agent.connect, retry_s=0)
    agent.answer(1)
    assert client.epoch("job") == 1
    agent.answer(2)
    assert client.epoch("job") == 2
    assert len(agent.ends) == 1
    client.close()


def test_an_agent_of_another_protocol_is_named(agent):
    agent.greeting = Welcome(protocol=HANDSHAKE_VERSION + 1, version="9.9")
    with pytest.raises(ProtocolError, match=r"speaks protocol 4 \(version 9\.9\), this client 3: use the same release"):
        Client(agent.connect, retry_s=0)
    assert receive_message(agent.ends[0], Hello).protocol == HANDSHAKE_VERSION
    assert agent.ends[0].recv(1) == b"", "the refused connection was left open"


def test_client_without_an_agent_raises():
    def nobody():
        raise AgentUnreachableError("no agent answers on nowhere")

    with pytest.raises(AgentUnreachableError, match="nowhere"):
        Client(nobody, retry_s=0)


def test_retry_time_is_spent_once_on_a_lost_agent():
    """Calls of a loop that runs without its agent try once each until one succeeds."""
    agent, tries = ScriptedAgent(), []
    waiting = [agent.connect()]

    def connect():
        tries.append(1)
        if not waiting:
            raise AgentUnreachableError("nobody")
        return waiting.pop()

    client = Client(connect, retry_s=0.3)
    client._pool.take().close()
    with pytest.raises(AgentUnreachableError):
        client.epoch("job")
    assert len(tries) > 3
    for _ in range(3):
        before = len(tries)
        with pytest.raises(AgentUnreachableError):
            client.epoch("job")
        assert len(tries) == before + 1
    waiting.append(agent.connect())
    agent.answer(7, end=-1)
    assert client.epoch("job") == 7
    client.close()
    agent.close()


def test_a_closed_client_opens_nothing_again(agent):
    client = Client(agent.connect, retry_s=5.0)
    client.close()
    with pytest.raises(RequestError, match="closed"):
        client.status()
    client.notify("status", StoreStatusRequest(), timeout_s=1.0)
    client.notify("status", StoreStatusRequest(), timeout_s=1.0, seek=agent.connect)
    assert len(agent.ends) == 1, "the connector, which may start an agent, was asked again"


def test_short_remaining_wait_does_not_replace_the_agent(agent):
    """A replacement would take longer than the remaining time."""
    asked = []
    client = Client(agent.connect, retry_s=0, replace=lambda: bool(asked.append(1)))
    with contextlib.closing(client), pytest.raises(AgentUnreachableError, match="did not answer 'epoch'"):
        client.call("epoch", JobRequest("job"), int, within_s=3.5)
    assert asked == []


def test_failed_replacement_of_a_hanging_agent_fails_the_call(agent):
    def hangs():
        raise AgentUnreachableError("it hangs")

    client = Client(agent.connect, retry_s=0, replace=hangs)
    with contextlib.closing(client), pytest.raises(AgentUnreachableError, match="it hangs"):
        client.call("epoch", JobRequest("job"), int, timeout_s=600)


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_request_carries_its_remaining_time(agent):
    with contextlib.closing(Client(agent.connect, retry_s=0)) as client:
        agent.answer(1)
        client.epoch("job")
        assert agent.request().remaining_s == 60.0
        agent.answer(1)
        client.call("epoch", JobRequest("job"), int, within_s=7.0)
        agent.answer(1)
        with deadlines.timeout_scope(3.0), deadlines.timeout_scope(50.0):
            client.epoch("job")
        within, budget = (receive_message(agent.ends[0], Request).remaining_s for _ in range(2))
        assert 6.0 < within <= 7.0
        assert 2.0 < budget <= 3.0


def test_retried_call_has_the_remaining_time(agent):
    with contextlib.closing(Client(agent.connect)) as client:
        answers = []
        caller = threading.Thread(
            target=lambda: answers.append(client.call("epoch", JobRequest("job"), int, within_s=30.0))
        )
        caller.start()
        first = agent.request()
        agent.ends[0].close()
        wait_until(lambda: len(agent.ends) == 2, "it tries again")
        second = agent.request(1)
        agent.answer(7, 1)
        caller.join(30)
        assert answers == [7]
        assert 0 < second.remaining_s < first.remaining_s <= 30.0


def test_silent_agent_raises_an_error(agent):
    with contextlib.closing(Client(agent.connect)) as client:
        began = time.monotonic()
        said = rf"process {os.getpid()}\) did not answer 'epoch': nothing was heard of it for \d\.\d s"
        with pytest.raises(AgentUnreachableError, match=said):
            client.call("epoch", JobRequest("job"), int, within_s=0.2)
        assert time.monotonic() - began < 20
        with deadlines.timeout_scope(0.0), pytest.raises(AgentUnreachableError, match="no time was left"):
            client.epoch("job")


def test_agent_that_does_not_accept_costs_no_more_than_the_deadline(agent_of_nobody):
    with deadlines.timeout_scope(0.2), pytest.raises(AgentUnreachableError):
        Client(agent_of_nobody)


@pytest.fixture
def agent_of_nobody(tmp_path):
    """A server that listens with a full backlog."""
    path = tmp_path / "agent.sock"
    tmp_path.chmod(0o700)
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                one = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(str(path))
        yield lambda: connect_to_agent(path)
