"""Messages that a worker receives from its agent, in every possible order."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ControlDeadlineError, ControlPlaneUnavailableError, PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.elastic_agent import ipc
from integration.hyperpod.elastic_agent import ipc as connection_module
from integration.hyperpod.elastic_agent import worker_client as worker_module
from integration.hyperpod.elastic_agent.environment import AGENT_MODE_ENV, AGENT_SOCKET_ENV, AgentMode, agent_mode
from integration.hyperpod.elastic_agent.ipc import (
    AgentConnection,
    DamagedFrameError,
    encode_agent_frame,
)
from integration.hyperpod.elastic_agent.worker_client import (
    REPEAT_OFFENDER_LABEL,
    AgentWorker,
    choose_restart_mode,
    parse_job_start,
    repeat_offender_labels,
    wait_rank,
)
from integration.hyperpod.job_resource import RestartMode
from tests.support.control_planes import start_all
from tests.support.hyperpod_socket import agent_listener
from tests.support.local_nodes import wait_until

PATIENCE_S = 60.0


def envs(count=0, rank=8):
    return {"RANK": rank, "WORLD_SIZE": 16, "MASTER_ADDR": "n0", "MASTER_PORT": "1", "JOB_RESTART_COUNT": count}


@pytest.fixture
def both():
    with agent_listener() as listener:
        worker = AgentWorker(AgentConnection(listener.path, 0))
        agent = listener.accept()
        assert agent.receive()["type"] == ipc.MSG_INIT
        yield worker, agent
        worker.close()
        agent.close()


def start(agent, count=0):
    agent.send(ipc.MSG_JOB_START, worker_envs=envs(count), aggregate_worker_data={"rank_ips": []})


def test_worker_reports_arrival_at_and_departure_from_the_barrier(both):
    worker, agent = both
    found = []
    waiting = threading.Thread(target=lambda: found.append(worker.wait_at_barrier(timeout_s=PATIENCE_S)))
    waiting.start()
    assert agent.receive()["type"] == ipc.MSG_AT_BARRIER
    start(agent, count=3)
    assert agent.receive()["type"] == ipc.MSG_PAST_BARRIER
    waiting.join()
    ((begun, faults),) = found
    assert (begun.restart_count, begun.environ["RANK"], begun.data, faults) == (3, "8", {"rank_ips": []}, 0)


def test_start_followed_by_a_fault_is_skipped(both):
    worker, agent = both
    with pytest.raises(ControlDeadlineError):
        worker.wait_at_barrier(timeout_s=0.01)
    start(agent)
    agent.send(ipc.MSG_JOB_FAULT, restart_count=0)
    wait_until(lambda: worker.fault_count == 1)
    found = []
    waiting = threading.Thread(target=lambda: found.append(worker.wait_at_barrier(timeout_s=PATIENCE_S)))
    waiting.start()
    assert [agent.receive()["type"] for _ in range(2)] == [ipc.MSG_AT_BARRIER] * 2
    start(agent, count=1)
    waiting.join()
    assert found[0][0].restart_count == 1
    assert found[0][1] == 1


def test_start_repeated_to_another_channel_is_begun_once(both):
    """Otherwise the faulty rank would begin it again and report it, and the agent would forget the fault."""
    worker, agent = both
    other = worker._connection.open_channel(ipc.CHECKPOINT_MESSAGES)
    begun = start_all(lambda: worker.wait_at_barrier(timeout_s=PATIENCE_S))
    assert [agent.receive()["type"] for _ in range(2)] == [ipc.MSG_INIT, ipc.MSG_AT_BARRIER]
    start(agent, count=1)
    assert begun[0].result(PATIENCE_S)[0].restart_count == 1
    assert agent.receive()["type"] == ipc.MSG_PAST_BARRIER
    agent.send(ipc.MSG_JOB_START, client_id=other.client, worker_envs=envs(1), aggregate_worker_data={"rank_ips": []})
    agent.send(ipc.MSG_RANK_INFO, worker_envs=envs(2))
    wait_until(lambda: worker.wait_for_rank_info().restart_count == 2)
    worker.report_fault(8, RestartMode.PROCESS, "WorkerFault")
    again = start_all(lambda: worker.wait_at_barrier(timeout_s=PATIENCE_S))
    assert [agent.receive()["type"] for _ in range(2)] == [ipc.MSG_JOB_FAULT, ipc.MSG_AT_BARRIER]
    assert not again[0].done()
    agent.send(ipc.MSG_JOB_FAULT, restart_count=1)
    start(agent, count=1)  # by an operator that does not count: after a fault it is another one
    assert again[0].result(PATIENCE_S)[1] == 1


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["start", "fault", "info"]), max_size=8))
def test_newest_start_without_a_later_fault_is_begun(said):
    with agent_listener() as listener:
        worker = AgentWorker(AgentConnection(listener.path, 0))
        agent = listener.accept()
        for number, kind in enumerate([*said, "start"]):
            if kind == "fault":
                agent.send(ipc.MSG_JOB_FAULT, restart_count=number)
            else:
                agent.send(ipc.MSG_JOB_START if kind == "start" else ipc.MSG_RANK_INFO, worker_envs=envs(number))
        wait_until(lambda: worker._known is not None and worker._known.restart_count == len(said))
        begun, faults = worker.wait_at_barrier(timeout_s=PATIENCE_S)
        assert (begun.restart_count, faults) == (len(said), said.count("fault"))
        worker.close()
        agent.close()


def test_unexpected_messages_are_ignored(both):
    worker, agent = both
    asking = worker._connection.open_channel(ipc.CHECKPOINT_MESSAGES)
    assert agent.receive()["type"] == ipc.MSG_INIT
    agent.send(ipc.MSG_RANK_INFO, worker_envs=envs(7))  # for a start that comes first
    agent.send(ipc.MSG_CHECKPOINT_GET, client_id="another's", path="of another's question")
    agent.send(ipc.MSG_JOB_FAULT, restart_count=["no number"], client_id={"no": "name"})
    agent.send(ipc.MSG_INVALID, client_id=asking.client)
    start(agent, count=1)
    agent.send(ipc.MSG_PAST_BARRIER)
    agent.send(ipc.MSG_AT_BARRIER, client_id=asking.client)
    wait_until(lambda: worker._known is not None and worker._known.restart_count == 1)
    begun, faults = worker.wait_at_barrier(timeout_s=PATIENCE_S)
    assert (begun.restart_count, faults) == (1, 1)
    assert asking.receive(ipc.MSG_INVALID, timeout_s=PATIENCE_S)["client_id"] == asking.client


def test_agent_lost_within_a_frame_is_reported(both):
    worker, agent = both
    whole = encode_agent_frame({"type": ipc.MSG_JOB_START, "worker_envs": envs(3)})
    waiting = start_all(lambda: worker.wait_at_barrier(timeout_s=PATIENCE_S))
    assert agent.receive()["type"] == ipc.MSG_AT_BARRIER
    agent.sock.sendall(whole[:-5])
    agent.close()
    with pytest.raises(ControlPlaneUnavailableError, match="within a frame"):
        waiting[0].result(PATIENCE_S)


def test_every_fault_is_delivered_once(both):
    worker, agent = both
    told = []
    worker.add_fault_callback(told.append)
    for number in range(5):
        agent.send(ipc.MSG_JOB_FAULT, restart_count=number)
    wait_until(lambda: len(told) == 5)
    assert [reason[-2] for reason in told] == ["0", "1", "2", "3", "4"]


def test_waiting_worker_fails_when_the_agent_is_gone(both):
    worker, agent = both
    told = []
    worker.add_fault_callback(told.append)
    going = threading.Thread(target=agent.close)
    going.start()
    with pytest.raises(ControlPlaneUnavailableError):
        worker.wait_at_barrier(timeout_s=PATIENCE_S)
    going.join()
    wait_until(lambda: told)
    assert "lost" in told[0]


def test_waiting_for_an_agent_that_does_not_read_fails(both, monkeypatch):
    worker, agent = both
    monkeypatch.setattr(worker_module, "AGENT_SILENCE_LIMIT_S", 0.2)
    with pytest.raises(ControlPlaneUnavailableError, match=r"has not read for 0\.2 s"):
        worker.wait_at_barrier(timeout_s=PATIENCE_S)
    assert agent.receive()["type"] == ipc.MSG_AT_BARRIER


def test_silent_agent_that_reads_is_awaited(both, monkeypatch):
    worker, agent = both
    with pytest.raises(ControlDeadlineError):
        worker.wait_at_barrier(timeout_s=0.01)
    assert agent.receive()["type"] == ipc.MSG_AT_BARRIER
    monkeypatch.setattr(worker_module, "AGENT_SILENCE_LIMIT_S", 0.1)
    with pytest.raises(ControlDeadlineError):
        worker.wait_at_barrier(timeout_s=0.5)


def test_fault_report_carries_the_restart_mode_and_is_sent_on_return(both):
    worker, agent = both
    worker.report_fault(8, RestartMode.PROCESS, "WorkerFault", "x" * 100_000)
    said = agent.receive()
    assert (said["type"], said["rank"], said["restart_mode"]) == ("job_fault", 8, "process_level_restart")
    assert len(said["message"]) < 10_000


def test_labels_are_passed_on(both):
    worker, agent = both
    worker.set_health_labels({"health": "good"})
    labels = agent.receive()
    assert (labels["type"], labels["labels"]) == ("rank_labels", {"health": "good"})


@pytest.fixture
def environ(monkeypatch):
    monkeypatch.setattr(worker_module, "_workers", [])
    monkeypatch.setattr(connection_module, "_shared", [])
    with agent_listener() as listener:
        environ = {AGENT_SOCKET_ENV: str(listener.path), "LOCAL_RANK": "0", "RANK": "-2", "MASTER_ADDR": ""}
        yield environ, listener
        for worker in worker_module._workers:
            worker.close()


def test_awaited_rank_is_set_in_the_environment(environ):
    environ, listener = environ
    waiting = threading.Thread(target=wait_rank, args=(environ,), kwargs={"timeout_s": PATIENCE_S})
    waiting.start()
    agent = listener.accept()
    assert [agent.receive()["type"] for _ in range(2)] == [ipc.MSG_INIT, ipc.MSG_AT_BARRIER]
    agent.send(ipc.MSG_RANK_INFO, worker_envs=envs(rank=8))
    waiting.join()
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["MASTER_ADDR"]) == ("8", "16", "n0")
    agent.close()


def test_start_message_supplies_the_rank_and_is_not_lost(environ):
    environ, listener = environ
    waiting = threading.Thread(target=wait_rank, args=(environ,), kwargs={"timeout_s": PATIENCE_S})
    waiting.start()
    agent = listener.accept()
    start(agent, count=2)
    waiting.join()
    assert environ["JOB_RESTART_COUNT"] == "2"
    assert worker_module.this_agent_worker(environ).wait_at_barrier(timeout_s=PATIENCE_S)[0].restart_count == 2
    agent.close()


def test_missing_rank_times_out(environ):
    environ, listener = environ
    with pytest.raises(ControlDeadlineError, match="gave no rank"):
        wait_rank(environ, timeout_s=0.05)
    listener.accept().close()


def test_worker_does_not_wait_without_an_agent():
    wait_rank({})
    wait_rank({AGENT_SOCKET_ENV: "/nowhere", AGENT_MODE_ENV: "process", "RANK": "0", "MASTER_ADDR": "n0"})


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_process_of_a_rank_is_not_a_rank():
    child = multiprocessing.get_context("fork").Process(
        target=wait_rank, args=({AGENT_SOCKET_ENV: "/nowhere", "RANK": "-2"},)
    )
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == 0
    with pytest.raises(ControlPlaneUnavailableError, match="/nowhere"):
        wait_rank({AGENT_SOCKET_ENV: "/nowhere", "RANK": "-2"})


def started_by(tmp_path, pid, *words):
    (tmp_path / pid).mkdir()
    (tmp_path / pid / "cmdline").write_bytes(b"\0".join(word.encode() for word in words))
    return {AGENT_SOCKET_ENV: f"/tmp/hyperpod_elastic_agent_{pid}.sock", "RANK": "8", "MASTER_ADDR": "n0"}


def test_agent_mode_is_read_from_the_parent_process(tmp_path):
    in_process = started_by(tmp_path, "17", "python", "hyperpodrun", "--inprocess-restart", "train.py")
    process = started_by(tmp_path, "18", "python", "hyperpodrun", "--inprocess-timeout=3", "train.py")
    assert agent_mode(in_process, tmp_path) is AgentMode.IN_PROCESS
    assert agent_mode(process, tmp_path) is AgentMode.PROCESS
    assert agent_mode({**process, "RANK": "-2"}, tmp_path) is AgentMode.IN_PROCESS
    assert agent_mode({**process, "MASTER_ADDR": ""}, tmp_path) is AgentMode.IN_PROCESS
    assert agent_mode({**in_process, AGENT_MODE_ENV: "process"}, tmp_path) is AgentMode.PROCESS
    assert agent_mode({"RANK": "8"}, tmp_path) is AgentMode.NONE


def test_unknown_mode_is_not_guessed(tmp_path):
    hidden = {AGENT_SOCKET_ENV: "/tmp/hyperpod_elastic_agent_19.sock", "RANK": "8", "MASTER_ADDR": "n0"}
    with pytest.raises(PolicyError, match=AGENT_MODE_ENV):
        agent_mode(hidden, tmp_path)
    with pytest.raises(PolicyError, match="in-process, process"):
        agent_mode({**hidden, AGENT_MODE_ENV: "both"}, tmp_path)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"worker_envs": None},
        {"worker_envs": [1]},
        {"worker_envs": {"RANK": 0}},
        {"worker_envs": envs("x")},
        {"worker_envs": envs(rank=[8])},
        {"worker_envs": envs(rank={"of": 8})},
        {"worker_envs": envs(rank=-1)},
        {"worker_envs": envs(rank=16)},
        {"worker_envs": envs(rank="8" * 5000)},
        {"worker_envs": {**envs(), "MASTER_PORT": 0}},
        {"worker_envs": {**envs(), "MASTER_PORT": 65536}},
    ],
)
def test_a_start_that_names_no_place_is_damaged(said):
    with pytest.raises(DamagedFrameError, match="job_start with"):
        parse_job_start({"type": ipc.MSG_JOB_START, **said})


def test_rank_of_a_spare_follows_the_last_rank():
    assert parse_job_start({"type": ipc.MSG_RANK_INFO, "worker_envs": envs(rank=16)}).environ["RANK"] == "16"
    assert parse_job_start({"type": ipc.MSG_JOB_START, "worker_envs": {**envs(rank=17), "SPARE": "True"}}).is_spare


def test_restart_mode_escalates_with_repeated_restarts():
    policy = ScalingPolicy(num_restart_before_full_job_restart=3, eval_period_s=100)
    asked = [choose_restart_mode(policy, range(count), 10.0) for count in range(5)]
    assert asked == [RestartMode.IN_PROCESS] * 3 + [RestartMode.PROCESS] * 2
    assert choose_restart_mode(policy, range(5), 104.5) is RestartMode.IN_PROCESS  # long ago
    assert choose_restart_mode(policy, [], 0.0, final=True) is RestartMode.JOB
    assert (
        choose_restart_mode(ScalingPolicy(num_restart_before_full_job_restart=None), range(99), 99)
        is RestartMode.IN_PROCESS
    )


def test_a_node_is_labelled_when_its_rank_is_at_fault_again():
    policy = ScalingPolicy(repeat_offender_faults=2, eval_period_s=100)
    assert repeat_offender_labels(policy, [0.0], 1.0) == {}
    assert repeat_offender_labels(policy, [0.0, 1.0], 2.0) == {REPEAT_OFFENDER_LABEL: "2"}
    assert repeat_offender_labels(policy, [0.0, 1.0], 100.5) == {}
