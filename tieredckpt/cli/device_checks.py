"""``tieredckpt doctor --gpu``: checks on each device the functions that staging and recovery need.

Every wait is bounded: device calls run on a thread that is abandoned if they hang. Registered memory is unregistered
after any failure, except while a device may still copy to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from peerstore.sizes_and_durations import show_size
from tieredckpt.cli.findings import CheckResult, CheckStatus, check_failed, check_passed, check_warning
from tieredckpt.tensors.device import DeviceBackend, DeviceCopy, DeviceEvent, accelerator, answered, nccl_version
from tieredckpt.tensors.slot_copy import MappedSlot

_SIZE_BYTES = 64 << 20
_LIMIT_S = 30.0
_POLL_S = 0.001
_ROUNDS = 3
_POISON = 0xA5
Empty = Callable[[int, torch.device], torch.Tensor]
"""Allocator of a number of bytes on a device."""

_left: list[object] = []
"""Memory that a hanging device may still write to; it must stay allocated."""


def check_devices(
    device: DeviceBackend | None = None,
    *,
    empty: Empty | None = None,
    size_bytes: int = _SIZE_BYTES,
    limit_s: float = _LIMIT_S,
) -> list[CheckResult]:
    """Check each device that torch reports. Without a device the result names the skipped checks."""
    device = device or accelerator()
    torch_s = f"torch {torch.__version__}"
    if not device.device_count():
        found = check_failed("device", f"{torch_s} reports no accelerator", _missing_device_hint())
        return [found, check_warning("device checks", "not tried: registered memory, copies both ways, events, health")]
    names = [str(torch.device(device.type, index)) for index in range(device.device_count())]
    findings = [check_passed("device", f"{torch_s} reports {', '.join(names)}, {_nccl()}")]
    for index in range(device.device_count()):
        findings += _DeviceCheck(device, index, empty or _empty, size_bytes, limit_s).findings()
    return findings


def _missing_device_hint() -> str:
    built = torch.version.cuda or torch.version.hip
    if built or torch.xpu._is_compiled():
        return "torch was built for one: look at the driver (nvidia-smi, rocm-smi) and at CUDA_VISIBLE_DEVICES"
    return "this is torch's build for CPUs: install the one for your device"


def _nccl() -> str:
    version = nccl_version()
    return f"NCCL {version}" if version else "without NCCL"


def _empty(size_bytes: int, place: torch.device) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=place)


class _DeviceCheck:
    """Checks of one device."""

    def __init__(self, device: DeviceBackend, index: int, empty: Empty, size_bytes: int, limit_s: float) -> None:
        self._device = device
        self._index = index
        self._place = torch.device(device.type, index)
        self._empty = empty
        self._size_bytes = size_bytes
        self._limit_s = limit_s
        self._stage = "its memory"
        self._registered = False
        self._found: list[CheckResult] = []

    def findings(self) -> list[CheckResult]:
        try:
            answered(self._limit_s, self._run_checks)
        except TimeoutError:
            self._fail(f"it does not answer within {self._limit_s:g} s", "start the node anew, or give it back")
        except Exception as error:  # noqa: BLE001 - any error of a driver is the finding
            self._fail(f"{type(error).__name__}: {error}", "see the driver's log (dmesg: Xid)")
        return list(self._found)  # an abandoned thread may still append

    def _fail(self, text: str, advice: str) -> None:
        self._found.append(check_failed("health", f"{self._place}, {self._stage}: {text}", advice))

    def _run_checks(self) -> None:
        self._device.set_current(self._index)
        there = self._empty(self._size_bytes, self._place)
        memory = _slot(2 * self._size_bytes)
        is_quiet = False
        try:
            self._register(memory)
            self._copy(memory, there)
            self._stage = "its health"
            self._device.synchronize(self._place)
            is_quiet = True
            self._found.append(check_passed("health", f"{self._place} has done all it was given"))
        finally:
            if not is_quiet:
                is_quiet = self._is_quiet()
            if is_quiet:
                self._unregister(memory)
            else:
                _left.extend((memory, there))

    def _is_quiet(self) -> bool:
        """Return whether no copy runs. A device that raises has stopped; a device that hangs may still copy."""
        try:
            answered(self._limit_s / 4, lambda: self._device.synchronize(self._place))
        except TimeoutError:
            return False
        except Exception:  # noqa: BLE001 - already reported
            return True
        return True

    def _register(self, memory: MappedSlot) -> None:
        self._stage = "registering memory"
        problem = self._device.register_host_memory(memory.address, memory.size_bytes, self._place)
        self._registered = not problem
        text = f"{self._place}: {show_size(memory.size_bytes)} of shared memory"
        if problem:
            advice = (
                "saves and restores are right, and slower; most often the limit on locked memory is too low (ulimit -l)"
            )
            self._found.append(check_failed("registered memory", f"{text} cannot be registered: {problem}", advice))
        else:
            self._found.append(check_passed("registered memory", f"{text} was registered"))

    def _unregister(self, memory: MappedSlot) -> None:
        if self._registered:
            self._registered = False
            if problem := self._device.unregister_host_memory(memory.address, self._place):
                advice = "look at the driver's log; the memory stays taken until this process ends"
                self._found.append(
                    check_failed("registered memory", f"{self._place}: it stays registered: {problem}", advice)
                )
        memory.close()

    def _copy(self, memory: MappedSlot, there: torch.Tensor) -> None:
        self._stage = "a copy"
        size = self._size_bytes
        source, target = (memory.tensor(start, torch.uint8, (size,)) for start in (0, size))
        source.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
        stream = self._device.new_stream(self._place)
        stream.wait_stream(self._device.current_stream(self._place))
        took: dict[str, float] = {}
        for _ in range(_ROUNDS):
            target.fill_(_POISON)
            for name, copy in (("to", DeviceCopy(there, source)), ("from", DeviceCopy(target, there))):
                began = time.perf_counter()
                self._device.copy([copy], stream)
                event = stream.record_event()
                if not self._completes(event):
                    self._fail(f"an event has not completed within {self._limit_s / 2:g} s", "start the node anew")
                    return
                took[name] = min(took.get(name, float("inf")), time.perf_counter() - began)
            if not torch.equal(source, target):
                self._found.append(
                    check_failed("copies", f"{self._place} gave back other bytes than it had got", "do not use it")
                )
                return
        speeds = {f"{name}_GB_per_s": round(size / max(took[name], 1e-9) / 1e9, 3) for name in took}
        text = (
            f"{self._place}: {show_size(size)} each way, bit for bit, {speeds['to_GB_per_s']:.1f} GB/s to it and "
            f"{speeds['from_GB_per_s']:.1f} GB/s from it; every event completed"
        )
        self._found.append(CheckResult("copies", CheckStatus.PASSED, text, measured=speeds))

    def _completes(self, event: DeviceEvent) -> bool:
        deadline = time.monotonic() + self._limit_s / 2
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _slot(size_bytes: int) -> MappedSlot:
    """Return shared memory like a slot of the arena: a file of fixed size."""
    fd = os.memfd_create("tieredckpt-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return MappedSlot(fd, size_bytes, 0)
