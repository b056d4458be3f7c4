"""Custom resource definitions of Kueue's Workloads, with the fields of its API.

Written from Kueue's reference. Fields that do not concern queues, such as a pod template's, are accepted unchecked.
"""

from __future__ import annotations

from typing import Any

from tests.support.kube_server import KubeClient

_NAME = {
    "type": "string",
    "maxLength": 253,
    "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
_REASON = "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
_POD_SET = {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "format": "int32", "minimum": 0}
_TIME = {"type": "string", "format": "date-time"}
_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _table(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _named(items: dict[str, Any], key: str = "name", **more: Any) -> dict[str, Any]:
    keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {"type": "array", "items": items, **keys, **more}


_CONDITION = _table(
    {
        "type": {"type": "string", "maxLength": 316},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "reason": {"type": "string", "minLength": 1, "maxLength": 1024, "pattern": _REASON},
        "message": {"type": "string", "maxLength": 32768},
        "lastTransitionTime": _TIME,
        "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
    },
    "type", "status", "reason", "message", "lastTransitionTime",
)  # fmt: skip
_CONTAINER = {**_table({"name": {"type": "string"}}, "name"), "x-kubernetes-preserve-unknown-fields": True}
_POD_SPEC = _table({"containers": _named(_CONTAINER)}, "containers")
_TEMPLATE = _table(
    {
        "metadata": _table({"labels": _TEXTS, "annotations": _TEXTS}),
        "spec": {**_POD_SPEC, "x-kubernetes-preserve-unknown-fields": True},
    }
)
_PRIORITY_IN: dict[str, dict[str, Any]] = {
    "v1beta1": {
        "priorityClassName": _NAME,
        "priorityClassSource": {
            "type": "string",
            "enum": ["kueue.x-k8s.io/workloadpriorityclass", "scheduling.k8s.io/priorityclass", ""],
        },
    },
    "v1beta2": {
        "priorityClassRef": _table(
            {
                "group": {"type": "string", "enum": ["kueue.x-k8s.io", "scheduling.k8s.io"]},
                "kind": {"type": "string", "enum": ["WorkloadPriorityClass", "PriorityClass"]},
                "name": {**_NAME, "minLength": 1},
            },
            "group", "kind", "name",
        )
    },
}  # fmt: skip


def _workload(version: str) -> dict[str, Any]:
    pod_set = _table(
        {
            "name": {**_POD_SET, "default": "main"},
            "count": {**_COUNT, "default": 1},
            "minCount": {"type": "integer", "format": "int32", "minimum": 1},
            "template": _TEMPLATE,
            "topologyRequest": _OPEN,
        },
        "template",
    )
    assignment = _table(
        {"name": {**_POD_SET, "default": "main"}, "count": _COUNT, "flavors": _TEXTS, "resourceUsage": _OPEN,
         "topologyAssignment": _OPEN},
    )  # fmt: skip
    update = _table(
        {"name": _POD_SET, "labels": _TEXTS, "annotations": _TEXTS, "nodeSelector": _TEXTS,
         "tolerations": {"type": "array", "maxItems": 8, "items": _OPEN}},
        "name",
    )  # fmt: skip
    check = _table(
        {
            "name": {"type": "string", "minLength": 1, "maxLength": 316},
            "state": {"type": "string", "enum": ["Pending", "Ready", "Retry", "Rejected"]},
            "message": {"type": "string"},
            "lastTransitionTime": _TIME,
            "podSetUpdates": {"type": "array", "maxItems": 8, "items": update},
        },
        "name", "state", "message", "lastTransitionTime",
    )  # fmt: skip
    spec = {
        "podSets": _named(pod_set, minItems=1, maxItems=8),
        "queueName": _NAME,
        "priority": {"type": "integer", "format": "int32"},
        "active": {"type": "boolean", "default": True},
        "maximumExecutionTimeSeconds": {"type": "integer", "format": "int32", "minimum": 1},
        **_PRIORITY_IN[version],
    }
    admission = {"clusterQueue": _NAME, "podSetAssignments": _named(assignment, maxItems=8)}
    status = {
        "conditions": _named(_CONDITION, "type", maxItems=16),
        "admission": _table(admission, "clusterQueue", "podSetAssignments"),
        "admissionChecks": _named(check, maxItems=8),
        "requeueState": _table({"count": _COUNT, "requeueAt": _TIME}),
        "reclaimablePods": _named(_table({"name": _POD_SET, "count": _COUNT}, "name", "count"), maxItems=8),
    }
    return _table({"spec": _table(spec, "podSets"), "status": _table(status)})


def _priority_class(_: str) -> dict[str, Any]:
    return _table({"value": {"type": "integer", "format": "int32"}, "description": {"type": "string"}}, "value")


def _flavor(_: str) -> dict[str, Any]:
    lists = {"type": "array", "maxItems": 8, "items": _OPEN}
    return _table({"spec": _table({"nodeLabels": _TEXTS, "nodeTaints": lists, "tolerations": lists})})


_KINDS = {
    "Workload": ("workloads", "Namespaced", _workload),
    "WorkloadPriorityClass": ("workloadpriorityclasses", "Cluster", _priority_class),
    "ResourceFlavor": ("resourceflavors", "Cluster", _flavor),
}


def install(kube: KubeClient, version: str = "v1beta2", *, group: str = "kueue.x-k8s.io") -> None:
    """Install one version.

    Without Kueue's converter, a server would drop fields that only one of two versions has.
    """
    for kind, (plural, scope, schema) in _KINDS.items():
        served = {
            "name": version,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": schema(version)},
            **({"subresources": {"status": {}}} if kind == "Workload" else {}),
        }
        names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
        # Definitions in a ``*.k8s.io`` group need this annotation.
        approved = {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/kueue"}
        kube.apply(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}", "annotations": approved},
                "spec": {"group": group, "scope": scope, "names": names, "versions": [served]},
            }
        )
    for plural, scope, _ in _KINDS.values():
        place = "namespaces/default/" if scope == "Namespaced" else ""
        kube.wait_served(f"/apis/{group}/{version}/{place}{plural}")
