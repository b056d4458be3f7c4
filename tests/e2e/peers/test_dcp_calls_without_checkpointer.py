"""Plain ``dcp.save`` and ``dcp.load`` make copies on other nodes, and load from them."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.e2e.peers.test_node_lost import full, sharded
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.local_nodes import wait_until
from tieredckpt import TieredReader, TieredWriter

NAMES = ["n1", "n2", "n3"]


def save(job, *steps):
    for step in steps:
        dcp.save(sharded(step), storage_writer=TieredWriter(job, step))


def save_async(job, *steps):
    for step in steps:
        writer = TieredWriter(job, step)
        dcp.async_save(sharded(step), storage_writer=writer, async_stager=writer).result()


def load(job, step):
    state = zeros_like_state(sharded(step))
    dcp.load(state, storage_reader=TieredReader(job))
    assert_same_bits(sharded(step), state)


def wait_copies(cluster, names, count):
    """Wait until each node has ``count`` shards, its own and those of other nodes."""
    for name in names:
        with cluster[name].agent(cluster.job) as agent:
            wait_until(lambda agent=agent: len(agent.store.list_shards(cluster.job)) >= count, f"{name} has {count}")


@pytest.mark.parametrize("call", [save, save_async])
def test_lost_node_is_loaded_from_copies_of_a_plain_dcp_save(cluster, call):
    cluster.run(NAMES, call, 5)
    wait_copies(cluster, NAMES, 2)
    cluster["n2"].lose()
    cluster.add("n4", "rack=r4")
    cluster.run(["n1", "n4", "n3"], load, 5)


def load_alone(job, step):
    """Load in a process group of this rank alone, as an evaluation does on some of the ranks."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    expected = {**full(step), "step": step}
    state = zeros_like_state(expected)
    dcp.load(state, storage_reader=TieredReader(job), process_group=groups[dist.get_rank()])
    assert_same_bits(expected, state)


def test_load_in_a_group_of_some_ranks_waits_for_no_other_rank(cluster):
    cluster.run(NAMES, save, 5)
    wait_copies(cluster, NAMES, 2)
    cluster.run(NAMES, load_alone, 5)


def save_on_two(job, step):
    """Save with two of three ranks, and return the warnings of this rank."""
    log = logging.getLogger("tieredckpt.dcp.rank_group")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    two = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        state = {"w": torch.full((8,), float(dist.get_rank()))}
        dcp.save(state, storage_writer=TieredWriter(job, step), process_group=two)
    log.removeHandler(handler)
    return said


def test_save_of_some_ranks_says_that_it_has_no_copies(cluster):
    said = cluster.run(NAMES, save_on_two, 5)
    assert ["no copies on other nodes" in " ".join(one) for one in said] == [True, True, False]
