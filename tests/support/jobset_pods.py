"""Pods of a JobSet, and the JobSet of a TrainJob, as their controllers create them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def jobset_of_train_job(runtime: Mapping[str, Any], train_job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JobSet of ``train_job``: the runtime's template with the trainer's values and ``PET_*``."""
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    name, trainer = train_job["metadata"]["name"], train_job["spec"].get("trainer")
    (replicated,) = [one for one in spec["replicatedJobs"] if one["name"] == "node"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    nodes = (trainer or {}).get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    replicated["template"]["spec"] |= {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed"}
    (container,) = [one for one in pod_spec(spec)["containers"] if one["name"] == "node"]
    if trainer is not None:  # Kubeflow sets PET_* only for a TrainJob with a trainer
        container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
        made = {
            "PET_NNODES": {"value": str(nodes)},
            "PET_NPROC_PER_NODE": {"value": str(trainer.get("numProcPerNode", "auto"))},
            "PET_NODE_RANK": {"valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            "PET_MASTER_ADDR": {"value": f"{name}-node-0-0.{name}"},
            "PET_MASTER_PORT": {"value": "29500"},
        }
        theirs = {one["name"]: one for one in trainer.get("env", ())}
        env = {one["name"]: one for one in container["env"]} | theirs
        container["env"] = list((env | {key: {"name": key, **value} for key, value in made.items()}).values())
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec}


def pod_spec(jobset_spec: Mapping[str, Any]) -> dict[str, Any]:
    (replicated,) = jobset_spec["replicatedJobs"]
    spec: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]
    return spec


class JobSetPod:
    """One pod of a JobSet, with the values of its fields and secrets."""

    def __init__(self, jobset: Mapping[str, Any], index: int, suffix: str, *, secrets: Mapping[str, str]) -> None:
        """``suffix`` is the random end of a pod's name; ``secrets`` has the key ``secret`` of each Secret."""
        self.spec = pod_spec(jobset["spec"])
        name = jobset["metadata"]["name"]
        self.name = f"{name}-node-0-{index}-{suffix}"
        self._secrets = secrets
        self._fields = {
            "status.podIP": "127.0.0.1",
            "metadata.name": self.name,
            "metadata.labels['jobset.sigs.k8s.io/jobset-name']": name,
            "metadata.labels['batch.kubernetes.io/controller-uid']": "5f0c3a52-1b7e-4a36-9b0e-2f5a8f6f1f10",
            _INDEX: str(index),
        }

    def environ(self, container: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of a container. A variable may refer to those before it."""
        found: dict[str, str] = {}
        for one in container["env"]:
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                found[one["name"]] = self._fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                assert source["secretKeyRef"]["key"] == "secret"
                found[one["name"]] = self._secrets[source["secretKeyRef"]["name"]]
            else:
                found[one["name"]] = _expand(one["value"], found)
        return found

    def words(self, container: Mapping[str, Any]) -> list[str]:
        """Return the command line of a container."""
        environ = self.environ(container)
        return [_expand(word, environ) for word in (*container["command"], *container["args"])]


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` as the kubelet does; an unknown name stays as it is."""
    return _VARIABLE.sub(lambda found: environ.get(found[1], found[0]), text)
