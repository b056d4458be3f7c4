"""A job as its operator sees it, and its missing pods."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from integration.hyperpod.operator import AgentState, AgentStatus, AssignedWorld, DesiredPods, JobState, RunningPhase
from integration.kubernetes.pods import ReplicaSlot, missing_slots, node_health_status, observe_job
from tests.support.kube_objects import pod_object, pod_objects


def running_state(*members, **fields):
    return JobState(current=RunningPhase(world=AssignedWorld(members=members)), **fields)


def _missing(wanted, pods, state=None):
    return missing_slots("llama", DesiredPods(wanted), state or JobState(), pods)


def test_observation_joins_agent_status_and_node_health():
    answer = AgentStatus(state=AgentState.READY)
    pods = pod_objects(0, 1, 2)
    seen = observe_job(pods, {"llama-workers-0": answer}, {"n1": "UnschedulablePendingReboot", "n2": "Schedulable"})
    first, second, third = seen.pods
    assert (first.agent_status, first.ip, first.node, first.group) == (answer, "10.0.0.1", "n0", "workers")
    assert second.agent_status is None
    assert [pod.node_health_problem for pod in seen.pods] == ["", "UnschedulablePendingReboot", ""]
    assert not third.terminating


def test_pod_with_an_ended_container_is_not_observed():
    assert not observe_job(pod_objects(0, phase="Failed"), {}, {}).pods


def test_deleted_pod_is_terminating():
    (pod,) = observe_job([pod_object(0, deletionTimestamp="2026-01-01T00:00:00Z")], {}, {}).pods
    assert pod.terminating


def test_a_node_without_the_label_is_healthy():
    assert node_health_status({"metadata": {"name": "n"}}) == ""
    assert node_health_status({"metadata": {"labels": {"sagemaker.amazonaws.com/node-health-status": "x"}}}) == "x"


def test_all_of_them_at_first():
    assert _missing({"a": 2, "b": 1}, []) == [ReplicaSlot("a", 0), ReplicaSlot("a", 1), ReplicaSlot("b", 0)]


def test_gap_in_the_indices_is_filled():
    assert _missing({"workers": 3}, pod_objects(0, 2)) == [ReplicaSlot("workers", 1)]


def test_remembered_pod_name_is_not_reused():
    state = running_state("llama-workers-0", "llama-workers-1", replaced_pods=("llama-workers-2",))
    assert _missing({"workers": 2}, pod_objects(0), state) == [ReplicaSlot("workers", 3)]


def test_occupied_name_is_not_reused():
    ended = pod_object(1, phase="Failed")
    going = pod_object(2, deletionTimestamp="2026-01-01T00:00:00Z")
    assert _missing({"workers": 2}, [pod_object(0), ended, going]) == [ReplicaSlot("workers", 3)]


def test_replaced_pod_does_not_count():
    state = JobState(replaced_pods=("llama-workers-0",))
    assert _missing({"workers": 1}, pod_objects(0), state) == [ReplicaSlot("workers", 1)]


def test_names_of_other_jobs_and_specs_are_others():
    state = running_state("my-llama-workers-0", "llama-workers-0-1", "llama-workers2-0")
    assert _missing({"workers": 1}, [], state) == [ReplicaSlot("workers", 0)]


def test_surplus_pods_are_not_deleted_here():
    assert _missing({"workers": 1}, pod_objects(0, 1)) == []


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.integers(0, 12))
def test_missing_slots_are_new_and_as_many_as_needed(there, remembered, count):
    state = running_state(*(f"llama-workers-{index}" for index in sorted(remembered)))
    found = _missing({"workers": count}, pod_objects(*there), state)
    assert len(found) == max(0, count - len(there))
    assert len(set(found)) == len(found)
    assert not {seat.index for seat in found} & (there | remembered)
    assert found == _missing({"workers": count}, pod_objects(*there), state), "asked again, the same"
