"""Every broken production rule is detected by an invariant of the simulation."""

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
"""Schedules within which each broken rule must be detected."""
SHOWN = {
    "keep abandoned versions": 48,
    "accept chunks without comparing": 81,
    "load without comparing": 1,
    "ignore the fence": 23,
    "begin without a quorum": 22,
    "decide without a quorum": 2,
    "evict below committed": 17,
    "replicate after one report": 16,
    "count aborted parts as sealed": 13,
    "trust an abort of a sealed part": 16,
    "keep aborted versions": 12,
    "ignore racks": 6,
    "keep old partners": 4,
    "never repair": 14,
    "trust restarted holders": 88,
    "never finish a task": 1,
    "choose without voting": 1,
    "choose superseded steps": 17,
    "treat silence as absence": 17,
}
"""Seeds that detected a rule in an earlier search. The search tries them first."""


def find_violation_of(name: str) -> Finding:
    """Return a schedule with the violation that the broken rule must cause."""
    rule = BROKEN[name]
    with break_rule(name):
        for seed in itertools.chain([SHOWN.get(name, 0)], range(ENOUGH)):
            finding = find_violation(rule.schedule_of(seed))
            if finding is not None and rule.noticed in str(finding.violation):
                return finding
    pytest.fail(f"None of {ENOUGH} schedules caused the violation {rule.noticed!r}.")


@pytest.fixture(scope="module")
def findings():
    """Return a search that runs once per rule."""
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
