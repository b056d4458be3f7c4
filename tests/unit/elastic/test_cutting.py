"""Connections are ended by number, and a number may be somebody else's a moment later."""

import os
import select
import socket
import threading
from pathlib import Path

import pytest

from elastic.workers import cutting
from elastic.workers.cutting import cut_gloo, cut_store


@pytest.fixture
def pair():
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            yield here, there


def works(pair):
    here, there = pair
    try:
        here.sendall(b"x")
    except BrokenPipeError:
        return False
    return there.recv(1) == b"x"


class _TakenMeanwhile:
    """Addresses; whoever looks one up finds that the number of its socket is somebody else's afterwards."""

    def __init__(self, address, number, other):
        self._address, self._number, self._other = address, number, other

    def __contains__(self, address):
        if address != self._address:
            return False
        os.dup2(self._other, self._number)
        return True


@pytest.fixture
def stranger():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_number_that_became_somebody_else_s_is_not_cut_in_a_store_s_place(pair, stranger):
    here, _ = pair
    cut_store(_TakenMeanwhile(here.getpeername(), here.fileno(), stranger[0].fileno()))
    assert works(stranger)


def test_a_number_that_became_somebody_else_s_is_not_cut_in_gloo_s_place(pair, stranger, monkeypatch):
    here, _ = pair
    watched = cutting._watched

    def and_then_taken(poll):
        found = watched(poll)
        os.dup2(stranger[0].fileno(), here.fileno())
        return found

    with select.epoll() as poll:
        poll.register(here, select.EPOLLIN)
        monkeypatch.setattr(cutting, "_polls", lambda: [poll.fileno()])
        monkeypatch.setattr(cutting, "_watched", and_then_taken)
        assert cut_gloo() == 0
    assert works(stranger)


def test_what_a_poll_watches_is_cut(pair, stranger, monkeypatch):
    with select.epoll() as poll:
        poll.register(pair[0], select.EPOLLIN)
        monkeypatch.setattr(cutting, "_polls", lambda: [poll.fileno()])
        assert cut_gloo() == 1
    assert not works(pair)
    assert works(stranger)


def test_a_loop_that_is_in_another_call_is_not_taken_for_one_that_polls():
    reading, writing = os.pipe()

    def loop():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
        named.set()
        os.read(reading, 1)

    named = threading.Event()
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        assert named.wait(60)
        assert [*cutting._polls()] == []
    finally:
        os.write(writing, b"x")
        thread.join()
        os.close(reading)
        os.close(writing)
