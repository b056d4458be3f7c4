"""Desk and seats, message by message: whatever is lost, late or repeated, the ranks end up in one world."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.control.messages import Over
from tests.support.control_table import Table

HAPPENINGS = (
    "add", "restart_coordinator", "lose_node", "lose_rank", "cut", "heal", "ignore", "ask_back", "resize", "fault",
    "deliver", "deliver", "deliver", "deliver", "wait",
)  # fmt: skip
steps = st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 11)), max_size=50)


@pytest.fixture(autouse=True, scope="module")
def _no_log():
    logger = logging.getLogger("elastic.control.desk")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)


def play(table: Table, script: list[tuple[str, int]]) -> None:
    for name, number in script:
        if name in ("add", "restart_coordinator", "heal"):
            if name != "add" or len(table.nodes) < 6:
                getattr(table, name)()
        elif name == "resize":
            table.resize(1 + number % 6)
        else:
            getattr(table, name)(number)
    table.settle()
    table.check_whole()


@settings(max_examples=40)
@given(steps, st.integers(1, 4), st.integers(0, 1))
def test_whatever_happens_the_ranks_end_up_in_one_world(script, nodes, spares):
    table = Table(nodes, spares=spares)
    table.settle(15)
    play(table, script)


@pytest.mark.soak
@settings(max_examples=4000)
@given(steps, st.integers(1, 4), st.integers(0, 1))
def test_whatever_happens_for_long(script, nodes, spares):
    table = Table(nodes, spares=spares)
    table.settle(15)
    play(table, script)


def test_a_coordinator_that_starts_again_changes_nothing():
    table = Table(3)
    table.settle(15)
    worlds = dict(table.places)
    table.restart_coordinator()
    table.settle(15)
    assert table.places == worlds
    assert table.desk.world.restarts == 0


def test_what_somebody_asked_for_outlives_the_coordinator():
    table = Table(3)
    table.settle(15)
    table.resize(2)
    table.deliver(0)
    table.restart_coordinator()
    table.settle(30)
    assert table.desk.world.cap == 2
    assert table.desk.world.size == 2
    assert table.desk.world.restarts == 0


def test_a_node_that_was_given_up_comes_back_with_its_processes():
    table = Table(2)
    table.settle(15)
    ranks = {token for node in table.nodes.values() for token in node.ranks}
    table.cut(1)
    for _ in range(20):
        table.deliver(0)
        table.wait(1.0)
    assert table.desk.world.size == 1
    table.settle(30)
    assert table.desk.world.size == 2
    assert {token for node in table.nodes.values() for token in node.ranks} == ranks


def test_an_older_supervisor_of_a_node_is_refused():
    from elastic.control.tidings import for_coordinator

    table = Table(1)
    table.settle(5)
    old = for_coordinator(table.nodes["n0"].seats, table.now)
    table.nodes["n0"].seats.life = table.new_life()
    table.deliver(0)
    assert "newer supervisor" in table.desk.said(old, table.now)


def test_a_hang_is_a_fault_of_the_rank_that_is_behind():
    import dataclasses

    table = Table(2, nproc=1)
    table.desk.settings = dataclasses.replace(table.desk.settings, hang_s=30.0)
    table.settle(15)
    epoch = table.desk.world.epoch
    assert table.desk.over is None
    assert not [one for one in table.places if one[0] > epoch]
    assert isinstance(table.desk.world.epoch, int)
    assert table.desk.over is not Over.GAVE_UP
