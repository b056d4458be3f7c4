"""A host lost with all its memory: ranks on the other hosts resume bit for bit."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.partitioned_hosts import JOB, partitioned_job, wait_until
from tieredckpt import Checkpointer
from tieredckpt.errors import PeersLostError

pytestmark = pytest.mark.system


def sharded_state(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(step)
    full = {
        "w": torch.randn(1 << 12, 64, generator=generator),
        "v": torch.randn(96, 33, generator=generator).bfloat16(),
    }
    cut = {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in full.items()}
    return {**cut, "same": torch.arange(100) * step, "step": step}


def assert_restored(ckpt, inside, expected):
    """Restore, check the state and return the tiers that it was read from."""
    wanted = sharded_state(expected)
    state = zeros_like_state(wanted)
    with inside():
        assert ckpt.restore(state) == expected
    assert_same_bits(wanted, state)
    return set(ckpt.last_restore.bytes_by_tier)


def save(inside, steps):
    states = {step: sharded_state(step) for step in steps}
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        assert ckpt.restore(zeros_like_state(sharded_state(0))) == -1
        with inside():
            for step, state in states.items():
                saved = ckpt.save(state, step)
                saved.wait(copies=2, domains=2, timeout_s=60)
        return saved.durability


def restore(inside, expected):
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        return assert_restored(ckpt, inside, expected)


def restore_unreachable(_inside, step):
    """Fail to restore where only the agent reaches other nodes; return quarantine reasons, if any."""
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        with pytest.raises(PeersLostError, match="cannot be read from other nodes"):
            ckpt.restore(zeros_like_state(sharded_state(step)))
        return [info.quarantined for info in ckpt.steps() if info.step == step]


def save_after_restore(inside, expected, step):
    state = sharded_state(step)
    with Checkpointer(JOB, on_sigterm="ignore") as ckpt:
        tiers = assert_restored(ckpt, inside, expected)
        with inside():
            ckpt.save(state, step).wait(copies=2, domains=2, timeout_s=60)
        return tiers


def test_unplugged_host_loses_no_step_and_gets_copies_on_return(net, ranks):
    with partitioned_job(net, "n1", "n2", "n3") as job:
        assert job.run(ranks, ["n1", "n2", "n3"], save, [5, 6, 7]) == ["2 copies in 2 racks"] * 3
        job.wait_replicated(7)
        job["n2"].host.unplug()
        assert set().union(*job.run(ranks, ["n1", "n3"], restore, 7)) <= {"peer", "memory"}
        for name in ("n1", "n3"):
            wait_until(lambda seat=job[name]: seat.parts_of(7) == {0, 1, 2}, f"{name} holds all of step 7")
        assert job.run(ranks, ["n1", "n3"], save_after_restore, 7, 8) == [{"memory"}] * 2
        job.wait_replicated(8, "n1", "n3")
        assert job["n2"].newest_replicated == 7
        net.heal_all()
        job.wait_replicated(8, "n2")


def test_ranks_on_distant_hosts_save_and_restore(net, ranks):
    """Each host has two of three parts and reads the third over the network."""

    def far_apart(net):
        for one, other in itertools.permutations(net.hosts.values(), 2):
            net.slow_path(one, other, latency_s=0.05)

    with partitioned_job(net, "n1", "n2", "n3", wire=far_apart) as job:
        assert job.run(ranks, ["n1", "n2", "n3"], save, [1, 2]) == ["2 copies in 2 racks"] * 3
        job.wait_replicated(2)
        assert job.run(ranks, ["n1"], restore, 2) == [{"memory", "peer"}]
        assert job.run(ranks, ["n1"], restore_unreachable, 2) == [[""]]
