"""One budget for all that is done for who waits."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from peerstore import deadlines


def late():
    return LookupError("late")


def test_the_nearest_deadline_counts_and_only_in_its_block():
    assert deadlines.left() == math.inf
    assert deadlines.left(5.0) == 5.0
    with deadlines.within(100.0):
        with deadlines.within(1000.0):
            assert 90.0 < deadlines.left() <= 100.0
        with deadlines.within(10.0), deadlines.within(None):
            assert 5.0 < deadlines.left() <= 10.0
            assert deadlines.left(3.0) == 3.0
            with deadlines.lifted():
                assert deadlines.left() == math.inf
        assert deadlines.left() > 10.0
    assert not deadlines.over()


@pytest.mark.parametrize("seconds", [0.0, -1.0, -math.inf, math.nan])
def test_no_time_is_no_time(seconds):
    with deadlines.within(seconds):
        assert deadlines.over()
        assert deadlines.left(5.0) == 0.0


def test_a_thread_has_it_where_it_is_carried():
    with deadlines.within(100.0), ThreadPoolExecutor(1) as pool:
        assert pool.submit(deadlines.left).result() == math.inf
        assert pool.submit(deadlines.carried(deadlines.left)).result() <= 100.0
        assert pool.submit(deadlines.left).result() == math.inf


def test_work_that_ends_in_time_gives_what_it_gives():
    assert deadlines.in_time(threading.get_ident, late) == threading.get_ident()
    with deadlines.within(60.0):
        assert deadlines.in_time(lambda: deadlines.left() <= 60.0, late)
        with pytest.raises(ZeroDivisionError):
            deadlines.in_time(lambda: 1 / 0, late)
        with pytest.raises(TimeoutError, match="its own"):
            deadlines.in_time(lambda: (_ for _ in ()).throw(TimeoutError("its own")), late)


def test_work_that_does_not_is_not_waited_for():
    go_on, ended = threading.Event(), threading.Event()

    def work():
        assert go_on.wait(60)
        ended.set()

    with deadlines.within(0.1), pytest.raises(LookupError):
        deadlines.in_time(work, late)
    go_on.set()
    assert ended.wait(60)
