"""Effects of the fault kinds: the ending signal, bounded memory use, ignored signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.fault_injection import fault_actions
from tests.support.local_nodes import wait_until

ROOT = Path(__file__).parents[4]


def start(what: str) -> subprocess.Popen[bytes]:
    lines = f"from elastic.fault_injection import fault_actions; print('begins', flush=True); fault_actions.{what}"
    one = subprocess.Popen(
        [sys.executable, "-c", lines],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with one.stdout as said:
        assert said.readline() == b"begins\n"
    return one


def ended(one: subprocess.Popen[bytes]) -> int:
    return one.wait(60)


@pytest.mark.parametrize(("what", "number"), [("sigkill()", signal.SIGKILL), ("segfault()", signal.SIGSEGV)])
def test_process_ends_by_the_injected_signal(what, number):
    assert ended(start(what)) == -number


def test_exhausted_memory_is_bounded_and_ends_with_sigkill():
    limit = 48 << 20
    assert ended(start(f"exhaust_memory({limit})")) == -signal.SIGKILL
    peak = "int(__import__('re').search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    measured = (
        f"setattr(fault_actions, 'sigkill', lambda: print({peak} - before)), fault_actions.exhaust_memory({limit})"
    )
    lines = f"from elastic.fault_injection import fault_actions; (before := {peak}), {measured}"
    said = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )
    page_tables = 1 << 20
    assert limit // 2 < int(said.stdout) << 10 <= limit + page_tables


def test_process_holding_the_gil_handles_no_signal():
    one = start("hold_gil()")
    try:
        wait_until(lambda: has(one.pid, "SigBlk", signal.SIGTERM), "it keeps the lock")
        os.kill(one.pid, signal.SIGTERM)
        assert has(one.pid, "ShdPnd", signal.SIGTERM)
    finally:
        one.kill()
        assert ended(one) == -signal.SIGKILL


def has(pid: int, field: str, number: int) -> bool:
    """Return whether a process has a signal blocked or pending."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return bool(int(next(line for line in lines if line.startswith(f"{field}:")).split()[1], 16) & 1 << (number - 1))


def test_a_process_that_no_supervisor_started_loses_no_node():
    with pytest.raises(fault_actions.InjectedFaultError, match="is not the supervisor"):
        fault_actions.parent_supervisor()
