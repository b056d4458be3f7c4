"""Newer steps of a node that was silent when the next world resumed are logged when the node is back."""

from __future__ import annotations

import logging

import msgspec
import pytest

from elastic.control.control_messages import NodeStatus, WorldSpec
from elastic.control.control_plane import RankProgress
from elastic.coordinator.repeated_steps import RepeatedSteps
from elastic.world.world_state import ReachedStep
from tests.faults.judge import names_older_step

ALONE = WorldSpec(1, ("n1",), 0, "")
NEXT = WorldSpec(2, ("n0",), 1, "", reached=ReachedStep("job", 84))


def says(node, world, sealed, base_step=None, *, job="job", here=True):
    """Return the report of a node whose rank has sealed a step, in this world unless ``here`` is false."""
    ranks = (RankProgress(sealed + 1, sealed, has_sealed=here, job=job, base_step=base_step),)
    return NodeStatus(1, node, 1, 1, world=world, rank_progress=ranks)


@pytest.fixture
def steps():
    return RepeatedSteps()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "elastic.coordinator.repeated_steps")

    def read():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return read


LINE = (
    "job: node n1 was silent and has sealed step 92 in world 1. World 2 resumed from step 84 without it; 8 steps are "
    "done again ('tieredckpt ls job' shows the node's steps)"
)


def test_single_repeated_step_is_reported_in_the_singular(steps, lines):
    steps.observe(says("n0", NEXT, 92, base_step=91), NEXT)
    steps.observe(says("n1", ALONE, 92, base_step=40), NEXT)
    (line,) = lines()
    assert "World 2 resumed from step 91 without it; 1 step is done again" in line
    assert names_older_step(line)


def test_node_returns_after_the_next_world_has_sealed_a_step(steps, lines):
    steps.observe(says("n0", NEXT, 88, base_step=84), NEXT)
    assert lines() == []
    for _ in range(2):
        steps.observe(says("n1", ALONE, 92, base_step=40), NEXT)
    assert lines() == [LINE]
    assert names_older_step(LINE)
    steps.observe(says("n1", ALONE, 96, base_step=40), NEXT)  # it trains on until it receives the order
    assert [line.partition("sealed step ")[2][:2] for line in lines()] == ["96"]


def test_node_returns_before_the_next_world_has_sealed_a_step(steps, lines):
    steps.observe(says("n1", ALONE, 92, base_step=40), NEXT)
    steps.observe(says("n0", NEXT, 84), NEXT)
    assert lines() == []
    for _ in range(2):
        steps.observe(says("n0", NEXT, 88, base_step=84), NEXT)
    assert lines() == [LINE]


def test_step_is_done_again_by_a_world_before_the_newest(steps, lines):
    steps.observe(says("n0", NEXT, 88, base_step=84), NEXT)
    newest = WorldSpec(3, ("n0", "n2"), 1, "")
    steps.observe(says("n2", newest, 124, base_step=120), newest)
    steps.observe(says("n1", ALONE, 92), newest)
    assert lines() == [LINE]


def test_world_that_starts_from_nothing(steps, lines):
    start = msgspec.structs.replace(NEXT, reached=None)
    steps.observe(says("n0", start, 4, base_step=-1), start)
    steps.observe(says("n1", ALONE, 2), start)
    (line,) = lines()
    assert "World 2 starts from nothing without it; 3 steps are done again" in line


@pytest.mark.parametrize(
    ("late", "newest"),
    [
        (says("n1", ALONE, 84), NEXT),  # restored
        (says("n1", ALONE, 86), msgspec.structs.replace(NEXT, reached=ReachedStep("job", 86))),  # the ranks report it
        (says("n1", ALONE, 92, job="other"), NEXT),
        (says("n1", None, 92), NEXT),
        (says("n1", NEXT, 92), NEXT),  # from the same world
        (says("n1", ALONE, -1), NEXT),
        (says("n1", ALONE, 92, here=False), NEXT),  # sealed before world 1, which resumed from an older step
        (NodeStatus(1, "n1", 1, 2, world=ALONE, rank_progress=(None, None)), NEXT),
    ],
)
def test_nothing_is_repeated_or_the_ranks_report_it(steps, lines, late, newest):
    steps.observe(says("n0", newest, 88, base_step=84), newest)
    steps.observe(late, newest)
    assert lines() == []


def test_report_of_a_world_that_this_coordinator_does_not_know(steps, lines):
    steps.observe(says("n0", NEXT, 88, base_step=84), ALONE)
    steps.observe(says("n1", ALONE, 92), NEXT)
    assert lines() == []
