"""P9 runs, and an interrupted benchmark leaves nothing behind, without a check of speed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import recovery, warden
from benchmarks.parameters import Scene
from benchmarks.sandbox import sandbox
from tests.support.local_nodes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
DESCENDANTS = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "1000"])
    os._exit(0)
os.wait()
print("ready", flush=True)
{end}
"""


def processes_about(folder):
    """Return the processes whose command line or environment contains ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in said:
                found.append((int(entry.name), (entry / "cmdline").read_bytes()))
    return found


def guarded(tmp_path, end):
    """Start a guarded command whose descendants have their own sessions, two of them orphaned."""
    command = [sys.executable, "-I", "-S", warden.__file__, sys.executable, "-c", DESCENDANTS.format(end=end)]
    environ = {**os.environ, "ABOUT": str(tmp_path)}
    one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    assert one.stdout.readline() == b"ready\n"
    return one


def test_command_ends_completely_when_its_guard_closes(tmp_path):
    one = guarded(tmp_path, "time.sleep(1000)")
    with one:
        assert len(processes_about(tmp_path)) == 4
        one.stdin.close()
        assert one.wait(60) == 128 + signal.SIGKILL
    assert processes_about(tmp_path) == []


def test_children_end_with_their_command(tmp_path):
    with guarded(tmp_path, "sys.exit(7)") as one:
        assert one.wait(60) == 7
    assert processes_about(tmp_path) == []


def test_a_signal_is_passed_on(tmp_path):
    with guarded(tmp_path, "time.sleep(1000)") as one:
        one.terminate()
        assert one.wait(60) == 128 + signal.SIGTERM
    assert processes_about(tmp_path) == []


@pytest.mark.nightly
def test_an_interrupted_benchmark_leaves_nothing(tmp_path):
    before = set(SHM.glob("tieredckpt-bench-*"))
    small = ("--only", "P13", "--size", "16MiB", "--rounds", "1", "--out", str(tmp_path / "raw.json"))
    environ = {**os.environ, "ABOUT": str(tmp_path)}  # all its children inherit it
    one = subprocess.Popen([sys.executable, "-m", "benchmarks", *small], cwd=ROOT, env=environ)

    def is_going():
        mine = set(SHM.glob("tieredckpt-bench-*")) - before
        return [folder for folder in mine if list(folder.glob("elastic-0/diary/*.jsonl"))]

    with one:
        mine = wait_until(is_going, "the ranks run", 300.0)
        assert any(b"benchmarks.resize_trainer" in command for _, command in processes_about(tmp_path))
        one.terminate()
        assert one.wait(120) == 128 + signal.SIGTERM
    assert processes_about(tmp_path) == []
    assert not any(folder.exists() for folder in mine)


@pytest.mark.nightly
def test_killed_rank_is_replaced_and_the_result_matches(monkeypatch):
    monkeypatch.setitem(recovery._FAULTS, recovery.RANK, {recovery.SPARE: recovery.Warm})
    with sandbox() as folder:
        scene = Scene("P9", "", recovery.RANKS, 1, 1 << 20, 1, folder)
        rows = recovery.run(0, scene, fault=recovery.RANK, model="FSDP2")
        assert not list(folder.iterdir())
    assert processes_about(folder) == []
    total, *stages, usual = rows
    assert [row["name"] for row in stages] == [f"{one}: {recovery.SPARE}" for one in recovery._ORDER]
    assert total["name"] == recovery.SPARE
    assert total["equal"] is True
    assert total["samples"][0] == pytest.approx(sum(row["samples"][0] for row in stages))
    assert usual["name"] == recovery.USUAL.format(recovery.SPARE)
    assert usual["samples"][0] > 0
