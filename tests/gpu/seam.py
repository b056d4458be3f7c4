"""Section "seam": the contract of the device seam, and its users, on the devices of this machine."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.checked import run_tests

CHECKED = (
    "tests/contract/test_device.py",
    "tests/unit/tieredckpt/tensors/test_slot_copy_devices.py",
    "tests/unit/tieredckpt/restore/test_read_executor_devices.py",
    "tests/unit/tieredckpt/tensors/test_slot_copy_registration.py",
    "tests/unit/tieredckpt/live/test_boundary_recorder_captured_steps.py",
    "tests/unit/tieredckpt/cli/test_device_checks.py",
    "tests/unit/elastic/samples/test_rng.py",
    "tests/unit/repository/test_nccl_like.py",
)
_TEST_S = 40.0


def run(device: str, out: Path, limit_s: float) -> None:
    """Run the contract suite and the tests of its users."""
    run_tests(out, CHECKED, timeout_s=_TEST_S)
