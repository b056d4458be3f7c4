"""``make test-gpu``: the first hour on a GPU, as one command and one report.

``build/gpu/report.json`` and ``report.html`` have what is there (driver, NCCL, torch), each check and each figure.
Without a GPU the same checks run on fakes, and the report says so. What is not run is in it too, with the reason.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.gpu.report import Check, Figure, Report, page
from tieredckpt.device import Accelerator, Copy, Device, accelerator

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build/gpu"
CHECKED = (
    "tests/contract/test_device.py",
    "tests/unit/tieredckpt/test_staging_on_devices.py",
    "tests/unit/tieredckpt/test_loading_on_devices.py",
    "tests/unit/tieredckpt/test_slot_memory.py",
    "tests/unit/tieredckpt/live/test_captured_steps.py",
    "tests/unit/tieredckpt/cli/test_device_checks.py",
    "tests/unit/elastic/samples/test_sample_seeds.py",
    "tests/unit/elastic/test_nccl_like.py",
    "tests/e2e/elastic/test_aborted_collectives.py",
    "tests/e2e/elastic/test_aborted_a_hundred_times.py",
    "tests/e2e/elastic/test_lost_while_communicators_are_made.py",
)
ON_NCCL = (
    "a rank is killed inside an all-reduce of NCCL, bits compared",
    "communicators of NCCL are aborted and made again, 100 times",
)
"""What those of the last three files do on a device that is there, beside the backend that does what NCCL does."""
MEASURED = ("P1", "P3", "P5", "P9")
_MEASURING_S = 1200.0
_PROBED_BYTES = 256 << 20
_ROUNDS = 5


class Collected:
    """What pytest has run."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.figures: list[Figure] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.figures += [Figure(name, float(value), "ms", "") for name, value in report.user_properties]
        if report.when == "call" or report.outcome != "passed":
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
            outcome = "not run" if report.skipped else report.outcome
            self.checks.append(Check(report.nodeid, outcome, round(report.duration, 3), why.strip()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.checks.append(Check(report.nodeid, "failed", why=str(report.longrepr)))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.checks += [Check(item.nodeid, "not run", why="left out by -m") for item in items]


def environment(device: Device) -> dict[str, str]:
    found = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}",
        "accelerator": device.type if device.count() else "none",
        "revision": _said("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"),
        "driver": _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
    }
    if torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


def figures(device: Device) -> list[Figure]:
    """How fast each device copies, both ways, to registered memory and to other."""
    found = []
    memory = mmap.mmap(-1, _PROBED_BYTES)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for is_registered in (False, True):
        if is_registered and (problem := device.register(address, _PROBED_BYTES, device.current())):
            raise RuntimeError(f"{_PROBED_BYTES} bytes cannot be registered: {problem}")
        try:
            for index in range(device.count()):
                there = torch.zeros_like(host, device=torch.device(device.type, index))
                for way, copy in (("to", Copy(there, host)), ("from", Copy(host, there))):
                    name = f"{way} {there.device}, {'registered' if is_registered else 'other'} memory"
                    found.append(Figure(name, _PROBED_BYTES / _best(device, there.device, copy) / 1e9, "GB/s"))
        finally:
            if is_registered:
                device.unregister(address, device.current())
    return found


def _best(device: Device, place: torch.device, copy: Copy) -> float:
    """Seconds, of the best of some rounds."""
    stream, took = device.new_stream(place), []
    stream.wait_stream(device.current_stream(place))
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        device.copy([copy], stream)
        stream.synchronize()
        took.append(time.perf_counter() - began)
    return min(took)


def measured(device: Device, names: Sequence[str]) -> tuple[list[Check], list[Figure]]:
    """P1, P3, P5 and P9 with few rounds, on the device; on the CPU where there is none, with as little as is enough to
    see that they run.
    """
    is_real = isinstance(device, Accelerator)
    kind, size, rounds = (device.type, "1GiB", "3") if is_real else ("cpu", "16MiB", "1")
    raw, log = PLACE / "benchmarks.json", PLACE / "benchmarks.log"
    raw.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks", "--only", ",".join(MEASURED), "--device", kind, "--size", size]
    command += ["--rounds", rounds, "--states", "A,C", "--threads", "1", "--ranks", "1", "--out", str(raw)]
    began, why = time.monotonic(), ""
    with log.open("wb") as out:
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, timeout=_MEASURING_S, check=False)
            why = f"status {done.returncode}, see {log}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"not done in {_MEASURING_S:g} s, see {log}"
    groups = json.loads(raw.read_bytes())["groups"] if raw.exists() else []
    seconds = round(time.monotonic() - began, 1)
    checks = []
    for subject in MEASURED:
        mine = [group for group in groups if group["subject"] == subject]
        wrong = [row["name"] for group in mine for row in group["rows"] if row["compared"] and not row["equal"]]
        problem = f"other bits: {', '.join(wrong)}" if wrong else "" if mine else why or "it measured nothing"
        what = f"{subject} on {', '.join(names) or 'the CPU (no figure of a device)'}"
        checks.append(Check(what, "failed" if problem else "passed", seconds, problem))
    if why and all(check.outcome == "passed" for check in checks):
        checks.append(Check("benchmarks end well", "failed", seconds, why))
    return checks, [figure for group in groups for figure in _figures_of(group, names)]


def _figures_of(group: dict[str, Any], names: Sequence[str]) -> Iterator[Figure]:
    backend = "NCCL" if names else "gloo"
    where = f"{', '.join(names) or 'CPU, no accelerator'}; {backend if group['subject'] == 'P9' else 'no collectives'}"
    what = " ".join(
        one for one in (group["subject"], group["title"], group["state"] and f"state {group['state']}") if one
    )
    for row in group["rows"]:
        if row["samples"] and row["unit"] == "s":
            yield Figure(f"{what}: {row['name']}", 1e3 * statistics.median(row["samples"]), "ms", where)


def examined(arguments: Sequence[str] = ()) -> Report:
    collected = Collected()
    chosen: list[Any] = list(arguments) or [str(ROOT / name) for name in CHECKED]
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider")
    pytest.main([*settings, "-q", "-m", "not system", *chosen], plugins=[collected])
    device = accelerator()
    is_real = isinstance(device, Accelerator)
    names = [str(torch.device(device.type, index)) for index in range(device.count())]
    checks, found = collected.checks, collected.figures
    if not is_real:
        why = "no accelerator: tried on the backend of the tests that does what NCCL does, over gloo"
        checks += [Check(name, "not run", why=why) for name in ON_NCCL]
    if not arguments:
        more, rows = measured(device, names)
        checks, found = [*checks, *more], [*found, *rows]
    if is_real:
        try:
            found = [*figures(device), *found]
        except RuntimeError as error:
            checks.append(Check("copies are measured", "failed", why=str(error)))
    else:
        checks.append(Check("copies are measured", "not run", why="no accelerator: a fake has no speed"))
    return Report(names, environment(device), checks, [_placed(one, names) for one in found])


def _placed(figure: Figure, names: Sequence[str]) -> Figure:
    where = figure.where or (", ".join(names) if names else "CPU, no accelerator: on fakes")
    return msgspec.structs.replace(figure, where=where)


def main() -> int:
    PLACE.mkdir(parents=True, exist_ok=True)
    report = examined(sys.argv[1:])
    (PLACE / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    (PLACE / "report.html").write_text(page(report), encoding="utf-8")
    print(report.title)
    for check in report.checks:
        if check.outcome != "passed":
            print(f"{check.outcome}: {check.name}: {check.why.splitlines()[-1] if check.why else ''}")
    print(f"{PLACE / 'report.html'} and report.json have all of it")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
