"""Replica placement: its guarantees for clusters of every size and shape."""

import math
import random
import statistics
from collections import Counter, defaultdict

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peerstore.errors import RequestError
from peerstore.membership.topology import NodeId, PeerNode, failure_domains, memory_shares
from peerstore.replication.replica_placement import MAX_SHARE_FACTOR, ReplicaPlacement, place_replicas

RACK = ("rack",)
untimed = settings(deadline=None)  # machines that run tests are busy


def cluster(*sizes, memory=(0,), zones=None, tag=""):
    """Racks of these sizes; node i of the whole has memory[i % len(memory)], rack i is in zones[i]."""
    found = []
    for rack, size in enumerate(sizes):
        labels = {"rack": f"r{rack}{tag}"} | ({"zone": zones[rack]} if zones else {})
        for index in range(size):
            memory_bytes = memory[len(found) % len(memory)]
            found.append(PeerNode(NodeId(f"n{rack}-{index}{tag}"), "", tuple(sorted(labels.items())), memory_bytes))
    return found


unknown = st.just(0)


@st.composite
def clusters(draw, memory=unknown):
    sizes = draw(st.lists(st.integers(1, 9), max_size=8))
    zones = draw(st.none() | st.lists(st.sampled_from("abc"), min_size=len(sizes), max_size=len(sizes)))
    tag = str(draw(st.integers(0, 10**6)))  # other names, other hashes
    nodes = cluster(*sizes, memory=draw(st.lists(memory, min_size=1, max_size=7)), zones=zones, tag=tag)
    unlabelled = draw(st.sets(st.integers(0, max(0, len(nodes) - 1)), max_size=3))
    return [PeerNode(node.id, "", (), node.memory_bytes) if i in unlabelled else node for i, node in enumerate(nodes)]


sizes_of_memory = st.sampled_from([0, 1 << 30, 1000 << 20, 2 << 30, 8 << 30])
any_cluster = clusters(memory=sizes_of_memory)
copies_of = st.integers(1, 3)


def loads(placement):
    """Return for each node the number of nodes whose replicas it holds."""
    held = Counter(partner for partners in placement.partners.values() for partner in partners)
    return {node: held[node] for node in placement.partners}


def fatal_racks(placement, nodes):
    rack = failure_domains(nodes, RACK).innermost
    return {frozenset(rack[node] for node in copyset) for copyset in placement.copysets()}


# -- every cluster ----------------------------------------------------------------------------------------------------


@untimed
@given(any_cluster, copies_of)
def test_every_node_gets_all_its_partners(nodes, copies):
    partners = place_replicas(nodes, copies=copies).partners
    assert set(partners) == {node.id for node in nodes}
    for node, found in partners.items():
        assert len(found) == min(copies, len(nodes)) - 1
        assert len({node, *found}) == len(found) + 1
        assert set(found) <= set(partners)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7, 9, 13, 101])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("racks", ["one", "each its own"])
def test_small_prime_and_odd_numbers_of_nodes(count, copies, racks):
    nodes = cluster(count) if racks == "one" else cluster(*[1] * count)
    placement = place_replicas(nodes, copies=copies)
    kept = min(copies, count) - 1
    assert all(len(found) == kept for found in placement.partners.values())
    assert all(load == kept for load in loads(placement).values())


@untimed
@given(any_cluster, copies_of, st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_given_does_not_matter(nodes, copies, shuffling):
    placement = place_replicas(nodes, copies=copies)
    shuffling.shuffle(nodes)
    assert place_replicas(nodes, copies=copies) == placement


def test_every_process_and_release_gives_the_same_answer():
    # agents of two releases serve one job while it is upgraded: changing this on purpose needs a new wire version
    placement = place_replicas(cluster(5, 3, 4, 1, 7, memory=(2, 2, 2, 5), zones="aabba"), copies=3)
    assert xxhash.xxh3_64_hexdigest(repr(sorted(placement.partners.items())).encode()) == "1fb9d57aaa637903"


@untimed
@given(any_cluster, copies_of)
def test_copies_share_a_domain_only_without_room_elsewhere(nodes, copies):
    placement = place_replicas(nodes, copies=copies)
    where, share, load = failure_domains(nodes, ("zone", "rack")).innermost, memory_shares(nodes), loads(placement)
    each = min(copies, len(nodes)) - 1
    has_room = {where[node] for node in load if load[node] < math.floor(MAX_SHARE_FACTOR * each * share[node])}
    for node, partners in placement.partners.items():
        used = {where[node], *(where[partner] for partner in partners)}
        if len(used) < copies:
            assert not has_room - used


@untimed
@given(any_cluster, clusters(), copies_of)
def test_no_node_exceeds_its_memory_share(nodes, alike, copies):
    each = copies - 1
    for node, load in loads(place_replicas(alike, copies=copies)).items():
        assert load <= MAX_SHARE_FACTOR * each, node
    held = loads(place_replicas(nodes, copies=copies))
    for node, share in memory_shares(nodes).items():
        assert held[node] <= max(each, math.ceil(MAX_SHARE_FACTOR * each * share)) + each


# -- equal memory -----------------------------------------------------------------------------------------------------


@untimed
@given(clusters())
@example(cluster(5, 3))
@example(cluster(1, 1, 8))
def test_two_copies_load_nodes_evenly_unless_one_domain_dominates(nodes):
    placement = place_replicas(nodes)
    largest = max(Counter(failure_domains(nodes, ("zone", "rack")).innermost.values()).values(), default=0)
    if 2 * largest <= len(nodes):
        assert set(loads(placement).values()) <= {1}
    else:
        outside = max(1, len(nodes) - largest)
        assert max(loads(placement).values(), default=0) <= max(1, min(MAX_SHARE_FACTOR, math.ceil(largest / outside)))


@untimed
@given(clusters())
def test_three_copies_load_is_bounded_unless_one_domain_has_a_third(nodes):
    largest = max(Counter(failure_domains(nodes, ("zone", "rack")).innermost.values()).values(), default=0)
    if 3 * largest <= len(nodes):
        assert max(loads(place_replicas(nodes, copies=3)).values(), default=0) <= 4


@untimed
@given(st.integers(2, 20), st.integers(1, 8), st.integers(0, 10**6))
def test_racks_are_paired_and_an_odd_count_has_a_ring_of_three(racks, size, tag):
    nodes = cluster(*[size] * racks, tag=str(tag))
    placement = place_replicas(nodes)
    fatal = fatal_racks(placement, nodes)
    if racks % 2 == 0:
        assert len(fatal) == racks // 2
        assert len(frozenset().union(*fatal)) == racks
    else:
        assert len(fatal) <= racks // 2 + 2
        assert max(Counter(rack for pair in fatal for rack in pair).values()) == 2
    assert len(placement.copysets()) == math.ceil(racks * size / 2) + (racks * size % 2)


@untimed
@given(st.integers(2, 40), st.integers(0, 10**6))
def test_single_rack_is_pairs_and_a_ring_of_three(size, tag):
    copysets = place_replicas(cluster(size, tag=str(tag))).copysets()
    assert len(copysets) == (size // 2 if size % 2 == 0 else (size - 3) // 2 + 3)


@untimed
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_three_copies_are_closed_sets_of_three(bundles, size, tag):
    nodes = cluster(*[size] * 3 * bundles, tag=str(tag))
    placement = place_replicas(nodes, copies=3)
    assert len(placement.copysets()) == size * bundles
    assert len(fatal_racks(placement, nodes)) == bundles


# -- several levels ---------------------------------------------------------------------------------------------------


@untimed
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6), st.sampled_from([(2, 2), (2, 3), (3, 3), (3, 2)]))
@example(3, 3, 2, (2, 3))
def test_even_zones_share_no_fate(racks, size, tag, zones_and_copies):
    zone_count, copies = zones_and_copies
    zones = [zone for zone in "abc"[:zone_count] for _ in range(2 * racks)]
    nodes = cluster(*[size] * len(zones), zones=zones, tag=str(tag))
    zone = failure_domains(nodes, ("zone",)).innermost
    placement = place_replicas(nodes, copies=copies)
    for node, partners in placement.partners.items():
        assert len({zone[node], *(zone[partner] for partner in partners)}) == min(copies, zone_count)
        away = [zone[partner] != zone[node] for partner in partners]
        assert away == sorted(away, reverse=True)  # the first partner is the furthest


@untimed
@given(st.integers(3, 9), st.integers(1, 5), st.integers(0, 10**6))
def test_small_zone_is_not_overloaded(racks, size, tag):
    nodes = cluster(*[size] * racks, zones=["a"] * (racks - 1) + ["b"], tag=str(tag))
    placement = place_replicas(nodes)
    assert set(loads(placement).values()) == {1}
    assert all(len(pair) == 2 for pair in fatal_racks(placement, nodes))
    zone = failure_domains(nodes, ("zone",)).innermost
    assert all(zone[placement.partners[node][0]] == "\x1ea" for node in zone if zone[node] == "\x1eb")


def test_racks_are_distinct_per_zone_and_unlabelled_zones_are_the_same():
    nodes = [
        PeerNode(NodeId("x"), "", (("rack", "r1"), ("zone", "a"))),
        PeerNode(NodeId("y"), "", (("rack", "r1"), ("zone", "b"))),
        PeerNode(NodeId("z"), "", (("rack", "r1"),)),
        PeerNode(NodeId("alone"), ""),
    ]
    found = failure_domains(nodes, ("zone", "rack"))
    assert len(set(found.innermost.values())) == 4
    assert found.levels[0][NodeId("z")] == found.levels[0][NodeId("alone")]
    assert len(set(failure_domains(nodes, ("zone",)).innermost.values())) == 4


def test_only_the_configured_levels_count():
    nodes = cluster(2, 2, 2, 2, zones="aabb")
    zone = failure_domains(nodes, ("zone",)).innermost
    assert all(zone[node] != zone[found[0]] for node, found in place_replicas(nodes, levels=("zone",)).partners.items())


# -- unequal memory ---------------------------------------------------------------------------------------------------


@untimed
@given(st.lists(sizes_of_memory, min_size=4, max_size=40), st.integers(2, 3), st.integers(0, 10**6))
def test_node_alone_in_its_domain_holds_its_share_within_the_copies(memory, copies, tag):
    nodes = cluster(*[1] * len(memory), memory=memory, tag=str(tag))
    held = loads(place_replicas(nodes, copies=copies))
    for node, share in memory_shares(nodes).items():
        assert held[node] - share * (copies - 1) <= copies


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("sizes", [[1] * 320, [8] * 40])
def test_mean_load_of_nodes_is_proportional_to_their_memory(sizes, copies):
    nodes = cluster(*sizes, memory=(1 << 30, 2 << 30, 4 << 30))
    held, share = loads(place_replicas(nodes, copies=copies)), memory_shares(nodes)
    by_memory = defaultdict(list)
    for node in nodes:
        by_memory[node.memory_bytes].append(held[node.id] / (copies - 1) / share[node.id])
    assert all(0.8 < statistics.mean(found) < 1.25 for found in by_memory.values())


@untimed
@given(st.integers(2, 12), st.integers(0, 10**6))
def test_small_nodes_store_no_copies_while_large_ones_have_space(pairs, tag):
    nodes = cluster(*[1] * 2 * pairs, memory=(1, 10**6), tag=str(tag))
    placement = place_replicas(nodes)
    large = [node.id for node in nodes if node.memory_bytes > 1]
    assert all(set(partners) <= set(large) for partners in placement.partners.values()) or pairs == 1
    held = loads(placement)
    assert sum(held[node] for node in large) == 2 * pairs


def test_unknown_memory_is_average_and_small_differences_are_none():
    assert set(memory_shares(cluster(4, memory=(1000, 1100, 0, 950))).values()) == {1.0}
    assert memory_shares(cluster(3, memory=(100, 0, 300))) == {"n0-0": 0.5, "n0-1": 1.0, "n0-2": 1.5}
    assert memory_shares([]) == {}


# -- who comes and goes -----------------------------------------------------------------------------------------------


def changed(one: ReplicaPlacement, other: ReplicaPlacement):
    both = set(one.partners) & set(other.partners)
    return sum(set(one.partners[node]) != set(other.partners[node]) for node in both)


def from_scratch(nodes):
    """Pair nodes in the order of their hashes, like a placement that ignores movement."""
    order = sorted((xxhash.xxh3_64_intdigest(node.id.encode()), node.id) for node in nodes)
    pairs = [(order[i][1], order[i + 1][1]) for i in range(0, len(order) - 1, 2)]
    return ReplicaPlacement({one: (other,) for pair in pairs for one, other in (pair, pair[::-1])})


def moves(sizes, leaves, copies=2, how=place_replicas):
    """Return for each seed how many nodes change partners when a node or its rack leaves."""
    found = []
    for seed in range(24):
        choosing = random.Random(seed)
        nodes = cluster(*sizes, tag=f"-{seed}")
        gone = choosing.choice(nodes)
        rest = [node for node in nodes if (node != gone if leaves == "node" else node.labels != gone.labels)]
        found.append(
            changed(how(nodes, copies=copies), how(rest, copies=copies))
            if how is place_replicas
            else changed(how(nodes), how(rest))
        )
    return found


@pytest.mark.parametrize(
    ("sizes", "leaves", "copies", "mean", "most"),
    [
        ([8] * 16, "node", 2, 9, 20),
        ([8] * 17, "node", 2, 14, 32),
        ([7, 8, 6, 8] * 4, "node", 2, 12, 24),
        ([1] * 128, "node", 2, 7, 14),
        ([64], "node", 2, 7, 14),
        ([8] * 16, "rack", 2, 36, 64),
        ([8] * 16, "node", 3, 20, 50),
        ([1] * 128, "node", 3, 12, 24),
    ],
)
def test_few_nodes_change_partners_when_a_node_joins_or_leaves(sizes, leaves, copies, mean, most):
    found = moves(sizes, leaves, copies)
    assert statistics.mean(found) <= mean
    assert max(found) <= most


def test_far_fewer_than_when_pairing_starts_from_scratch():
    ours, theirs = moves([1] * 128, "node"), moves([1] * 128, "node", how=from_scratch)
    assert statistics.mean(ours) * 8 < statistics.mean(theirs)


# -- wrong calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [0, 4])
def test_invalid_copy_count_is_refused(copies):
    with pytest.raises(RequestError, match="choose 1 to 3"):
        place_replicas(cluster(4), copies=copies)


def test_a_node_given_twice():
    with pytest.raises(RequestError, match="n0-1"):
        place_replicas([*cluster(3), PeerNode(NodeId("n0-1"), "elsewhere:1")])


def test_empty_levels_are_refused():
    with pytest.raises(RequestError, match="rack"):
        place_replicas(cluster(3), levels=())
