"""A step completes on all ranks or on none, and every stateful object is restored bit for bit."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support.clusters import make_cluster
from tests.support.recovery_training import train_with_rng, train_with_torn_optimizers
from tests.support.socket_control_plane import socket_bridge

pytestmark = pytest.mark.e2e

TOTAL = 6
RANKS = 3


def train_with_faults(zygote, ranks, torn):
    """Return each rank's last report of every step, and the first step of each world."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with make_cluster(ranks, "n1") as cluster, socket_bridge(RANKS, f"127.0.0.1:{store.port}") as bridge:
        environ = {**cluster["n1"].environ, "OMP_NUM_THREADS": "1"}
        running = [
            zygote.start(train_with_torn_optimizers, bridge.address_of(seat), cluster.job, TOTAL, torn, environ=environ)
            for seat in bridge.plane.planes
        ]
        try:
            ends = [one.wait() for one in running]
        finally:
            for one in running:
                one.kill_if_alive()
        assert bridge.plane.restarts == bool(torn)
    said = [line.split() for end in ends for line in end.lines]
    steps = {(int(step), int(rank)): rest for kind, step, rank, *rest in said if kind == "step"}
    return steps, {(int(epoch), int(first)) for kind, epoch, first, *_ in said if kind == "world"}


def test_torn_optimizer_step_rolls_all_ranks_back(zygote, ranks):
    undisturbed, worlds = train_with_faults(zygote, ranks, ())
    assert worlds == {(0, 0)}
    assert set(undisturbed) == {(step, rank) for step in range(TOTAL) for rank in range(RANKS)}
    assert len({words[-1] for words in undisturbed.values()}) == len(undisturbed)
    torn, worlds = train_with_faults(zygote, ranks, (0, 2))
    assert worlds <= {(0, 0), (1, 2), (1, 3)}  # a rank may not have sealed step 2 when another one failed
    assert len(worlds) == 2
    assert torn == undisturbed


def test_rng_continues_at_any_rank_count(zygote, ranks):
    with make_cluster(ranks, "n1") as cluster:
        environ = cluster["n1"].environ

        def world(size, save, before):
            running = zygote.start_world(
                size, train_with_rng, cluster.job, save, before, environ=dict.fromkeys(range(size), environ)
            )
            return [one.wait().result for one in running]

        saved = world(2, True, 3)
        same = world(2, False, 0)
        more, again = world(3, False, 0), world(3, False, 7)
        (fewer,) = world(1, False, 1)
    assert same == saved
    assert more == again
    assert more[:2] == saved
    assert more[2] not in saved
    assert fewer == saved[0]
