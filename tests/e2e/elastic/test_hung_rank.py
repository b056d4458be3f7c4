"""A rank hangs without dying, and the ranks that wait for it in a collective are woken at once."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

from elastic.workers.train_loop import RecoveryPolicy, run
from tests.support.local_nodes import wait_until
from tests.support.socket_control_plane import SocketControlPlane, socket_bridge

pytestmark = pytest.mark.e2e


def train(say, address, how):
    """Block in the first world, at rank 1 until the test acts, and elsewhere in the way of ``how``."""
    import torch

    def work(world):
        ones = torch.ones(1000)
        dist.all_reduce(ones)
        say(f"world {world.size} sum {int(ones[0])}")
        if world.size == 2 and world.rank == 1:
            signal.pause()
        if world.size == 2 and how == "collective":
            dist.all_reduce(ones)
        if world.size == 2 and how == "other group":
            dist.all_reduce(ones, group=dist.new_group(backend="gloo"))
        if world.size == 2 and how == "store":
            dist.distributed_c10d._get_default_store().get("what nobody sets")

    # The timeout is so long that only recovery can end the wait.
    return run(
        work, plane=SocketControlPlane(address), policy=RecoveryPolicy(timeout=timedelta(minutes=30))
    ).outcome.value


@pytest.mark.parametrize("how", ["collective", "other group", "store"])
def test_rank_waiting_for_a_hung_one_is_woken(zygote, how):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket_bridge(2, f"127.0.0.1:{store.port}") as bridge:
        plane = bridge.plane
        ranks = {seat: zygote.start(train, bridge.address_of(seat), how) for seat in plane.planes}
        try:
            for one in ranks.values():
                one.wait_line("world 2 sum 2")
            waits, hangs = plane.members
            ranks[hangs].kill(signal.SIGSTOP)
            plane.size = 1
            plane.lose_rank(hangs, "rank 1 does not answer")
            end = ranks[waits].wait(timeout_s=60)
            assert (end.result, end.lines[-1]) == ("finished", "world 1 sum 1")
            assert waits.faults == []
        finally:
            for one in ranks.values():
                one.kill_if_alive()
                one.wait()
    assert wait_until(lambda: not waits.is_alive)
