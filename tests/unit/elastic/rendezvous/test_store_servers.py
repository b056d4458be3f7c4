"""Placement of keys on store members: the same on all ranks, even, and stable after a loss."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.rendezvous.store_servers import key_holders, store_nodes
from tests.support.example_counts import examples

KEYS = [f"elastic/3/default_pg/0//cpu//0/{rank}" for rank in range(8000)]
PINNED = ((12, 8), (382, 433, 926), ("d", "e", "f", "i"))


@settings(max_examples=examples(40), deadline=None)
@given(st.text(), st.integers(1, 5000), st.integers(1, 4))
def test_as_many_different_members_as_there_can_be(key, members, copies):
    held = key_holders(key, members, copies)
    assert len(set(held)) == len(held) == min(copies, members)
    assert all(0 <= one < members for one in held)
    assert held == key_holders(key, members, copies)
    assert held[:1] == key_holders(key, members, 1)


def test_placement_is_part_of_the_protocol():
    """Ranks compute it independently: it must be equal in all Python versions and releases."""
    assert key_holders("elastic/3/default_pg/0//cpu//0/16", 16) == PINNED[0]
    assert key_holders("a", 1024, 3) == PINNED[1]
    assert store_nodes(7, "abcdefghij", 4) == PINNED[2]


@pytest.mark.parametrize("members", [2, 3, 7, 16, 100])
def test_members_hold_equal_parts(members):
    for place in (0, 1):
        held = Counter(key_holders(key, members)[place] for key in KEYS)
        share = len(KEYS) / members
        assert len(held) == members
        assert max(held.values()) < share + 6 * share**0.5


def test_keys_of_a_dead_member_spread_over_all_others():
    heirs = Counter(second for first, second in (key_holders(key, 16) for key in KEYS) if first == 5)
    assert len(heirs) == 15
    assert max(heirs.values()) < 3 * sum(heirs.values()) / 15


def test_a_large_world_has_other_members_in_every_epoch():
    nodes = [f"n{number}" for number in range(3000)]
    drawn = [store_nodes(epoch, nodes) for epoch in range(8)]
    assert {len(one) for one in drawn} == {1024}
    assert all(list(one) == sorted(one, key=nodes.index) for one in drawn)
    assert len(set(drawn)) == 8
    assert store_nodes(3, nodes[:1024]) == tuple(nodes[:1024])


@pytest.mark.parametrize(("members", "copies"), [(0, 2), (2, 0)])
def test_key_without_members_is_refused(members, copies):
    with pytest.raises(ValueError, match="at least one"):
        key_holders("key", members, copies)
