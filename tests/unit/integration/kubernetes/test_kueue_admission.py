"""The Kueue workloads that a job requests: their sizes, names and fields."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.hyperpod.operator import parse_job_resource
from integration.kubernetes.api_client import ApiServerClient, KueueClient
from integration.kubernetes.errors import ApiServerRefusedError, ResourceConflictError, ResourceNotFoundError
from integration.kubernetes.kueue_admission import (
    AdmissionPlan,
    PriorityClass,
    WorkloadStep,
    assign_workloads,
    build_workload,
    plan_admission,
    priority_class_for,
    released_quota_status,
    workload_steps,
)
from integration.kubernetes.pods import ReplicaSlot, flavor_names, pod_admission
from tests.support.kube_objects import TEMPLATE, job_object, pod_object

HIGH = {"kueue.x-k8s.io/priority-class": "high"}
LOW = {"kueue.x-k8s.io/priority-class": "low"}


def _job(groups: list[dict[str, Any]] | None = None, labels: dict[str, str] | None = None, **spec: Any) -> dict:
    groups = groups or [{"name": "workers", "replicas": 1, "maxReplicas": 100}]
    job = job_object(replicaSpecs=[{"template": TEMPLATE, **one} for one in groups], **spec)
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a", **(labels or {})}
    return job


def _steps(job: dict, admitted: int) -> list[WorkloadStep]:
    """Return the workload steps if the first ``admitted`` steps are admitted."""
    names: list[str] = []
    for _ in range(admitted):
        names = [step.name for step in workload_steps(job, parse_job_resource(job), names)]
    return workload_steps(job, parse_job_resource(job), names)


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        ({"minReplicas": 2, "maxReplicas": 5}, [2, 3, 4, 5]),
        ({"minReplicas": 2, "maxReplicas": 9, "replicaIncrementStep": 3}, [2, 5, 8]),
        ({"minReplicas": 1, "maxReplicas": 8, "replicaDiscreteValues": [8, 1, 4]}, [1, 4, 8]),
    ],
)
def test_a_step_for_every_size_up_to_the_greatest(policy, sizes):
    found = _steps(_job(elasticPolicy=policy), admitted=9)
    assert [step.size for step in found] == sizes
    assert [step.previous_size for step in found] == [0, *sizes[:-1]]
    assert [step.replicas_by_group["workers"] for step in found] == [step.size - step.previous_size for step in found]


def test_next_step_is_requested_after_all_before_it_are_admitted():
    job = _job(elasticPolicy={"minReplicas": 1, "maxReplicas": 4})
    assert [len(_steps(job, admitted)) for admitted in range(6)] == [1, 2, 3, 4, 4, 4]


def test_workload_names_depend_on_the_job_uid():
    first, again, other = _job(), _job(), _job()
    other["metadata"]["uid"] = "another"
    (a,), (b,), (c,) = (_steps(one, 0) for one in (first, again, other))
    assert a.name == b.name != c.name
    longest = f"{'x' * 40}{a.name.removeprefix('llama')}".replace("-1-", "-100000-").replace("-0-", "-100000-")
    assert len(longest) <= 63, "a label's value, too"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_steps_add_up_to_each_allowed_size(drawn, step):
    groups = [
        {"name": f"g{at}", "replicas": replicas, "maxReplicas": replicas + more, "spares": spares}
        for at, (replicas, more, spares) in enumerate(drawn)
    ]
    least = max(1, sum(one["replicas"] for one in groups))
    most = sum(one["maxReplicas"] for one in groups)
    if most < least:
        return
    job = _job(groups, elasticPolicy={"minReplicas": least, "maxReplicas": most, "replicaIncrementStep": step})
    spares = sum(one["spares"] for one in groups)
    found = _steps(job, admitted=20)
    for at, each in enumerate(found):
        assert sum(sum(one.replicas_by_group.values()) for one in found[: at + 1]) == each.size + spares
    for one in groups:
        assert sum(each.replicas_by_group.get(one["name"], 0) for each in found) <= one["maxReplicas"] + one["spares"]
        assert all(count > 0 for each in found for count in each.replicas_by_group.values())


def test_workload_is_owned_by_the_job():
    job = _job()
    (step,) = _steps(job, 0)
    made = build_workload(job, step, "v1beta2")
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("HyperPodPyTorchJob", "uid-of-llama", True)
    assert made["metadata"]["labels"]["HPJob"] == "llama"
    assert made["spec"]["queueName"] == "team-a"
    (pod_set,) = made["spec"]["podSets"]
    assert (pod_set["name"], pod_set["count"]) == ("workers", 1)
    assert pod_set["template"]["spec"]["containers"] == TEMPLATE["spec"]["containers"]
    assert pod_set["template"]["spec"]["restartPolicy"] == "Never", "as its pods will be"


def test_a_priority_has_its_name_and_its_number_in_either_version():
    job = _job()
    (step,) = _steps(job, 0)
    of_kueue, of_pods = PriorityClass("high", is_kueue_class=True), PriorityClass("high", is_kueue_class=False)
    new = build_workload(job, step, "v1beta2", of_kueue, 7)["spec"]
    assert new["priority"] == 7
    assert new["priorityClassRef"] == {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
    old = build_workload(job, step, "v1beta1", of_pods, 7)["spec"]
    assert (old["priorityClassName"], old["priorityClassSource"]) == ("high", "scheduling.k8s.io/priorityclass")
    assert "priority" not in build_workload(job, step, "v1beta1")["spec"]


def test_workload_step_priority():
    template = {**TEMPLATE, "metadata": {"labels": LOW}}
    of_pods = {"spec": {**TEMPLATE["spec"], "priorityClassName": "batch"}}
    base = {"name": "base", "replicas": 1, "maxReplicas": 1}
    more = {"name": "more", "replicas": 0, "maxReplicas": 1, "template": template}
    policy = {"minReplicas": 1, "maxReplicas": 2}
    job = _job([base, more], labels=HIGH, elasticPolicy=policy)
    first, second = _steps(job, 1)
    assert priority_class_for(job, first) == PriorityClass("high", is_kueue_class=True)
    assert priority_class_for(job, second) == PriorityClass("low", is_kueue_class=True), "more easily taken back"
    job = _job([{**base, "template": of_pods}, more], elasticPolicy=policy)
    assert priority_class_for(job, _steps(job, 0)[0]) == PriorityClass("batch", is_kueue_class=False)
    assert priority_class_for(_job(), first) is None


def _admitted_workload(**status: Any) -> dict[str, Any]:
    job = _job()
    (step,) = _steps(job, 0)
    made = build_workload(job, step, "v1beta2")
    moment = "2026-01-01T00:00:00Z"
    conditions = [
        {"type": kind, "status": "True", "reason": "R", "message": "", "lastTransitionTime": moment}
        for kind in ("QuotaReserved", "Admitted")
    ]
    made["metadata"] |= {"uid": "w", "resourceVersion": "3"}
    return {**made, "status": {"conditions": conditions, **status}}


def _plan(workload: dict[str, Any], pods: list[dict[str, Any]], now_s: float = 0.0) -> AdmissionPlan:
    job = _job()
    return plan_admission(job, parse_job_resource(job), [workload], pods, now_s)


def test_pod_on_a_lost_machine_releases_its_quota_after_a_timeout():
    evicted = _admitted_workload()
    evicted["status"]["conditions"].append({"type": "Evicted", "status": "True", "reason": "Preempted", "message": "m"})
    name = evicted["metadata"]["name"]
    pod = pod_object(0, deletionTimestamp="2026-01-01T00:00:10Z")
    pod["metadata"]["labels"]["HPWorkload"] = name
    due_s = 1767225610.0
    assert not _plan(evicted, [pod], due_s).status_updates
    assert _plan(evicted, [pod], due_s + 61).status_updates


def test_released_quota_status_matches_kueue_and_keeps_other_conditions():
    evicted = _admitted_workload()
    evicted["status"]["conditions"] += [
        {"type": "Evicted", "status": "True", "reason": "PodsReadyTimeout", "message": "too slow"},
        {"type": "Other", "status": "True"},
    ]
    status = released_quota_status(evicted, 0.0)
    found = {one["type"]: one for one in status["conditions"]}
    assert status["admission"] is None
    assert [found[kind]["status"] for kind in ("QuotaReserved", "Admitted", "Requeued", "Evicted", "Other")] == [
        "False", "False", "False", "True", "True",
    ]  # fmt: skip
    assert found["QuotaReserved"]["lastTransitionTime"] == "1970-01-01T00:00:00Z"


def test_conditions_that_stay_as_they_are_keep_their_time():
    evicted = _admitted_workload()
    first = released_quota_status(evicted, 0.0)
    again = released_quota_status({**evicted, "status": first}, 100.0)
    assert again == first


def test_fewer_pods_where_kueue_admitted_fewer():
    fewer = _admitted_workload(admission={"podSetAssignments": [{"name": "workers", "count": 0}]})
    seats = [ReplicaSlot("workers", 0), ReplicaSlot("workers", 1)]
    assert assign_workloads(_plan(fewer, []), seats, [], ()) == []
    assert [seat for seat, _ in assign_workloads(_plan(_admitted_workload(), []), seats, [], ())] == seats[:1]


def test_admission_checks_and_flavors_are_added_to_the_pods():
    toleration = {"key": "a", "operator": "Exists"}
    update = {"name": "workers", "labels": {"l": "1"}, "annotations": {"n": "2"}, "nodeSelector": {"s": "3"}}
    checks = [{"podSetUpdates": [{**update, "tolerations": [toleration]}, {"name": "others", "labels": {"no": ""}}]}]
    given = {"name": "workers", "flavors": {"cpu": "f", "nvidia.com/gpu": "f", "memory": "e"}}
    workload = _admitted_workload(admissionChecks=checks, admission={"podSetAssignments": [given]})
    assert flavor_names(workload, "workers") == ["e", "f"]
    flavors = [{"spec": {"nodeLabels": {"zone": "z"}, "tolerations": [toleration]}}, {}]
    grant = pod_admission(workload, "workers", flavors)
    assert grant.labels == {"l": "1", "HPWorkload": workload["metadata"]["name"]}
    assert grant.annotations == {"n": "2"}
    assert grant.node_selector == {"zone": "z", "s": "3"}
    assert grant.tolerations == (toleration,)


class _Asked:
    """Answers in turn."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str, Any]] = []

    def __call__(self, method: str, path: str, body: Any = None, query: Any = None) -> Any:
        self.calls.append((method, path, body))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _no_list(what):
    raise AssertionError(f"{what} was listed")


@pytest.mark.parametrize(
    ("served", "version"),
    [(["v1beta1"], "v1beta1"), (["v1beta1", "v1beta2"], "v1beta2"), (["v1alpha1"], None), (None, None)],
)
def test_best_served_kueue_version_is_used(served, version, monkeypatch):
    cluster = ApiServerClient(None)
    answer = ResourceNotFoundError("none") if served is None else {"versions": [{"version": one} for one in served]}
    monkeypatch.setattr(cluster, "request", _Asked(answer))
    kueue = cluster.kueue_client()
    assert (kueue.version if kueue else None) == version


def test_workload_status_update_requires_the_version_read_before():
    ask = _Asked({})
    KueueClient(ask, _no_list, "v1beta1").update_workload_status(_admitted_workload(), {"admission": None})
    ((method, path, body),) = ask.calls
    assert method == "PATCH"
    assert path.startswith("/apis/kueue.x-k8s.io/v1beta1/namespaces/default/workloads/llama-")
    assert path.endswith("/status")
    assert body == {"metadata": {"resourceVersion": "3"}, "status": {"admission": None}}


@pytest.mark.parametrize("gone", [ResourceNotFoundError("no"), ResourceConflictError("another")])
def test_workload_is_deleted_with_preconditions(gone):
    ask = _Asked(gone)
    KueueClient(ask, _no_list, "v1beta2").delete_workload(_admitted_workload())
    assert ask.calls[0][2]["preconditions"] == {"uid": "w", "resourceVersion": "3"}


def test_priority_class_values_are_resolved():
    ask = _Asked({"value": 5}, {"value": -3}, ResourceNotFoundError("404"))
    kueue = KueueClient(ask, _no_list, "v1beta2")
    assert kueue.priority_value(PriorityClass("a", is_kueue_class=True)) == 5
    assert kueue.priority_value(PriorityClass("b", is_kueue_class=False)) == -3
    with pytest.raises(ApiServerRefusedError, match="no WorkloadPriorityClass c"):
        kueue.priority_value(PriorityClass("c", is_kueue_class=True))
    assert [path for _, path, _ in ask.calls[:2]] == [
        "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses/a",
        "/apis/scheduling.k8s.io/v1/priorityclasses/b",
    ]
