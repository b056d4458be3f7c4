from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tieredckpt.durable.object_store import StopSignal, UploadCancelledError

FOREVER_S = 3600.0


def test_stop_interrupts_sleeps_and_sockets_of_children():
    stop = StopSignal()
    child = stop.child()
    ours, theirs = socket.socketpair()
    watched = threading.Event()

    def read() -> None:
        with child.shutting_down_on_stop(ours):
            watched.set()
            if not ours.recv(1):
                raise ConnectionResetError

    with ours, theirs, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(stop.wait, FOREVER_S), pool.submit(child.wait, FOREVER_S), pool.submit(read)]
        watched.wait()
        stop.set()
        for each in waiting:
            with pytest.raises(UploadCancelledError):
                each.result(30)


def test_a_child_leaves_its_parent_alone():
    stop = StopSignal()
    stop.child().set()
    stop.raise_if_set()


def test_children_of_the_stopped_are_stopped():
    stop = StopSignal()
    stop.set()
    assert stop.child().is_set()


def test_socket_error_without_a_stop_is_unchanged():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BrokenPipeError), StopSignal().shutting_down_on_stop(ours):
        raise BrokenPipeError


def test_following_a_cancel():
    stop, cancel = StopSignal(), threading.Event()
    with stop.linked_to(cancel):
        cancel.set()
        with pytest.raises(UploadCancelledError):
            stop.wait(FOREVER_S)
    with StopSignal().linked_to(None):
        pass
