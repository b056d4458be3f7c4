"""A process that has recovered many times leaks nothing."""

from __future__ import annotations

import statistics

import pytest
import torch.distributed as dist

from tests.support.clusters import make_cluster
from tests.support.recovery_training import train_with_faults
from tests.support.socket_control_plane import socket_bridge

pytestmark = pytest.mark.e2e

WARM = 8
"""Worlds after which all lazy initialization is done."""
KIB_EACH = 8
"""KiB of allocated memory that a recovery may leave behind, averaged over many."""
PAGES_EACH = 24
"""Resident pages that a recovery may leave behind, including what the allocator retains."""
SHORT_HISTORY = {"TORCH_FR_BUFFER_SIZE": "16"}
"""A short flight recorder: torch's default of 2,000 collectives grows by 70 KiB per recovery."""


def worlds_of(lines):
    """Return epoch, first step, threads, descriptors, allocated KiB, resident pages and time per world."""
    return [[float(word) for word in line.split()[1:]] for line in lines if line.startswith("world")]


def recover(zygote, ranks, faults, size=2):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with make_cluster(ranks, "n1") as cluster, socket_bridge(size, f"127.0.0.1:{store.port}") as bridge:
        environ = {**cluster["n1"].environ, "OMP_NUM_THREADS": "1", **SHORT_HISTORY}
        running = [
            zygote.start(train_with_faults, bridge.address_of(seat), cluster.job, faults, environ=environ)
            for seat in bridge.plane.planes
        ]
        try:
            ends = [one.wait(1500.0) for one in running]
        finally:
            for one in running:
                one.kill_if_alive()
    assert [end.result for end in ends] == ["finished"] * size
    assert bridge.plane.restarts == faults
    return [worlds_of(end.lines) for end in ends]


def growth(worlds, what):
    """Return the growth per recovery between the medians of both halves."""
    seen, half = [world[what] for world in worlds], len(worlds) // 2
    return (statistics.median(seen[-half:]) - statistics.median(seen[:half])) / half


def assert_nothing_stays(worlds, faults):
    for rank in worlds:
        assert [int(world[0]) for world in rank] == list(range(faults + 1))
        assert rank[-1][1] >= faults  # every world completed a step
        warm = rank[WARM:]
        for what in (2, 3):  # some threads and descriptors of the last world may still exist
            seen = [world[what] for world in warm]
            assert min(seen[-8:]) <= max(seen[: len(seen) // 2]), seen
        assert growth(warm, 4) <= KIB_EACH, [world[4] for world in rank]
        assert growth(warm, 5) <= PAGES_EACH, [world[5] for world in rank]


@pytest.mark.timeout(600)
def test_process_is_unchanged_after_twenty_five_recoveries(zygote, ranks):
    assert_nothing_stays(recover(zygote, ranks, 25), 25)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_process_is_unchanged_after_two_hundred_recoveries(zygote, ranks):
    assert_nothing_stays(recover(zygote, ranks, 200), 200)
