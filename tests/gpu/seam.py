"""Section "seam": the contract of the device seam, and its users, on the devices of this machine."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.checked import run_tests

CHECKED = (
    "tests/contract/test_device.py",
    "tests/unit/tieredckpt/test_staging_on_devices.py",
    "tests/unit/tieredckpt/test_loading_on_devices.py",
    "tests/unit/tieredckpt/test_slot_memory.py",
    "tests/unit/tieredckpt/live/test_captured_steps.py",
    "tests/unit/tieredckpt/cli/test_device_checks.py",
    "tests/unit/elastic/samples/test_sample_seeds.py",
    "tests/unit/elastic/test_nccl_like.py",
)
_TEST_S = 40.0


def run(device: str, out: Path, limit_s: float) -> None:
    """Run the contract suite and the tests of its users."""
    run_tests(out, CHECKED, timeout_s=_TEST_S)
