"""The store and the node agents that ``elastic run`` starts in addition to the ranks."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from peerstore.daemon_process import process_start_time
from peerstore.settings import AgentPaths
from tests.support.agents import agent_pid, stop_agent, wait_process_ended
from tests.support.elastic_runs import ElasticRun, elastic_job, kill
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture
def job():
    with elastic_job() as one:
        yield one


def test_store_outlives_ranks_and_the_coordinator(job: ElasticRun) -> None:
    from torch.distributed import TCPStore

    run = job.run("--simulate-nodes", "2", "--nnodes", "1:2", "--shrink-after", "0", "--store", "")
    (one, two) = job.wait_world(2)
    assert one["store"] == two["store"]
    host, _, port = one["store"].rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    store.set("said", "before")
    kill(job.coordinator_pid())
    wait_until(lambda: job.is_in_phase("running"))
    assert store.get("said") == b"before"
    kill(one["pid"])
    again = job.wait_world(2, after=one["epoch"])
    assert {place["store"] for place in again} == {one["store"]}
    assert store.get("said") == b"before"
    job.finish()
    assert job.wait_ended(run) == 0
    wait_until(lambda: not job.pids())


def broken_agent(job: ElasticRun, node: str) -> Path:
    """Prepare a directory in which the node's agent cannot start."""
    place = job.folder / "run" / "job" / node / "agent"
    for folder in (*reversed(place.parents[:3]), place):
        folder.mkdir(mode=0o700, exist_ok=True)
    (place / "slots").touch()
    return place


def test_node_whose_agent_cannot_start_leaves_the_job(job: ElasticRun) -> None:
    broken_agent(job, "n1")
    run = job.run("--simulate-nodes", "2", "--nnodes", "1:2", "--shrink-after", "0", "--agent")
    wait_until(lambda: "node n1 leaves the job: its node agent did not start in 3 attempts" in job.output())
    wait_until(lambda: job.is_in_phase("running"))
    job.wait_world(1)
    job.finish()
    assert job.wait_ended(run) == 0


def is_watched(place: Path) -> bool:
    """Return whether a process holds the lock of the agent's watchdog."""
    with contextlib.suppress(FileNotFoundError), AgentPaths(place).watchdog_lock.open("r+") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_node_whose_agent_dies_and_cannot_restart_leaves_the_job(job: ElasticRun) -> None:
    job.environ["TIEREDCKPT_AGENT_BUDGET"] = "16MiB"
    run = job.run("--simulate-nodes", "2", "--nnodes", "1:2", "--shrink-after", "0", "--agent")
    before = job.wait_world(2)
    place = job.folder / "run" / "job" / "n1" / "agent"
    wait_until(lambda: is_watched(place), "the supervisor watches its agent")
    pid = agent_pid(place)
    assert pid is not None
    shutil.rmtree(place / "slots")
    (place / "slots").touch()
    kill(pid)
    wait_until(
        lambda: re.search("n1 leaves the job: its node agent d.*start in 3 attempts", job.output()), job.output()
    )
    job.wait_world(1, after=before[0]["epoch"])
    assert job.output().count("node n1 leaves the job") == 1
    job.finish()
    assert job.wait_ended(run) == 0


def test_wrong_agent_setting_is_a_usage_error(job: ElasticRun) -> None:
    job.environ["TIEREDCKPT_AGENT_SLOTS_PER_RANK"] = "many"
    assert job.wait_ended(job.run("--agent")) == 2
    assert "agent.slots_per_rank" in job.output().lower().replace("tieredckpt_agent_slots", "agent.slots")


def test_job_ends_with_the_reason_where_no_node_has_an_agent(job: ElasticRun) -> None:
    job.environ["TIEREDCKPT_AGENT_DIRECTORY"] = str(broken_agent(job, "n0"))
    run = job.run("--shrink-after", "0", "--agent")
    assert job.wait_ended(run) in (7, 8)  # depends on whether the node leaves during a world or before the first one
    end = next(line for line in reversed(job.output().splitlines()) if "did not start" in line)
    assert end.startswith(("failed: ", "stopped: ")), job.output()
    assert "its node agent did not start in 3 attempts: FileExistsError" in end


def test_agents_of_simulated_nodes_end_with_success_and_stay_for_a_resume(job: ElasticRun) -> None:
    job.environ["TIEREDCKPT_AGENT_BUDGET"] = "16MiB"
    run = job.run("--simulate-nodes", "2", "--nnodes", "2", "--agent")
    before = job.wait_world(2)
    places = [job.folder / "run" / "job" / node / "agent" for node in ("n0", "n1")]
    pids = wait_until(lambda: (found := [agent_pid(place) for place in places]) and None not in found and found)
    kill(before[0]["pid"])  # the agents survive the death of a rank
    job.wait_world(2, after=before[0]["epoch"])
    run.send_signal(signal.SIGTERM)
    assert job.wait_ended(run) == 7
    assert all(process_start_time(pid) >= 0 for pid in pids)
    assert "the checkpoints remain in" in job.output()
    stop_agent(places[0])
    again = job.run("--simulate-nodes", "2", "--nnodes", "2", "--agent")
    wait_until(lambda: len({one["pid"] for one in job.rank_messages("in", epoch=0)}) == 4)
    own = wait_until(lambda: (pid := agent_pid(places[0])) != pids[0] and pid)
    job.finish()
    assert job.wait_ended(again) == 0
    wait_process_ended(own)
    wait_process_ended(pids[1])  # the second run found this agent, and releases it although it did not start it


def test_agent_of_a_killed_supervisor_ends_with_the_job(job: ElasticRun) -> None:
    job.environ |= {"TIEREDCKPT_AGENT_BUDGET": "16MiB", "TIEREDCKPT_AGENT_LINGER_S": "3600"}
    run = job.run("--simulate-nodes", "2", "--nnodes", "1:2", "--shrink-after", "0", "--agent")
    before = job.wait_world(2)
    place = job.folder / "run" / "job" / "n1" / "agent"
    agent = wait_until(lambda: agent_pid(place))
    for pid in job.pids('"type":"node"', '"node":"n1"'):
        kill(pid)
    job.wait_world(1, after=before[0]["epoch"])
    assert process_start_time(agent) >= 0, "the agent's data may be needed"
    job.finish()
    assert job.wait_ended(run) == 0
    wait_process_ended(agent)
