"""Eviction plans for a new batch: a table of cases, and properties of every plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.batch_cache.cache_directory import CacheEntry, EvictionPlan, plan_eviction


def sized(*indices, size=10):
    return [CacheEntry(index, size) for index in indices]


@pytest.mark.parametrize(
    ("held", "cursor", "new", "limit", "expected"),
    [
        ([], 0, 0, 10, EvictionPlan(fits=True)),
        ([], 0, 0, 9, EvictionPlan(fits=False)),
        ([1, 2, 3], 0, 4, 40, EvictionPlan(fits=True)),
        ([1, 2, 3, 8], 4, 9, 40, EvictionPlan(fits=True, evict=(1, 2, 3))),  # everything behind the cursor, at once
        ([4, 5, 6, 9], 4, 7, 40, EvictionPlan(fits=True, evict=(9,))),  # then the farthest ahead
        ([4, 5, 6, 7], 4, 8, 40, EvictionPlan(fits=False)),  # no batch is evicted for one that is needed later
        ([1, 4, 5, 6], 4, 8, 40, EvictionPlan(fits=True, evict=(1,))),
        ([1, 2, 5, 6], 4, 3, 40, EvictionPlan(fits=True, evict=(1, 2))),  # behind, but nearer than others behind
        ([2, 3, 5, 6], 4, 1, 40, EvictionPlan(fits=False)),
        ([8, 9, 12, 16], 4, 5, 20, EvictionPlan(fits=True, evict=(16, 12, 9))),
        ([1, 8, 9, 12], 4, 10, 20, EvictionPlan(fits=False)),  # the evictable batches are too small, so none is evicted
    ],
)
def test_eviction_plan_table(held, cursor, new, limit, expected):
    assert plan_eviction(sized(*held), cursor, CacheEntry(new, 10), limit) == expected


_entries = st.lists(
    st.builds(CacheEntry, st.integers(0, 30), st.integers(1, 9)), max_size=12, unique_by=lambda entry: entry.index
)


@given(_entries, st.integers(0, 30), st.integers(31, 60), st.integers(1, 9), st.integers(0, 60))
def test_eviction_keeps_the_bound_and_the_nearest_batches(entries, cursor, index, size, limit):
    new = CacheEntry(index, size)
    room = plan_eviction(entries, cursor, new, limit)
    kept = [entry for entry in entries if entry.index not in room.evict]
    if room.fits:
        assert sum(entry.size_bytes for entry in [*kept, new]) <= limit
    else:
        assert room.evict == ()
        needed = [entry for entry in entries if cursor <= entry.index < index]
        assert sum(entry.size_bytes for entry in [*needed, new]) > limit
    gone_ahead = [gone for gone in room.evict if gone >= cursor]
    assert all(gone > index for gone in gone_ahead)
    if gone_ahead:
        assert all(entry.index >= cursor for entry in kept)
        assert all(entry.index < min(gone_ahead) for entry in kept)
