"""One deadline for all the work of a call."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from peerstore import deadlines


def late():
    return LookupError("late")


def test_the_nearest_deadline_counts_and_only_in_its_block():
    assert deadlines.remaining_s() == math.inf
    assert deadlines.remaining_s(5.0) == 5.0
    with deadlines.timeout_scope(100.0):
        with deadlines.timeout_scope(1000.0):
            assert 90.0 < deadlines.remaining_s() <= 100.0
        with deadlines.timeout_scope(10.0), deadlines.timeout_scope(None):
            assert 5.0 < deadlines.remaining_s() <= 10.0
            assert deadlines.remaining_s(3.0) == 3.0
            with deadlines.no_deadline():
                assert deadlines.remaining_s() == math.inf
        assert deadlines.remaining_s() > 10.0
    assert not deadlines.expired()


@pytest.mark.parametrize("seconds", [0.0, -1.0, -math.inf, math.nan])
def test_zero_timeout_expires_at_once(seconds):
    with deadlines.timeout_scope(seconds):
        assert deadlines.expired()
        assert deadlines.remaining_s(5.0) == 0.0


def test_thread_inherits_a_deadline_only_explicitly():
    with deadlines.timeout_scope(100.0), ThreadPoolExecutor(1) as pool:
        assert pool.submit(deadlines.remaining_s).result() == math.inf
        assert pool.submit(deadlines.inherit_deadline(deadlines.remaining_s)).result() <= 100.0
        assert pool.submit(deadlines.remaining_s).result() == math.inf


def test_work_within_the_deadline_returns_its_result():
    assert deadlines.run_within_deadline(threading.get_ident, late) == threading.get_ident()
    with deadlines.timeout_scope(60.0):
        assert deadlines.run_within_deadline(lambda: deadlines.remaining_s() <= 60.0, late)
        with pytest.raises(ZeroDivisionError):
            deadlines.run_within_deadline(lambda: 1 / 0, late)
        with pytest.raises(TimeoutError, match="its own"):
            deadlines.run_within_deadline(lambda: (_ for _ in ()).throw(TimeoutError("its own")), late)


def test_work_beyond_the_deadline_is_not_awaited():
    go_on, ended = threading.Event(), threading.Event()

    def work():
        assert go_on.wait(60)
        ended.set()

    with deadlines.timeout_scope(0.1), pytest.raises(LookupError):
        deadlines.run_within_deadline(work, late)
    go_on.set()
    assert ended.wait(60)
