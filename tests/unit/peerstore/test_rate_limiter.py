from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore.rate_limiter import SEND_SLICE_BYTES, RateLimiter, TokenBucket

steps = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5_000)), min_size=1, max_size=50)


@given(steps=steps, rate=st.integers(1, 10_000), burst=st.integers(1, 5_000))
def test_rate_and_burst_are_never_exceeded(steps: list[tuple[float, int]], rate: int, burst: int):
    bucket = TokenBucket(rate, burst, now=0.0)
    now, sent = 0.0, 0
    for later, amount in steps:
        now += later
        wait_s = bucket.take(amount, now)
        sent += amount
        assert sent <= burst + rate * (now + wait_s) + 1e-3 * rate


@given(steps=steps, rate=st.integers(1, 10_000))
def test_obedient_sender_reaches_the_rate(steps: list[tuple[float, int]], rate: int):
    """A sender that always sends takes the time that the rate gives, and no more."""
    bucket = TokenBucket(rate, burst=1, now=0.0)
    now = 0.0
    for _, amount in steps:
        now += bucket.take(amount, now)
    total = sum(amount for _, amount in steps)
    assert now == pytest.approx((total - 1) / rate, abs=1e-6)


def test_clock_set_back_adds_no_tokens():
    bucket = TokenBucket(rate=10, burst=10, now=100.0)
    assert bucket.take(10, 100.0) == 0
    assert bucket.take(10, 50.0) == pytest.approx(1.0)
    assert bucket.take(10, 100.0) == pytest.approx(2.0)


def test_the_cost_is_counted_over_all_threads():
    slept, lock = [], threading.Lock()

    def sleep(seconds: float) -> None:
        with lock:
            slept.append(seconds)

    limit = RateLimiter(1_000_000, clock=lambda: 0.0, sleep=sleep)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: limit.acquire(limit.slice_bytes), range(40)))
    assert limit.throttled_s == pytest.approx(sum(slept))
    assert max(slept) == pytest.approx(39 * limit.slice_bytes / 1_000_000)


def test_no_limit_costs_nothing():
    limit = RateLimiter(0, sleep=lambda _: pytest.fail("slept"))
    for _ in range(100):
        limit.acquire(1 << 30)
    assert limit.throttled_s == 0
    assert limit.slice_bytes == SEND_SLICE_BYTES


@pytest.mark.parametrize(("rate", "slice_bytes"), [(1, 16 << 10), (1 << 20, 128 << 10), (1 << 30, 1 << 20)])
def test_slices_are_short_enough_to_be_interrupted(rate: int, slice_bytes: int):
    assert RateLimiter(rate).slice_bytes == slice_bytes
