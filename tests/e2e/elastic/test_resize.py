"""One job in worlds of 2, 4, 3, 3 (after a killed rank), 1 and 4 ranks, each rank on its own node."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.clusters import make_cluster
from tests.support.elastic_training import expected_losses, train
from tests.support.local_nodes import wait_until
from tests.support.socket_control_plane import socket_bridge

# test_elastic_run_end_to_end.py does the same in every run, with another control plane.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

TOTAL = 24
NODES = ("n1", "n2", "n3", "n4")


@pytest.fixture
def store():
    """The rendezvous store of the ranks, outside any rank."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Driven:
    """A job with one process per node, whose progress the test limits."""

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
        """Wait until a world of this size has restored."""
        plane = self.plane
        self.check(lambda: plane.size == size == len(plane.members))
        self.check(lambda: sum(line[0] == str(plane.epoch) for line in self.lines("restored")) == size)

    def resize(self, size, reason):
        """Resize the world, and wait until every rank has reported the step at which it pauses."""
        self.plane.resize(size, reason)
        wait_until(lambda: all(seat.paused_step is not None for seat in self.plane.members if seat.is_alive))

    def wait_step(self, step):
        """Wait until every rank of the world has completed ``step``."""
        ranks = self.plane.size
        self.check(
            lambda: (
                sum((line[0], line[1]) == (str(self.plane.epoch), str(step)) for line in self.lines("step")) == ranks
            )
        )

    def check(self, happened):
        def alive_or_happened():
            assert not any(one._read("error") for one in self.running.values()), [
                one._read("error") for one in self.running.values()
            ]
            return happened()

        wait_until(alive_or_happened)


def test_job_survives_resizes_and_a_fault(zygote, ranks, store, tmp_path):
    with (
        make_cluster(ranks, *NODES, labels=lambda name: f"rack=r{name[1:]}") as cluster,
        socket_bridge(2, f"127.0.0.1:{store.port}") as bridge,
        Driven(zygote, cluster, bridge, tmp_path) as job,
    ):
        plane = bridge.plane
        for name, seat in zip(NODES[:2], plane.planes, strict=True):
            job.start(name, seat)
        job.wait_world(2)
        job.allow(4)
        job.wait_step(3)  # now all ranks are inside step 4, which they finish

        for name in NODES[2:]:
            job.start(name, plane.add_rank())
        job.resize(4, "two more came")
        job.allow(8)
        job.wait_world(4)
        job.wait_step(7)

        job.resize(3, "one is too many")
        job.allow(12)
        job.wait_world(3)
        job.wait_step(11)

        lost = plane.members[1]
        job.running[lost].kill(signal.SIGKILL)
        assert job.running[lost].wait().status == -signal.SIGKILL
        job.allow(15)  # the others notice in step 12, and the spare replaces the lost rank
        job.wait_world(3)
        job.wait_step(14)

        job.resize(1, "two are wanted elsewhere")
        job.allow(18)
        job.wait_world(1)
        job.wait_step(17)

        job.start("n2", plane.add_rank())
        job.resize(4, "all are back")
        job.allow(TOTAL)
        ends = [one.wait() for seat, one in job.running.items() if seat is not lost]

    assert plane.succeeded
    assert {(end.status, end.result) for end in ends} == {(0, "finished")}
    said = [line.split() for end in ends for line in end.lines]
    assert {(epoch, size) for kind, epoch, size, *_ in said if kind == "world"} == {
        ("0", "2"), ("1", "4"), ("2", "3"), ("3", "3"), ("4", "1"), ("5", "4")
    }  # fmt: skip
    steps = steps_of(said)
    # The world that lost a rank stopped during step 12, perhaps before that rank had sealed step 11.
    assert steps[2] in (range(9, 11), range(9, 12))
    assert [steps[epoch] for epoch in (0, 1, 4, 5)] == [range(5), range(5, 9), range(16, 19), range(19, TOTAL)]
    assert steps[3] == range(steps[2].stop, 16)
    for kind, epoch, step, *tiers in said:
        if kind == "restored":
            assert int(step) == steps[int(epoch)].start - 1
            assert set(tiers[0].split(",") if tiers else []) <= {"memory", "peer"}
    assert_as_if_undisturbed(said)


def steps_of(said):
    """Return each world's steps, without steps that a later world repeated."""
    done = defaultdict(set)
    for kind, epoch, step, *_ in said:
        if kind == "step":
            done[int(epoch)].add(int(step))
    first_after = TOTAL
    found = {}
    for epoch in sorted(done, reverse=True):
        found[epoch] = range(min(done[epoch]), min(max(done[epoch]) + 1, first_after))
        assert {step for step in done[epoch] if step < first_after} == set(found[epoch])
        first_after = found[epoch].start
    return found


def assert_as_if_undisturbed(said):
    """Check every rank's losses against an undisturbed run, up to the order of float sums."""
    runs = [expected_losses(TOTAL, ranks) for ranks in (1, 2, 3, 4)]
    noise = max(max(losses) - min(losses) for losses in zip(*runs, strict=True))
    assert noise < 1e-6
    seen = [(int(step), float(loss)) for kind, _, step, *rest in said if kind == "step" for loss in rest]
    assert {step for step, _ in seen} == set(range(TOTAL))
    for step, loss in seen:
        assert abs(loss - runs[0][step]) <= 10 * noise
