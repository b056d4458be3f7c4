"""A rank dies between two saves; with replicas no step is lost, and no bit differs."""

from __future__ import annotations

import contextlib
import signal

import pytest
import torch.distributed as dist

from tests.support.clusters import make_cluster
from tests.support.crashes import crash_environ
from tests.support.live_training import reference_steps, train
from tests.support.local_nodes import wait_until
from tests.support.socket_control_plane import socket_bridge

pytestmark = pytest.mark.e2e

TOTAL = 11


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextlib.contextmanager
def started(zygote, store, size, kind, optimizer, at, environs):
    """Start the ranks of a job and the spares that replace lost ranks."""
    with socket_bridge(size, f"127.0.0.1:{store.port}") as bridge:
        plane = bridge.plane
        seats = [*plane.planes, *(plane.add_rank() for _ in environs[size:])]
        args = (kind, optimizer, TOTAL, at)
        running = []

        def start(seat, **environ):
            environ = {"OMP_NUM_THREADS": "1", **environ}
            running.append(zygote.start(train, bridge.address_of(seat), *args, environ=environ))

        try:
            for number, (seat, environ) in enumerate(zip(seats, environs, strict=True)):
                if number == size:  # otherwise a spare could be first and receive a rank
                    for one in running:
                        one.wait_lines(1)
                start(seat, **environ)
            yield plane, running, start
        finally:
            for one in running:
                one.kill_if_alive()


def trained(zygote, store, size, kind, optimizer, at, environs=None):
    """Train to the end with one spare for each rank that dies, and return the ended processes."""
    environs = environs or [{}] * (size + 1)
    with started(zygote, store, size, kind, optimizer, at, environs) as (plane, running, _):
        ends = [one.wait() for one in running]
        assert plane.succeeded
    lost = len(environs) - size
    assert sorted(end.status for end in ends) == [-signal.SIGKILL] * lost + [0] * size
    return ends


def assert_same_bits(ends, expected):
    for end in ends:
        for line in end.lines:
            kind, number, *seen = line.split()
            if kind == "step":
                assert " ".join(seen) == expected[int(number)], f"step {number}"


def worlds(ends, epoch):
    """Return the restore report that all ranks of a world agree on: step, mode, lost, and world."""
    found = [line.split()[2:] for end in ends for line in end.lines if line.startswith(f"world {epoch} ")]
    assert len({tuple(one) for one in found}) == 1
    return found[0]


@pytest.mark.parametrize(
    ("size", "kind", "optimizer", "at", "expected"),
    [
        pytest.param(2, "ddp", "adamw", "8 forward", "7 live 0 live", marks=pytest.mark.nightly),
        (2, "ddp", "fused", "8 optimizer", "8 live 0 live"),
        pytest.param(2, "norm", "sgd", "8 forward", "7 live 0 live", marks=pytest.mark.nightly),
        (4, "hsdp", "adamw", "8 backward", "7 live 0 live"),
        (2, "fsdp", "adamw", "8 forward", "5 snapshot 2 snapshot"),
    ],
)
def test_replacement_rank_hydrates_from_survivors(zygote, agent_dir, store, size, kind, optimizer, at, expected):
    ends = trained(zygote, store, size, kind, optimizer, at)
    assert worlds(ends, 1) == expected.split()
    assert_same_bits(ends, zygote.run_world(size, reference_steps, kind, optimizer, TOTAL)[0])


def test_second_death_during_hydration_is_survived(zygote, agent_dir, store):
    """The survivors keep their state until a world has restored it."""
    environs = [{}, {}, crash_environ("live.chosen")]
    with started(zygote, store, 2, "ddp", "adamw", "8 forward", environs) as (plane, running, start):
        wait_until(lambda: sum(one.has_ended for one in running) == 2, "a rank and its replacement have died")
        start(plane.add_rank())
        ends = [one.wait() for one in running]
        assert plane.succeeded
    assert sorted(end.status for end in ends) == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    assert not [line for end in ends for line in end.lines if line.startswith("world 1 ")]
    assert worlds(ends, 2) == ["7", "live", "0", "live"]
    assert_same_bits(ends, zygote.run_world(2, reference_steps, "ddp", "adamw", TOTAL)[0])


def test_ranks_hydrate_after_successive_faults(zygote, agent_dir, store):
    """The second recovery resumes from the first recovery's state and the steps after it."""
    ends = trained(zygote, store, 2, "ddp", "sgd", "3 forward;7 optimizer", [{}] * 4)
    assert worlds(ends, 1) == ["2", "live", "0", "live"]
    assert worlds(ends, 2) == ["7", "live", "0", "live"]
    assert_same_bits(ends, zygote.run_world(2, reference_steps, "ddp", "sgd", TOTAL)[0])


@pytest.mark.parametrize(
    ("at", "crash", "steps"),
    [
        ("8 forward 1,2", "", range(7, 8)),  # step 5 was complete, and is lost
        ("", "seal.asked", range(5)),  # during the very first save: no step was ever complete
    ],
)
def test_last_replica_continues_after_two_of_three_nodes_are_lost(zygote, ranks, store, at, crash, steps):
    with make_cluster(ranks, "n1", "n2", "n3") as cluster:
        environs = [{**cluster[name].environ, "TIEREDCKPT_AGENT_EMBEDDED": "1"} for name in ("n1", "n2", "n3")]
        environs[1:] = [{**environ, **crash_environ(crash)} for environ in environs[1:]]
        with started(zygote, store, 3, "ddp", "fused", at or "99 never", environs) as (plane, running, _):
            for lost in running[1:]:
                assert lost.wait().status == -signal.SIGKILL
            for name in ("n2", "n3"):
                cluster[name].lose()
            plane.resize(1, "there is no other one")
            end = running[0].wait()
            assert plane.succeeded
        step, *how = worlds([end], 1)
        assert int(step) in steps
        assert how == ["live", "0", "live"]


def test_fewer_ranks_on_separate_nodes_continue(zygote, ranks, store):
    with make_cluster(ranks, "n1", "n2", "n3") as cluster:
        environs = [{**cluster[name].environ, "TIEREDCKPT_AGENT_EMBEDDED": "1"} for name in ("n1", "n2", "n3")]
        with started(zygote, store, 3, "ddp", "fused", "8 forward", environs) as (plane, running, _):
            lost = running[1].wait()
            plane.resize(2, "there is no other one")
            ends = [running[0].wait(), running[2].wait()]
            assert plane.succeeded
        assert lost.status == -signal.SIGKILL
        assert worlds(ends, 1) == ["7", "live", "0", "live"]
