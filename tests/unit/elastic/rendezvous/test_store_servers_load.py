"""The load of the busiest member, for 2 to 10,000 members."""

from __future__ import annotations

import math

import pytest

from tests.support.rendezvous_load import gloo_keys, load_of_one_store, nccl_keys, spread_load

SIZES = [(2, 2), (16, 2), (64, 8), (64, 64), (1000, 125), (1024, 1024), (10_000, 1250), (10_000, 10_000)]


@pytest.mark.parametrize(("ranks", "nodes"), SIZES)
def test_no_server_exceeds_a_logarithm_times_its_share(ranks, nodes):
    """Of all nodes: of those beyond the 1,024 that keep keys, too, whose own part is nothing."""
    load = spread_load(ranks, nodes, gloo_keys(ranks))
    share = load.mean * load.members / nodes
    assert load.most / share <= max(2.0, 2 * math.log2(nodes))
    assert load.ratio <= max(2.0, math.log2(nodes))
    assert load.most <= load_of_one_store(ranks, gloo_keys(ranks)).most
    assert load.per_rank <= min(nodes, 1024)
    assert load.connections <= ranks


def test_requests_are_counted_as_they_are_made():
    load = spread_load(16, 4, gloo_keys(16))
    assert load.mean * load.members == 16 * 2 + 2 * 16 * 16
    assert load_of_one_store(16, gloo_keys(16)).most == 16 + 2 * 16 * 16


@pytest.mark.parametrize("ranks", [64, 1000, 10_000])
def test_few_shared_keys_load_few_servers(ranks):
    """NCCL's keys load no server more than a single store, and a rank needs few connections."""
    keys = nccl_keys(ranks)
    load, one = spread_load(ranks, ranks // 8, keys), load_of_one_store(ranks, keys)
    assert len(keys) == math.ceil(ranks / 128)
    assert load.most <= one.most + len(keys)
    assert load.per_rank <= len(keys) + 2
