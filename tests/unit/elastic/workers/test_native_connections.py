"""Connections are closed by descriptor, which another connection may reuse a moment later."""

import contextlib
import os
import select
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic.control.control_plane import RankAssignment
from elastic.workers import native_connections
from elastic.workers.native_connections import abort_gloo_connections, close_gloo_connections, close_store_connections
from elastic.workers.process_groups import ProcessGroups


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
    """Addresses whose lookup lets another socket take over the descriptor."""

    def __init__(self, address, number, other):
        self._address, self._number, self._other = address, number, other

    def __contains__(self, address):
        if address != self._address:
            return False
        os.dup2(self._other, self._number)
        return True


@pytest.fixture
def polled(pair, monkeypatch):
    """A loop of gloo's that waits for one end of the connection."""
    with select.epoll() as poll:
        poll.register(pair[0], select.EPOLLIN)
        monkeypatch.setattr(native_connections, "_polls", lambda: [poll.fileno()])
        yield poll


@pytest.fixture
def stranger():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_reused_descriptor_of_a_store_connection_is_not_closed(pair, stranger):
    here, _ = pair
    close_store_connections(_TakenMeanwhile(here.getpeername(), here.fileno(), stranger[0].fileno()))
    assert works(stranger)


@pytest.mark.parametrize("end", [abort_gloo_connections, close_gloo_connections])
def test_reused_descriptor_of_a_gloo_connection_is_not_closed(end, polled, pair, stranger, monkeypatch):
    here, _ = pair
    watched = native_connections._watched

    def and_then_taken(poll):
        found = watched(poll)
        os.dup2(stranger[0].fileno(), here.fileno())
        return found

    monkeypatch.setattr(native_connections, "_watched", and_then_taken)
    assert end() == 0
    assert works(stranger)


def test_polled_connections_are_cut(polled, pair, stranger):
    assert close_gloo_connections() == 1
    assert not works(pair)
    assert works(stranger)


def test_aborted_connection_ends_before_its_writes_fail(polled, pair, stranger, monkeypatch):
    here, there = pair
    monkeypatch.setattr(native_connections, "_HELD_S", 60.0)
    assert abort_gloo_connections() == 1
    assert polled.poll(60)
    assert here.recv(1) == b""
    assert works(pair)
    here.close()  # as gloo does when it has read the end
    there.sendall(b"x")
    native_connections.release_aborted_connections()
    there.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        assert there.recv(1) == b""
    assert works(stranger)


def test_sockets_of_aborted_connections_close_by_themselves(polled, pair, monkeypatch):
    here, there = pair
    monkeypatch.setattr(native_connections, "_HELD_S", 0.0)
    assert abort_gloo_connections() == 1
    here.close()
    there.settimeout(60)
    assert there.recv(1) == b""


def test_no_collective_of_an_aborted_group_waits_for_its_timeout():
    """Ranks that send one message after the other, so that aborts find sends in flight."""

    def repeat(rank, store, ready, ended):
        group = dist.ProcessGroupGloo(store, rank, 4, timedelta(seconds=20))
        tensor = torch.ones(10_000)
        group.allreduce([tensor]).wait()
        ready.wait(60)
        try:
            while True:
                group.allreduce([tensor]).wait()
        except RuntimeError as error:
            ended.append(str(error))

    for _ in range(25):
        store, ready, ended = dist.HashStore(), threading.Barrier(5), []
        ranks = [threading.Thread(target=repeat, args=(rank, store, ready, ended)) for rank in range(4)]
        for rank in ranks:
            rank.start()
        ready.wait(60)
        assert abort_gloo_connections()
        for rank in ranks:
            rank.join()
        assert len(ended) == 4
        assert not [text for text in ended if "Timed out waiting" in text]


@pytest.mark.parametrize("listens", [False, True], ids=["nothing listens", "the store is silent"])
def test_abort_ends_the_wait_for_a_store(listens, monkeypatch):
    connecting, real, errors = threading.Event(), dist.TCPStore, []

    def connect(*args, **kwargs):
        connecting.set()
        return real(*args, **kwargs)

    def initialize():
        try:
            groups.initialize()
        except dist.DistError as error:
            errors.append(error)

    monkeypatch.setattr(dist, "TCPStore", connect)
    with socket.socket() as store:
        store.bind(("127.0.0.1", 0))
        if listens:
            store.listen()
        address = "127.0.0.1:{1}".format(*store.getsockname())
        groups = ProcessGroups(RankAssignment(0, 0, 1, 0, 1, 0, 1, address), backend="gloo")
        waiting = threading.Thread(target=initialize, daemon=True)
        waiting.start()
        assert connecting.wait(60)
        if listens:
            accepted, _ = store.accept()
        groups.abort()
        waiting.join(100)
        if listens:
            accepted.close()
        groups.destroy(broken=True)
    assert not waiting.is_alive(), "it waits for the store's whole timeout"
    assert len(errors) == 1


def test_gloo_loop_in_another_call_is_not_taken_for_polling():
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
        assert reading not in native_connections._polls()  # loops of earlier tests may still run here
    finally:
        os.write(writing, b"x")
        thread.join()
        os.close(reading)
        os.close(writing)


@pytest.fixture
def python_poll(stranger):
    """A Python thread that waits in epoll for a connection unrelated to gloo."""
    with select.epoll() as poll:
        poll.register(stranger[1], select.EPOLLIN)
        thread = threading.Thread(target=poll.poll)
        thread.start()
        yield
        stranger[0].sendall(b"y")
        thread.join()


def test_gloo_loops_without_a_name_are_cut_and_python_threads_are_not(python_poll, stranger):
    """Torch before 2.13 does not name gloo's loops."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = {}

    def make(rank):
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        groups[rank] = dist.ProcessGroupGloo(client, rank, 2, timedelta(seconds=60))

    ranks = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    work = groups[0].allreduce([torch.ones(4)])
    own = Path(f"/proc/self/task/{os.getpid()}/comm").read_text()
    for task in native_connections._tasks():
        (task / "comm").write_text(own)
    assert native_connections._tasks() == []
    assert close_gloo_connections()  # at least one end: the other loop sees it and closes its own
    with pytest.raises(RuntimeError):
        work.wait()
    assert works(stranger)
