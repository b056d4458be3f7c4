"""Partitions: each node is in one, sizes are even, and a membership change affects only one."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore.membership.topology import MAX_DELEGATES, PARTITION_MIN_NODES, DelegateCandidates, NodePartitions

NAMES = st.sets(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,12}", fullmatch=True), min_size=1, max_size=200)


def hosts(count):
    return [f"ip-10-{number // 65536}-{number // 256 % 256}-{number % 256}" for number in range(count)]


def cut(nodes, split_from=2):
    districts = NodePartitions(nodes, split_from=split_from)
    return {frozenset(districts.partition_of(node)) for node in nodes}


@given(NAMES, st.integers(2, 64))
def test_every_node_is_in_exactly_one_partition(nodes, split_from):
    districts = NodePartitions(nodes, split_from=split_from)
    for me in nodes:
        assert me in districts.partition_of(me)
        seen = [*districts.partition_of(me), *(node for members in districts.other_partitions(me) for node in members)]
        assert sorted(seen) == sorted(nodes)


@given(NAMES, st.randoms())
def test_partitions_are_independent_of_the_node_order(nodes, random):
    shuffled = list(nodes)
    random.shuffle(shuffled)
    one, other = NodePartitions(nodes, split_from=2), NodePartitions(shuffled, split_from=2)
    for me in nodes:
        assert one.partition_of(me) == other.partition_of(me)
        assert one.other_partitions(me) == other.other_partitions(me)


@given(NAMES)
def test_delegates_have_the_expected_partition(nodes):
    districts = NodePartitions(nodes, split_from=2)
    for me in nodes:
        for members in districts.other_partitions(me):
            assert all(set(districts.partition_of(lookout)) == set(members) for lookout in members)


@given(NAMES, st.integers(2, 300))
def test_small_job_is_a_single_partition(nodes, split_from):
    districts = NodePartitions(nodes, split_from=split_from)
    if len(nodes) < split_from:
        assert all(set(districts.partition_of(me)) == nodes and districts.other_partitions(me) == [] for me in nodes)


@given(NAMES, st.data())
def test_removed_node_changes_only_its_own_partition(nodes, data):
    """This holds while the number of nodes needs the same number of partitions."""
    gone = data.draw(st.sampled_from(sorted(nodes)))
    left = nodes - {gone}
    if len(left).bit_length() // 2 != len(nodes).bit_length() // 2:
        return
    before, after = cut(nodes), cut(left) if left else set()
    assert {district - {gone} for district in before} - {frozenset()} == after


@pytest.mark.parametrize("count", [64, 100, 511, 512, 1000, 2047, 2048, 10_000])
def test_partition_count_and_size_are_near_the_square_root(count):
    nodes = hosts(count)
    districts = cut(nodes, PARTITION_MIN_NODES)
    root = math.sqrt(count)
    assert 0.5 * root <= len(districts) <= 1.5 * root
    assert max(map(len, districts)) <= 2.5 * root


def test_doubling_the_partition_count_splits_each_in_two():
    nodes = hosts(2047)
    small, large = cut(nodes), cut([*nodes, "one-more"])
    assert len(large) == 2 * len(small)
    assert all(any(district - {"one-more"} <= before for before in small) for district in large)


def test_delegates_are_loaded_evenly():
    nodes = hosts(1000)
    districts = NodePartitions(nodes)
    asked = Counter(members[0] for me in nodes for members in districts.other_partitions(me))
    mean = sum(asked.values()) / len(nodes)
    assert max(asked.values()) <= 3 * mean
    assert len(asked) >= 0.9 * len(nodes), "everybody is somebody's lookout"


def test_node_outside_the_member_list_sees_all_nodes():
    nodes = hosts(500)
    districts = NodePartitions(nodes)
    seen = [
        *districts.partition_of("stranger"),
        *(node for members in districts.other_partitions("stranger") for node in members),
    ]
    assert sorted(seen) == sorted(nodes)


def test_partitions_of_no_nodes_are_empty():
    assert NodePartitions(()).partition_of("me") == ()
    assert NodePartitions(()).other_partitions("me") == []


# -- whom to ask next -------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.sets(st.sampled_from("abcdefgh")))
def test_live_delegates_are_tried_in_order_up_to_the_limit(members, gone):
    errand = DelegateCandidates(members, gone=gone.__contains__)
    asked = list(iter(errand.next_delegate, None))
    assert asked == [node for node in members if node not in gone][:MAX_DELEGATES]
    assert errand.next_delegate() is None


def test_delegates_that_died_are_skipped():
    gone = set()
    errand = DelegateCandidates(("a", "b", "c"), gone=gone.__contains__)
    assert errand.next_delegate() == "a"
    gone.add("b")
    assert errand.next_delegate() == "c"
