"""``doctor --gpu`` on asynchronous devices: findings, unchanged devices, and a time limit."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.support.async_device import AsyncDevice
from tieredckpt.cli import device_checks
from tieredckpt.cli.device_checks import check_devices
from tieredckpt.cli.findings import CheckStatus, about_nccl
from tieredckpt.tensors.device import CpuBackend

pytestmark = pytest.mark.slow

SIZE = 64 << 10
LIMIT_S = 60.0


def tried(device, limit_s=LIMIT_S):
    def empty(size, place):
        return device.to_device(torch.zeros(size, dtype=torch.uint8), place.index)

    return check_devices(device, empty=empty, size_bytes=SIZE, limit_s=limit_s)


def bad_ones(found):
    return [one for one in found if one.status is CheckStatus.FAILED]


def test_every_device_is_checked_and_left_unchanged():
    device = AsyncDevice(seed=3, count=2)
    found = tried(device)
    assert [one.subject for one in found] == ["device", *["registered memory", "copies", "health"] * 2]
    assert bad_ones(found) == []
    copies = [one for one in found if one.subject == "copies"]
    assert [one.measured.keys() for one in copies] == [{"to_GB_per_s", "from_GB_per_s"}] * 2
    assert ["privateuseone:1" in one.message for one in copies] == [False, True]
    device.close()
    assert (device.registered, device.violations, device.races) == (set(), [], [])


def test_skipped_checks_are_named_without_a_device():
    found = check_devices(CpuBackend())
    assert [one.status for one in found] == [CheckStatus.FAILED, CheckStatus.WARNING]
    assert "reports no accelerator" in found[0].message
    assert "not tried" in found[1].message


def test_unregistrable_memory_is_a_finding_and_other_checks_run():
    device = AsyncDevice(count=1)
    device.refuses = "error 2"
    (one,) = bad_ones(tried(device))
    assert one.subject == "registered memory"
    assert "error 2" in one.message
    assert "ulimit -l" in one.hint
    assert device.violations == []


def test_other_bytes_than_were_given_are_a_finding(monkeypatch):
    device = AsyncDevice(count=1)
    copy = device.copy

    def flips(copies, stream):
        copy(copies, stream)
        (one,) = copies
        if device.device_of(one.target):
            device.launch(lambda it: it[100].bitwise_xor_(4), [one.target], stream=stream)

    monkeypatch.setattr(device, "copy", flips)
    (one,) = bad_ones(tried(device))
    assert (one.subject, "other bytes" in one.message) == ("copies", True)
    device.close()
    assert (device.registered, device.violations) == (set(), [])


@pytest.mark.parametrize("where", ["copy", "register_host_memory", "synchronize"])
def test_a_device_that_raises_is_a_finding_and_keeps_no_memory(monkeypatch, where):
    device = AsyncDevice(count=1)
    given = getattr(device, where)
    calls = []

    def raises(*arguments):
        calls.append(where)
        if len(calls) == 1:
            raise RuntimeError("an illegal memory access was encountered")
        return given(*arguments)

    monkeypatch.setattr(device, where, raises)
    (one,) = bad_ones(tried(device))
    assert (one.subject, "illegal memory access" in one.message) == ("health", True)
    device.close()
    assert (device.registered, device.violations) == (set(), [])


def test_incomplete_event_fails_the_check_and_keeps_the_memory(monkeypatch):
    """Memory that a device may still write to is neither unregistered nor freed."""
    device = AsyncDevice(count=1)
    for_ever = threading.Event()
    monkeypatch.setattr("tests.support.async_device.AsyncEvent.query", lambda _self: False)
    monkeypatch.setattr(device, "synchronize", lambda _place: for_ever.wait())
    monkeypatch.setattr(device_checks, "_left", [])
    found = tried(device, limit_s=0.4)
    assert bad_ones(found)[0].subject == "health"
    for_ever.set()
    assert device.violations == []


@pytest.mark.parametrize("where", ["copy", "register_host_memory", "synchronize"])
def test_hanging_device_is_a_finding(monkeypatch, where):
    device = AsyncDevice(count=1)
    for_ever = threading.Event()
    monkeypatch.setattr(device, where, lambda *_: for_ever.wait() and "")
    monkeypatch.setattr(device_checks, "_left", [])
    found = tried(device, limit_s=0.2)
    assert [one.subject for one in bad_ones(found)] == ["health"]
    assert "does not answer" in bad_ones(found)[0].message
    for_ever.set()


def test_nccl_environment_is_reported():
    unset = about_nccl({}, needed=True)
    assert unset.status is CheckStatus.PASSED
    assert "unset: TORCH_NCCL_ASYNC_ERROR_HANDLING=0, TORCH_NCCL_ENABLE_MONITORING=0" in unset.message
    assert "costs their processes" in unset.message
    is_set = about_nccl({"NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, needed=True)
    assert "set: NCCL_ASYNC_ERROR_HANDLING=0; unset: TORCH_NCCL_ENABLE_MONITORING=0" in is_set.message
    assert "leaves their processes" in is_set.message
    environ = {"TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert about_nccl(environ, needed=False).status is CheckStatus.WARNING
    wrong = about_nccl(environ, needed=True)
    assert wrong.status is CheckStatus.FAILED
    assert "TORCH_NCCL_ENABLE_MONITORING=1: once the watchdog" in wrong.message
    assert "unset TORCH_NCCL_ENABLE_MONITORING, TORCH_DISTRIBUTED_DEBUG" in wrong.hint
