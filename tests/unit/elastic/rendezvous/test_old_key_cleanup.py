"""Cleanup of one world's calls and connections leaves the next world alone."""

from __future__ import annotations

import contextlib
import socket
import threading

from elastic.rendezvous.call_watchdog import CallWatchdog
from elastic.rendezvous.old_key_cleanup import OldKeyCleanup

PATIENCE_S = 30.0
MOMENT_S = 0.5
"""Longer than a guard waits between two looks."""


def test_a_call_that_was_left_is_not_ended_any_more():
    guard, entered, left = CallWatchdog(), threading.Event(), threading.Event()
    found = []

    def end():
        if not entered.is_set():
            entered.set()
            found.append(left.wait(MOMENT_S))

    with guard.limit(0.0, end):
        assert entered.wait(PATIENCE_S)
    left.set()
    guard.close()
    assert found == [False], "the next connection to the same place would have been cut"


def test_a_sweep_that_was_ended_cuts_nothing_any_more():
    """Its server does not answer; the next world's connection has the same address."""
    server = socket.create_server(("127.0.0.1", 0))
    again, is_over = threading.Event(), threading.Event()

    def cut(_addresses):
        if is_over.is_set():
            again.set()
        return 0

    sweep = OldKeyCleanup(f"127.0.0.1:{server.getsockname()[1]}", 1, close_connections=cut)
    with server, contextlib.ExitStack() as accepted:
        for _ in range(2):  # the reachability check and the client
            accepted.enter_context(server.accept()[0])
        sweep.stop()
        is_over.set()
        assert not again.wait(MOMENT_S)
    assert sweep.join(PATIENCE_S)
