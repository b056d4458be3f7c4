"""A clock that counts only the time during which its process runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.control.running_clock import RunningClock
from tests.support.example_counts import examples


class Hand:
    """A clock that the test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_clock_leap_counts_as_one_interval_and_reports_the_rest_once():
    hand = Hand()
    clock = RunningClock(1.0, hand)
    began = clock()
    hand.now += 600.0
    assert clock() == began + 1.0
    assert clock() == began + 1.0
    assert clock.skipped() == 599.0
    assert clock.skipped() == 0.0


def test_clock_set_back_stands_still():
    hand = Hand()
    clock = RunningClock(1.0, hand)
    began = clock()
    hand.now -= 50.0
    assert clock() == began
    hand.now += 0.5
    assert clock() == began + 0.5
    assert clock.skipped() == 0.0


@settings(max_examples=examples(100))
@given(st.lists(st.floats(0.0, 1e4), max_size=30), st.floats(0.01, 60.0))
def test_counted_and_skipped_time_add_up_to_the_elapsed_time(gaps, interval_s):
    hand = Hand()
    clock = RunningClock(interval_s, hand)
    began, skipped, last = clock(), 0.0, clock()
    for gap in gaps:
        hand.now += gap
        now = clock()
        assert 0.0 <= now - last <= interval_s * (1 + 1e-9) + 1e-6
        last = now
        skipped += clock.skipped()
    assert last - began + skipped == pytest.approx(sum(gaps), abs=1e-6)
