"""The event log of an ``elastic run`` with a killed rank is exact."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.agents import stop_agent
from tests.support.elastic_runs import ROOT, elastic_job, kill
from tests.support.local_nodes import wait_until
from tests.support.otlp_receiver import otlp_receiver
from tieredckpt.cli.trace_export import TraceExporter
from tieredckpt.event_log import EventLogWriter, read_event_log
from tieredckpt.event_log.event_types import (
    FaultInjected,
    ProcessBegan,
    ProcessEnded,
    RestoreEvent,
    SaveEvent,
    StageEvent,
    WorldFormed,
)
from tieredckpt.goodput import TimeCategory, analyse
from tieredckpt.goodput.traces import job_traces

pytestmark = pytest.mark.e2e

SCRIPT = ROOT / "tests/support/event_log_training.py"
TOTAL, KILLED_AT = 12, 5
WAYS_IN = {"rendezvous", "groups", "hydrate", "loader", "first_step"}


@pytest.fixture(scope="module")
def run():
    """Run two ranks, kill rank 1 inside step 5, and return the event log, its analysis and the time."""
    with elastic_job() as job:
        job.environ |= {"OMP_NUM_THREADS": "1", "TIEREDCKPT_AGENT_BUDGET": "64MiB"}
        job.environ["TIEREDCKPT_AGENT_DIRECTORY"] = str(job.folder / "agent")
        try:
            yield trained(job)
        finally:
            for one in job.started:
                one.send_signal(signal.SIGKILL)
                one.wait()
            wait_until(lambda: not job.pids("event_log_training"))
            for place in {path.parent for path in job.folder.rglob("agent.lock")}:
                stop_agent(place)


def trained(job):
    limit = job.folder / "limit"
    limit.write_text(str(KILLED_AT))
    running = job.start(
        "run", "--nproc", "2", "--job", "told", "--log-dir", str(job.folder / "logs"), "--node", "n0",
        str(SCRIPT), str(job.folder), str(TOTAL),
    )  # fmt: skip
    at = wait_until(lambda: job.rank_messages("step", step=KILLED_AT, rank=1), "rank 1 is in the step", 120)
    wait_until(lambda: job.rank_messages("step", step=KILLED_AT, rank=0), "rank 0 is in the step")
    killed_at = time.time()
    told = EventLogWriter(job.folder / "logs" / "event-log", name="injector")
    told.write(FaultInjected(killed_at, "sigkill", epoch=0, node="n0", local_rank=1))
    told.close()
    kill(at[0]["pid"])
    limit.write_text(str(TOTAL))  # the other rank continues until it waits for the killed one
    assert job.wait_ended(running) == 0, job.output()
    assert job.rank_messages("in", epoch=1)[0]["first"] == KILLED_AT
    read = read_event_log(job.folder / "logs" / "event-log")
    return read, analyse(read.events, warnings=read.warnings), killed_at


def test_event_log_has_every_completed_step(run):
    read, found, _ = run
    assert [one.step for one in found.step_views] == [*range(TOTAL)]
    assert all(one.counts for one in found.step_views)
    assert {one.epoch for one in found.step_views if one.step < KILLED_AT} == {0}
    assert {one.epoch for one in found.step_views if one.step >= KILLED_AT} == {1}
    assert [one.loss for one in found.step_views] == [16.0 * step for step in range(TOTAL)]
    assert found.tokens == TOTAL * 32
    assert not read.warnings


def test_fault_is_recorded_with_its_details(run):
    _, found, killed_at = run
    (recovery,) = [one for one in found.recoveries if one.faults]
    (fault,) = recovery.faults
    assert (fault.epoch, fault.node, fault.local_rank, fault.kind) == (0, "n0", 1, "process")
    assert "SIGKILL" in fault.reason
    assert (fault.injected, fault.at_us) == ("sigkill", round(killed_at * 1e6))
    assert fault.at_us < fault.noticed_us
    assert recovery.known_us is not None
    assert recovery.known_us > fault.at_us
    assert (recovery.category, recovery.how, recovery.resumed, recovery.steps_lost) == (
        TimeCategory.RECOVERY,
        "respawn",
        True,
        0,
    )
    assert found.faults == 1


def test_every_rank_records_every_stage(run):
    read, found, _ = run
    told = {}
    for stage in read.events:
        if isinstance(stage, StageEvent):
            told.setdefault((stage.epoch, stage.rank), set()).add(stage.name)
    assert told == {
        (0, 0): WAYS_IN | {"launch", "detect", "abort"},
        (0, 1): WAYS_IN | {"launch"},
        (1, 0): WAYS_IN,
        (1, 1): WAYS_IN | {"launch"},
    }
    (recovery,) = [one for one in found.recoveries if one.faults]
    assert {"detect", "abort", "launch", "groups", "hydrate"} <= {
        one.name for one in found.stages if one.category is TimeCategory.RECOVERY
    }
    assert {"detect", "hydrate"} <= {*recovery.stages}  # the others may end before a slower one does
    assert sum(recovery.stages.values()) == pytest.approx(recovery.seconds)


def test_event_log_accounts_for_the_time(run):
    _, found, _ = run
    assert sum(found.wall.by.values()) == found.wall.total == found.end_us - found.start_us
    assert sum(found.capacity.by.values()) == found.capacity.total == 2 * found.wall.total
    assert found.unattributed_us <= 0.02 * found.wall.total
    assert 0 < found.ettr < 1
    assert found.ettr == pytest.approx(found.goodput)
    assert (found.worlds, found.ranks, found.runs[0].how) == (2, 2, "finished")


def test_every_rank_records_saves_and_restores(run):
    read, found, _ = run
    assert {(one.epoch, one.rank, one.step) for one in read.events if isinstance(one, RestoreEvent)} == {
        (epoch, rank, step) for epoch, step in ((0, -1), (1, KILLED_AT - 1)) for rank in (0, 1)
    }
    assert found.restores["nothing"] == 2
    assert sum(found.restores.values()) == 4
    assert {tier for tier, size in found.restored_bytes.items() if size} == {"memory"}
    saved = [(one.rank, one.step) for one in read.events if isinstance(one, SaveEvent)]
    assert sorted(saved) == [(rank, step) for rank in (0, 1) for step in range(TOTAL)]


def test_participants_and_the_end_are_recorded(run):
    read, _, _ = run
    assert [one.who for one in read.events if isinstance(one, ProcessBegan)].count("rank") == 3
    ended = [(one.who, one.how) for one in read.events if isinstance(one, ProcessEnded)]
    assert sorted(ended) == [("coordinator", "finished"), ("rank", "finished"), ("rank", "finished")]
    assert [(one.epoch, one.ranks, one.nodes, one.how) for one in read.events if isinstance(one, WorldFormed)] == [
        (0, 2, ("n0",), "start"),
        (1, 2, ("n0",), "respawn"),
    ]


def test_traces_of_the_run_reach_a_collector(run, monkeypatch):
    read, found, killed_at = run
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        assert TraceExporter().send(job_traces(read.events))
    names = {one.span_id: one.name for one in receiver.spans}
    assert [one.name for one in receiver.spans if not one.parent_span_id].count("save") == TOTAL
    (root,) = [one for one in receiver.spans if one.name == "recovery"]
    assert root.start_time_unix_nano == round(killed_at * 1e6) * 1000
    children = [one.name for one in receiver.spans if one.parent_span_id == root.span_id]
    assert {"fault", "detect", "abort", "launch", *WAYS_IN} == {*children}
    assert children.count("first_step") == 2
    restores = [one for one in receiver.spans if one.name == "restore rank" and one.trace_id == root.trace_id]
    assert [names[one.parent_span_id] for one in restores] == ["hydrate"] * 2
    (sent,) = [one.end_us - one.start_us for one in found.recoveries if one.faults]
    assert root.end_time_unix_nano - root.start_time_unix_nano >= sent * 1000
