"""Random schedules of faults over a fake network and clock, through the decisions that production makes.

A failing one is printed with its seed: ``python -m tests.simulation --seed N`` tells it as it happens.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tests.simulation.schedule import schedule_of

IN_A_TEST_RUN = 3_000
IN_A_SOAK = 200_000
AT_ONCE = 2


def hold(first: int, count: int) -> None:
    """All of these schedules keep the invariants; they are shared by a few processes."""
    cuts = [first + count * number // AT_ONCE for number in range(AT_ONCE + 1)]
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulation", "--seeds", str(begin), str(stop)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for begin, stop in itertools.pairwise(cuts)
    ]
    said = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * AT_ONCE, "\n".join(said)
    assert sum(int(text.rsplit("\n", 2)[-2].split(" ", 1)[0]) for text in said) == count


def test_a_seed_is_a_schedule():
    assert schedule_of(7) == schedule_of(7)
    assert schedule_of(7) != schedule_of(8)


@pytest.mark.timeout(1800)
def test_random_schedules_keep_the_invariants():
    hold(0, IN_A_TEST_RUN)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_many_random_schedules_keep_the_invariants():
    hold(IN_A_TEST_RUN, IN_A_SOAK)
