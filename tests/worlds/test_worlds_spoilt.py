"""Every broken production rule is detected by an invariant of the simulation."""

from __future__ import annotations

import pytest

from tests.worlds.broken_rules import BROKEN, break_rule
from tests.worlds.schedules import Finding, find_violation, schedule_of

ENOUGH = 100
"""Schedules within which each broken rule must be detected."""


def find_violation_of(name: str) -> Finding:
    """Return the first schedule with the violation that the broken rule must cause."""
    rule = BROKEN[name]
    with break_rule(name):
        for seed in range(ENOUGH):
            finding = find_violation(schedule_of(seed, rule.kinds))
            if finding is not None and rule.noticed in str(finding.violation):
                return finding
    pytest.fail(f"None of {ENOUGH} schedules caused the violation {rule.noticed!r}.")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_detected_and_a_correct_one_passes(name):
    assert find_violation(find_violation_of(name).schedule) is None
