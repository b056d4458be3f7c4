"""Parity groups are disjoint, complete, and spread over failure domains."""

import random
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerstore.errors import RequestError
from peerstore.membership.topology import NodeId, PeerNode
from peerstore.replication.replica_placement import parity_groups

untimed = settings(deadline=None)  # machines that run tests are busy


def racks(*sizes, tag=""):
    return [
        PeerNode(NodeId(f"n{rack}-{index}{tag}"), "", (("rack", f"r{rack}{tag}"),))
        for rack, size in enumerate(sizes)
        for index in range(size)
    ]


def crowded(found, nodes):
    rack = {node.id: node.failure_domain("rack") for node in nodes}
    return [group for group in found if len({rack[node] for node in group}) < len(group)]


any_sizes = st.lists(st.integers(1, 9), max_size=14)
tags = st.integers(0, 10**6).map(str)


@untimed
@given(any_sizes, st.integers(2, 9), tags)
def test_every_node_is_in_a_group_of_about_the_requested_size(sizes, size, tag):
    nodes = racks(*sizes, tag=tag)
    found = parity_groups(nodes, size)
    members = sorted(node for group in found for node in group)
    assert members == (sorted(node.id for node in nodes) if len(nodes) > 1 else [])
    assert all(2 <= len(group) < 2 * size for group in found)


@untimed
@given(st.integers(2, 14), st.integers(1, 9), st.integers(2, 9), tags)
def test_equal_racks_are_never_crowded(count, each, size, tag):
    nodes = racks(*[each] * count, tag=tag)
    assert not crowded(parity_groups(nodes, size), nodes)


@untimed
@given(any_sizes, st.integers(2, 9), tags)
def test_small_racks_are_never_crowded(sizes, size, tag):
    nodes = racks(*sizes, tag=tag)
    if max(sizes, default=0) * (2 * size - 1) <= len(nodes):
        assert not crowded(parity_groups(nodes, size), nodes)


@untimed
@given(any_sizes, st.integers(2, 9), tags, st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_given_does_not_matter(sizes, size, tag, shuffling):
    nodes = racks(*sizes, tag=tag)
    found = parity_groups(nodes, size)
    shuffling.shuffle(nodes)
    assert parity_groups(nodes, size) == found


def test_groups_have_the_requested_size_when_it_divides_well():
    assert Counter(map(len, parity_groups(racks(*[8] * 16), 8))) == {8: 16}
    assert Counter(map(len, parity_groups(racks(*[8] * 4), 8))) == {4: 8}
    assert Counter(map(len, parity_groups(racks(32), 8))) == {8: 4}


@pytest.mark.parametrize("tag", ["", "a", "b", "c"])
def test_larger_rack_makes_groups_smaller_and_not_crowded(tag):
    nodes = racks(8, 6, 4, tag=tag)
    assert not crowded(parity_groups(nodes, 8), nodes)


def test_groups_are_apart_in_zones_when_there_are_enough():
    nodes = [
        PeerNode(NodeId(f"n{zone}{rack}{index}"), "", (("rack", f"r{rack}"), ("zone", f"z{zone}")))
        for zone in range(4)
        for rack in range(3)
        for index in range(2)
    ]
    zone = {node.id: node.failure_domain("zone") for node in nodes}
    assert all(len({zone[node] for node in group}) == len(group) == 4 for group in parity_groups(nodes, 4))


def test_few_groups_change_when_a_node_leaves():
    shares = []
    for seed in range(16):
        nodes = racks(*[1] * 128, tag=f"-{seed}")
        gone = random.Random(seed).choice(nodes)
        before, after = parity_groups(nodes, 8), parity_groups([node for node in nodes if node != gone], 8)
        shares.append(len(set(before) - set(after)))
    assert statistics.mean(shares) <= 5  # of 16


def test_group_size_of_one_is_refused():
    with pytest.raises(RequestError, match="2 or more"):
        parity_groups(racks(4), 1)
