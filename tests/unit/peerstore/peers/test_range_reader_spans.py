"""Targets in a shard are joined and cut without losing a byte."""

from __future__ import annotations

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from peerstore.peers.range_reader import ReadSpan, ReadTarget, coalesce_targets, span_digest, split_span


def targets_of(runs):
    """Return targets of these sizes, each ``gap`` bytes after the previous one."""
    at, found = 0, []
    for gap, size in runs:
        at += gap
        found.append(ReadTarget(at, at + size, memoryview(bytearray(size))))
        at += size
    return found


def fill(spans, shard):
    for span in spans:
        at = span.start
        for view in span.views:
            view[:] = shard[at : at + len(view)]
            at += len(view)
        assert at == span.stop


def test_adjacent_targets_share_a_span():
    first, second, third, fourth = targets = targets_of([(5, 10), (0, 20), (64, 7), (65, 9)])
    one, other = coalesce_targets(reversed(targets))
    assert (one.start, one.stop, other.start, other.stop) == (5, 106, 171, 180)
    assert [len(view) for view in one.views] == [10, 20, 64, 7]
    assert one.views[0] is first.view
    assert one.views[1] is second.view
    assert one.views[3] is third.view
    assert other.views == (fourth.view,)


def test_overlapping_targets_are_read_twice():
    wanted = [ReadTarget(0, 8, memoryview(bytearray(8))), ReadTarget(4, 12, memoryview(bytearray(8)))]
    assert [(span.start, span.stop) for span in coalesce_targets(wanted)] == [(0, 8), (4, 12)]


def test_empty_targets_need_no_span():
    assert coalesce_targets([]) == []
    assert coalesce_targets([ReadTarget(3, 3, memoryview(b""))]) == []


@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 300)), max_size=20),
    st.integers(1, 128),
    st.integers(1, 4),
)
def test_every_target_is_filled_with_its_own_bytes(runs, chunk, steps):
    targets = targets_of(runs)
    size = targets[-1].stop if targets else 0
    shard = bytes(xxhash.xxh3_64_intdigest(at.to_bytes(4, "big")) % 256 for at in range(size))
    spans = [part for span in coalesce_targets(targets) for part in split_span(span, chunk, steps * chunk)]
    fill(spans, shard)
    for target in targets:
        assert bytes(target.view) == shard[target.start : target.stop]
    for span in spans:
        inside = range(span.start + 1, span.stop)
        whole = span.start % chunk == 0 and span.stop % chunk == 0
        assert whole or not any(edge % chunk == 0 for edge in inside)
        assert span.stop - span.start <= steps * chunk
        assert span_digest(span) == xxhash.xxh3_64_digest(shard[span.start : span.stop])[::-1]


def test_a_digest_is_that_of_all_views():
    data = bytes(range(200))
    views = tuple(memoryview(data)[at : at + 33] for at in range(0, 200, 33))
    assert span_digest(ReadSpan(0, 200, views)) == span_digest(ReadSpan(0, 200, (memoryview(data),)))
