"""Changes of world from an event log: their faults, times and stages."""

from __future__ import annotations

import pytest

from elastic.coordinator.world_changes import WorldHistory
from tests.support.event_logs import EventLogBuilder


def history(built):
    one = WorldHistory()
    for event in built.events:
        one.add(event)
    return one


def changes(built):
    return history(built).changes()


def started():
    return EventLogBuilder().process_began(0).world_formed(1, ranks=2).steps(0, 10, at=2)


def test_log_without_a_world_has_no_changes():
    assert changes(EventLogBuilder()) == []
    assert changes(EventLogBuilder().process_began(0)) == []


def test_first_world_is_a_start():
    (start,) = changes(started())
    assert (start.epoch, start.how, start.ranks_before, start.ranks, start.faults) == (0, "start", 0, 2, ())
    assert start.at_us == EventLogBuilder.microseconds(0)
    assert start.seconds == pytest.approx(2)


def test_recovery_lasts_from_the_fault_to_the_next_step():
    log = started().fault(13, since=12.5, node="n1", local_rank=0).world_formed(14, epoch=1, ranks=2, how="respawn")
    log.stage("detect", 13, 0, epoch=0).stage("hydrate", 14, 2, epoch=1).steps(10, 5, at=16.5, epoch=1)
    _, recovery = changes(log)
    assert (recovery.epoch, recovery.how, recovery.ranks_before, recovery.ranks) == (1, "respawn", 2, 2)
    assert [(one.node, one.local_rank) for one in recovery.faults] == [("n1", 0)]
    assert recovery.at_us == EventLogBuilder.microseconds(12.5)
    assert recovery.seconds == pytest.approx(4)
    assert dict(recovery.stages)["hydrate"] == pytest.approx(2)
    assert sum(seconds for _, seconds in recovery.stages) == pytest.approx(recovery.seconds)


def test_fault_without_a_new_world_is_pending():
    *_, pending = changes(started().fault(13, since=12.5, node="n1"))
    assert (pending.epoch, pending.ranks_before, pending.seconds) == (None, 2, None)
    assert [one.node for one in pending.faults] == ["n1"]


def test_world_without_a_recorded_step_has_no_duration():
    log = started().fault(13).world_formed(14, epoch=1, how="shrink")
    assert [(one.epoch, one.seconds) for one in changes(log)][1:] == [(1, None)]
    no_steps = EventLogBuilder().process_began(0).world_formed(1, ranks=2).fault(13).world_formed(14, epoch=1)
    assert [(one.epoch, one.seconds) for one in changes(no_steps)] == [(0, None), (1, None)]


def test_fault_in_a_world_without_steps_belongs_to_the_next_change():
    log = started().fault(13, node="n0").world_formed(14, epoch=1)
    log.fault(15, epoch=1, node="n1").world_formed(16, epoch=2).steps(10, 3, at=17, epoch=2)
    _, first, second = changes(log)
    assert ([one.node for one in first.faults], first.seconds) == (["n0"], None)
    assert [one.node for one in second.faults] == ["n1"]
    assert second.seconds == pytest.approx(4)


def test_earlier_run_in_the_same_log_is_not_shown():
    log = started().fault(13, node="n1").process_ended(14)
    log.process_began(100).world_formed(101, ranks=4).steps(10, 3, at=103)
    for event in started().events[2:]:  # the files of the first run's ranks are read later
        log.add(event)
    (start,) = changes(log)
    assert (start.epoch, start.ranks) == (0, 4)
    assert start.seconds == pytest.approx(3)


def test_restarted_coordinator_continues_the_run():
    log = started().process_began(20, again=True).fault(21).world_formed(22, epoch=1).steps(10, 3, at=23, epoch=1)
    assert [one.epoch for one in changes(log)] == [0, 1]


def test_memory_is_bounded_in_a_long_run():
    log = EventLogBuilder().process_began(0)
    for epoch in range(2000):
        log.world_formed(10 * epoch, epoch=epoch).steps(9 * epoch, 9, at=10 * epoch + 1, each=0.5, epoch=epoch)
        log.stage("hydrate", 10 * epoch, 0.5, epoch=epoch)
    long = history(log)
    assert len(long._decisions) <= 1000
    assert len(long._steps) <= 64
    assert all(len(steps) <= 4 for steps in long._steps.values())
    assert long.changes()[-1].epoch == 1999


def test_later_step_of_a_world_is_not_analysed_again():
    one = history(started())
    before = one.changes()
    for event in EventLogBuilder().steps(10, 50, at=12).events:
        one.add(event)
    assert one.changes() is before
    for event in EventLogBuilder().fault(70).world_formed(71, epoch=1).steps(60, 1, at=75, epoch=1).events:
        one.add(event)
    *_, recovery = one.changes()
    assert recovery.seconds == pytest.approx(5)
