"""A JobSet of pods with checkpoint memory, and a runtime for Kubeflow Trainer with the same pods.

A development tool: ``python -m integration.kubernetes.tiered_pods`` writes both manifests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration.hyperpod.job_manifest import (
    MEMORY_LABEL,
    MemoryLocation,
    manifest_yaml,
    pod_memory_spec,
    security_context,
    settings_environ,
)
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.settings import Settings

MANIFESTS = Path(__file__).parent / "manifests"
RUNTIME_NAME = "torch-tiered"
SERVICE_ACCOUNT = SECRET_NAME = "elastic-job"  # noqa: S105 - the name of one
NODES = 2
"""Number of pods, unless the TrainJob has another one."""
CONTAINER = REPLICATED_JOB = "node"
"""Name that Kubeflow requires of the training container and its replicated job."""
PREEMPTED_STATUS = 143
"""Exit status of a preempted pod.

With 0, Kubernetes would count the pod as finished and not replace it.
"""
FINAL_STATUSES = (ExitCode.USAGE, ExitCode.REFUSED, ExitCode.STOPPED, ExitCode.JOB_FAILED)
"""Exit statuses of ``elastic run`` after which no new pod would succeed."""
_IMAGE, _AGENT_IMAGE, _USER, _MEMORY = "training:1", "tieredckpt:0.1.0", 10001, "64GiB"
_GRACE_S = 120
_LISTEN_PORT = 7400
_POD_FIELDS = {
    "POD_NAME": "metadata.name",
    "JOBSET_NAME": "metadata.labels['jobset.sigs.k8s.io/jobset-name']",
    "JOB_UID": "metadata.labels['batch.kubernetes.io/controller-uid']",
}


def training_runtime() -> dict[str, Any]:
    """Return Kubeflow's runtime.

    Its controller replaces image, arguments, ``PET_*`` and the number of pods.
    """
    job = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": _job_spec()}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": RUNTIME_NAME, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": NODES, "torch": {}}, "template": {"spec": _jobset_spec(job)}},
    }


def training_jobset() -> dict[str, Any]:
    """Return the JobSet for clusters without Kubeflow Trainer."""
    pods = {"parallelism": NODES, "completions": NODES, "completionMode": "Indexed"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "llama"},
        "spec": _jobset_spec({"spec": pods | _job_spec()}),
    }


def _jobset_spec(job: dict[str, Any]) -> dict[str, Any]:
    """Return a JobSet that restarts all pods only when single pods have been replaced too often."""
    gave_up = {"name": "gaveUp", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "failurePolicy": {"maxRestarts": 3, "rules": [gave_up]},
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": [{"name": REPLICATED_JOB, "template": job}],
    }


def _job_spec() -> dict[str, Any]:
    """Return a Job that replaces single pods, and fails at once if ``elastic run`` ended the job."""
    final = {"containerName": CONTAINER, "operator": "In", "values": [int(status) for status in FINAL_STATUSES]}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return {
        "backoffLimit": 20,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": final},
                {"action": "Ignore", "onPodConditions": [disrupted]},
            ]
        },
        "template": {"metadata": {"labels": {MEMORY_LABEL: MemoryLocation.SIDECAR.value}}, "spec": _pod_spec()},
    }


def _pod_spec() -> dict[str, Any]:
    memory = pod_memory_spec(MemoryLocation.SIDECAR, _MEMORY, image=_AGENT_IMAGE, user=_USER)
    pod = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in _POD_FIELDS.items()]
    variables = settings_environ(Settings(), MemoryLocation.SIDECAR) | {
        "PET_NNODES": str(NODES),
        "PET_NPROC_PER_NODE": "auto",
    }
    secret = {"secretKeyRef": {"name": SECRET_NAME, "key": "secret"}}
    (sidecar,) = memory.sidecars
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S + 60,
        "serviceAccountName": SERVICE_ACCOUNT,
        "initContainers": [
            {**sidecar, "args": [*sidecar["args"], "--node=$(POD_NAME)"], "env": [*sidecar["env"], pod[0]]}
        ],
        "containers": [
            {
                "name": CONTAINER,
                "image": _IMAGE,
                "command": training_command(),
                "args": ["/app/train.py"],
                "env": [
                    *memory.env,
                    *pod,
                    *({"name": name, "value": value} for name, value in variables.items()),
                    {"name": "ELASTIC_SECRET", "valueFrom": secret},
                ],
                "ports": [{"name": "coordinator", "containerPort": _LISTEN_PORT}],
                "volumeMounts": list(memory.mounts),
                **security_context(_USER, read_only=False),
            }
        ],
        "volumes": list(memory.volumes),
    }


def training_command() -> list[str]:
    """Return the command before the script.

    The name of the Lease has the UID of the pods' Job. So a restart or a new job does not find an old Lease.
    """
    return [
        "elastic",
        "run",
        "--job=$(JOBSET_NAME)",
        "--node=$(POD_NAME)",
        "--nnodes=1:$(PET_NNODES)",
        "--coordinator=kubernetes:///$(JOBSET_NAME)-$(JOB_UID)",
        f"--listen=$(POD_IP):{_LISTEN_PORT}",
        f"--grace={_GRACE_S}",
        f"--preempted-status={PREEMPTED_STATUS}",
        "--log-dir=/tmp/elastic-logs",
    ]


_ABOUT = """\
# {about}
# Needs training/leadership.yaml and the Secret {secret} with the key "secret" in each namespace with jobs, and
# Kubernetes 1.31 or later. The agent has {memory} of each pod's memory: change --budget, its memory and sizeLimit.
# Made by integration/kubernetes/tiered_pods.py.
"""
SHIPPED = {
    "kubeflow/torch-tiered.yaml": (
        "Runtime of Kubeflow Trainer 2.3 for a TrainJob with runtimeRef: {name: torch-tiered}.",
        training_runtime,
    ),
    "training/jobset.yaml": ("JobSet whose lost pods are replaced while the others train.", training_jobset),
}


def manifest_text(name: str) -> str:
    """Return the text of one shipped manifest."""
    about, make = SHIPPED[name]
    return _ABOUT.format(about=about, secret=SECRET_NAME, memory=_MEMORY) + manifest_yaml(make())


def main() -> None:
    for name in SHIPPED:
        path = MANIFESTS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(manifest_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
