"""Jobs with several leader candidates whose leader is lost, resigns, or is suspended."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from elastic.control.leader_election import LeaderRecord, open_leader_record
from tests.support.elastic_runs import ElasticRun, elastic_job, kill
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e

LEASE_S = 3


@pytest.fixture
def job():
    with elastic_job() as one:
        yield one


class LauncherNodes:
    """Several launchers that find each other only through a record in a file."""

    def __init__(self, job: ElasticRun, url: str, *options: str) -> None:
        self.job, self.url = job, url
        secret = job.folder / "secret"
        secret.write_text("a secret that three machines know")
        secret.chmod(0o600)
        self.options = ("--coordinator", url, "--listen", "127.0.0.1:0", "--secret", f"file:{secret}", *options)
        self.runs: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            self.runs[name] = self.job.run("--node", name, *self.options)

    def record(self) -> LeaderRecord | None:
        return open_leader_record(self.url).read()

    def leader(self, *, but: str = "") -> str:
        """Wait for a leader other than ``but`` and return its machine."""

        def leads() -> str:
            record = self.record()
            name = "" if record is None else record.holder.rpartition("-")[0]
            return name if name in self.runs and name != but else ""

        try:
            return wait_until(leads, "a machine leads")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.record()}\n{self.job.output()}") from None

    def lose(self, name: str) -> None:
        """Kill the machine's launcher, supervisor, coordinator and ranks."""
        run = self.runs.pop(name)
        gone = [run.pid, *self.job.pids(f'"node":"{name}"'), *self.job.pids(f'"candidate":"{name}-')]
        for pid in gone:
            kill(pid, signal.SIGSTOP)
        for pid in gone:
            kill(pid)
        run.wait(60)


def machines(job: ElasticRun, *options: str) -> LauncherNodes:
    folder: Path = job.folder / "shared"
    folder.mkdir(mode=0o700)
    return LauncherNodes(job, f"file://{folder}/leader?lease={LEASE_S}", *options)


def test_another_machine_takes_over_from_a_lost_leader(job: ElasticRun) -> None:
    all_of_them = machines(job, "--nnodes", "1:3", "--grow-after", "0.3", "--shrink-after", "0")
    all_of_them.start("m1", "m2", "m3")
    before = job.wait_world(3)
    first = all_of_them.leader()
    term = all_of_them.record().term
    all_of_them.lose(first)
    assert all_of_them.leader(but=first) in all_of_them.runs
    after = job.wait_world(2, after=before[0]["epoch"])
    assert {one["pid"] for one in after} == {one["pid"] for one in before if one["node"] != first}
    record = all_of_them.record()
    assert record.term > term
    assert record.epoch >= after[0]["epoch"]
    job.finish()
    assert [job.wait_ended(run) for run in all_of_them.runs.values()] == [0, 0]
    record = all_of_them.record()
    assert (record.holder, record.over) == ("", "finished")


@pytest.mark.nightly
def test_killed_coordinator_is_replaced_within_the_same_world(job: ElasticRun) -> None:
    all_of_them = machines(job, "--nnodes", "2")
    all_of_them.start("m1", "m2")
    before = job.wait_world(2)
    leader, record = all_of_them.leader(), all_of_them.record()
    kill(job.candidate_pid(leader))
    wait_until(lambda: all_of_them.record().term > record.term)
    wait_until(lambda: job.is_in_phase("running"))
    assert (job.status().epoch, job.status().restarts) == (before[0]["epoch"], 0)
    assert job.rank_messages("notice") == []
    job.finish()
    assert [job.wait_ended(run) for run in all_of_them.runs.values()] == [0, 0]


def test_suspended_leader_steps_down_for_its_successor(job: ElasticRun) -> None:
    all_of_them = machines(job, "--nnodes", "2")
    all_of_them.start("m1", "m2")
    before = job.wait_world(2)
    leader, record = all_of_them.leader(), all_of_them.record()
    stopped = job.candidate_pid(leader)
    kill(stopped, signal.SIGSTOP)
    other = all_of_them.leader(but=leader)
    wait_until(lambda: job.is_in_phase("running"))
    assert all_of_them.record().term > record.term
    kill(stopped, signal.SIGCONT)
    wait_until(lambda: stopped not in job.pids('"type":"coordinator"'))
    assert all_of_them.leader() == other
    assert (job.status().epoch, job.status().restarts) == (before[0]["epoch"], 0)
    assert job.rank_messages("notice") == []
    job.finish()
    assert [job.wait_ended(run) for run in all_of_them.runs.values()] == [0, 0]


def test_preempted_leader_hands_over(job: ElasticRun) -> None:
    all_of_them = machines(job, "--nnodes", "1:2", "--grow-after", "0.3", "--shrink-after", "0")
    all_of_them.start("m1", "m2")
    before = job.wait_world(2)
    leader = all_of_them.leader()
    run = all_of_them.runs.pop(leader)
    run.send_signal(signal.SIGTERM)
    assert job.wait_ended(run) == 0
    after = job.wait_world(1, after=before[0]["epoch"])
    assert (after[0]["restarts"], after[0]["node"]) == (0, all_of_them.leader(but=leader))
    job.finish()
    assert [job.wait_ended(run) for run in all_of_them.runs.values()] == [0]


@pytest.mark.nightly
def test_deleted_leader_record_is_recreated_and_the_world_continues(job: ElasticRun) -> None:
    all_of_them = machines(job, "--nnodes", "2")
    all_of_them.start("m1", "m2")
    before = job.wait_world(2)
    all_of_them.leader()
    record = all_of_them.record()
    (job.folder / "shared" / "leader").unlink()
    wait_until(lambda: all_of_them.record() is not None)
    all_of_them.leader()  # usually the same machine
    assert all_of_them.record().term >= record.term
    wait_until(lambda: job.is_in_phase("running"))
    assert (job.status().epoch, job.status().restarts) == (before[0]["epoch"], 0)
    assert job.rank_messages("notice") == []
    job.finish()
    assert [job.wait_ended(run) for run in all_of_them.runs.values()] == [0, 0]


def test_same_command_resumes_a_stopped_job_and_skips_a_finished_one(job: ElasticRun) -> None:
    all_of_them = machines(job, "--nnodes", "2")
    all_of_them.start("m1", "m2")
    before = job.wait_world(2)
    job.run_json("stop")
    assert [job.wait_ended(run) for run in all_of_them.runs.values()] == [7, 7]
    assert all_of_them.record().over == "stopped"
    all_of_them.start("m1", "m2")
    after = job.wait_world(2, after=before[0]["epoch"])
    assert after[0]["epoch"] > before[0]["epoch"]
    job.finish()
    assert [job.wait_ended(run) for run in all_of_them.runs.values()] == [0, 0]
    all_of_them.start("m1")
    assert job.wait_ended(all_of_them.runs["m1"]) == 0
    assert len(job.rank_messages("in")) == 4
    assert "job job has finished; to run it again, delete the record of file:" in job.output()


@pytest.mark.nightly
def test_a_standby_coordinator_leads_when_the_leader_is_lost(job: ElasticRun) -> None:
    all_of_them = machines(job, "--nnodes", "1:2", "--grow-after", "0.3", "--shrink-after", "0")
    all_of_them.start("m1", "m2")
    before = job.wait_world(2)
    leader = all_of_them.leader()
    (secret,) = (word for word in all_of_them.options if word.endswith("/secret"))
    standby = job.start(
        "coordinator", "--listen", "127.0.0.1:0", "--job", "job", "--nnodes", "1:2", "--store", "nowhere:1",
        "--shrink-after", "0", "--secret", secret, "--leadership", all_of_them.url,
    )  # fmt: skip
    all_of_them.lose(leader)
    job.wait_world(1, after=before[0]["epoch"])
    job.finish()
    assert [job.wait_ended(run) for run in all_of_them.runs.values()] == [0]
    assert job.wait_ended(standby) == 0


@pytest.mark.nightly
def test_world_continues_while_the_leader_record_is_unreachable(job: ElasticRun) -> None:
    all_of_them = machines(job, "--nnodes", "2")
    all_of_them.start("m1", "m2")
    before = job.wait_world(2)
    shared, away = job.folder / "shared", job.folder / "away"
    shared.rename(away)
    wait_until(lambda: job.output().count("the coordinator has sent nothing for") == 2, "both have been without a word")
    assert job.status() is None
    away.rename(shared)
    wait_until(lambda: job.is_in_phase("running"))
    assert (job.status().epoch, job.status().restarts) == (before[0]["epoch"], 0)
    assert job.rank_messages("notice") == []
    job.finish()
    assert [job.wait_ended(run) for run in all_of_them.runs.values()] == [0, 0]
