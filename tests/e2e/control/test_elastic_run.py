"""Real coordinators, supervisors and ranks that join, leave, are killed and ignore instructions."""

from __future__ import annotations

import contextlib
import re
import signal

import pytest

from peerstore.daemon_process import process_start_time
from tests.support.elastic_runs import ElasticRun, elastic_job, kill
from tests.support.local_nodes import wait_until
from tieredckpt.cli.exit_codes import ExitCode

pytestmark = pytest.mark.e2e


@pytest.fixture
def job():
    with elastic_job() as one:
        yield one


def pids(world):
    return [one["pid"] for one in world]


def test_ranks_finish_although_one_is_killed(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "2", "--nproc", "2")
    world = job.wait_world(4)
    assert [(one["local"], one["restarts"]) for one in world] == [(0, 0), (1, 0), (0, 0), (1, 0)]
    status = job.run_json("status")
    assert (status["phase"], status["job"], len(status["nodes"])) == ("running", "job", 2)
    kill(world[0]["pid"])  # without a spare, the supervisor starts another process for this local rank
    after = job.wait_world(4, after=world[0]["epoch"])
    assert pids(after)[1:] == pids(world)[1:]
    assert after[0]["pid"] != world[0]["pid"]
    job.finish()
    assert job.wait_ended(run) == 0
    assert len(job.rank_messages("finished")) == 4
    assert job.run_json("status")["error"]["exit"] == 3
    assert "[n1/0] {" in job.output()


def test_a_job_shrinks_and_grows_with_the_same_processes(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "3", "--nnodes", "1:3", "--grow-after", "0.3")
    before = job.wait_world(3)
    assert job.run_json("resize", "--nodes", "2")["max_nodes"] == 2
    smaller = job.wait_world(2, after=before[0]["epoch"])
    (target,) = {one["step"] for one in job.rank_messages("target", epoch=before[0]["epoch"])}
    assert target >= 0
    assert set(pids(smaller)) < set(pids(before))
    job.run_json("resize", "--nodes", "max")
    larger = job.wait_world(3, after=smaller[0]["epoch"])
    assert set(pids(larger)) == set(pids(before))
    assert {one["restarts"] for one in larger} == {0}
    job.finish()
    assert job.wait_ended(run) == 0


def test_a_node_joins_a_job_that_runs(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "1", "--nnodes", "1:2", "--grow-after", "0.2", "--shrink-after", "0")
    first = job.wait_world(1)
    other = job.start("join", "--node", "late", "--no-agent")
    world = job.wait_world(2)
    assert pids(first)[0] == world[0]["pid"]
    assert world[1]["node"] == "late"
    kill(job.supervisor_pid("late"))
    assert job.wait_ended(other) == 1
    job.wait_world(1, after=world[0]["epoch"])
    job.finish()
    assert job.wait_ended(run) == 0


def test_joined_node_leaves_when_its_run_has_failed(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "1", "--nnodes", "1:2", "--grow-after", "0.2", "--shrink-after", "0")
    job.wait_world(1)
    other = job.start("join", "--node", "late", "--no-agent")
    (late,) = (one for one in job.wait_world(2) if one["node"] == "late")
    while run.poll() is None:
        for pid in job.pids('"type":"coordinator"'):
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
    assert job.wait_ended(run) == ExitCode.JOB_FAILED
    assert "the coordinator ended 6 times" in job.output()
    assert job.wait_ended(other) == ExitCode.JOB_FAILED
    assert process_start_time(late["pid"]) < 0


def test_spare_replaces_a_killed_rank(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "2", "--nproc", "2", "--spares", "1")
    before = job.wait_world(4)
    wait_until(lambda: len(job.rank_messages("warm")) == 6)
    wait_until(lambda: [node.spares for node in job.status().nodes] == [1, 1])
    warm = {one["pid"] for one in job.rank_messages("warm")}
    kill(before[1]["pid"])
    after = job.wait_world(4, after=before[0]["epoch"])
    (taken,) = set(pids(after)) - set(pids(before))
    assert taken in warm
    assert after[1]["pid"] == taken
    assert [one["pid"] for number, one in enumerate(after) if number != 1] == [
        one["pid"] for number, one in enumerate(before) if number != 1
    ]
    assert {one["restarts"] for one in after} == {1}
    job.finish()
    assert job.wait_ended(run) == 0


def test_killed_supervisor_ends_its_ranks_and_may_rejoin(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "1:2", "--shrink-after", "0")
    before = job.wait_world(2)
    lost = next(one for one in before if one["node"] == "n1")
    kill(job.supervisor_pid("n1"))
    alone = job.wait_world(1, after=before[0]["epoch"])
    assert alone[0]["node"] == "n0"
    wait_until(lambda: process_start_time(lost["pid"]) < 0)
    again = job.start("join", "--node", "n1", "--no-agent")
    wait_until(lambda: len(job.status().nodes) == 2)
    job.finish()
    assert [job.wait_ended(run), job.wait_ended(again)] == [0, 0]


def test_job_survives_coordinator_kills_during_a_resize(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "3", "--nnodes", "1:3")
    before = job.wait_world(3)
    first = job.coordinator_pid()
    kill(first)
    wait_until(lambda: job.is_in_phase("running"))
    assert job.coordinator_pid() != first
    assert (job.status().epoch, job.status().restarts) == (before[0]["epoch"], 0)
    assert job.rank_messages("notice") == []
    holding = job.touch("ignore-n1")
    job.run_json("resize", "--nodes", "2")
    wait_until(lambda: len(job.rank_messages("notice", want="resize")) == 2)
    kill(job.coordinator_pid())
    wait_until(lambda: job.is_in_phase("pausing"))
    holding.unlink()
    after = job.wait_world(2, after=before[0]["epoch"])
    assert set(pids(after)) < set(pids(before))
    assert {one["restarts"] for one in after} == {0}
    assert len(job.rank_messages("target", epoch=before[0]["epoch"])) == 3
    assert job.status().max_nodes == 2
    job.finish()
    assert job.wait_ended(run) == 0


def test_coordinator_restarts_without_the_secret_file(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "2", "--shrink-after", "60")
    before = job.wait_world(2)
    secret = job.folder / "run/job/secret"
    aside = secret.rename(secret.with_name("aside"))
    kill(job.coordinator_pid())
    kill(before[1]["pid"])
    after = job.wait_world(2, after=before[0]["epoch"])
    assert after[0]["pid"] == before[0]["pid"]
    aside.rename(secret)
    job.finish()
    assert job.wait_ended(run) == 0


def test_a_resize_during_a_resize(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "3", "--nnodes", "1:3")
    before = job.wait_world(3)
    holding = job.touch("ignore-n1")
    job.run_json("resize", "--nodes", "2")
    wait_until(lambda: len(job.rank_messages("notice")) == 2)
    job.run_json("resize", "--nodes", "1")
    holding.unlink()
    after = job.wait_world(1, after=before[0]["epoch"])
    assert after[0]["epoch"] == before[0]["epoch"] + 1
    assert job.rank_messages("in", size=2) == []
    job.finish()
    assert job.wait_ended(run) == 0


def test_a_rank_is_killed_during_a_resize(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "3", "--nnodes", "1:3")
    before = job.wait_world(3)
    job.touch("ignore-n1")
    job.run_json("resize", "--nodes", "2")
    wait_until(lambda: len(job.rank_messages("notice", want="resize")) == 2)
    kill(next(one["pid"] for one in before if one["node"] == "n1"))
    (job.folder / "ignore-n1").unlink()
    after = job.wait_world(2, after=before[0]["epoch"])
    assert {one["restarts"] for one in after} == {1}
    assert len(job.rank_messages("stale")) == 2
    job.finish()
    assert job.wait_ended(run) == 0


def test_drained_node_that_does_not_leave_is_killed(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "1:2", "--shrink-after", "0")
    before = job.wait_world(2)
    job.touch("ignore-n1")
    job.run_json("drain", "n1", "--deadline", "0.5")
    after = job.wait_world(1, after=before[0]["epoch"])
    assert after[0]["node"] == "n0"
    wait_until(lambda: process_start_time(next(one["pid"] for one in before if one["node"] == "n1")) < 0)
    wait_until(lambda: not job.pids('"node":"n1"'))
    job.finish()
    assert job.wait_ended(run) == 0


def test_job_fails_after_too_many_faults(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "2", "--max-restarts", "1")
    before = job.wait_world(2)
    job.touch("fault-n0")
    after = job.wait_world(2, after=before[0]["epoch"])
    job.touch("fault-n1")
    assert pids(after) == pids(before)  # a fault that a rank reports kills no process
    assert job.wait_ended(run) == 8
    assert len(job.rank_messages("job failed")) == 2
    assert "attempts: 2 faults; at most 1 restart allowed (job_max_retry_count)" in job.output()
    assert after[0]["restarts"] == 1


def test_sigterm_seals_and_stops_the_job(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "2")
    job.wait_world(2)
    run.send_signal(signal.SIGTERM)
    assert job.wait_ended(run) == 7
    assert len({one["step"] for one in job.rank_messages("target")}) == 1
    assert len(job.rank_messages("dismissed")) == 2
    assert "the same command resumes it" in job.output()


def test_the_second_interrupt_ends_everything_at_once(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "2")
    job.wait_world(2)
    job.touch("ignore-n0")
    run.send_signal(signal.SIGINT)
    wait_until(lambda: job.rank_messages("notice", want="stop"))
    run.send_signal(signal.SIGINT)
    assert job.wait_ended(run) == 130
    wait_until(lambda: not job.pids())


def test_nothing_outlives_a_killed_launcher(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "2", "--nnodes", "2", "--spares", "1")
    job.wait_world(2)
    kill(run.pid)
    run.wait()
    wait_until(lambda: not job.pids())


def test_preempted_machine_of_several_leaves_the_job(job: ElasticRun) -> None:
    secret = job.folder / "secret"
    secret.write_text("a secret that three machines know")
    secret.chmod(0o600)
    known = ("--secret", f"file:{secret}")
    leader = job.start("coordinator", "--listen", "127.0.0.1:0", "--job", "job", "--nnodes", "1:2", *known, "-v",
                       "--store", "nowhere:1", "--grow-after", "1")  # fmt: skip
    address = wait_until(lambda: re.search(r"listens on (\S+)", job.output()))[1]
    one, two = (
        job.run("--coordinator", address, "--node", f"m{number}", "--preempted-status", status, *known)
        for number, status in ((1, "0"), (2, "143"))
    )
    before = job.wait_world(2)
    two.send_signal(signal.SIGTERM)
    assert job.wait_ended(two) == 143
    after = job.wait_world(1, after=before[0]["epoch"])
    assert (after[0]["node"], after[0]["restarts"]) == ("m1", 0)
    assert after[0]["epoch"] > before[0]["epoch"]
    other = job.folder / "other"
    other.write_text("quite another secret of others")
    other.chmod(0o600)
    refused = job.run("--coordinator", address, "--node", "m3", "--secret", f"file:{other}")
    assert job.wait_ended(refused) == 6
    job.finish()
    assert [job.wait_ended(one), job.wait_ended(leader)] == [0, 0]


def test_spare_node_replaces_a_lost_node(job: ElasticRun) -> None:
    run = job.run("--simulate-nodes", "3", "--nnodes", "2", "--shrink-after", "60")
    before = job.wait_world(2)
    wait_until(lambda: sorted(node.state for node in job.status().nodes) == ["standby", "training", "training"])
    (spare,) = (node.node for node in job.status().nodes if node.state == "standby")
    kill(job.supervisor_pid(before[0]["node"]))
    after = job.wait_world(2, after=before[0]["epoch"])
    assert [one["node"] for one in after] == [spare, before[1]["node"]]
    assert after[1]["pid"] == before[1]["pid"]
    job.finish()
    assert job.wait_ended(run) == 0
