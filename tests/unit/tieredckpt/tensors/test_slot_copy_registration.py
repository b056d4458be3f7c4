"""Slots in a trainer's address space, registered with a device that keeps the pages it was shown."""

import pytest
import torch

from peerstore.shard_records import ShardKey
from tests.support.async_device import AsyncDevice
from tests.support.stores import pinned_file
from tieredckpt import Settings
from tieredckpt.format.shard_layout import TensorEntry, build_layout
from tieredckpt.format.slice_boxes import Box
from tieredckpt.session.session import open_session
from tieredckpt.tensors.device import use_device_backend
from tieredckpt.tensors.slot_copy import SlotWrite
from tieredckpt.testing import memory_node


@pytest.fixture
def session(tmp_path):
    with memory_node():
        yield open_session("job", Settings())


def layout_of(elements):
    return build_layout([TensorEntry("w", "float32", (elements,), Box((0,), (elements,)), 4, True)], [], None)


def saved(session, device, step, elements):
    """Save a tensor of a device as a writer does; return the slot, its record and the tensor."""
    tensor = torch.arange(elements, dtype=torch.float32) + 1000 * step
    staged = session.slots.lease(ShardKey("job", step, 1, "a", 0, 0), 1, layout_of(elements), 0, wait_s=5)
    with use_device_backend(device):
        staged.memory.copy_in([SlotWrite(device.to_device(tensor), staged.layout.header_bytes)], session.copier)
    record = session.seal(staged, staged.lease.key, [], durable=False, table=None)
    return staged, record, tensor


def test_device_sees_the_sealed_slot_for_any_save_size(session):
    """Large, small and large again, as after two resizes: the device writes to the sealed file."""
    device = AsyncDevice()
    for step, elements in enumerate([200_000, 200_000, 50_000, 50_000, 200_000, 200_000, 50_000]):
        staged, record, tensor = saved(session, device, step, elements)
        header = staged.layout.header_bytes
        pin = session.agent.store.pin(record.key)
        sealed = pinned_file(pin).read_bytes()[: record.size_bytes]
        session.agent.store.unpin(pin.id)
        assert sealed[header : header + tensor.nbytes] == tensor.numpy().tobytes()
        device.close()
        assert device.violations == [], f"save {step}"


def test_only_released_slots_are_unregistered(session):
    device = AsyncDevice()
    memories = [saved(session, device, step, 50_000)[0].memory for step in range(4)]
    assert device.registered == {memory.address for memory in memories}
    session.close()
    assert device.registered == set()
    assert device.violations == []


def test_refused_registration_warns_once_and_is_not_retried(session, caplog):
    device = AsyncDevice()
    device.refuses = "out of locked memory"
    memories = {saved(session, device, step, 50_000)[0].memory for step in range(6)}
    assert len(memories) < 6
    assert len([one for one in caplog.records if "out of locked memory" in one.message]) == len(memories)
