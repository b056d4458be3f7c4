"""Contract of every :class:`tieredckpt.tensors.device.DeviceBackend`, with real and simulated devices."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.support.async_device import POISON, AsyncDevice
from tests.support.async_staging import lay_out, mapped_slot
from tieredckpt.tensors.device import (
    AcceleratorBackend,
    CpuBackend,
    DeviceBackend,
    DeviceCopy,
    accelerator,
    record_device_work,
    use_device_backend,
)
from tieredckpt.tensors.slot_copy import Copier, StagingBuffers

ELEMENTS = 100_000
REAL = accelerator()
KINDS = [CpuBackend, AsyncDevice, *([lambda: REAL] if isinstance(REAL, AcceleratorBackend) else [])]


@pytest.fixture(params=KINDS, ids=["none", "late", "real"][: len(KINDS)])
def device(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    with use_device_backend(request.param()) as device:
        yield device
    if isinstance(device, AsyncDevice):
        device.close()
        assert (device.violations, device.races) == ([], [])


def on_device(device: DeviceBackend, tensor: torch.Tensor) -> torch.Tensor:
    return device.to_device(tensor) if isinstance(device, AsyncDevice) else tensor.to(device.current())


def test_copies_both_ways_are_done_when_the_stream_is_synchronized(device):
    place = device.current()
    sources = [torch.randn(ELEMENTS), torch.randn(7, 11).t(), torch.randn(0), torch.arange(5)]
    there = [on_device(device, torch.zeros_like(one)) for one in sources]
    back = [torch.zeros(one.shape, dtype=one.dtype) for one in sources]
    stream = device.new_stream(place)
    stream.wait_stream(device.current_stream(place))
    device.copy([DeviceCopy(*pair) for pair in zip(there, sources, strict=True)], stream)
    device.copy([DeviceCopy(*pair) for pair in zip(back, there, strict=True)], stream)
    stream.synchronize()
    for one, other in zip(sources, back, strict=True):
        assert torch.equal(one, other)


def test_stream_that_waits_for_an_event_sees_the_copied_data(device):
    place = device.current()
    source, there, back = torch.randn(ELEMENTS), on_device(device, torch.zeros(ELEMENTS)), torch.zeros(ELEMENTS)
    first, second = device.new_stream(place), device.new_stream(place)
    first.wait_stream(device.current_stream(place))
    device.copy([DeviceCopy(there, source)], first)
    second.wait_event(first.record_event())
    device.copy([DeviceCopy(back, there)], second)
    event = second.record_event()
    event.synchronize()
    assert event.query()
    assert torch.equal(source, back)


def test_awaited_work_has_completed_for_any_thread(device):
    place = device.current()
    source, there = torch.randn(ELEMENTS), on_device(device, torch.zeros(ELEMENTS))
    device.copy([DeviceCopy(there, source)], device.current_stream(place))
    work = record_device_work([there])
    found = []
    thread = threading.Thread(target=lambda: (work.wait(), found.append(work.has_completed())))
    thread.start()
    thread.join()
    assert found == [True]
    device.synchronize(place)
    assert record_device_work().has_completed()


def sample_tensors() -> list[torch.Tensor]:
    tensors = torch.randn(ELEMENTS), torch.randn(70, 30).t(), torch.randn(0), torch.randn(()), torch.arange(99)
    return [*tensors, torch.randn(501).to(torch.bfloat16)]


def test_slots_are_filled_from_a_device_bit_by_bit(device):
    sources = sample_tensors()
    pieces, size_bytes = lay_out([on_device(device, one) for one in sources])
    with mapped_slot(size_bytes) as memory, contextlib.closing(Copier(2)) as copier:
        for _ in range(3):  # from the second time on it is registered
            memory.write(512, bytes(size_bytes))
            memory.copy_in(pieces, copier)
            for piece, source in zip(pieces, sources, strict=True):
                assert torch.equal(memory.tensor(piece.start, source.dtype, source.shape), source)


def test_device_is_filled_from_alternating_buffers(device):
    sources = sample_tensors()
    there = [on_device(device, torch.zeros_like(one)) for one in sources]
    place = device.device_of(there[0]) or device.current()
    buffers = StagingBuffers(device, place, 4 * ELEMENTS)
    try:
        for target, source in zip(there, sources, strict=True):
            part = buffers.acquire().tensor(0, source.dtype, source.shape)
            part.copy_(source)
            buffers.submit({place: [DeviceCopy(target, part)]})
        buffers.synchronize()
        for target, source in zip(there, sources, strict=True):
            assert torch.equal(target.cpu(), source)
    finally:
        buffers.close()


def test_released_memory_can_be_registered_again(device):
    size_bytes = 4 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for _ in range(2):
        problem = device.register_host_memory(address, size_bytes, device.current())
        assert bool(problem) == (device.device_count() == 0)
        if not problem:
            assert device.register_host_memory(address, size_bytes, device.current())  # once is enough
            assert on_device(device, torch.ones(3)).add_(1).sum().item() == 6, "what went wrong is nobody else's error"
            assert not device.unregister_host_memory(address, device.current())


def test_current_device_is_per_thread(device):
    before = device.current()

    def set_last_device() -> None:
        device.set_current(max(0, device.device_count() - 1))

    thread = threading.Thread(target=set_last_device)
    thread.start()
    thread.join()
    assert device.current() == before


def test_process_memory_is_on_no_device(device):
    assert device.device_of(torch.zeros(3)) is None
    if device.device_count():
        assert device.device_of(on_device(device, torch.zeros(3))) == device.current()


def test_device_has_a_generator_where_available(device):
    generator = device.default_generator()
    assert (generator is None) == (device.device_count() == 0)
    if generator is not None:
        before = generator.get_state()
        first = torch.rand(3, generator=generator, device=generator.device)
        device.default_generator().set_state(before)
        assert torch.equal(first, torch.rand(3, generator=generator, device=generator.device))


def test_device_reports_and_releases_its_memory(device):
    before = device.memory_allocated()
    tensor = on_device(device, torch.zeros(1 << 20))
    assert device.memory_allocated() - before in (
        (0,) if device.device_count() == 0 else range(tensor.nbytes, 2 * tensor.nbytes)
    )
    del tensor
    device.empty_cache()
    assert device.memory_allocated() == before


def test_installed_backend_applies_to_all_threads_until_the_block_ends():
    before = accelerator()
    with use_device_backend(CpuBackend()) as outer:
        with use_device_backend(CpuBackend()) as inner:
            found = []
            thread = threading.Thread(target=lambda: found.append(accelerator()))
            thread.start()
            thread.join()
            assert found == [inner]
        assert accelerator() is outer
    assert accelerator() is before


def test_failed_work_of_a_device_is_not_reported_as_completed():
    class Broken:
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class BrokenStream:
        def record_event(self):
            return Broken()

    class BrokenDevice(CpuBackend):
        def device_of(self, tensor):
            return torch.device("cpu")

        def current_stream(self, place):
            return BrokenStream()

    with use_device_backend(BrokenDevice()):
        assert not record_device_work([torch.zeros(1)]).has_completed()


# -- the late devices are what they say --------------------------------------------------------------------------


@pytest.fixture
def async_device() -> Iterator[AsyncDevice]:
    with use_device_backend(AsyncDevice(seed=1)) as device:
        yield device


def page_aligned(elements: int) -> torch.Tensor:
    """Memory of whole pages, which can be registered."""
    return torch.frombuffer(mmap.mmap(-1, 4 * elements + mmap.PAGESIZE), dtype=torch.float32)[:elements]


def test_late_copy_to_registered_memory_is_poison_until_awaited(async_device):
    source, target = async_device.to_device(torch.randn(ELEMENTS)), page_aligned(ELEMENTS)
    async_device.register_host_memory(target.data_ptr(), target.nbytes, async_device.current())
    stream = async_device.new_stream(async_device.current())
    async_device.copy([DeviceCopy(target, source)], stream)
    assert set(target.numpy().tobytes()) == {POISON}
    async_device.host_reads([target])
    assert async_device.violations == ["memory is read that a device has not filled yet"]
    assert async_device.races
    stream.synchronize()
    assert torch.equal(target, source)


def test_late_queried_event_completes_after_some_of_the_bytes(async_device):
    source, target = async_device.to_device(torch.randn(ELEMENTS)), page_aligned(ELEMENTS)
    async_device.register_host_memory(target.data_ptr(), target.nbytes, async_device.current())
    async_device.copy([DeviceCopy(target, source)], async_device.current_stream(async_device.current()))
    work, halves = record_device_work([source]), 0
    while not work.has_completed():
        halves += 0 < int((target == source).sum()) < ELEMENTS
    assert halves > 10
    assert torch.equal(target, source)


def test_late_unregistered_memory_is_copied_before_the_call_returns(async_device):
    source, target = async_device.to_device(torch.randn(ELEMENTS)), torch.zeros(ELEMENTS)
    stream = async_device.new_stream(async_device.current())
    async_device.copy([DeviceCopy(target, source)], stream)
    assert torch.equal(target, source)
    given, there = target.clone(), async_device.to_device(torch.zeros(ELEMENTS))
    async_device.copy([DeviceCopy(there, given)], stream)
    given.zero_()
    assert torch.equal(async_device.copy_after_all_work(there), source)


def test_late_source_changed_before_its_copy_is_copied_changed(async_device):
    source, target = async_device.to_device(torch.ones(ELEMENTS)), page_aligned(ELEMENTS)
    async_device.register_host_memory(target.data_ptr(), target.nbytes, async_device.current())
    side = async_device.new_stream(async_device.current())
    side.wait_stream(async_device.current_stream(async_device.current()))
    async_device.copy([DeviceCopy(target, source)], side)
    async_device.launch(torch.Tensor.zero_, [source])  # and the compute stream does not wait for the copy
    assert async_device.races
    async_device.current_stream(async_device.current()).synchronize()
    side.synchronize()
    assert not torch.equal(target, torch.ones(ELEMENTS))


def test_late_memory_stays_registered_during_a_copy(async_device, tmp_path):
    source = async_device.to_device(torch.randn(ELEMENTS))
    stream = async_device.new_stream(async_device.current())
    for action, said in (
        ("unregister", "memory was unregistered while a device copies it"),
        ("cut", "memory is gone that is registered: its file was cut"),
        ("regrow", "registered memory has other pages: its file was cut, and has grown again"),
    ):
        with (tmp_path / action).open("wb+") as file:
            file.truncate(source.nbytes)
            target = torch.frombuffer(mmap.mmap(file.fileno(), source.nbytes), dtype=torch.float32)
            async_device.violations.clear()
            assert not async_device.register_host_memory(target.data_ptr(), target.nbytes, async_device.current())
            async_device.copy([DeviceCopy(target, source)], stream)
            if action == "unregister":
                async_device.unregister_host_memory(target.data_ptr(), async_device.current())
                stream.synchronize()
            else:
                file.truncate(0)
                if action == "regrow":
                    file.truncate(source.nbytes)
                stream.synchronize()
                async_device.unregister_host_memory(target.data_ptr(), async_device.current())
            assert said in async_device.violations


def test_late_tensor_freed_under_an_unrecorded_copy_is_a_violation(async_device):
    target, side = page_aligned(ELEMENTS), async_device.new_stream(async_device.current())
    async_device.register_host_memory(target.data_ptr(), target.nbytes, async_device.current())
    for is_said in (True, False):
        source = async_device.to_device(torch.randn(ELEMENTS))
        if is_said:
            async_device.record_stream(source, side)
        async_device.copy([DeviceCopy(target, source)], side)
        del source
        side.synchronize()
        assert bool(async_device.violations) == (not is_said)
