"""Somebody who calls an agent while nobody needs anything of it, and how that ends."""

import contextlib
import socket
import threading
import time

import pytest

from peerstore import frames
from peerstore.agent_watch import AgentWatch
from peerstore.arena import MemfdArena
from peerstore.client import connect
from peerstore.frames import PROTOCOL, Greeting, Request
from peerstore.operations import Operation
from peerstore.server import StoreServer
from peerstore.settings import StoreSettings
from peerstore.store import NodeStore
from tests.support.neighbours import until

pytestmark = pytest.mark.slow


def greeted(ends):
    here, there = socket.socketpair()
    there.settimeout(30)
    frames.send(there, Greeting(PROTOCOL, ""))
    ends.append(there)
    return here


def test_an_agent_that_says_nothing_does_not_keep_its_watch_from_ending():
    ends = []
    with contextlib.ExitStack() as cleanup:
        watch = AgentWatch(lambda: greeted(ends), lambda: False)
        cleanup.callback(lambda: [end.close() for end in ends])
        until(lambda: ends)
        assert frames.receive(ends[0], Greeting).protocol == PROTOCOL
        assert frames.receive(ends[0], Request).op == "epoch"
        began = time.monotonic()
        watch.close()
        assert time.monotonic() - began < 30


def test_a_start_that_is_under_way_is_not_waited_for_and_no_other_follows():
    ends, starting, go_on = [], threading.Event(), threading.Event()

    def connect():
        if ends:
            starting.set()
            assert go_on.wait(60)
        return greeted(ends)

    watch = AgentWatch(connect, lambda: False)
    until(lambda: ends)
    ends[0].close()  # the agent has died
    assert starting.wait(60)
    began = time.monotonic()
    watch.close()
    assert time.monotonic() - began < 30
    go_on.set()
    watch._thread.join(60)
    assert len(ends) == 2
    ends[1].close()


def test_an_agent_that_ends_takes_its_socket_along_before_anybody_hears_of_it(tmp_path):
    arena = MemfdArena()
    store = NodeStore(arena, StoreSettings(budget="64MiB"), threads=1)
    asked, go_on = threading.Event(), threading.Event()

    def wait(_body, _owner):
        asked.set()
        assert go_on.wait(60)

    server = StoreServer(store, tmp_path / "agent.sock", more={"wait": Operation(type(None), type(None), wait)})
    server.start()
    here = connect(tmp_path / "agent.sock")
    here.settimeout(30)
    frames.send(here, Greeting(PROTOCOL, ""))
    assert frames.receive(here, Greeting).protocol == PROTOCOL
    frames.send(here, Request("wait", frames.encode_raw(None)))
    assert asked.wait(30)
    ending = threading.Thread(target=server.close)
    ending.start()
    try:
        with contextlib.suppress(OSError):
            assert here.recv(1) == b""  # as who looks after it hears that it ends
        assert not (tmp_path / "agent.sock").exists()
    finally:
        go_on.set()
        ending.join(60)
        here.close()
        store.close()
        arena.purge()
