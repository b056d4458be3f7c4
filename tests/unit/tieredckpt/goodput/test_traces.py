"""Traces of event logs made by hand. All times are seconds from an arbitrary start."""

import random

import pytest

from tests.support.event_logs import START, EventLogBuilder
from tests.support.synthetic_event_logs import SyntheticJob
from tieredckpt.event_log.event_types import RestoreEvent, SaveEvent
from tieredckpt.goodput import TimeCategory, analyse
from tieredckpt.goodput.traces import job_traces


def run_with_a_fault():
    """Return events of a job whose rank 1 is killed in step 3, and that resumes from step 2."""
    told = EventLogBuilder().process_began(0).world_formed(1, ranks=2, nodes=("n0", "n1"))
    told.stage("hydrate", 1, 1).restored(-1, at=1, took=1).stage("first_step", 2, 1).steps(0, 3, at=2)
    told.save(2, at=4.9, took=0.1).protection(2, at=5.1)
    told.fault(5.6, since=5.5, node="n1", local_rank=0)
    told.stage("detect", 5.75, 0).stage("abort", 5.75, 0.25)
    told.world_formed(6, epoch=1, ranks=2, nodes=("n0", "n1"), how="respawn").stage("rendezvous", 6, 0.5, epoch=1)
    for rank in range(2):
        told.stage("hydrate", 6.5, 0.5, epoch=1, rank=rank)
        sizes = {"memory": 100, "peer": 50 * rank}
        told.add(RestoreEvent(rank, 2, "snapshot", START + 6.5, 0.5, sizes, epoch=1))
    return told.stage("first_step", 7, 1, epoch=1).steps(3, 2, at=7, epoch=1)


def rows(trace):
    """Return name, parent, start and end of each span."""
    names = {one.span_id: one.name for one in trace.spans}
    shown = [(one.start_us / 1e6 - START, one.end_us / 1e6 - START) for one in trace.spans]
    return [
        (one.name, names.get(one.parent_id, ""), pytest.approx(start), pytest.approx(end))
        for one, (start, end) in zip(trace.spans, shown, strict=True)
    ]


def traces_named(name, events):
    return [one for one in job_traces(events) if one.spans[0].name == name]


def test_recovery_has_its_fault_stages_and_restores():
    (trace,) = traces_named("recovery", run_with_a_fault().process_ended(10).events)
    assert rows(trace) == [
        ("recovery", "", 5.5, 8),
        ("fault", "recovery", 5.5, 5.6),
        ("detect", "recovery", 5.5, 5.75),
        ("abort", "recovery", 5.75, 6),
        ("rendezvous", "recovery", 6, 6.5),
        ("hydrate", "recovery", 6.5, 7),
        ("hydrate", "recovery", 6.5, 7),
        ("first_step", "recovery", 7, 8),
        ("restore rank", "hydrate", 6.5, 7),
        ("restore rank", "hydrate", 6.5, 7),
    ]
    root, fault = trace.spans[:2]
    assert root.attributes == {
        "tieredckpt.job.name": "job",
        "tieredckpt.epoch": 1,
        "tieredckpt.world.size": 2,
        "tieredckpt.transition.how": "respawn",
    }
    assert (fault.error, fault.attributes["error.type"], fault.attributes["tieredckpt.node.name"]) == (
        *("SIGKILL", "process", "n1"),
    )
    assert trace.spans[-1].attributes == {
        "tieredckpt.job.name": "job",
        "tieredckpt.rank": 1,
        "tieredckpt.node.name": "n1",
        "tieredckpt.step": 2,
        "tieredckpt.restore.mode": "snapshot",
        "tieredckpt.restore.bytes.memory": 100,
        "tieredckpt.restore.bytes.peer": 50,
    }


def test_recovery_without_a_first_step_waits_for_the_end_of_the_run():
    told = EventLogBuilder().process_began(0).world_formed(1).steps(0, 2, at=1).fault(4)
    told.world_formed(5, epoch=1, how="respawn").restored(1, at=6, epoch=1)
    assert [one.spans[0].name for one in job_traces(told.events)] == ["startup"]
    (trace,) = traces_named("recovery", told.process_ended(9, how="job failed").events)
    assert rows(trace) == [("recovery", "", 4, 9), ("fault", "recovery", 4, 4), ("restore rank", "recovery", 6, 6)]


def test_recovery_of_an_earlier_run_ends_with_that_run():
    told = EventLogBuilder().process_began(0).world_formed(1).steps(0, 2, at=1).fault(4)
    told.process_began(20).world_formed(21).steps(2, 1, at=22)
    assert [one.spans[0].name for one in job_traces(told.events)] == ["startup", "recovery", "startup"]


def test_save_has_its_ranks_and_the_report_of_protection():
    told = EventLogBuilder().process_began(0).world_formed(1, ranks=2, nodes=("n0", "n1")).steps(0, 2, at=1)
    told.save(1, at=3, took=0.2).add(SaveEvent(1, 1, "failed", START + 3.1, 0.4, 0)).protection(1, at=4.5)
    (trace,) = traces_named("save", told.protection(1, at=6, since=5).events)
    assert rows(trace) == [
        ("save", "", 3, 4.5),
        ("save rank", "save", 3, 3.2),
        ("save rank", "save", 3.1, 3.5),
        ("protect", "save", 3.5, 4.5),
    ]
    assert trace.spans[2].error == "the save failed"
    assert trace.spans[2].attributes == {
        "tieredckpt.job.name": "job",
        "tieredckpt.rank": 1,
        "tieredckpt.node.name": "n1",
        "tieredckpt.step": 1,
        "tieredckpt.save.state": "failed",
    }


def test_repeated_save_of_a_step_has_its_own_trace():
    told = EventLogBuilder().process_began(0).save(4, at=1, took=0.5).save(4, at=8, took=0.5).protection(4, at=9)
    first, second = traces_named("save", told.events)
    assert first.trace_id != second.trace_id
    assert rows(first) == [("save", "", 1, 1.5), ("save rank", "save", 1, 1.5)]
    assert rows(second)[-1] == ("protect", "save", 8.5, 9)


def test_save_that_was_never_protected_has_no_such_span():
    told = EventLogBuilder().process_began(0).save(4, at=1, took=0.5).save(5, at=2, took=0.5)
    first, second = traces_named("save", told.protection(5, at=3).events)
    assert [one.name for one in first.spans] == ["save", "save rank"]
    assert second.spans[-1].name == "protect"


def test_restore_outside_a_transition_has_its_own_trace():
    told = EventLogBuilder().restored(7, at=1, took=2, epoch=-1).save(8, at=4, took=1, epoch=-1)
    told.add(RestoreEvent(1, 7, "snapshot", START + 1, 3), RestoreEvent(0, -1, "lost", START + 9, 1))
    restored, saved, lost = job_traces(told.events)
    assert [rows(one)[0] for one in (restored, saved, lost)] == [
        ("restore", "", 1, 4),
        ("save", "", 4, 5),
        ("restore", "", 9, 10),
    ]
    assert [one.attributes.get("tieredckpt.rank") for one in restored.spans] == [None, 0, 1]
    assert lost.spans[1].error == "lost"
    assert "tieredckpt.node.name" not in saved.spans[1].attributes


@pytest.mark.parametrize("seed", range(3))
def test_traces_of_a_long_job_match_its_report(seed):
    told = SyntheticJob(steps=200, faults=5, resizes=3, seed=seed).events
    traces, found = job_traces(told), analyse(told)
    recoveries = [one.spans[0] for one in traces if one.spans[0].name == "recovery"]
    reported = [one for one in found.recoveries if one.category is TimeCategory.RECOVERY]
    assert [one.start_us for one in recoveries] == [one.start_us for one in reported]
    assert sum(span.name == "restore rank" for one in traces for span in one.spans) == sum(found.restores.values())
    assert sum(span.name == "save rank" for one in traces for span in one.spans) == found.save_s.count
    for trace in traces:
        root, *others = trace.spans
        known = {root.span_id}
        assert root.parent_id == 0
        for one in others:
            assert root.start_us <= one.start_us <= one.end_us <= root.end_us
            assert one.parent_id in known
            known.add(one.span_id)
        assert len(known) == len(trace.spans)


def test_ids_are_the_same_for_the_same_events_in_any_order():
    told = run_with_a_fault().events
    shuffled = random.Random(1).sample(told, len(told))
    assert job_traces(shuffled) == job_traces(told)
    assert len({one.trace_id for one in job_traces(told)}) == len(job_traces(told)) == 3
