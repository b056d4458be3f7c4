"""The simulation would notice: rules of production that do not hold, and the invariant that says so."""

from __future__ import annotations

import pytest

from tests.worlds.broken_rules import SPOILT, break_rule
from tests.worlds.schedules import Finding, find_violation, schedule_of

ENOUGH = 100
"""Schedules within which each broken rule shows."""


def find_violation_of(name: str) -> Finding:
    """The first schedule in which the broken rule shows as it is to."""
    rule = SPOILT[name]
    with break_rule(name):
        for seed in range(ENOUGH):
            finding = find_violation(schedule_of(seed, rule.kinds))
            if finding is not None and rule.noticed in str(finding.violation):
                return finding
    pytest.fail(f"{ENOUGH} schedules, and nothing says {rule.noticed!r}")


@pytest.mark.parametrize("name", SPOILT)
def test_broken_rule_is_detected_and_a_correct_one_passes(name):
    assert find_violation(find_violation_of(name).schedule) is None
