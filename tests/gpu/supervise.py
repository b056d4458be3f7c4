"""Run one section as a process group of its own, until its time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import msgspec

from tests.gpu.findings import FILE, read
from tests.gpu.report import Check, Fact, Figure, Section

ROOT = Path(__file__).resolve().parents[2]
_MARK = "TEST_GPU_SECTION"
"""In the environment of all processes of a section, agents with a session of their own included."""
_DEFAULTS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Ranks share one GPU only over sockets. Counting GPUs by NVML leaves a process that can be forked."""
_MARGIN_S = 12.0
"""Seconds for imports and clean-up, which a section that plans its own time does not count."""
_STACKS_S = 2.0
_LOG_LINES = 60


def supervised(name: str, module: str, out: Path, limit_s: float) -> tuple[Section, list[Fact]]:
    """Run ``module`` for at most ``limit_s`` seconds, then kill all its processes.

    The section has all findings up to then, even when it was killed.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).unlink(missing_ok=True)
    log, mark = out / "log.txt", uuid.uuid4().hex
    environment = {**_DEFAULTS, **os.environ, _MARK: mark, "PYTHONUNBUFFERED": "1"}
    path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH", "")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    own_s = max(limit_s / 2, limit_s - _MARGIN_S)
    command = [sys.executable, "-m", "tests.gpu.section", module, str(out), str(own_s)]
    began = time.monotonic()
    with log.open("wb") as to:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=to, stderr=to, env=environment, start_new_session=True
        )
    status: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        if status is None:
            _write_stacks(process)
    finally:
        _kill(process, mark)
    seconds = round(time.monotonic() - began, 1)
    found = read(out)
    checks = [one for one in found if isinstance(one, Check)]
    section = Section(
        name, "finished", limit_s, seconds, "", "", checks, [one for one in found if isinstance(one, Figure)]
    )
    if status is None:
        why = f"not finished in {limit_s:g} s: its processes were killed"
        section = msgspec.structs.replace(section, outcome="not finished", why=why, log=_end_of(log))
    elif status:
        why = f"it ended with status {status} before its end"
        section = msgspec.structs.replace(section, outcome="failed", why=why, log=_end_of(log))
    elif not section.checks and not section.figures:
        section = msgspec.structs.replace(section, outcome="failed", why="it recorded no check and no figure")
    return section, [one for one in found if isinstance(one, Fact)]


def _write_stacks(process: subprocess.Popen[bytes]) -> None:
    """Have the section write the Python stacks of all its threads to its log."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STACKS_S)


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in processes_with(_MARK, mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_with(variable: str, value: str) -> list[int]:
    """Return the processes that have this variable in their environment."""
    wanted, found = f"{variable}={value}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_LINES:])
