"""Hang detection from the reports of a world's nodes: a table of reports and times."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.control.control_messages import NodeStatus, WorldSpec
from elastic.control.control_plane import RankAssignment, RankProgress
from elastic.control.hang_detector import HangDetector, HangTimeouts, StepTimes
from elastic.errors import PolicyError
from elastic.settings import abort_timeout_in, hang_limits, hang_limits_in
from elastic.workers.process_groups import ProcessGroups
from elastic.world.world_state import HangDetected, RankLost
from tests.support.control_simulation import ControlSimulation
from tests.support.example_counts import examples

WORLD = WorldSpec(7, ("n0", "n1"), 0, "")
SHORT = HangTimeouts(step_s=5.0, first_s=100.0)


def report(node, *steps, quiet=(), free=False):
    said = tuple(None if step is None else RankProgress(step, idle=free) for step in steps)
    return NodeStatus(
        1, node, 3, len(steps), spawn_count=9, world=WORLD, rank_progress=said, silent_s=tuple(map(float, quiet))
    )


def both(one, other):
    return {"n0": one, "n1": other}


def moving(at, *, pace=None, began=0.0):
    """Return a world whose first rank reached step 4 by ``at``."""
    movement = HangDetector(began, pace)
    movement.observe(report("n0", 3, 3), report("n0", 4, 4), at)
    return movement


def test_hang_names_the_rank_behind_all_others():
    movement = moving(10.0)
    reports = both(report("n0", 4, 4), report("n1", 4, 3))
    assert movement.find_hangs(WORLD, reports, SHORT, 15.0) == []
    (hang,) = movement.find_hangs(WORLD, reports, SHORT, 15.1)
    assert (hang.epoch, hang.node, hang.local_rank) == (7, "n1", 1)
    assert movement.find_hangs(WORLD, reports, SHORT, 99.0) == []  # once is enough


def test_hang_of_several_ranks_blames_none():
    (hang,) = moving(10.0).find_hangs(WORLD, both(report("n0", 4), report("n1", 4)), SHORT, 99.0)
    assert (hang.node, hang.local_rank) == ("", -1)


def test_single_rank_is_never_behind():
    world = WorldSpec(7, ("n0",), 0, "")
    (hang,) = moving(10.0).find_hangs(world, {"n0": report("n0", 4)}, SHORT, 99.0)
    assert (hang.node, hang.local_rank) == ("", -1)


def test_unresponsive_rank_is_blamed_even_when_ahead():
    reports = both(report("n0", 5, 4, quiet=(30, 0)), report("n1", 4, 3, quiet=(0.5, 0.1)))
    (hang,) = moving(10.0).find_hangs(WORLD, reports, SHORT, 40.0)
    assert (hang.node, hang.local_rank) == ("n0", 0)
    assert "does not answer" in hang.reason


def test_all_unresponsive_ranks_are_replaced_at_once():
    reports = both(report("n0", 4, 4, quiet=(30, 30)), report("n1", 4, 4, quiet=(0, 30)))
    hang, *others = moving(10.0).find_hangs(WORLD, reports, SHORT, 40.0)
    assert isinstance(hang, HangDetected)
    assert [
        (one.node, one.local_rank, one.generation, one.spawn_count) for one in others if isinstance(one, RankLost)
    ] == [
        ("n0", 1, 3, 9),
        ("n1", 1, 3, 9),
    ]


def test_before_the_first_step_there_is_another_limit():
    movement = HangDetector(10.0)
    movement.observe(report("n0", None), report("n0", None), 90.0)
    reports = both(report("n0", None), report("n1", None))
    assert movement.find_hangs(WORLD, reports, SHORT, 110.0) == []
    (hang,) = movement.find_hangs(WORLD, reports, SHORT, 110.1)
    assert hang.node == ""


def test_rank_stopped_during_restore_is_found_before_the_first_step():
    movement = HangDetector(10.0)
    reports = both(report("n0", None, quiet=(70,)), report("n1", None, quiet=(0.2,)))
    assert movement.find_hangs(WORLD, reports, HangTimeouts(), 70.0) == []
    (hang,) = movement.find_hangs(WORLD, reports, HangTimeouts(), 80.1)
    assert (hang.node, hang.local_rank) == ("n0", 0)


def test_unresponsive_rank_is_ignored_while_others_progress():
    movement = moving(100.0)
    reports = both(report("n0", 4, quiet=(80,)), report("n1", 4))
    assert movement.find_hangs(WORLD, reports, HangTimeouts(), 130.0) == []


def test_default_timeouts_follow_from_measured_step_times():
    pace = StepTimes()
    movement = moving(400.0, pace=pace)
    assert (pace.longest_first_step_s, pace.longest_step_s) == (400.0, 0.0)
    movement.observe(report("n1", 4), report("n1", 5), 490.0)
    assert (pace.longest_first_step_s, pace.longest_step_s) == (400.0, 90.0)
    reports = both(report("n0", 5), report("n1", 5))
    assert movement.find_hangs(WORLD, reports, HangTimeouts(), 490.0 + 900.0) == []
    assert movement.find_hangs(WORLD, reports, HangTimeouts(), 490.0 + 901.0)
    again = HangDetector(2000.0, pace)
    assert again.find_hangs(WORLD, reports, HangTimeouts(), 2000.0 + 4000.0) == []
    assert again.find_hangs(WORLD, reports, HangTimeouts(), 2000.0 + 4001.0)


def test_rewind_to_an_earlier_step_is_not_progress():
    movement = moving(10.0)
    movement.observe(report("n0", 9), report("n0", None), 14.0)
    assert movement.find_hangs(WORLD, both(report("n0", None), report("n1", 4)), SHORT, 15.1)


def test_idle_rank_outside_its_steps_never_hangs():
    reports = both(report("n0", 4, free=True), report("n1", 4))
    assert moving(10.0).find_hangs(WORLD, reports, SHORT, 9999.0) == []
    stopped = both(report("n0", 4, free=True, quiet=(99,)), report("n1", 4))
    assert moving(10.0).find_hangs(WORLD, stopped, SHORT, 9999.0)


def test_the_longest_that_a_rank_may_wait_is_known_when_a_world_is_formed():
    assert SHORT.longest_s(StepTimes()) == 100.0
    assert HangTimeouts().longest_s(StepTimes()) == 3600.0
    assert HangTimeouts().longest_s(StepTimes(longest_step_s=500.0, longest_first_step_s=90.0)) == 5000.0
    assert hang_limits("9", "off").longest_s(StepTimes()) is None
    table = ControlSimulation(2, hang=HangTimeouts(step_s=7.0, first_s=50.0))
    table.run_without_faults(15)
    assert {place.hang_s for place in table.assignments} == {50.0}


def timeouts(monkeypatch, given, hang_s):
    """Return the timeout that torch received."""
    told = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_a, timeout, **_n: told.append(timeout))
    monkeypatch.setattr(ProcessGroups, "_store", lambda _self: dist.HashStore())
    place = RankAssignment(0, 0, 1, 0, 1, 0, 1, "127.0.0.1:1", hang_s=hang_s)
    ProcessGroups(place, backend="gloo", timeout=given).initialize()
    return told[0]


@pytest.mark.parametrize(
    ("hang_s", "least_s"), [(100.0, 1800.0), (1799.0, 1801.0), (3600.0, 3601.0), (90_000.0, 90_001.0)]
)
def test_groups_wait_longer_than_a_hang_takes_to_be_found(monkeypatch, hang_s, least_s):
    assert timeouts(monkeypatch, None, hang_s) >= timedelta(seconds=least_s)


def test_group_timeout_is_torchs_without_hang_detection(monkeypatch):
    assert timeouts(monkeypatch, None, None) is None


def test_explicit_group_timeout_wins_and_a_short_one_warns(monkeypatch, caplog):
    assert timeouts(monkeypatch, timedelta(seconds=900), 600.0) == timedelta(seconds=900)
    assert caplog.messages == []
    assert timeouts(monkeypatch, timedelta(seconds=300), 600.0) == timedelta(seconds=300)
    assert "Policy(timeout=) is 300 s, and hang detection takes up to 600 s" in caplog.text


def test_off_is_off():
    off = hang_limits("off", "off")
    reports = both(report("n0", 4, quiet=(9999,)), report("n1", 4))
    assert moving(10.0).find_hangs(WORLD, reports, off, 99999.0) == []
    assert HangDetector(0.0).find_hangs(WORLD, reports, off, 99999.0) == []


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_invalid_hang_limit_is_refused(text):
    with pytest.raises(PolicyError, match="--first-step-timeout"):
        hang_limits("auto", text)


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.sampled_from(("n0", "n1")), st.integers(0, 1), st.floats(0.1, 500)), max_size=12),
    st.booleans(),
    st.floats(0, 20_000),
)
def test_no_hang_is_found_within_ten_times_the_longest_step(moves, first, later):
    """A hang is reported only once, and never before the minimum limit."""
    pace, now, last = StepTimes(), 0.0, 0.0
    movement, steps = HangDetector(now, pace), {"n0": [0, 0], "n1": [0, 0]}
    for node, rank, gap in moves:
        before = report(node, *steps[node])
        steps[node][rank] += 1
        now += gap
        movement.observe(before, report(node, *steps[node]), now)
        last = now
    reports = {node: report(node, *said) for node, said in steps.items()}
    found = movement.find_hangs(WORLD, reports, HangTimeouts(), now + later)
    limit = max(600.0, 10 * pace.longest_step_s) if moves else 3600.0
    assert bool(found) is (now + later - last > limit)
    assert movement.find_hangs(WORLD, reports, HangTimeouts(), math.inf if first else now + later) == [] or not found


def test_hang_limits_are_read_from_the_environment():
    assert hang_limits_in({}) == HangTimeouts()
    said = {"ELASTIC_HANG_TIMEOUT": "90", "ELASTIC_FIRST_STEP_TIMEOUT": "off"}
    assert hang_limits_in(said) == HangTimeouts(90.0, 0.0)
    with pytest.raises(PolicyError, match=r"\$ELASTIC_FIRST_STEP_TIMEOUT 'soon'"):
        hang_limits_in({"ELASTIC_FIRST_STEP_TIMEOUT": "soon"})


def test_abort_timeout_of_the_environment():
    assert abort_timeout_in({}) == 10.0
    assert abort_timeout_in({"ELASTIC_ABORT_TIMEOUT": "60"}) == 60.0
    for wrong in ("soon", "0", "inf"):
        with pytest.raises(PolicyError, match=r"\$ELASTIC_ABORT_TIMEOUT"):
            abort_timeout_in({"ELASTIC_ABORT_TIMEOUT": wrong})
