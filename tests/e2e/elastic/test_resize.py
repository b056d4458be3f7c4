"""One job through worlds of 2, 4, 3, 3 (one rank killed), 1 and 4 ranks, each on a node of its own."""

from __future__ import annotations

import contextlib
import signal
from collections import defaultdict
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.bridged import bridged
from tests.support.clusters import cluster_of
from tests.support.elastic_training import train, undisturbed
from tests.support.neighbours import until

pytestmark = pytest.mark.e2e

TOTAL = 24
NODES = ("n1", "n2", "n3", "n4")


@pytest.fixture
def store():
    """Who the ranks meet at; it lives in no rank."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Driven:
    """A job whose ranks are processes on nodes, and a test that says how far they may go."""

    def __init__(self, zygote, cluster, bridge, folder: Path):
        self.zygote, self.cluster, self.bridge = zygote, cluster, bridge
        self.plane = bridge.plane
        self.limit = folder / "limit"
        self.allow(0)
        self.running = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for one in self.running.values():
            one.kill_if_alive()

    def allow(self, steps):
        new = self.limit.with_suffix(".new")
        new.write_text(str(steps))
        new.rename(self.limit)

    def start(self, name, seat):
        args = (self.bridge.address_of(seat), self.cluster.job, TOTAL, str(self.limit))
        environ = {**self.cluster[name].environ, "OMP_NUM_THREADS": "1"}
        self.running[seat] = self.zygote.start(train, *args, environ=environ)

    def lines(self, kind):
        return [line.split()[1:] for one in self.running.values() for line in one.lines() if line.startswith(kind)]

    def wait_world(self, size):
        """Until a world of this size has restored, and is inside a step."""
        plane = self.plane
        self.check(lambda: plane.size == size == len(plane.members))
        self.check(lambda: sum(line[0] == str(plane.epoch) for line in self.lines("restored")) == size)

    def wait_step(self, step):
        """Until every rank of the world has completed ``step``."""
        ranks = self.plane.size
        self.check(lambda: sum((line[0], line[1]) == (str(self.plane.epoch), str(step)) for line in self.lines("step")) == ranks)

    def check(self, happened):
        def alive_or_happened():
            assert not any(one._read("error") for one in self.running.values()), [
                one._read("error") for one in self.running.values()
            ]
            return happened()

        until(alive_or_happened)


def test_a_job_goes_through_worlds_of_all_sizes_and_one_fault(zygote, ranks, store, tmp_path):
    with (
        cluster_of(ranks, *NODES, labels=lambda name: f"rack=r{name[1:]}") as cluster,
        bridged(2, f"127.0.0.1:{store.port}") as bridge,
        contextlib.ExitStack() as stack,
    ):
        job = stack.enter_context(Driven(zygote, cluster, bridge, tmp_path))
        plane = bridge.plane
        for name, seat in zip(NODES[:2], plane.seats, strict=True):
            job.start(name, seat)
        job.wait_world(2)
        job.allow(4)
        job.wait_step(3)

        for name in NODES[2:]:  # all stand in step 4 and finish it
            job.start(name, plane.join())
        plane.resize(4, "two more came")
        job.allow(8)
        job.wait_world(4)
        job.wait_step(7)

        plane.resize(3, "one is wanted elsewhere", deadline_s=60)
        job.allow(12)
        job.wait_world(3)
        job.wait_step(11)

        lost = plane.members[1]
        job.running[lost].kill(signal.SIGKILL)
        assert job.running[lost].wait().status == -signal.SIGKILL
        job.start("n2", plane.join())
        job.allow(15)  # the others were in a step, and find out in its collectives
        job.wait_world(3)
        job.wait_step(14)

        plane.resize(1, "nearly all are wanted elsewhere", deadline_s=60)
        job.allow(18)
        job.wait_world(1)
        job.wait_step(17)

        plane.resize(4, "all are back")
        for name in NODES[1:]:
            job.start(name, plane.join())
        job.allow(TOTAL)
        ends = {seat: one.wait() for seat, one in job.running.items() if seat is not lost}
        print({seat.rank: (end.status, end.result) for seat, end in ends.items()})
        for seat, end in ends.items():
            print(*end.lines, sep="\n")
        assert plane.succeeded
