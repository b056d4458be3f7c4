"""NVRx's local checkpoints after killed ranks, lost nodes, incomplete saves and damage."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("nvidia_resiliency_ext", reason="NVRx is not installed: pip install tieredckpt[nvrx]")

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import CheckpointingException

from integration.nvrx import TieredLocalCheckpointManager
from tests.e2e.peers.test_export_from_peers import flip_shard_bits
from tests.e2e.peers.test_torn_lost_or_absent_steps import sealed_on
from tests.support.bits import assert_same_bits
from tests.support.local_nodes import wait_until
from tieredckpt.errors import MismatchError, StoreBusyError, UntrustedObjectError, UsageError
from tieredckpt.session.session import Session
from tieredckpt.session.slot_pool import SlotPool
from tieredckpt.settings import settings_from_mapping

pytestmark = pytest.mark.e2e

WHERE = ["n1", "n2"]


class HostState(BasicTensorAwareStateDict):
    """State whose tensors are on the CPU, which NVRx's own class refuses."""

    def __init__(self, state_dict):
        self.state_dict = state_dict
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking=True):
        assert not self.is_hollow


torch.serialization.add_safe_globals([HostState])


class Custom:
    """Value that is more than data."""


def state_at(step):
    """Return the state of this rank, with another number of tensors on each rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        "model": {"weight": torch.randn(64, 33, generator=generator).bfloat16(), "empty": torch.empty(0, 3)},
        "moments": [torch.randn(1 << 12, generator=generator) for _ in range(1 + rank)],
        "transposed": torch.arange(6.0).reshape(2, 3).t() * step,
        "rng": generator.get_state(),
        "step": step,
        "options": {"lr": 0.1, "name": "adam", 7: None},
    }


def save(job, steps, copies=1, is_async=False):
    manager = TieredLocalCheckpointManager(job)
    manager.find_latest()
    for step in steps:
        state = HostState(state_at(step))
        request = manager.save(state, step, is_async)
        assert_same_bits(state_at(step), state.state_dict)
        if is_async:
            state.state_dict["transposed"].zero_()
            request.execute_sync()
        assert manager.find_latest() == step
    manager._checkpointer._last_saved.wait(copies=copies, domains=copies, timeout_s=60)
    manager.close()


def save_and_die(job, steps):
    save(job, steps)
    os.kill(os.getpid(), signal.SIGKILL)


def load(job, expected):
    """Load the newest checkpoint, and return the bytes that each tier served."""
    manager = TieredLocalCheckpointManager(job)
    assert manager.find_latest() == expected
    state, ckpt_id = manager.load()
    assert ckpt_id == (expected, dist.get_rank(), job)
    assert_same_bits(state_at(expected), state.state_dict)
    read = manager._checkpointer.last_restore.bytes_by_tier
    manager.save(HostState(state_at(expected + 1)), expected + 1)
    assert manager.find_latest() == expected + 1
    manager.close()
    return read


def test_killed_ranks_resume_bit_for_bit(nodes):
    with pytest.raises(AssertionError, match="died"):
        nodes.run(WHERE, save_and_die, [3, 4])
    for read in nodes.run(WHERE, load, 4):
        assert read.keys() == {"memory"}


def test_asynchronous_save_may_be_changed_at_once(nodes):
    nodes.run(WHERE, save, [3, 4], 1, True)
    nodes.run(WHERE, load, 4)


def test_lost_node_is_loaded_from_peer_copies(nodes):
    nodes.run(WHERE, save, [3, 4], 2)
    nodes["n2"].lose()
    nodes.add("n3", "rack=r3")
    kept, replaced = nodes.run(["n1", "n3"], load, 4)
    assert "memory" in kept
    assert replaced


def test_damaged_copy_is_replaced_by_the_other_copy(nodes):
    nodes.run(WHERE, save, [3], 2)
    flip_shard_bits(nodes["n1"], nodes.job)
    nodes.run(WHERE, load, 3)


def load_after_drop(job):
    manager = TieredLocalCheckpointManager(job)
    assert manager.find_latest() == 4
    dist.barrier()
    if dist.get_rank() == 0:
        manager._checkpointer.drop(4)
    dist.barrier()
    with pytest.raises(CheckpointingException, match=r"Local checkpoint 4 cannot be loaded: .*there is step 3"):
        manager.load()
    found = manager.find_latest()
    manager.close()
    return found


def test_checkpoint_deleted_before_its_load_is_an_error(nodes):
    nodes.run(WHERE, save, [3, 4])
    assert nodes.run(WHERE, load_after_drop) == [3, 3]


def die_while_saving(job, step):
    """Kill rank 1 before its seal, and rank 0 after its own."""
    seal = Session.seal
    manager = TieredLocalCheckpointManager(job)
    manager.find_latest()

    def die(*args, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    Session.seal = die if dist.get_rank() == 1 else seal
    manager._save(HostState(state_at(step)), (step, dist.get_rank(), job)).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def find(job):
    manager = TieredLocalCheckpointManager(job)
    try:
        return manager.find_latest()
    finally:
        manager.close()


@pytest.mark.parametrize(("before", "found"), [([], -1), ([3], 3)])
def test_torn_save_is_not_listed(nodes, before, found):
    if before:
        nodes.run(WHERE, save, before)
    with pytest.raises(AssertionError, match="died"):
        nodes.run(WHERE, die_while_saving, 4)
    wait_until(lambda: 4 in sealed_on(nodes["n1"], nodes.job))
    assert nodes.run(WHERE, find) == [found, found]
    nodes.run(WHERE, save, [4, 5])
    nodes.run(WHERE, load, 5)


def save_without_room(job, step):
    lease = SlotPool.lease

    def busy(*args, **more):
        raise StoreBusyError("no room now")

    manager = TieredLocalCheckpointManager(job)
    manager.find_latest()
    SlotPool.lease = busy if dist.get_rank() == 1 else lease
    try:
        with pytest.raises(CheckpointingException, match=f"Local checkpoint {step} was not saved: .*no room now"):
            manager.save(HostState(state_at(step)), step)
    finally:
        SlotPool.lease = lease
    found = manager.find_latest()
    manager.save(HostState(state_at(step + 1)), step + 1)
    manager.close()
    return found


def test_failed_save_is_an_error_on_all_ranks(nodes):
    nodes.run(WHERE, save, [3])
    assert nodes.run(WHERE, save_without_room, 4) == [3, 3]
    nodes.run(WHERE, load, 5)


def test_old_checkpoints_are_evicted(nodes):
    nodes.run(WHERE, save, range(3, 11), 2)
    steps = sealed_on(nodes["n1"], nodes.job)
    assert 10 in steps
    assert 3 not in steps
    nodes.run(WHERE, load, 10)


def refused(job):
    with pytest.raises(MismatchError, match=r"Step 3 .* saved by 2 ranks, and 1 rank") as error:
        find(job)
    return str(error.value)


def test_another_world_size_is_refused(nodes):
    nodes.run(WHERE, save, [3], 2)
    nodes.run(["n1"], refused)
    assert nodes.run(WHERE, find) == [3, 3]


def save_unsafe(job):
    manager = TieredLocalCheckpointManager(job)
    manager.find_latest()
    unsafe = {"weight": torch.ones(3), "model": {"extra": Custom()}} if dist.get_rank() == 1 else state_at(1)
    with pytest.raises(UntrustedObjectError, match=r"\['state_dict'\]\['model'\]\['extra'\].*Custom"):
        manager.save(HostState(unsafe), 1)
    with pytest.raises(UsageError, match="Tensor 1 of the state is a Tensor"):
        manager.save(HostState({"a": torch.ones(2), "b": torch.eye(3).to_sparse()}), 1)
    manager.close()


def test_disabled_memory_tier_is_refused():
    settings = settings_from_mapping({"enabled": False, "durable": {"url": "s3://bucket/job"}})
    with pytest.raises(UsageError, match="need the memory tier"):
        TieredLocalCheckpointManager("job", settings=settings)


def test_unsafe_entry_is_refused_by_name(nodes):
    nodes.run(WHERE, save_unsafe)
    assert sealed_on(nodes["n1"], nodes.job) == []
