"""A rank dies between two saves: with replicas nothing is lost, and no bit is different."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from tests.support.bridged import bridged
from tests.support.live_training import train, undisturbed

pytestmark = pytest.mark.e2e

TOTAL = 11


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def trained(zygote, store, size, kind, optimizer, at, spares=1):
    """What the ranks of a job said that came to its end; they run on one node."""
    with bridged(size, f"127.0.0.1:{store.port}") as bridge:
        seats = [*bridge.plane.seats, *(bridge.plane.join() for _ in range(spares))]
        running = [
            zygote.start(train, bridge.address_of(seat), kind, optimizer, TOTAL, at, environ={"OMP_NUM_THREADS": "1"})
            for seat in seats
        ]
        try:
            ends = [one.wait() for one in running]
        finally:
            for one in running:
                one.kill_if_alive()
        assert bridge.plane.succeeded
    assert sorted(end.status for end in ends) == [-signal.SIGKILL] * spares + [0] * size
    return ends


def assert_same_bits(ends, expected):
    for end in ends:
        for line in end.lines:
            kind, number, *seen = line.split()
            if kind == "step":
                assert " ".join(seen) == expected[int(number)], f"step {number}"


def worlds(ends, epoch):
    """What every rank of a world said when it had restored: step, mode, lost, and what the world says."""
    found = [line.split()[2:] for end in ends for line in end.lines if line.startswith(f"world {epoch} ")]
    assert len({tuple(one) for one in found}) == 1
    return found[0]


@pytest.mark.parametrize(
    ("size", "kind", "optimizer", "at", "expected"),
    [
        (2, "ddp", "adamw", "8 forward", "7 live 0 live"),
        (2, "ddp", "fused", "8 optimizer", "8 live 0 live"),
        (2, "norm", "sgd", "8 forward", "7 live 0 live"),
        (4, "hsdp", "adamw", "8 backward", "7 live 0 live"),
        (2, "fsdp", "adamw", "8 forward", "5 snapshot 2 snapshot"),
    ],
)
def test_a_rank_dies(zygote, ranks, agent_dir, store, size, kind, optimizer, at, expected):
    ends = trained(zygote, store, size, kind, optimizer, at)
    assert worlds(ends, 1) == expected.split()
    assert_same_bits(ends, ranks.run(size, undisturbed, kind, optimizer, TOTAL)[0])
