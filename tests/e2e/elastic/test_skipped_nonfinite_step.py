"""All ranks, even one that has just joined, skip a step whose loss is non-finite at one rank."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from elastic.workers.train_loop import RecoveryPolicy, run
from tests.support.socket_control_plane import SocketControlPlane, socket_bridge

pytestmark = pytest.mark.e2e

BAD = 3


def train(say, address, stays):
    import torch

    def work(world):
        if world.epoch == 1 and not stays:
            os._exit(0)  # this process is replaced
        for step in world.steps(0 if world.epoch == 0 else BAD, 6):  # at the step of the other ranks
            both = torch.ones(1)
            dist.all_reduce(both)
            bad = step == BAD and world.rank == 1
            used = world.check_finite(both * float("nan") if bad else both)
            dist.all_reduce(both)
            say(f"step {world.epoch} {step} {used}")

    policy = RecoveryPolicy(nonfinite="skip", nonfinite_attempts=2, nonfinite_max_skips=1)
    return run(work, plane=SocketControlPlane(address), policy=policy).outcome.value


@pytest.mark.parametrize("replaced", [False, True])
def test_all_ranks_skip_the_same_nonfinite_step(zygote, replaced):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket_bridge(2, f"127.0.0.1:{store.port}") as bridge:
        plane = bridge.plane
        last = plane.add_rank() if replaced else None
        running = {}
        try:
            for seat in plane.planes:
                if seat is last:
                    assert plane.wait_for(lambda: plane.epoch >= 0, 60), "the first world is without it"
                running[seat] = zygote.start(
                    train, bridge.address_of(seat), seat is not plane.planes[0] or not replaced
                )
            ends = {seat: one.wait() for seat, one in running.items() if seat is not plane.planes[0] or not replaced}
        finally:
            for one in running.values():
                one.kill_if_alive()
                one.wait()
    assert {end.result for end in ends.values()} == {"finished"}
    for seat, end in ends.items():
        said = {int(step): used for _, _, step, used in (line.split() for line in end.lines)}
        assert {step for step, used in said.items() if used == "False"} == {BAD}
        assert set(said) == set(range(6)) or seat is last
