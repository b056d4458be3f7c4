"""The watchdog ends calls that take too long, and no later calls."""

import threading

import pytest

from elastic.rendezvous.call_watchdog import CallWatchdog


@pytest.fixture
def guard():
    one = CallWatchdog()
    yield one
    one.close()


def test_a_call_that_was_left_is_not_ended_any_more(guard):
    """Two calls are late at one check; the second returns while the first is ended."""
    begun, left, ended = threading.Event(), threading.Event(), []
    both_in = threading.Barrier(2)

    def end_first():
        begun.set()
        assert left.wait(60)

    def second():
        with guard.limit(0.0, lambda: ended.append(left.is_set())):
            both_in.wait(60)
            assert begun.wait(60)
        left.set()

    other = threading.Thread(target=second)
    with guard.limit(0.0, end_first):
        other.start()
        both_in.wait(60)
        other.join(60)
    assert True not in ended


def test_interrupted_call_returns_only_after_its_end_callback(guard):
    ending, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def end():
        ending.set()
        assert go_on.wait(60)
        seen.append(over.is_set())

    def call():
        with guard.limit(0.0, end):
            assert ending.wait(60)
        over.set()

    seen = []
    thread = threading.Thread(target=call)
    thread.start()
    assert ending.wait(60)
    assert not over.wait(0.05)
    go_on.set()
    thread.join(60)
    assert over.is_set()
    assert not any(seen)


def test_ended_call_is_marked(guard):
    ended = threading.Event()
    with guard.limit(0.0, ended.set) as call:
        assert ended.wait(60)
    assert call.was_ended
    with guard.limit(60.0, ended.set) as call:
        pass
    assert not call.was_ended
