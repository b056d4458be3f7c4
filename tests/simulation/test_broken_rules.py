"""The simulation would notice: rules of production that do not hold, and the invariant that says so."""

from __future__ import annotations

import ast
import functools
import itertools
import traceback
from pathlib import Path

import pytest

from tests.simulation.broken_rules import BROKEN, break_rule
from tests.simulation.schedule import Finding, find_violation

ENOUGH = 200
"""Schedules within which each broken rule shows."""
SHOWN = {
    "keep all of the past": 48,
    "count what was not compared": 81,
    "let the past write": 23,
    "begin without a quorum": 22,
    "evict below whole": 17,
    "settle with what one tells": 16,
    "count what was left out": 13,
    "believe who did not hear": 16,
    "keep what is torn": 12,
    "mend never": 14,
    "believe who started again": 88,
    "choose what was left": 17,
    "take silence for absence": 17,
}
"""Schedules that showed a rule when it was last looked for: each is tried before all others."""


def find_violation_of(name: str) -> Finding:
    """A schedule in which the broken rule shows as it is to."""
    rule = BROKEN[name]
    with break_rule(name):
        for seed in itertools.chain([SHOWN.get(name, 0)], range(ENOUGH)):
            finding = find_violation(rule.schedule_of(seed))
            if finding is not None and rule.noticed in str(finding.violation):
                return finding
    pytest.fail(f"{ENOUGH} schedules, and nothing says {rule.noticed!r}")


@pytest.fixture(scope="module")
def findings():
    """Each is looked for once."""
    return functools.cache(find_violation_of)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_detected_and_a_correct_one_passes(name, findings):
    assert find_violation(findings(name).schedule) is None


def test_every_invariant_detects_a_broken_rule(findings):
    sites = {
        (path.name, node.lineno)
        for path in Path(__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and "Violation" in ast.dump(node)
    }
    last = [traceback.extract_tb(findings(name).violation.__traceback__)[-1] for name in BROKEN]
    reached = {(Path(frame.filename).name, frame.lineno) for frame in last}
    assert sites - reached == set()
