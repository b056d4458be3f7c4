"""Concurrent callers share a run, and no caller gets a result older than its call."""

import threading

import pytest

from peerstore import deadlines
from peerstore.errors import UnavailableError
from peerstore.peers.single_flight import SingleFlight
from tests.support.local_nodes import wait_until


class Work:
    """A function that counts its runs and can be made to wait."""

    def __init__(self):
        self.begun = 0
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def __call__(self):
        self.begun += 1
        number = self.begun
        self.entered.release()
        assert self.go_on.acquire(timeout=60)
        return number


def test_concurrent_callers_share_the_next_run():
    work = Work()
    turns = SingleFlight(work)
    found = {}

    def ask(name):
        found[name] = turns.run()

    first = threading.Thread(target=ask, args=("first",))
    first.start()
    assert work.entered.acquire(timeout=60)
    others = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for other in others:
        other.start()
    wait_until(lambda: turns.waiting == 21, "all have asked")
    work.go_on.release(1)
    while first.is_alive():
        first.join(60)
    work.go_on.release(len(others))
    for other in others:
        other.join(60)
    assert found.pop("first") == 1
    assert set(found) == set(range(20))
    assert set(found.values()) == {2}, "nobody who asked later has what was found before, and all share one turn"
    assert work.begun == 2


def test_recent_result_is_reused():
    now = [0.0]
    numbers = iter(range(1, 10))
    turns = SingleFlight(lambda: next(numbers), clock=lambda: now[0])
    assert turns.cached(2.0) == 1
    now[0] = 1.9
    assert turns.cached(2.0) == 1
    now[0] = 2.0
    assert turns.cached(2.0) == 2
    assert turns.run() == 3
    assert turns.cached(2.0) == 3
    turns.invalidate()
    assert turns.cached(2.0) == 4


def test_failed_run_does_not_affect_the_next_caller():
    outcomes = iter([ValueError("the first"), 2])

    def work():
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    turns = SingleFlight(work)
    with pytest.raises(ValueError, match="the first"):
        turns.run()
    assert turns.run() == 2


def test_an_answer_is_as_new_as_the_question():
    """A result includes all facts from before the call, even for callers that share a run."""
    facts = []
    turns = SingleFlight(lambda: tuple(facts))
    failures = []

    def say_and_look(name):
        for number in range(50):
            facts.append((name, number))
            if (name, number) not in turns.run():
                failures.append((name, number))

    threads = [threading.Thread(target=say_and_look, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "all have looked")
    assert failures == []


def test_caller_that_times_out_does_not_cancel_the_shared_run():
    work = Work()
    turns = SingleFlight(work)
    with deadlines.timeout_scope(0.2), pytest.raises(UnavailableError, match="in the time"):
        turns.run()  # the caller that starts the run
    with deadlines.timeout_scope(0.2), pytest.raises(UnavailableError, match="in the time"):
        turns.run()
    later = []
    patient = threading.Thread(target=lambda: later.append(turns.run()))
    patient.start()
    wait_until(lambda: turns.waiting == 1, "the first two have gone")
    work.go_on.release(2)
    patient.join(60)
    assert later == [2]


def test_shared_run_has_no_deadline_of_its_first_caller():
    left = []
    turns = SingleFlight(lambda: left.append(deadlines.remaining_s()))
    with deadlines.timeout_scope(60):
        turns.run()
    assert left == [float("inf")]
