"""The pod that a job requests from Kubernetes for one of its places."""

from __future__ import annotations

import copy

import pytest

from integration.kubernetes.pods import ReplicaSlot, agent_port, build_pod, is_owned_by, slot_of
from tests.support.kube_objects import TEMPLATE, job_object

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def _with_template(**pod_spec: object) -> dict:
    template = copy.deepcopy(TEMPLATE)
    template["spec"].update(pod_spec)
    return job_object(replicaSpecs=[{"name": "workers", "replicas": 1, "template": template}])


def _variables(pod: dict) -> dict[str, dict]:
    return {one["name"]: one for one in pod["spec"]["containers"][0]["env"]}


def test_a_pod_knows_its_job_and_its_place():
    job = job_object()
    pod = build_pod(job, ReplicaSlot("workers", 8), nodes=2)
    assert pod["metadata"]["name"] == "llama-workers-8"
    assert pod["metadata"]["labels"]["HPJob"] == "llama"
    assert slot_of(pod) == ReplicaSlot("workers", 8)
    assert is_owned_by(pod, job["metadata"]["uid"])
    assert not is_owned_by(pod, "a job of that name before it")


def test_pod_environment_has_the_node_and_process_counts():
    pod = build_pod(job_object(), ReplicaSlot("workers", 0), nodes=16)
    found = _variables(pod)
    assert found["NNODES"]["value"] == "16"
    assert found["PET_NPROC_PER_NODE"]["value"] == "2"
    assert found["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_environment_of_the_template_wins():
    container = {"name": "pytorch", "env": [{"name": "NNODES", "value": "64"}, {"name": "URL", "value": "$(POD_IP)"}]}
    pod = build_pod(_with_template(containers=[container]), ReplicaSlot("workers", 0), nodes=2)
    assert _variables(pod)["NNODES"]["value"] == "64"
    names = [one["name"] for one in pod["spec"]["containers"][0]["env"]]
    assert len(set(names)) == len(names)
    assert names.index("POD_IP") < names.index("URL"), "Kubernetes knows only what stands before"


def test_kueue_sees_the_pods_in_the_queue_of_the_job():
    job = job_object()
    queue = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "high"}
    topology = {"kueue.x-k8s.io/podset-preferred-topology": "rack"}
    job["metadata"] |= {"labels": {**queue, "team": "a"}, "annotations": topology}
    job["spec"]["replicaSpecs"][0]["template"] = {
        **TEMPLATE, "metadata": {"labels": {"kueue.x-k8s.io/priority-class": "low"}},
    }  # fmt: skip
    meta = build_pod(job, ReplicaSlot("workers", 0), nodes=2)["metadata"]
    assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert meta["labels"]["kueue.x-k8s.io/priority-class"] == "low", "one spec of a job may be more easily taken back"
    assert "team" not in meta["labels"]
    assert meta["annotations"] == topology


def test_pod_is_never_restarted_by_kubernetes():
    pod = build_pod(_with_template(restartPolicy="Always"), ReplicaSlot("workers", 0), nodes=2)
    assert pod["spec"]["restartPolicy"] == "Never"


def test_every_alternative_of_the_template_keeps_away_from_unhealthy_nodes():
    by_zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    by_name = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    wish = {"weight": 1, "preference": by_zone}
    on_nodes = {_REQUIRED: {"nodeSelectorTerms": [by_zone, by_name]}, _PREFERRED: [wish]}
    affinity = {"nodeAffinity": on_nodes, "podAffinity": {"kept": []}}
    pod = build_pod(_with_template(affinity=affinity), ReplicaSlot("workers", 0), nodes=2, avoid=["n9", "n8"])
    terms = pod["spec"]["affinity"]["nodeAffinity"][_REQUIRED]["nodeSelectorTerms"]
    for term in terms:
        rules = {rule["key"]: rule for rule in term["matchExpressions"]}
        assert rules["sagemaker.amazonaws.com/node-health-status"]["operator"] == "NotIn"
        assert "kubernetes.io/hostname" not in rules
    assert terms[0]["matchExpressions"][0] == by_zone["matchExpressions"][0]
    assert terms[1]["matchFields"] == by_name["matchFields"]
    assert pod["spec"]["affinity"]["podAffinity"] == {"kept": []}
    assert pod["spec"]["affinity"]["nodeAffinity"][_PREFERRED][0] == wish
    (rule,) = pod["spec"]["affinity"]["nodeAffinity"][_PREFERRED][1]["preference"]["matchExpressions"]
    assert rule == {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n8", "n9"]}


def test_building_a_pod_leaves_the_job_unchanged():
    job = job_object()
    before = copy.deepcopy(job)
    build_pod(job, ReplicaSlot("workers", 0), nodes=2, avoid=["n1"])["spec"]["containers"][0]["env"].clear()
    assert job == before


@pytest.mark.parametrize(
    ("container", "port"),
    [
        ({}, 8080),
        ({"args": ["--server-port=9000", "train.py"]}, 9000),
        ({"command": ["hyperpodrun", "--server-port", "9001"]}, 9001),
        ({"ports": [{"name": "http", "containerPort": 80}]}, 8080),
        ({"ports": [{"name": "agent", "containerPort": 9002}], "args": ["--server-port=1"]}, 9002),
        ({"args": ["--server-port=$(PORT)"]}, 8080),
    ],
)
def test_pod_agent_port(container, port):
    pod = build_pod(_with_template(containers=[{"name": "pytorch", **container}]), ReplicaSlot("workers", 0), nodes=1)
    assert agent_port(pod) == port
