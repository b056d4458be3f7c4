"""Random schedules of faults over a simulated network and clock, with the decisions of production.

A failure is printed with its seed, the fewest events that still fail, and the command that replays it.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tests.simulation.schedule import schedule_of

IN_A_TEST_RUN = 104
"""Schedules of a normal test run, one in eight with parities. ``make nightly`` runs many more."""
AT_ONCE = 2


def start_simulation(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_invariants(first: int, count: int) -> None:
    """Check that all of these schedules keep the invariants, in several processes."""
    cuts = [first + count * number // AT_ONCE for number in range(AT_ONCE + 1)]
    runs = [start_simulation("--seeds", str(begin), str(stop)) for begin, stop in itertools.pairwise(cuts)]
    outputs = [run.communicate() for run in runs]
    for _, errors in outputs:
        sys.stderr.write(errors)
    assert [run.returncode for run in runs] == [0] * AT_ONCE, "\n".join(out + errors for out, errors in outputs)
    assert sum(int(out.rsplit("\n", 2)[-2].split(" ", 1)[0]) for out, _ in outputs) == count


def test_schedule_depends_only_on_its_seed():
    assert schedule_of(7) == schedule_of(7)
    assert schedule_of(7) != schedule_of(8)


def test_failure_prints_its_seed_schedule_and_replay_command():
    out, errors = start_simulation("--seeds", "0", "50", "--break", "choose the oldest").communicate()
    seed = out.split(":", 1)[0].removeprefix("seed ")
    again = f"replay: python -m tests.simulation --seed {seed} --shrink --break 'choose the oldest'"
    for output in (out, errors):
        assert f"seed {seed}, ClusterShape(" in output
        assert " s restart" in output
        assert output.rstrip().endswith(again)
    replay = start_simulation("--seed", seed, "--shrink", "--break", "choose the oldest")
    output, _ = replay.communicate()
    assert replay.returncode == 1
    assert "VIOLATION: the job resumes from" in output


@pytest.mark.timeout(1800)
def test_random_schedules_keep_the_invariants():
    assert_invariants(0, IN_A_TEST_RUN)
