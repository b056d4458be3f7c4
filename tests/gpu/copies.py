"""Section "copies": how fast bytes move between this process's memory and each device."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.gpu.devices import is_real, where
from tests.gpu.report import Check, Figure, Finding
from tieredckpt.tensors.device import DeviceBackend, DeviceCopy, accelerator

_BYTES, _CPU_BYTES, _ROUNDS = 1 << 30, 64 << 20, 5


def run(device: str, out: Path, limit_s: float) -> Iterator[Finding]:
    """Measure copies within the host, then both ways to each device."""
    size = _BYTES if is_real() else _CPU_BYTES
    host, other = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Figure("host to host, one thread", _rate(size, lambda: other.copy_(host)), "GB/s", where())
    torch.set_num_threads(threads)
    if not is_real():
        yield Check("copies to a device are measured", "not run", why="no accelerator: a fake has no speed")
        return
    yield from _of_devices(accelerator(), size)


def _of_devices(device: DeviceBackend, size: int) -> Iterator[Finding]:
    memory = mmap.mmap(-1, size)
    memory[:] = b"\1" * size
    host = torch.frombuffer(memory, dtype=torch.uint8)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for is_registered in (False, True):
        kind = "registered" if is_registered else "pageable"
        if is_registered and (problem := device.register_host_memory(address, size, device.current())):
            yield Check(f"{size} bytes are registered", "failed", why=problem)
            continue
        try:
            for index in range(device.device_count()):
                yield from _both_ways(device, torch.device(device.type, index), host, kind)
        finally:
            if is_registered:
                device.unregister_host_memory(address, device.current())


def _both_ways(device: DeviceBackend, place: torch.device, host: torch.Tensor, kind: str) -> Iterator[Finding]:
    there = torch.full_like(host, 2, device=place)
    stream = device.new_stream(place)
    for way, copy in (("host to", DeviceCopy(there, host)), ("device to host from", DeviceCopy(host, there))):

        def moved(copy: DeviceCopy = copy) -> None:
            stream.wait_stream(device.current_stream(place))
            device.copy([copy], stream)
            stream.synchronize()

        if copy.target is host:
            host.zero_()
        yield Figure(f"{way} {place}, {kind} memory", _rate(host.nbytes, moved), "GB/s", where())
    is_same = torch.equal(host, torch.ones_like(host))
    why = "" if is_same else "the bytes differ after a round trip"
    yield Check(f"bits after copies both ways, {place}, {kind} memory", "passed" if is_same else "failed", why=why)


def _rate(size: int, call: Callable[[], object]) -> float:
    """Return gigabytes per second, of the best of some rounds."""
    took = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return size / min(took) / 1e9
