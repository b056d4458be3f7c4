"""A watchdog that calls an agent between requests, and how it is closed."""

import contextlib
import socket
import threading
import time

import pytest

from peerstore.client.agent_launcher import AgentWatchdog
from peerstore.rpc import Operation, Request
from peerstore.server.store_server import StoreServer
from peerstore.settings import StoreSettings
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from peerstore.transport.authentication import HANDSHAKE_VERSION, Hello, Welcome
from peerstore.transport.unix import connect_to_agent
from tests.support.local_nodes import wait_until
from tests.support.raw_messages import receive_message, send_message, send_request

pytestmark = pytest.mark.slow


def greeted(ends):
    here, there = socket.socketpair()
    there.settimeout(30)
    send_message(there, Welcome())
    ends.append(there)
    return here


def test_silent_agent_does_not_block_closing_the_watchdog():
    ends = []
    with contextlib.ExitStack() as cleanup:
        watch = AgentWatchdog(lambda: greeted(ends), lambda: False)
        cleanup.callback(lambda: [end.close() for end in ends])
        wait_until(lambda: ends)
        assert receive_message(ends[0], Hello).protocol == HANDSHAKE_VERSION
        assert receive_message(ends[0], Request).op == "epoch"
        began = time.monotonic()
        watch.close()
        assert time.monotonic() - began < 30


def test_close_does_not_wait_for_a_running_launch_and_no_other_follows():
    ends, starting, go_on = [], threading.Event(), threading.Event()

    def connect():
        if ends:
            starting.set()
            assert go_on.wait(60)
        return greeted(ends)

    watch = AgentWatchdog(connect, lambda: False)
    wait_until(lambda: ends)
    ends[0].close()  # the agent has died
    assert starting.wait(60)
    began = time.monotonic()
    watch.close()
    assert time.monotonic() - began < 30
    go_on.set()
    watch._thread.join(60)
    assert len(ends) == 2
    ends[1].close()


def test_lost_agent_is_logged_with_its_replacement(caplog):
    ends = []
    watch = AgentWatchdog(lambda: greeted(ends), lambda: False)
    try:
        wait_until(lambda: ends)
        ends[0].close()  # the agent has died
        wait_until(lambda: caplog.records)
    finally:
        watch.close()
        for end in ends:
            end.close()
    text = caplog.records[0].getMessage()
    assert text.startswith("the agent of this node does not answer: ")
    assert text.endswith(". If it has ended, another one starts and takes over the checkpoints in memory")


def test_ending_agent_removes_its_socket_before_closing_connections(tmp_path):
    arena = MemfdArena()
    store = NodeStore(arena, StoreSettings(budget="64MiB"), threads=1)
    asked, go_on = threading.Event(), threading.Event()

    def wait(_body, _owner):
        asked.set()
        assert go_on.wait(60)

    server = StoreServer(store, tmp_path / "agent.sock", more={"wait": Operation(type(None), type(None), wait)})
    server.start()
    here = connect_to_agent(tmp_path / "agent.sock")
    here.settimeout(30)
    send_message(here, Hello(HANDSHAKE_VERSION, ""))
    assert receive_message(here, Welcome).protocol == HANDSHAKE_VERSION
    send_request(here, "wait", None)
    assert asked.wait(30)
    ending = threading.Thread(target=server.close)
    ending.start()
    try:
        with contextlib.suppress(OSError):
            assert here.recv(1) == b""  # like a watchdog that learns that the agent ends
        assert not (tmp_path / "agent.sock").exists()
    finally:
        go_on.set()
        ending.join(60)
        here.close()
        store.close()
        arena.purge()
