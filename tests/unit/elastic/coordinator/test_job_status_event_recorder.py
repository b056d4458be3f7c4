"""Events that the coordinator records: each once, and a fault only for a real fault."""

from __future__ import annotations

import pytest

from elastic.control.control_messages import ExitReason
from elastic.coordinator.job_status import WorldEventRecorder
from tests.support.control_simulation import ControlSimulation
from tests.unit.elastic.workers.test_rank_timeline import Written
from tieredckpt.event_log.event_types import FaultEvent, ProcessBegan, ProcessEnded, StopRequested, WorldFormed


@pytest.fixture
def table():
    """Three nodes in their first world, and the recorded events."""
    return told(ControlSimulation(3))


def told(table):
    table.written = Written()
    table.recorder = WorldEventRecorder(table.written, "job", again=False, wall=lambda: 1000.0 + table.now)
    table.desk._observer = table.recorder.record_decision
    table.run_without_faults(30)
    assert [(one.how, one.ranks) for one in table.written.of(WorldFormed)] == [("start", 3 * table.nproc)]
    assert table.written.of(FaultEvent) == []
    table.written.events.clear()
    return table


def faults(table):
    return [(one.kind, one.epoch) for one in table.written.of(FaultEvent)]


def test_lost_rank_is_recorded_as_a_process_fault(table):
    table.lose_rank(1)
    table.run_without_faults(30)
    assert faults(table) == [("process", 0)]
    (fault,) = table.written.of(FaultEvent)
    assert (fault.node, fault.reason) == ("n1", "it was killed")
    assert [(one.epoch, one.how) for one in table.written.of(WorldFormed)] == [(1, "respawn")]


def test_lost_node_fault_starts_at_its_last_report(table):
    lost_at = 1000.0 + table.now
    table.lose_node(2)
    table.run_without_faults(100)
    assert faults(table) == [("node", 0)]
    (fault,) = table.written.of(FaultEvent)
    assert fault.since == pytest.approx(lost_at)
    assert fault.at > fault.since
    assert [(one.how, len(one.nodes)) for one in table.written.of(WorldFormed)] == [("shrink", 2)]


def test_ranks_that_leave_unprompted_are_recorded_as_an_error(table):
    table.fault(0)
    table.run_without_faults(30)
    assert faults(table) == [("error", 0)]
    assert [one.how for one in table.written.of(WorldFormed)] == ["restart"]


def test_resize_is_not_recorded_as_a_fault(table):
    table.resize(2)
    table.run_without_faults(30)
    assert faults(table) == []
    (notice,) = table.written.of(StopRequested)
    assert (notice.want, notice.by, notice.epoch) == ("resize", "person", 0)
    assert notice.deadline_s > 0
    assert [one.how for one in table.written.of(WorldFormed)] == ["shrink"]


def test_a_rank_that_does_not_stop_is_late(table):
    table.ignore_orders(0)
    table.resize(2)
    for _ in range(400):
        for node in list(table.nodes.values()):
            table._exchange(node)
        table.advance(5.0)
        if table.written.of(FaultEvent):
            break
    assert {kind for kind, _ in faults(table)} == {"late"}


def test_two_successive_rank_losses_on_a_node_are_separate_faults(table):
    table.lose_rank(0)
    table.run_without_faults(1)
    table.lose_rank(0)
    table.run_without_faults(60)
    assert len(faults(table)) == len({(one.at, one.local_rank, one.epoch) for one in table.written.of(FaultEvent)}) <= 2
    assert faults(table)[0] == ("process", 0)


def test_job_end_is_recorded_with_its_reason(table):
    table.recorder.record_end(ExitReason.JOB_FAILED, "too many faults")
    (ended,) = table.written.of(ProcessEnded)
    assert (ended.who, ended.how, ended.words) == ("coordinator", "job failed", "too many faults")


def test_coordinator_restart_is_recorded():
    written = Written()
    WorldEventRecorder(written, "job", again=True)
    (began,) = written.of(ProcessBegan)
    assert began.again
