"""``tieredckpt goodput`` on hand-made event logs."""

import re

import pytest

from tests.support.event_logs import EventLogBuilder
from tieredckpt.cli.goodput import prometheus_text
from tieredckpt.event_log import EVENT_LOG_ENV, EventLogWriter
from tieredckpt.goodput import analyse

pytestmark = pytest.mark.e2e


@pytest.fixture
def event_log():
    told = (
        EventLogBuilder().process_began(0).world_formed(1, ranks=2).stage("groups", 1, 1).steps(0, 5, at=2, tokens=100)
    )
    told.fault(7.6, since=7.5, node="n1", local_rank=0, reason="it was ended by SIGKILL")
    told.stage("detect", 7.75, 0, epoch=0).world_formed(8, ranks=2, epoch=1, how="respawn")
    return told.stage("rendezvous", 7.75, 0.25, epoch=1).stage("groups", 8, 2, epoch=1)


@pytest.fixture
def log_folder(tmp_path, event_log):
    """Return a job's log folder with its event log."""
    writer = EventLogWriter(tmp_path / "elastic-logs" / "job" / "event-log")
    for event in event_log.steps(4, 6, at=10, epoch=1).process_ended(16).events:
        writer.write(event)
    writer.close()
    return tmp_path / "elastic-logs" / "job"


def test_goodput_report_accounts_for_the_time(cli, log_folder):
    said = cli("goodput", log_folder)
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "job finished; 16.00 s since 2023-11-14 22:13:20 UTC, 2 worlds, at most 2 ranks"
    assert lines[1] == "goodput 62.5 % of the capacity, ETTR 62.5 % of the time: 10 steps that count, 1 lost"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["productive"] == ["10.00", "s", "62.5", "%", "20.00", "s", "62.5", "%"]
    assert rows["lost"][:4] == ["1.50", "s", "9.4", "%"]
    assert "MTTR 2.50 s, MTBF 11.00 s" in said.out
    assert said.err == ""


def test_faults_are_listed(cli, log_folder):
    said = cli("goodput", log_folder, "--faults")
    (row,) = [line for line in said.out.splitlines() if line.startswith("recovery  respawn")]
    assert re.split(r"\s{2,}", row) == [
        *("recovery", "respawn", "+7.50 s", "2 → 2", "0.25 s", "0.25 s", "2.00 s", "2.50 s", "1", "1.50 s"),
    ]
    assert "1. process rank 0 of n1: it was ended by SIGKILL, noticed after 0.10 s" in said.out


def test_goodput_json_matches_the_report(cli, log_folder):
    value = cli("goodput", log_folder / "event-log", "--json").json
    assert (value["steps_counted"], value["steps_lost"], value["faults"], value["live"]) == (10, 1, 1, False)
    assert sum(value["wall"]["by"].values()) == value["wall"]["total"] == 16_000_000
    assert value["recoveries"][1]["stages"] == {"detect": 0.25, "rendezvous": 0.25, "groups": 2.0}
    assert value["timeline"][0]["start_us"] == value["start_us"]
    assert "step_views" not in value


def test_goodput_prometheus_matches_the_report(cli, log_folder):
    said = cli("goodput", log_folder, "--prometheus")
    assert 'tieredckpt_ettr_ratio{job="job"} 0.625\n' in said.out
    assert 'tieredckpt_job_seconds{category="lost",job="job"} 1.5\n' in said.out
    assert 'tieredckpt_transition_stage_p99_seconds{category="recovery",job="job",stage="groups"} 2.0\n' in said.out


def test_prometheus_output_round_trips():
    from prometheus_client.parser import text_string_to_metric_families

    hostile = 'a"job\\with\nlines'
    told = EventLogBuilder().process_began(0, job=hostile).world_formed(0).steps(0, 2, at=1).fault(4).process_ended(5)
    families = list(text_string_to_metric_families(prometheus_text(analyse(told.events))))
    assert {sample.labels["job"] for family in families for sample in family.samples} == {hostile}
    spent = {
        sample.labels["category"]: sample.value
        for family in families
        if family.name == "tieredckpt_job_seconds"
        for sample in family.samples
    }
    assert sum(spent.values()) == 5


def test_a_job_is_found_by_its_name_or_by_the_environment(cli, log_folder, monkeypatch):
    monkeypatch.chdir(log_folder.parent.parent)
    by_name = cli("goodput", "job")
    monkeypatch.setenv(EVENT_LOG_ENV, str(log_folder / "event-log"))
    assert cli("goodput").out == by_name.out != ""
    unknown = cli("goodput", "another")
    assert unknown.code == 3
    assert "elastic-logs has event logs of job" in " ".join(unknown.err.split())


def test_absent_empty_and_unnamed_logs_differ(cli, tmp_path, monkeypatch):
    monkeypatch.delenv(EVENT_LOG_ENV, raising=False)
    absent = cli("goodput", tmp_path / "none")
    assert (absent.code, "is not a directory with an event log" in absent.err, EVENT_LOG_ENV in absent.err) == (
        3,
        True,
        True,
    )
    empty = cli("goodput", tmp_path)
    assert (empty.code, "nothing has been written" in empty.err) == (3, True)
    assert cli("goodput").code == 2
    assert cli("goodput", tmp_path, "--prometheus", "--json").code == 2
    assert cli("goodput", tmp_path, "--watch", "--json").code == 2


def test_damage_is_counted_and_reported(cli, log_folder):
    (file,) = (log_folder / "event-log").iterdir()
    file.write_bytes(file.read_bytes() + b'not json\n{"event":"of tomorrow"}\n{"event":"st')
    said = cli("goodput", log_folder, "--json")
    assert said.code == 0
    assert "1 damaged lines were passed over" in said.err
    assert said.json["warnings"] == [
        "1 damaged lines were passed over",
        "1 lines are of a kind that this release does not know",
    ]
    assert said.json["steps_counted"] == 10


def test_unfinished_run_is_reported(cli, log_folder):
    """The event log lacks its last line, which records the end of the run."""
    (file,) = (log_folder / "event-log").iterdir()
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    assert cli("goodput", log_folder, "--watch").out.startswith("job is running or was killed; 16.00 s since")
