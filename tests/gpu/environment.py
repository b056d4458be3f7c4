"""Section "environment": facts about the machine and its software."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.machine import facts
from tests.gpu.devices import is_real, model_name
from tests.gpu.report import Check, Fact, Finding
from tieredckpt.tensors.device import nccl_version

_PACKAGES = ("torch", "numpy", "msgspec", "xxhash", "isal", "zstandard", "pytest", "hypothesis")
_REVISION = "TEST_GPU_REVISION"
"""Names the revision where the checkout has no history."""
_SETTINGS = ("NCCL_", "TORCH_NCCL_", "TIEREDCKPT_", "CUDA_", "OMP_NUM_THREADS")


def run(device: str, out: Path, limit_s: float) -> Iterator[Finding]:
    """Report the machine, its software and the variables that change what the sections do."""
    machine = facts()
    yield Fact("device", model_name())
    yield Fact("machine", f"{platform.machine()}, {machine['cores']} cores, {machine['cpu']}")
    yield Fact("memory", f"{machine['memory_bytes'] / 2**30:.0f} GiB, /dev/shm {_free('/dev/shm')}")
    yield Fact("kernel", platform.release())
    yield Fact("python", platform.python_version())
    yield Fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    yield Fact("NCCL", nccl_version() or "torch was built without it")
    yield Fact("driver", _answer("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"))
    yield Fact("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    yield Fact("revision", os.environ.get(_REVISION) or str(machine["revision"]))
    yield Fact("date", str(machine["date"]))
    yield Fact("load before", f"{machine['load_before']:.2f}")
    yield Fact("variables", ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)))
    if is_real():
        ones = torch.ones(1 << 10, device=device)
        is_right = float((ones + ones).sum()) == 2.0 * ones.numel()
        yield Check(
            f"{device} computes", "passed" if is_right else "failed", why="" if is_right else "the sum is wrong"
        )
    else:
        yield Check("an accelerator is there", "not run", why="torch sees none: the sections run on fakes and the CPU")


def _free(folder: str) -> str:
    usage = shutil.disk_usage(folder)
    return f"{usage.free / 2**30:.0f} of {usage.total / 2**30:.0f} GiB free"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _answer(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
