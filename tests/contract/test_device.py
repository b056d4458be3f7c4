"""What every implementation of :class:`tieredckpt.device.Device` promises: without one, and on what torch reports."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator

import pytest
import torch

from tieredckpt.device import Accelerator, Copy, Device, NoDevice, accelerator, installed, work_so_far

ELEMENTS = 100_000


def kinds() -> list[Device]:
    real = accelerator()
    return [NoDevice(), *([real] if isinstance(real, Accelerator) else [])]


@pytest.fixture(params=kinds(), ids=lambda device: type(device).__name__)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with installed(request.param) as device:
        yield device


def on(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device.current())


def test_copies_both_ways_are_done_when_the_stream_is_synchronized(device):
    place = device.current()
    sources = [torch.randn(ELEMENTS), torch.randn(7, 11).t(), torch.randn(0), torch.arange(5)]
    there = [on(device, torch.zeros_like(one)) for one in sources]
    back = [torch.zeros(one.shape, dtype=one.dtype) for one in sources]
    stream = device.new_stream(place)
    stream.wait_stream(device.current_stream(place))
    device.copy([Copy(*pair) for pair in zip(there, sources, strict=True)], stream)
    device.copy([Copy(*pair) for pair in zip(back, there, strict=True)], stream)
    stream.synchronize()
    for one, other in zip(sources, back, strict=True):
        assert torch.equal(one, other)


def test_a_stream_that_waits_for_another_s_event_finds_what_was_copied_there(device):
    place = device.current()
    source, there, back = torch.randn(ELEMENTS), on(device, torch.zeros(ELEMENTS)), torch.zeros(ELEMENTS)
    first, second = device.new_stream(place), device.new_stream(place)
    first.wait_stream(device.current_stream(place))
    device.copy([Copy(there, source)], first)
    second.wait_event(first.record_event())
    device.copy([Copy(back, there)], second)
    event = second.record_event()
    event.synchronize()
    assert event.query()
    assert torch.equal(source, back)


def test_work_so_far_has_completed_once_it_was_waited_for_whoever_asks(device):
    place = device.current()
    source, there = torch.randn(ELEMENTS), on(device, torch.zeros(ELEMENTS))
    device.copy([Copy(there, source)], device.current_stream(place))
    work = work_so_far([there])
    found = []
    thread = threading.Thread(target=lambda: (work.wait(), found.append(work.has_completed())))
    thread.start()
    thread.join()
    assert found == [True]
    device.synchronize(place)
    assert work_so_far().has_completed()


def test_registered_memory_is_given_back_and_can_be_registered_again(device):
    size_bytes = 4 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for _ in range(2):
        problem = device.register(address, size_bytes)
        assert bool(problem) == (device.count() == 0)
        if not problem:
            assert device.register(address, size_bytes)  # once is enough
            assert not device.unregister(address)


def test_the_current_device_is_a_thread_s_own(device):
    before = device.current()

    def other() -> None:
        device.make_current(max(0, device.count() - 1))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert device.current() == before


def test_what_is_in_this_process_s_memory_is_on_no_device(device):
    assert device.place_of(torch.zeros(3)) is None
    if device.count():
        assert device.place_of(on(device, torch.zeros(3))) == device.current()


def test_a_device_has_a_generator_where_there_is_one(device):
    generator = device.generator()
    assert (generator is None) == (device.count() == 0)
    if generator is not None:
        before = generator.get_state()
        assert generator.device == device.current()
        generator.set_state(before)


def test_there_is_memory_to_account_for_and_to_give_back(device):
    before = device.allocated_bytes()
    tensor = on(device, torch.zeros(1 << 20))
    assert device.allocated_bytes() - before in (
        (0,) if device.count() == 0 else range(tensor.nbytes, 2 * tensor.nbytes)
    )
    del tensor
    device.release_cached()
    assert device.allocated_bytes() == before


def test_what_is_installed_is_asked_by_all_threads_until_the_block_ends():
    before = accelerator()
    with installed(NoDevice()) as outer:
        with installed(NoDevice()) as inner:
            found = []
            thread = threading.Thread(target=lambda: found.append(accelerator()))
            thread.start()
            thread.join()
            assert found == [inner]
        assert accelerator() is outer
    assert accelerator() is before


def test_a_broken_device_s_work_is_not_taken_for_done():
    class Broken:
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class BrokenStream:
        def record_event(self):
            return Broken()

    class BrokenDevice(NoDevice):
        def place_of(self, tensor):
            return torch.device("cpu")

        def current_stream(self, place):
            return BrokenStream()

    with installed(BrokenDevice()):
        assert not work_so_far([torch.zeros(1)]).has_completed()
