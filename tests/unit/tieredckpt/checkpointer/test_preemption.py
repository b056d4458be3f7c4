"""SIGTERM around a last save: starting threads, forked children and the previous handler."""

import os
import signal
import threading

import pytest

from tests.support.local_nodes import wait_until
from tieredckpt.checkpointer.preemption import PreemptionHandler


@pytest.fixture
def heard():
    """Calls of the previous SIGTERM handler, which runs after the last save."""
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append("before"))
    yield calls
    signal.signal(signal.SIGTERM, before)


def test_signal_may_interrupt_a_starting_thread(heard):
    flushed = []
    told = PreemptionHandler(flushed.append, grace_s=0.2)
    with threading._active_limbo_lock:
        signal.raise_signal(signal.SIGTERM)
    assert told.requested
    wait_until(lambda: heard, "the time for one more save is over")
    assert len(flushed) == 1
    told.close()


def test_forked_child_uses_the_previous_handler(heard):
    told = PreemptionHandler(lambda _left_s: pytest.fail("a child flushes nothing"), grace_s=60.0)
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(len(heard))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    told.close()
    assert heard == []


def test_save_in_time_prevents_another_flush(heard):
    flushed = []
    told = PreemptionHandler(flushed.append, grace_s=60.0)
    signal.raise_signal(signal.SIGTERM)
    assert (told.requested, heard) == (True, [])
    told.flush_and_exit()
    assert (len(flushed), heard, told.requested) == (1, ["before"], False)
    told.close()
