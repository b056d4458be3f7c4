"""The operator's reaction to each event, with agents that follow AWS's tables."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from integration.hyperpod.operator import (
    JobPhase,
    JobSpec,
    JobState,
    ReplacePod,
    RestartMode,
    StartAgent,
    StopAgent,
    UpdateAgent,
    parse_job_resource,
    resource_status,
)
from integration.hyperpod.operator.observed_pods import ObservedJob
from tests.support.fake_hyperpod_agents import COMPLETED, FAULTED, INIT, READY, STOPPING, FakeHyperPodCluster

ELASTIC = {"minReplicas": 1, "maxReplicas": 4, "gracefulShutdownTimeoutInSeconds": 30, "scalingTimeoutInSeconds": 10}


def job(
    replicas: int = 2, *, most: int | None = None, spares: int = 0, elastic: Any = None, restart: Any = None, **run: Any
) -> JobSpec:
    group: dict[str, Any] = {"name": "pods", "replicas": replicas, "spares": spares}
    if most is not None:
        group["maxReplicas"] = most
    policy = {**run, "restartPolicy": restart} if restart else run
    return parse_job_resource(
        {
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": "job"},
            "spec": {"replicaSpecs": [group], "elasticPolicy": elastic, "runPolicy": policy},
        }
    )


def running(spec: JobSpec, size: int, **how: Any) -> FakeHyperPodCluster:
    cluster = FakeHyperPodCluster(spec, **how)
    cluster.run_until(lambda: cluster.is_running(size))
    return cluster


# -- start and end ----------------------------------------------------------------------------------------------------


def test_all_are_ready_before_any_is_started():
    cluster = FakeHyperPodCluster(job(3))
    cluster.room = 2
    cluster.run_cycles(20)
    assert not any(one.starts for one in cluster.live_agents), "two of three wait for the third"
    cluster.room = None
    cluster.run_until(lambda: cluster.is_running(3))
    bodies = [one.starts[0][1] for one in cluster.members]
    assert [body.rank for body in bodies] == [0, 1, 2]
    assert {(body.nnodes, body.fault_count, body.master_addr, body.spare) for body in bodies} == {
        (3, 0, "10.0.0.1", False)
    }
    assert len({(body.version, body.master_port) for body in bodies}) == 1
    assert bodies[0].rank_ips == tuple({"rank": rank, "ip": "10.0.0.1"} for rank in range(3))


def test_a_job_ends_when_all_have_completed():
    cluster = running(job(2), 2)
    cluster.members[0].complete()
    cluster.run_cycles(5)
    assert cluster.state.phase is JobPhase.RUNNING
    cluster.members[1].complete()
    cluster.run_until(lambda: cluster.decision.finished)
    assert cluster.state.phase is JobPhase.SUCCEEDED
    assert not cluster.live_agents
    assert sum(cluster.decision.wanted.pods.values()) == 0


def test_rules_and_progress_go_to_every_agent():
    rule = {"name": "JobHang", "logPattern": "x", "expectedRecurringFrequencyInSeconds": 600}
    cluster = running(job(2, logMonitoringConfiguration=[rule]), 2)
    for one, step in zip(cluster.members, (40, 30), strict=True):
        one.step = step
    cluster.run_cycle()
    cluster.members[0].step = None
    cluster.members[1].fail()
    cluster.run_until(lambda: cluster.is_running(2))
    for one in cluster.members:
        body = one.starts[-1][1]
        assert body.log_rules == (rule,)
        assert {key: (at.progress_data, at.progress_count) for key, at in body.progress.items()} == {
            "s3://b": ("s3://b/30", 30)
        }, "what is whole in all of them"
        assert body.fault_count == 1


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_process", [False, True])
def test_a_fault_stops_all_and_starts_all_again(in_process):
    cluster = running(job(2), 2, in_process=in_process)
    ports = {one.starts[0][1].master_port for one in cluster.members}
    cluster.members[1].fail("LogHang_JobHang")
    cluster.run_until(lambda: cluster.is_running(2) and cluster.state.restarts)
    mode = RestartMode.IN_PROCESS if in_process else RestartMode.PROCESS
    for one in cluster.members:
        assert [body.restart_mode for _, body in one.stops] == [mode.value]
        assert len(one.starts) == 2
        assert one.starts[1][1].master_port not in ports
    assert cluster.state.conditions[-1].message.startswith("The fault of reason LogHang_JobHang was remediated in ")
    assert cluster.state.last_fault.ranks == (1,)


def test_the_first_to_break_is_the_reason():
    cluster = running(job(3), 3)
    first, second = cluster.members[2], cluster.members[0]
    second.fail("Second")
    first.fail("First")
    pods = cluster.decide  # both in one cycle; the agents' clocks decide which was first
    answers = {first.name: "2026-01-01T00:00:01+00:00", second.name: "2026-01-01T00:00:02+00:00"}
    for one in (first, second):
        said = msgspec.structs.replace(one.answer(), transition_times={"FAULTED": answers[one.name]})
        one.answer = lambda said=said: said
    decision = pods()
    assert decision.state.fault.reason == "First"
    assert decision.state.fault.ranks == (2, 0)


def said(one, reason: str, message: str, at: str = "") -> None:
    """Let a faulted agent answer with this reason and message."""
    one.fail(reason)
    answer = msgspec.structs.replace(one.answer(), message=message, transition_times={"FAULTED": at} if at else {})
    one.answer = lambda: answer


PEER = "Local Rank 0 exited with code 1 due to: RuntimeError: [gloo/pair.cc:547] Connection closed by peer [10.0.0.3]"
OWN = "Local Rank 0 exited with code 1 due to: ValueError: batch 7 is no batch"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("WorkerCrash", PEER),
        ("ElasticWorld", "restart: rank 1 left"),
        ("WorkerReportedFault", "The processes reported a failure on ranks 0"),
        ("WorkerFault", "An unknown fault occurred resulting in the training worker processes becoming unhealthy"),
        ("", ""),
    ],
)
def test_fault_with_a_cause_is_quoted_over_an_earlier_one(reason, message):
    cluster = running(job(3), 3)
    first, culprit = cluster.members[0], cluster.members[2]
    said(first, reason, message, "2026-01-01T00:00:01+00:00")
    said(culprit, "WorkerCrash", OWN, "2026-01-01T00:00:02+00:00")
    fault = cluster.decide().state.fault
    assert (fault.reason, fault.message) == ("WorkerCrash", OWN)
    assert fault.ranks == (2, 0)
    assert fault.nodes == (f"node-{culprit.name}",)


def test_fault_caused_by_a_peer_waits_for_the_peers_report():
    cluster = running(job(3), 3)
    said(cluster.members[0], "WorkerCrash", PEER)
    for _ in range(2):
        assert not cluster.run_cycle().actions, "nobody is stopped who may have the reason"
    said(cluster.members[2], "WorkerCrash", OWN)
    assert cluster.run_cycle().state.fault.message == OWN
    assert cluster.events.count("WorkerCrash") == 1


def test_first_fault_is_quoted_when_no_cause_arrives():
    cluster = running(job(3), 3)
    said(cluster.members[1], "WorkerCrash", PEER)
    cluster.run_until(lambda: cluster.state.fault is not None, turns=10)
    assert cluster.state.fault.message == PEER
    assert cluster.state.fault.ranks == (1,)


def test_fault_is_decided_at_once_when_all_agents_reported():
    cluster = running(job(2), 2)
    for one in cluster.members:
        said(one, "WorkerCrash", PEER)
    assert cluster.decide().state.fault is not None


def test_lost_machine_replaces_the_reason_of_a_fault():
    cluster = running(job(3), 3)
    lost, other = cluster.members[2], cluster.members[0]
    lost.silent = True
    said(other, "WorkerCrash", PEER)
    cluster.run_until(lambda: cluster.state.fault is not None, turns=10)
    del other.answer
    cluster.run_until(lambda: cluster.state.fault is not None and cluster.state.fault.reason == "AgentUnreachable")
    assert cluster.state.fault.nodes == (f"node-{lost.name}",)
    assert {one.node for one in cluster.state.node_faults} == {f"node-{lost.name}"}, "and no other machine is blamed"
    cluster.run_until(lambda: cluster.is_running(3))
    assert cluster.state.last_fault.reason == "AgentUnreachable"
    assert cluster.state.restarts == 1


def test_unhealthy_node_is_replaced():
    cluster = running(job(2), 2)
    bad = cluster.members[1]
    bad.node_fault = "UnschedulablePendingReplacement"
    decision = cluster.run_cycle()
    assert any(isinstance(action, ReplacePod) and action.pod == bad.name for action in decision.actions)
    cluster.run_until(lambda: cluster.is_running(2))
    assert bad.name not in cluster.state.members
    assert cluster.state.last_fault.reason == "NodeFault"
    assert cluster.state.last_fault.nodes == (f"node-{bad.name}",)


def test_spare_takes_the_rank_of_a_lost_pod():
    cluster = running(job(3, spares=1), 3)
    (spare,) = cluster.state.spares
    lost = cluster.members[1]
    lost.silent = True
    cluster.room = len(cluster.live_agents)
    cluster.run_until(lambda: cluster.is_running(3) and cluster.state.restarts)
    assert [one.name for one in cluster.members] == ["p0", spare, "p2"]
    assert cluster.state.last_fault.reason == "AgentUnreachable"
    assert cluster.agents[spare].starts[0][1].spare is False


def test_in_process_spares_know_their_rank_and_wait():
    cluster = running(job(2, spares=1), 2, in_process=True)
    (spare,) = cluster.state.spares
    cluster.run_cycle()
    assert cluster.agents[spare].rank == 2
    assert cluster.agents[spare].state is READY
    assert not cluster.agents[spare].starts


def test_late_spare_is_registered():
    cluster = FakeHyperPodCluster(job(2, spares=1), in_process=True)
    cluster.room = 2
    cluster.run_until(lambda: cluster.is_running(2))
    assert cluster.state.spares == ()
    cluster.room = None
    cluster.run_until(lambda: cluster.state.spares)
    (name,) = cluster.state.spares
    cluster.run_until(lambda: cluster.agents[name].state is READY)
    assert [(body.rank, body.spare) for _, body in cluster.agents[name].updates] == [(2, True)]


def test_in_process_spare_receives_its_rank_before_it_starts():
    cluster = running(job(2, spares=1), 2, in_process=True)
    (name,) = cluster.state.spares
    spare = cluster.agents[name]
    cluster.run_cycle()
    cluster.members[0].silent = True
    cluster.room = len(cluster.live_agents)
    cluster.run_until(lambda: cluster.is_running(2) and cluster.state.restarts)
    assert cluster.state.members[0] == name
    told = [(state, body.rank, body.spare) for state, body in spare.updates]
    assert told[-1] == (READY, 0, False)
    assert told[0][1:] == (2, True)
    assert [(state, body.rank) for state, body in spare.starts] == [(READY, 0)]
    assert spare.updates[-1][1].version == spare.starts[0][1].version


def test_agent_that_never_becomes_ready_is_replaced_by_a_spare():
    """An agent that no longer receives messages of its processes."""
    spec = job(2, spares=1)
    spec = msgspec.structs.replace(spec, policy=msgspec.structs.replace(spec.policy, restart_timeout_s=20.0))
    cluster = running(spec, 2, in_process=True)
    (spare,) = cluster.state.spares
    deaf = cluster.members[0]

    def begin_anew() -> None:
        if deaf.state is STOPPING:
            deaf.transition_to(INIT)
        deaf.ranked, deaf.version = False, None

    deaf.advance = begin_anew
    deaf.fail()
    cluster.run_until(lambda: cluster.is_running(2) and cluster.state.restarts)
    assert [one.name for one in cluster.members] == [spare, "p1"]
    assert "StartTimeout" in cluster.events
    assert deaf.gone


def test_spare_that_ignores_its_rank_update_is_started():
    cluster = FakeHyperPodCluster(job(1), in_process=True)
    cluster.run_cycle()
    (one,) = cluster.live_agents
    one.handle_action = lambda action: None if isinstance(action, UpdateAgent) else type(one).handle_action(one, action)
    one.ranked = True
    cluster.run_until(lambda: cluster.is_running(1))
    assert cluster.now_s - cluster.state.created_s >= 10


def test_short_silence_is_not_a_fault():
    cluster = running(job(2), 2)
    cluster.members[0].silent = True
    cluster.run_cycles(int(cluster.spec.agent_timeout_s) - 1)
    cluster.members[0].silent = False
    cluster.run_cycles(5)
    assert cluster.state.restarts == 0
    assert cluster.is_running(2)


def test_restarted_agent_is_a_fault():
    cluster = running(job(2), 2)
    cluster.members[1].restart()
    cluster.run_until(lambda: cluster.is_running(2) and cluster.state.restarts)
    assert cluster.state.last_fault.reason == "AgentRestarted"


def test_lost_pod_is_replaced():
    cluster = running(job(2), 2)
    cluster.members[0].gone = True
    cluster.run_until(lambda: cluster.is_running(2) and cluster.state.restarts)
    assert cluster.state.last_fault.reason == "PodLost"
    assert cluster.state.members == ("p2", "p1"), "nobody else changes its rank"


# -- escalation -------------------------------------------------------------------------------------------------------


def test_fault_during_remediation_takes_new_processes():
    cluster = running(job(2), 2, in_process=True)
    cluster.members[1].fail()
    cluster.run_until(lambda: cluster.state.phase is JobPhase.STARTING)
    for one in cluster.members:
        one.fail()
    cluster.run_until(lambda: cluster.is_running(2))
    modes = [body.restart_mode for _, body in cluster.members[0].stops]
    assert modes[0] == RestartMode.IN_PROCESS.value
    assert RestartMode.PROCESS.value in modes[1:]


def test_worker_may_request_a_stronger_restart():
    cluster = running(job(2), 2, in_process=True)
    cluster.members[1].fail()
    cluster.members[1].asks = RestartMode.JOB
    before = {one.name for one in cluster.members}
    cluster.run_until(lambda: cluster.is_running(2) and cluster.state.restarts)
    assert before.isdisjoint(cluster.state.members)
    assert cluster.state.period_full_restarts == 1


def test_restart_limit_escalates_to_new_pods_and_then_fails_the_job():
    restart = {"evalPeriodSeconds": 3600, "numRestartBeforeFullJobRestart": 1, "maxFullJobRestarts": 1}
    cluster = running(job(2, restart=restart), 2)
    seen = []
    for _ in range(3):
        before = set(cluster.state.members)
        cluster.members[0].fail()
        cluster.run_cycle()
        cluster.run_until(lambda: cluster.is_running(2))
        seen.append(before.isdisjoint(cluster.state.members))
    assert seen == [False, True, False]
    cluster.members[0].fail()
    cluster.run_until(lambda: cluster.decision.finished)
    assert cluster.state.phase is JobPhase.FAILED
    assert "RestartLimitExceeded" in cluster.events
    assert cluster.state.conditions[-1].message.startswith("the job failed after WorkerCrash: more than 1 restarts")
    assert "maxFullJobRestarts" in cluster.state.conditions[-1].message


def test_fault_counts_restart_with_the_period():
    restart = {"evalPeriodSeconds": 100, "numRestartBeforeFullJobRestart": 0, "maxFullJobRestarts": 1}
    cluster = running(job(1, restart=restart), 1)
    for _ in range(3):
        cluster.members[0].fail()
        cluster.run_cycle()
        cluster.run_until(lambda: cluster.is_running(1))
        cluster.now_s += 100
    assert cluster.state.restarts == 3


def test_total_restarts_of_a_job_are_limited():
    cluster = running(job(1, jobMaxRetryCount=1), 1)
    cluster.members[0].fail()
    cluster.run_cycle()
    cluster.run_until(lambda: cluster.is_running(1))
    cluster.members[0].fail()
    cluster.run_until(lambda: cluster.state.phase is JobPhase.FAILED)


def test_full_restart_without_new_pods_restarts_all_processes():
    restart = {"evalPeriodSeconds": 3600, "numRestartBeforeFullJobRestart": 0}
    cluster = running(job(2, restart=restart), 2, in_process=True, can_replace=False)
    before = cluster.state.members
    cluster.members[0].fail()
    cluster.run_cycle()
    cluster.run_until(lambda: cluster.is_running(2))
    assert cluster.state.members == before
    assert [body.restart_mode for _, body in cluster.members[1].stops] == [RestartMode.PROCESS.value]
    assert cluster.state.period_full_restarts == 1


def test_repeated_offender_gets_no_rank_while_a_spare_exists():
    cluster = running(job(2, spares=1, restart={"evalPeriodSeconds": 3600}), 2)
    bad = cluster.state.members[1]
    for _ in range(2):
        assert bad in cluster.state.members
        cluster.agents[bad].fail()
        cluster.run_cycle()
        cluster.run_until(lambda: cluster.is_running(2))
    assert bad not in cluster.state.members
    assert cluster.decision.wanted.avoid_nodes == (f"node-{bad}",)


def test_agent_that_does_not_stop_is_stopped_harder_and_then_replaced():
    cluster = running(job(2), 2, in_process=True)
    stuck = cluster.members[1]
    stuck.stuck = True
    cluster.members[0].fail()
    cluster.run_until(lambda: cluster.is_running(2) and cluster.state.restarts, turns=600)
    assert stuck.gone
    modes = [body.restart_mode for _, body in stuck.stops]
    assert modes == [RestartMode.IN_PROCESS.value, RestartMode.PROCESS.value]


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_scaling_down_and_up_is_graceful_and_tolerates_completed_agents():
    cluster = FakeHyperPodCluster(job(2, most=2, elastic={**ELASTIC, "maxReplicas": 2}))
    cluster.run_until(lambda: cluster.is_running(2))
    cluster.capacity = 1
    decision = cluster.run_cycle()
    stops = [action for action in decision.actions if isinstance(action, StopAgent)]
    assert [(one.body.is_graceful, one.body.timeout) for one in stops] == [(True, 30), (True, 30)]
    keeps, _ = cluster.members
    keeps.state = COMPLETED  # it left on the first SIGUSR1, before its own stop arrived
    cluster.run_until(lambda: cluster.is_running(1))
    assert cluster.state.restarts == 0
    cluster.run_cycles(2)
    assert len(cluster.live_agents) == 1, "nobody pays for a pod that may not run"
    cluster.capacity = None
    cluster.run_until(lambda: cluster.is_running(2))
    assert cluster.state.scaling.consecutive_failures == 0
    assert keeps.starts[-1][1].nnodes == 2


def test_sizes_are_those_of_the_policy():
    elastic = {**ELASTIC, "minReplicas": 2, "replicaIncrementStep": 2}
    cluster = FakeHyperPodCluster(job(2, most=4, elastic=elastic))
    cluster.room = 3
    cluster.run_until(lambda: cluster.is_running(2))
    cluster.run_cycles(30)
    assert cluster.is_running(2), "three is no size"
    cluster.room = 4
    cluster.run_until(lambda: cluster.is_running(4))


def test_fault_waits_for_a_replacement_and_then_shrinks():
    elastic = {**ELASTIC, "maxReplicas": 2, "faultyScaleDownTimeoutInSeconds": 20}
    cluster = FakeHyperPodCluster(job(2, most=2, elastic=elastic))
    cluster.run_until(lambda: cluster.is_running(2))
    cluster.room = 1
    cluster.members[0].gone = True
    at = cluster.now_s
    cluster.run_until(lambda: cluster.is_running(1))
    assert cluster.now_s - at >= 20
    cluster.room = 2
    cluster.run_until(lambda: cluster.is_running(2))


def test_restart_delays_the_next_scale_up():
    restart = {"evalPeriodSeconds": 3600, "scaleUpSnoozeTimeInSeconds": 100}
    elastic = {**ELASTIC, "maxReplicas": 2, "faultyScaleDownTimeoutInSeconds": 1}
    cluster = FakeHyperPodCluster(job(2, most=2, elastic=elastic, restart=restart))
    cluster.run_until(lambda: cluster.is_running(2))
    cluster.room = 1
    cluster.members[0].gone = True
    cluster.run_until(lambda: cluster.is_running(1))
    at, cluster.room = cluster.now_s, 2
    cluster.run_until(lambda: cluster.is_running(2))
    assert cluster.now_s - at >= 90


def test_preempted_pod_is_stopped_gracefully():
    cluster = FakeHyperPodCluster(job(2, most=2, elastic={**ELASTIC, "maxReplicas": 2}))
    cluster.run_until(lambda: cluster.is_running(2))
    cluster.room = 1
    leaving = cluster.members[0]
    leaving.leaving = True
    decision = cluster.run_cycle()
    assert all(action.body.is_graceful for action in decision.actions if isinstance(action, StopAgent))
    cluster.run_until(lambda: cluster.is_running(1))
    assert cluster.state.restarts == 0


def test_less_than_the_least_waits():
    cluster = FakeHyperPodCluster(job(2, most=2, elastic={**ELASTIC, "minReplicas": 2, "maxReplicas": 2}))
    cluster.run_until(lambda: cluster.is_running(2))
    cluster.capacity = 1
    cluster.run_until(lambda: cluster.state.phase is JobPhase.FORMING)
    cluster.run_cycles(50)
    assert cluster.state.phase is JobPhase.FORMING
    cluster.capacity = 2
    cluster.run_until(lambda: cluster.is_running(2))


def test_suspended_job_releases_its_pods_and_resumes_later():
    cluster = running(job(2), 2)
    spec = cluster.spec
    cluster.spec = msgspec.structs.replace(spec, suspend=True)
    cluster.run_until(lambda: not cluster.live_agents)
    assert cluster.state.phase is JobPhase.SUSPENDED
    cluster.spec = spec
    cluster.run_until(lambda: cluster.is_running(2))
    assert cluster.state.restarts == 0


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_stuck_agent_does_not_delay_the_end_of_a_job():
    cluster = running(job(2, activeDeadlineSeconds=60), 2)
    cluster.members[1].stuck = True
    cluster.members[0].fail()
    cluster.run_until(lambda: cluster.state.phase is JobPhase.STOPPING)
    cluster.now_s += 60
    cluster.run_until(lambda: cluster.state.phase is JobPhase.FAILED)
    cluster.run_until(lambda: cluster.decision.finished)
    assert not cluster.live_agents, "its machine is free for others"


def test_time_in_a_queue_does_not_count_as_startup_time():
    cluster = FakeHyperPodCluster(job(2, startupDeadlineSeconds=30))
    cluster.capacity, cluster.room = 0, 1
    cluster.run_cycles(60)
    assert cluster.state.phase is JobPhase.FORMING, "it waits in its queue"
    cluster.capacity = 2
    cluster.run_cycles(20)
    assert cluster.state.phase is JobPhase.FORMING
    cluster.capacity = 0
    cluster.run_cycles(60)
    cluster.capacity = 2
    cluster.run_cycles(29)
    assert cluster.state.phase is JobPhase.FORMING, "admitted anew, it has all of its time again"
    cluster.run_cycles(3)
    assert cluster.state.phase is JobPhase.FAILED
    assert "StartupDeadlineExceeded" in cluster.events


@pytest.mark.parametrize(
    ("run", "reason"),
    [({"activeDeadlineSeconds": 50}, "DeadlineExceeded"), ({"faultDeadlineSeconds": 10}, "FaultDeadlineExceeded")],
)
def test_deadlines_of_a_job_that_runs(run, reason):
    cluster = running(job(2, **run), 2)
    cluster.room = 1
    cluster.members[0].gone = True
    cluster.run_until(lambda: cluster.state.phase is JobPhase.FAILED)
    assert reason in cluster.events


def test_job_that_never_starts_fails_at_its_deadline():
    cluster = FakeHyperPodCluster(job(2, startupDeadlineSeconds=30))
    cluster.room = 1
    cluster.run_until(lambda: cluster.decision is not None and cluster.decision.finished)
    assert cluster.events == ["StartupDeadlineExceeded"]


# -- an operator that is a new one ------------------------------------------------------------------------------------


def test_undelivered_decision_is_carried_out_by_the_next_operator():
    cluster = running(job(2), 2)
    cluster.members[1].fail()
    cluster.state = msgspec.json.decode(msgspec.json.encode(cluster.decide().state), type=JobState)
    assert cluster.members[1].state is FAULTED, "it was killed before it told anybody"
    cluster.run_until(lambda: cluster.is_running(2))
    assert cluster.state.restarts == 1


def test_an_operator_without_memory_leaves_a_job_alone_that_runs():
    cluster = running(job(2), 2)
    epoch = cluster.state.epoch
    cluster.state = JobState()
    cluster.run_cycles(3)
    assert cluster.is_running(2)
    assert cluster.state.epoch == epoch
    assert all(len(one.starts) == 1 and not one.stops for one in cluster.members)


def test_obeyed_actions_are_not_repeated():
    cluster = running(job(2, spares=1), 2, in_process=True)
    cluster.run_cycles(2)
    for _ in range(10):
        assert not cluster.run_cycle().actions


def test_a_start_that_arrives_late_does_not_count():
    cluster = running(job(2), 2)
    cluster.members[1].fail()
    cluster.run_until(lambda: cluster.is_running(2))
    old = cluster.members[0].starts[0][1]
    cluster.members[0].version = old.version
    cluster.run_until(lambda: cluster.state.restarts == 2)
    cluster.run_until(lambda: cluster.is_running(2))
    assert cluster.state.last_fault.reason == "StaleStart"


def test_status_matches_the_aws_model():
    models = pytest.importorskip("sagemaker.hyperpod.training.config.hyperpod_pytorch_job_unified_config")
    cluster = running(job(2, most=4, elastic=ELASTIC), 4)
    cluster.members[0].fail()
    cluster.run_cycle()
    cluster.run_until(lambda: cluster.is_running(4))
    status = resource_status(cluster.spec, cluster.state, ObservedJob())
    read = models.HyperPodPytorchJobStatus.model_validate(status, by_alias=False, by_name=True)
    assert read.restartCount == 1
    assert read.latestFaultyPodInstanceList.faultyRankList == ["0"]


def test_decisions_fit_into_json():
    cluster = FakeHyperPodCluster(job(2, spares=1), in_process=True)
    kinds = set()
    for _ in range(12):
        decision = cluster.run_cycle()
        kinds |= {type(action) for action in decision.actions}
        assert msgspec.json.decode(msgspec.json.encode(decision), type=type(decision)) == decision
    assert kinds == {StartAgent, UpdateAgent}


def test_faulted_spare_is_recovered_without_a_restart():
    cluster = running(job(2, spares=1), 2, in_process=True)
    spare = cluster.agents[cluster.state.spares[0]]
    spare.transition_to(FAULTED)
    cluster.run_until(lambda: spare.state is READY)
    assert cluster.state.restarts == 0
    assert all(not one.stops for one in cluster.members)


def test_agent_running_without_a_job_is_stopped_before_a_world_forms():
    cluster = running(job(2), 2)
    kept, lost = cluster.members
    lost.restart()  # and the operator has lost its state: half a world cannot be taken over
    cluster.state = JobState()
    cluster.run_until(lambda: cluster.is_running(2))
    assert len(kept.stops) == 1
    assert [one.starts[-1][1].nnodes for one in (kept, lost)] == [2, 2]
