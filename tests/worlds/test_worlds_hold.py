"""Random schedules of faults and resizes in a simulated cluster, with the decisions of a coordinator."""

from __future__ import annotations

from collections import Counter

import pytest

from elastic.world.world_state import WorldPhase
from tests.worlds.schedules import KINDS, find_violation, run, schedule_of, shrink_finding

IN_A_TEST_RUN = 1_000
"""Schedules of a normal test run. ``make nightly`` runs many more."""


def assert_invariants(first: int, count: int) -> None:
    for seed in range(first, first + count):
        finding = find_violation(schedule_of(seed))
        if finding is not None:
            pytest.fail(f"{shrink_finding(finding)}\nreplay: python -m tests.worlds --seed {seed}")


def test_seed_determines_the_schedule_and_its_run():
    assert schedule_of(7) == schedule_of(7)
    assert schedule_of(7) != schedule_of(8)
    logs: list[list[str]] = [[], []]
    for lines in logs:
        run(schedule_of(7), lines.append)
    assert logs[0] == logs[1]


def test_schedules_cover_every_event_and_every_end():
    schedules = [schedule_of(seed) for seed in range(400)]
    assert {event.kind for schedule in schedules for event in schedule.events} == set(KINDS)
    ends = Counter(run(schedule).world.phase for schedule in schedules)
    assert set(ends) >= {WorldPhase.RUNNING, WorldPhase.STOPPED, WorldPhase.FAILED, WorldPhase.FINISHED}
    assert ends[WorldPhase.RUNNING] > sum(ends.values()) // 2


@pytest.mark.timeout(1800)
def test_random_schedules_keep_the_invariants():
    assert_invariants(0, IN_A_TEST_RUN)
