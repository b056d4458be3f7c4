"""Random schedules of faults over a fake network and clock, through the decisions that production makes.

A failing one is printed with its seed, as few of its events as fail, and the command that tells it as it happens.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tests.simulation.schedule import schedule_of

IN_A_TEST_RUN = 200
"""One in eight with parities. ``make nightly`` runs more than a thousand times as many, and these among them."""
AT_ONCE = 2


def start_simulation(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_invariants(first: int, count: int) -> None:
    """All of these schedules keep the invariants; they are shared by a few processes."""
    cuts = [first + count * number // AT_ONCE for number in range(AT_ONCE + 1)]
    runs = [start_simulation("--seeds", str(begin), str(stop)) for begin, stop in itertools.pairwise(cuts)]
    said = [run.communicate() for run in runs]
    for _, errors in said:
        sys.stderr.write(errors)
    assert [run.returncode for run in runs] == [0] * AT_ONCE, "\n".join(out + errors for out, errors in said)
    assert sum(int(out.rsplit("\n", 2)[-2].split(" ", 1)[0]) for out, _ in said) == count


def test_a_seed_is_a_schedule():
    assert schedule_of(7) == schedule_of(7)
    assert schedule_of(7) != schedule_of(8)


def test_failure_prints_its_seed_schedule_and_replay_command():
    out, errors = start_simulation("--seeds", "0", "50", "--break", "choose the oldest").communicate()
    seed = out.split(":", 1)[0].removeprefix("seed ")
    again = f"replay: python -m tests.simulation --seed {seed} --shrink --break 'choose the oldest'"
    for told in (out, errors):
        assert f"seed {seed}, ClusterShape(" in told
        assert " s restart" in told
        assert told.rstrip().endswith(again)
    replay = start_simulation("--seed", seed, "--shrink", "--break", "choose the oldest")
    told, _ = replay.communicate()
    assert replay.returncode == 1
    assert "VIOLATION: the job goes back to" in told


@pytest.mark.timeout(1800)
def test_random_schedules_keep_the_invariants():
    assert_invariants(0, IN_A_TEST_RUN)
