"""A job's status: read by clients, and the only memory of the controller."""

from __future__ import annotations

import json

import pytest

from integration.hyperpod.operator import (
    AssignedWorld,
    JobCondition,
    JobFault,
    JobState,
    RestartMode,
    RunningPhase,
    parse_job_resource,
)
from integration.kubernetes.pods import observe_job
from integration.kubernetes.resource_status import (
    STATE_CONDITION,
    DamagedStateError,
    build_job_status,
    invalid_spec_status,
    is_marked_invalid,
    load_job_state,
    status_differs,
)
from tests.support.kube_objects import job_object, pod_objects

STATE = JobState(
    current=RunningPhase(
        world=AssignedWorld(
            members=("llama-workers-0", "llama-workers-8"), master_addr="10.0.0.1", master_port="23456"
        )
    ),
    created_s=1_700_000_000.0,
    restarts=3,
    last_fault=JobFault(
        reason="WorkerCrash", message="", pods=("llama-workers-1",), ranks=(1,), nodes=("n1",), at_s=1.0,
        mode=RestartMode.JOB,
    ),
    conditions=(JobCondition("Running", status=True, reason="Running", message="all of them", at_s=1_700_000_001.5),),
)  # fmt: skip


def _job_with(status: dict) -> dict:
    return {**job_object(), "status": json.loads(json.dumps(status))}


def _status(state: JobState = STATE) -> dict:
    pods = pod_objects(0, 8)
    return build_job_status(parse_job_resource(job_object()), state, observe_job(pods, {}, {}), pods)


def test_stored_state_is_read_back():
    assert load_job_state(_job_with(_status())) == STATE


def test_a_new_job_has_no_state():
    assert load_job_state(job_object()) is None
    assert load_job_state(_job_with({"conditions": [{"type": "Created", "status": "True"}]})) is None


@pytest.mark.parametrize("message", ["", "{", "[]", '{"phase":"Gone"}', '{"members":3}'])
def test_tampered_state_is_not_read_as_a_new_job(message):
    conditions = [{"type": STATE_CONDITION, "status": "Unknown", "message": message}]
    with pytest.raises(DamagedStateError, match="llama"):
        load_job_state(_job_with({"conditions": conditions}))


def test_aws_model_reads_the_status():
    models = pytest.importorskip("sagemaker.hyperpod.training.config.hyperpod_pytorch_job_unified_config")
    read = models.HyperPodPytorchJobStatus.model_validate(_status(), by_name=True)
    assert read.restartCount == 3
    assert read.masterAddr == "10.0.0.1"
    assert read.latestFaultyPodInstanceList.restartType == "JLR"
    assert read.elasticScalingStatus.targetReplicas["total"] == 2
    assert [one.name for one in read.jobPods] == ["llama-workers-0", "llama-workers-8"]
    assert read.conditions[0].status == "True"


def test_stored_state_is_not_a_true_condition():
    assert [one["type"] for one in _status()["conditions"] if one["status"] == "True"] == ["Running"]


def test_nothing_is_written_where_nothing_has_changed():
    job = _job_with(_status())
    assert not status_differs(job, _status())
    assert status_differs(job, _status(JobState()))
    assert status_differs(job_object(), _status())


def test_times_use_the_kubernetes_format():
    assert _status()["startTime"] == "2023-11-14T22:13:20Z"
    assert "completionTime" not in _status()


def test_invalid_spec_keeps_the_known_status():
    job = _job_with(_status())
    problem = "impossible job: maxReplicas is 1"
    job["status"] |= invalid_spec_status(job, problem, 5.0)
    assert load_job_state(job) == STATE
    assert is_marked_invalid(job, problem)
    assert not is_marked_invalid(job, "another")
    job["status"] |= invalid_spec_status(job, "another", 6.0)
    assert len(job["status"]["conditions"]) == 3
    job["status"] |= _status()
    assert not is_marked_invalid(job, "another"), "a spec that can be carried out takes the complaint away"
