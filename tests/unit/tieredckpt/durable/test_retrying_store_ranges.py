from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.durable.retrying_store import RangeRequest, assemble_ranges, plan_range_requests
from tieredckpt.errors import UsageError

DATA = random.Random(0).randbytes(2_000)
a_range = st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(lambda pair: tuple(sorted(pair)))
ranges_of_data = st.lists(a_range, max_size=20)


@given(ranges=ranges_of_data, gap=st.integers(0, 300), most=st.integers(1, 500))
def test_assembled_ranges_match_the_requested_ones(ranges: list[tuple[int, int]], gap: int, most: int):
    fetches = plan_range_requests(ranges, gap_bytes=gap, most_bytes=most)
    got = assemble_ranges(ranges, fetches, [DATA[fetch.start : fetch.stop] for fetch in fetches])
    assert [bytes(each) for each in got] == [DATA[start:stop] for start, stop in ranges]


@given(ranges=ranges_of_data, gap=st.integers(0, 300), most=st.integers(1, 500))
def test_no_byte_is_fetched_twice_and_no_request_is_too_long(ranges: list[tuple[int, int]], gap: int, most: int):
    fetches = plan_range_requests(ranges, gap_bytes=gap, most_bytes=most)
    assert all(0 < fetch.stop - fetch.start <= most for fetch in fetches)
    assert all(one.stop <= two.start for one, two in itertools.pairwise(fetches))


@given(ranges=ranges_of_data, gap=st.integers(0, 300))
def test_unasked_bytes_lie_only_in_gaps_that_are_short(ranges: list[tuple[int, int]], gap: int):
    asked = {byte for start, stop in ranges for byte in range(start, stop)}
    fetched = {
        byte
        for fetch in plan_range_requests(ranges, gap_bytes=gap, most_bytes=len(DATA))
        for byte in range(fetch.start, fetch.stop)
    }
    run = longest = 0
    for byte in range(len(DATA)):
        run = run + 1 if byte in fetched - asked else 0
        longest = max(longest, run)
    assert longest <= gap


def test_close_together_far_apart():
    fetches = plan_range_requests([(0, 10), (15, 20), (100, 130)], gap_bytes=5, most_bytes=25)
    assert fetches == [RangeRequest(0, 20), RangeRequest(100, 125), RangeRequest(125, 130)]


def test_single_fetch_returns_views():
    whole = bytearray(DATA)
    (got,) = assemble_ranges([(10, 20)], [RangeRequest(0, len(whole))], [whole])
    whole[10] ^= 1
    assert bytes(got) == bytes(whole[10:20])


@pytest.mark.parametrize("bad", [(-1, 0), (2, 1)])
def test_invalid_range_is_refused(bad: tuple[int, int]):
    with pytest.raises(UsageError, match="not a range"):
        plan_range_requests([bad], gap_bytes=0, most_bytes=1)
