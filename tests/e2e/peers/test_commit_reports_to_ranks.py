"""Agents report complete and incomplete steps to ranks on several nodes.

The nodes have replicas, no replicas, or no discovery.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.support.clusters import make_cluster
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import StoreBusyError
from tieredckpt.session.slot_pool import SlotPool

pytestmark = pytest.mark.e2e

STEPS = 12
WAYS = {
    "copies": {"TIEREDCKPT_PEER_COPIES": "2"},
    "no copies": {"TIEREDCKPT_PEER_COPIES": "1"},
    "apart": {"TIEREDCKPT_PEER_DISCOVERY": "off"},
}


def saves(job, left_out):
    """Return this rank's save outcomes, its node's parts, the committed step and the restored state."""
    mine, stage = left_out.get(dist.get_rank(), ()), SlotPool.lease

    def busy(slots, key, *args, **more):
        if key.version in mine:
            raise StoreBusyError("no room just now")
        return stage(slots, key, *args, **more)

    SlotPool.lease = busy
    state = {"w": torch.zeros(1000)}
    try:
        with Checkpointer(job, on_busy="wait", on_sigterm="ignore") as ckpt:
            assert ckpt.restore(state) == -1
            ends = []
            for step in range(STEPS):
                state["w"].fill_(step)
                saved = ckpt.save(state, step)
                ckpt.wait()
                ends.append(saved.state.name)
                dist.barrier()
    finally:
        SlotPool.lease = stage
    other = {"w": torch.zeros(1000)}
    with Checkpointer(job, on_sigterm="ignore") as ckpt:
        alone = ckpt.settings.peer.discovery == "off"  # a single node's memory has no complete step then
        found = STEPS - 1 if alone else ckpt.restore(other)
        store = ckpt.session.agent.store
        here = sorted({(fact.key.part, fact.key.version) for fact in store.list_shards(ckpt.session.job)})
        whole = store.versions.newest_committed(ckpt.session.job)
        dist.barrier()  # a rank that has requested nothing may exit before another one has its group
    return ends, here, whole.version, (found, found if alone else other["w"][0].item())


@pytest.mark.parametrize("way", WAYS)
def test_older_steps_are_evicted_once_a_step_is_complete_on_all_nodes(ranks, way):
    """No node has all parts or room for more than three steps, so every save needs a complete step."""
    with make_cluster(ranks, "n1", "n2") as cluster:
        for ends, here, whole, found in cluster.run(["n1", "n2"], saves, {}, environ=WAYS[way]):
            assert ends == [SaveState.SEALED.name] * STEPS
            assert max(Counter(part for part, _ in here).values()) <= 4
            assert whole >= STEPS - 1 - (way == "apart")  # without peers, a node learns it at the next save
            assert found == (STEPS - 1, STEPS - 1)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_on_several_nodes_that_skip_different_steps_have_slots(ranks, way):
    left_out = {0: (3, 5, 7), 1: (4, 6, 8)}
    with make_cluster(ranks, "n1", "n2") as cluster:
        for ends, here, whole, found in cluster.run(["n1", "n2"], saves, left_out, environ=WAYS[way]):
            assert ends[-3:] == [SaveState.SEALED.name] * 3
            assert not {version for _, version in here} & set(range(3, 9))
            assert whole >= STEPS - 1 - (way == "apart")  # without peers, a node learns it at the next save
            assert found == (STEPS - 1, STEPS - 1)
