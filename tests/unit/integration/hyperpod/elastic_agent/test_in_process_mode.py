"""A rank under an agent, beyond the guarantees of every control plane."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from elastic.control.control_plane import NoticeKind
from elastic.errors import ControlDeadlineError, ControlPlaneUnavailableError, JobFailedError, StaleEpochError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.elastic_agent import in_process_mode, ipc
from integration.hyperpod.elastic_agent.in_process_mode import InProcessControlPlane, RendezvousStore
from integration.hyperpod.elastic_agent.worker_client import AgentWorker
from tests.support.control_planes import PATIENCE_S, start_all, wait_all_assigned, wait_results, wanted_notice
from tests.support.fake_hyperpod_job import hyperpod_agent_job, worker_environ
from tests.support.hyperpod_socket import agent_listener
from tests.support.local_nodes import wait_until
from tests.support.ports import free_port


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:
        yield lambda *args: stack.enter_context(hyperpod_agent_job(*args))


@pytest.fixture
def alone():
    """One rank, with the test as its agent."""
    from integration.hyperpod.elastic_agent.ipc import AgentConnection

    with agent_listener() as listener:
        connection = AgentConnection(listener.path, 0)
        environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        policy = ScalingPolicy(num_restart_before_full_job_restart=1, repeat_offender_faults=2)
        plane = InProcessControlPlane(AgentWorker(connection), environ=environ, policy=policy)
        agent = listener.accept()
        assert agent.receive()["type"] == ipc.MSG_INIT
        yield plane, agent, environ
        plane.close()
        connection.close()
        agent.close()


@pytest.fixture
def port():
    return free_port()


def begin(plane, agent, port, count=0, **more):
    """Pass the barrier into a world of one."""
    coming = start_all(lambda: plane.wait_for_assignment(timeout_s=PATIENCE_S))
    assert wait_until(lambda: agent.receive()["type"] == ipc.MSG_AT_BARRIER)
    agent.send(ipc.MSG_JOB_START, worker_envs=worker_environ(0, 1, port, count, **more))
    assert agent.receive()["type"] == ipc.MSG_PAST_BARRIER
    return coming


def said(job, kind):
    return [message for node in job.nodes for message in node.heard if message["type"] == kind]


def test_a_fault_names_its_rank_and_its_reason_to_the_agent(start):
    job = start(2)
    wait_all_assigned(job.planes)
    job.planes[1].report_fault("ValueError: no such sample")
    wait_until(lambda: said(job, ipc.MSG_JOB_FAULT))
    first = said(job, ipc.MSG_JOB_FAULT)[0]
    assert (first["rank"], first["restart_mode"]) == (1, "in_process_restart")
    assert (first["reason"], first["message"]) == ("WorkerFault", "ValueError: no such sample")


def test_resize_pauses_at_a_common_step_and_requests_a_restart(start):
    job = start(2)
    before = wait_all_assigned(job.planes)
    job.planes[0].request_change(NoticeKind.RESIZE, "half is enough", nodes=1)
    wait_until(lambda: all(wanted_notice(seat) is NoticeKind.RESIZE for seat in job.planes))
    assert wait_results(
        start_all(*(lambda s=seat, n=n: s.agree_on_step(n) for seat, n in zip(job.planes, (3, 4), strict=True)))
    ) == [
        4,
        4,
    ]
    job.planes[0].report_sealed(4)
    coming = start_all(lambda: job.planes[0].wait_for_assignment(timeout_s=PATIENCE_S))
    with pytest.raises(TimeoutError):  # the other rank is about to reach the common step and must not stop earlier
        coming[0].result(0.3)
    assert said(job, ipc.MSG_JOB_FAULT) == []
    job.planes[1].report_sealed(4)
    after = wait_results([*coming, *start_all(lambda: job.planes[1].wait_for_assignment(timeout_s=PATIENCE_S))])
    assert after[0].epoch == before[0].epoch + 1
    assert {message["reason"] for message in said(job, ipc.MSG_JOB_FAULT)} == {"ElasticWorld"}
    assert "half is enough" in said(job, ipc.MSG_JOB_FAULT)[0]["message"]


def test_rank_that_could_not_seal_is_not_awaited(start):
    job = start(2)
    wait_all_assigned(job.planes)
    job.planes[0].request_change(NoticeKind.RESIZE, "preempted")
    wait_until(lambda: all(wanted_notice(seat) is NoticeKind.RESIZE for seat in job.planes))
    wait_results(start_all(*(lambda s=seat: s.agree_on_step(4) for seat in job.planes)))
    job.planes[0].report_sealed(4)
    assert {place.restarts for place in wait_all_assigned(job.planes)} == {1}


def test_finished_ranks_wait_for_each_other(start):
    job = start(2)
    wait_all_assigned(job.planes)
    first = start_all(job.planes[0].report_finished)[0]
    with pytest.raises(TimeoutError):
        first.result(0.3)
    job.planes[1].report_finished()
    first.result(PATIENCE_S)
    for seat in job.planes:
        start_all(seat.close)


def test_finished_rank_learns_of_a_rank_lost_on_its_last_steps(start):
    job = start(2)
    wait_all_assigned(job.planes)
    first = start_all(job.planes[1].report_finished)[0]
    job.lose_rank(job.planes[0])
    with pytest.raises((StaleEpochError, ControlPlaneUnavailableError)):
        first.result(PATIENCE_S)
    assert job.planes[1].wait_for_assignment(timeout_s=PATIENCE_S).world_size == 1


def test_ranks_are_in_the_environment_and_nodes_are_counted_by_ranks(alone, port):
    plane, agent, environ = alone
    (coming,) = begin(plane, agent, port, count=5)
    place = coming.result(PATIENCE_S)
    assert (place.epoch, place.restarts, place.node_count, place.world_size) == (5, 5, 1, 1)
    assert environ["JOB_RESTART_COUNT"] == "5"


def test_a_start_that_names_the_number_of_ranks_as_the_number_of_groups(alone, port):
    plane, agent, environ = alone
    environ["LOCAL_WORLD_SIZE"] = "2"
    coming = start_all(lambda: plane.wait_for_assignment(timeout_s=0.5))
    agent.receive()
    agent.send(
        ipc.MSG_JOB_START, worker_envs={**worker_environ(0, 4, port, 0), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "4"}
    )
    with pytest.raises(ControlDeadlineError):  # three other ranks are missing
        coming[0].result(PATIENCE_S)
    assert plane._inner is not None
    assert plane._inner._place.node_count == 2


def test_a_count_that_was_given_before_makes_a_newer_epoch_all_the_same(alone, port):
    plane, agent, _ = alone
    (coming,) = begin(plane, agent, port, count=3)
    assert coming.result(PATIENCE_S).epoch == 3
    agent.send(ipc.MSG_JOB_FAULT, restart_count=3)
    wait_until(lambda: wanted_notice(plane) is NoticeKind.RESTART)
    (coming,) = begin(plane, agent, port, count=3)
    assert coming.result(PATIENCE_S).epoch == 4


def test_spare_waits_until_it_is_started(alone, port):
    plane, agent, _ = alone
    (coming,) = begin(plane, agent, port, spare=True)
    assert agent.receive()["type"] == ipc.MSG_AT_BARRIER
    assert not coming.done()
    agent.send(ipc.MSG_JOB_START, worker_envs=worker_environ(0, 1, port, 1))
    assert coming.result(PATIENCE_S).restarts == 1


def test_withdrawn_start_is_awaited_again(alone, port):
    plane, agent, _ = alone
    coming = start_all(lambda: plane.wait_for_assignment(timeout_s=PATIENCE_S))
    agent.receive()
    agent.send(
        ipc.MSG_JOB_START, worker_envs=worker_environ(1, 2, port, 0)
    )  # the first rank, which should run the store, never arrives
    assert agent.receive()["type"] == ipc.MSG_PAST_BARRIER
    agent.send(ipc.MSG_JOB_FAULT, restart_count=0)
    assert agent.receive()["type"] == ipc.MSG_AT_BARRIER
    agent.send(ipc.MSG_JOB_START, worker_envs=worker_environ(0, 1, port, 1))
    assert coming[0].result(PATIENCE_S).epoch == 1


def test_repeated_in_process_restarts_escalate_to_new_processes(alone, port):
    plane, agent, _ = alone
    begin(plane, agent, port)[0].result(PATIENCE_S)
    plane.report_fault("once")
    assert agent.receive()["restart_mode"] == "in_process_restart"
    agent.send(ipc.MSG_JOB_FAULT, restart_count=0)
    begin(plane, agent, port, count=1)[0].result(PATIENCE_S)
    plane.report_fault("twice")
    assert agent.receive() | {"client_id": ""} == {
        "type": "rank_labels", "labels": {"elastic-repeat-offender": "2"}, "local_rank": 0, "client_id": "",
    }  # fmt: skip
    assert agent.receive()["restart_mode"] == "process_level_restart"


def test_final_fault_requests_one_job_restart(alone, port):
    plane, agent, _ = alone
    begin(plane, agent, port)[0].result(PATIENCE_S)
    plane.report_fault("a loss that is never finite", final=True)
    assert agent.receive()["restart_mode"] == "job_level_restart"
    with pytest.raises(JobFailedError, match="never finite"):
        plane.wait_for_assignment(timeout_s=PATIENCE_S)


def test_lost_agent_ends_the_world_and_the_rank(alone, port):
    plane, agent, _ = alone
    begin(plane, agent, port)[0].result(PATIENCE_S)
    told = threading.Event()
    plane.on_broken(lambda _notice: told.set())
    agent.close()
    assert told.wait(PATIENCE_S)
    assert wanted_notice(plane) is NoticeKind.RESTART
    with pytest.raises(ControlPlaneUnavailableError):
        plane.wait_for_assignment(timeout_s=PATIENCE_S)


def test_occupied_store_address_is_shared(port):
    first, second = RendezvousStore(), RendezvousStore()
    first.serve(f"127.0.0.1:{port}")
    first.serve(f"127.0.0.1:{port}")
    second.serve(f"127.0.0.1:{port}")
    assert (first.is_serving, second.is_serving) == (True, False)
    first.close()
    second.serve(f"127.0.0.1:{port}")
    assert second.is_serving
    second.close()


def test_port_without_a_store_requests_another_start(alone, port, monkeypatch):
    """An outgoing connection of any process may use that port, so a wait could last forever."""
    monkeypatch.setattr(in_process_mode, "_FOREIGN_STORE_TIMEOUT_S", 0.2)
    plane, agent, _ = alone
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        (coming,) = begin(plane, agent, other.getsockname()[1])
        told = agent.receive()
        assert (told["type"], told["restart_mode"]) == (ipc.MSG_JOB_FAULT, "in_process_restart")
        assert "is taken" in told["message"]
        agent.send(ipc.MSG_JOB_FAULT, restart_count=0)
        assert agent.receive()["type"] == ipc.MSG_AT_BARRIER
        agent.send(ipc.MSG_JOB_START, worker_envs=worker_environ(0, 1, port, 1))
        assert coming.result(PATIENCE_S).restarts == 1
