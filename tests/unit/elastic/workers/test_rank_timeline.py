"""A rank's recorded timeline: contiguous stages, even when a fault ends them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from elastic.control.control_plane import RankAssignment
from elastic.errors import JobFailedError
from elastic.settings import SOCKET_VARIABLE, TOKEN_VARIABLE
from elastic.workers import rank_timeline as module
from elastic.workers.rank_timeline import RankTimeline
from peerstore.shard_records import VersionId
from tieredckpt.checkpointer.progress_hook import SaveRestoreLog
from tieredckpt.dcp.restore_report import RestoreReport
from tieredckpt.event_log.event_types import (
    ProcessBegan,
    ProcessEnded,
    RestoreEvent,
    StageEvent,
    StepEvent,
    WorldFormed,
)
from tieredckpt.event_log.log_writer import RunPosition

SUPERVISED = {SOCKET_VARIABLE: "/somewhere", TOKEN_VARIABLE: "t", "ELASTIC_NODE": "n0", "ELASTIC_JOB": "job"}


class Written:
    """An event log that retains the events in memory."""

    def __init__(self) -> None:
        self.position = RunPosition()
        self.events = []

    def write(self, event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def ledger(monkeypatch):
    """Make each reading of a clock one second later than the previous one."""
    seconds = iter(range(1000, 10_000))
    monkeypatch.setattr(module.time, "time", lambda: float(next(seconds)))
    monkeypatch.setattr(module, "own_start_time", lambda: 990.0)
    return Written()


def place(epoch=0, rank=0, **more):
    return RankAssignment(epoch, rank, 2, rank, 2, 0, 1, "h:1", **more)


def into(record, **where):
    record.waiting_began()
    record.assigned(place(**where))
    record.groups_ready()


def stages(ledger):
    return [(one.epoch, one.name) for one in ledger.of(StageEvent)]


def assert_no_gap(ledger):
    told = [one for one in ledger.of(StageEvent) if one.name not in ("detect", "first_step")]
    assert all(after.began - (before.began + before.seconds) in (0.0, 1.0) for before, after in pairwise(told))


def test_timeline_has_every_stage_from_start_to_end(ledger):
    record = RankTimeline(ledger, SUPERVISED)
    into(record)
    for step in (3, 4):
        record.step_began(step)
        record.step_metrics(0.5, 8, None)
        record.step_ended(step)
    record.ended("finished")
    assert stages(ledger) == [(0, name) for name in ("launch", "rendezvous", "groups", "loader", "first_step")]
    assert_no_gap(ledger)
    first, second = ledger.of(StepEvent)
    assert (first.step, first.loss, first.tokens, first.samples) == (3, 0.5, 8, None)
    assert second.began == first.began + first.seconds, "no time is lost between two steps"
    assert [(one.who, one.node) for one in ledger.of(ProcessBegan)] == [("rank", "n0")]
    assert [one.how for one in ledger.of(ProcessEnded)] == ["finished"]


def test_after_a_fault(ledger):
    record = RankTimeline(ledger, SUPERVISED)
    into(record)
    record.step_began(0)
    record.fault_detected()
    record.fault_detected()  # the rank receives the notice, and its collective fails
    into(record, epoch=1)
    assert stages(ledger)[4:] == [(0, "detect"), (0, "abort"), (1, "rendezvous"), (1, "groups")]
    assert ledger.of(StepEvent) == [], "a step that was not ended is none"


def test_world_that_breaks_during_entry_is_recorded(ledger):
    record = RankTimeline(ledger, SUPERVISED)
    record.waiting_began()
    record.assigned(place())
    record.fault_detected()
    into(record, epoch=1)
    assert stages(ledger)[2:] == [(0, "detect"), (0, "groups"), (0, "abort"), (1, "rendezvous"), (1, "groups")]


def test_requested_change_is_recorded(ledger):
    record = RankTimeline(ledger, SUPERVISED)
    into(record)
    record.step_began(0)
    record.step_ended(0)
    record.pause_began()
    record.sealed()
    into(record, epoch=1)
    assert stages(ledger)[5:] == [(0, "seal"), (0, "leave"), (1, "rendezvous"), (1, "groups")]
    (step,) = ledger.of(StepEvent)
    seal = next(one for one in ledger.of(StageEvent) if one.name == "seal")
    assert seal.began == step.began + step.seconds, "also while the ranks agree where to stop"


def test_timeline_records_a_restore(ledger):
    record, recorded = RankTimeline(ledger, SUPERVISED), SaveRestoreLog(ledger)
    into(record, rank=1)
    with recorded.record_restore() as told:
        told.step = 6
    record.step_began(7)
    assert stages(ledger)[3:] == [(0, "loader"), (0, "hydrate"), (0, "loader")]
    assert_no_gap(ledger)
    (restored,) = ledger.of(RestoreEvent)
    assert (restored.rank, restored.step, restored.mode, restored.epoch) == (1, 6, "snapshot", 0)
    assert record.next_step == 7


def test_timeline_records_hydration_from_survivors(ledger):
    record, recorded = RankTimeline(ledger, SUPERVISED), SaveRestoreLog(ledger)
    into(record)
    record.survivors_asked(anything=True)
    with recorded.record_restore() as told:
        told.step = 6
        told.report = RestoreReport(6, VersionId(6, 1, 0, "x"), {"peer": 8}, mode="live", steps_redone=0)
    record.step_began(7)
    assert stages(ledger)[2:] == [(0, name) for name in ("groups", "hydrate", "loader", "hydrate", "loader")]
    assert_no_gap(ledger)
    (restored,) = ledger.of(RestoreEvent)
    assert (restored.mode, restored.steps_redone, restored.bytes_by_tier) == ("live", 0, {"peer": 8})


def test_interrupted_step_is_not_among_the_steps_that_are_done_again(ledger):
    record, recorded = RankTimeline(ledger, SUPERVISED), SaveRestoreLog(ledger)
    into(record)
    for step in range(5):
        record.step_began(step)
        record.step_ended(step)
    record.step_began(5)
    for step in (4, 2):
        with recorded.record_restore() as told:
            told.step = step
    assert [(one.step, one.steps_redone) for one in ledger.of(RestoreEvent)] == [(4, 0), (2, 2)]


def test_a_restore_that_fails_took_its_time(ledger):
    record, recorded = RankTimeline(ledger, SUPERVISED), SaveRestoreLog(ledger)
    into(record)
    with pytest.raises(OSError, match="gone"), recorded.record_restore():
        raise OSError("gone")
    assert stages(ledger)[-1] == (0, "hydrate")
    assert ledger.of(RestoreEvent) == []


def test_only_rank_zero_records_steps_and_reads_the_loss(ledger):
    class Unasked:
        def __float__(self):
            raise AssertionError("on a device this waits for all that was started there")

    record = RankTimeline(ledger, SUPERVISED)
    into(record, rank=1)
    record.step_began(0)
    record.step_metrics(Unasked(), 1, 1)
    record.step_ended(0)
    assert ledger.of(StepEvent) == []
    assert stages(ledger)[-1] == (0, "first_step")


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_nonfinite_loss_is_recorded_as_none(ledger, loss):
    record = RankTimeline(ledger, SUPERVISED)
    into(record)
    record.step_began(0)
    record.step_metrics(loss, None, None)
    record.step_ended(0)
    assert ledger.of(StepEvent)[0].loss is None


def test_rank_zero_records_coordinator_events_when_unsupervised(ledger):
    first, other = RankTimeline(ledger, {}), Written()
    into(first, restarts=2)
    into(RankTimeline(other, {}), rank=1, restarts=2)
    first.ended("finished")
    (world,) = ledger.of(WorldFormed)
    assert (world.epoch, world.ranks, world.how, world.restarts) == (2, 2, "restart", 2)
    assert [(one.who, one.again) for one in ledger.of(ProcessBegan)] == [("rank", False), ("coordinator", True)]
    assert [one.who for one in ledger.of(ProcessEnded)] == ["rank", "coordinator"]
    assert [one.who for one in other.of(ProcessBegan)] == ["rank"]
    assert other.of(WorldFormed) == []


@pytest.mark.parametrize(("error", "how"), [(JobFailedError("no more"), "job failed"), (ValueError("bad"), "failed")])
def test_an_end_by_an_error(ledger, error, how):
    with pytest.raises(type(error)), RankTimeline(ledger, SUPERVISED):
        raise error
    (ended,) = ledger.of(ProcessEnded)
    assert (ended.how, ended.words) == (how, f"{type(error).__name__}: {error}")
