"""What an admission says about the pods it lets in: on which nodes they go, and what they carry. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from integration.kubernetes.names import WORKLOAD_LABEL

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Grant:
    """For the pods of one replica spec in one Workload."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node_selector: Mapping[str, str]
    tolerations: tuple[Object, ...] = ()


def flavors_of(workload: Object, replica_spec: str) -> list[str]:
    """Names of the ResourceFlavors whose quota was given."""
    admission = (workload.get("status") or {}).get("admission") or {}
    for one in admission.get("podSetAssignments") or ():
        if one["name"] == replica_spec:
            return sorted(set((one.get("flavors") or {}).values()))
    return []


def grant_for(workload: Object, replica_spec: str, flavors: Sequence[Object]) -> Grant:
    """Nodes of those flavors, and whatever admission checks want added; every pod says which Workload it is for."""
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    updates = [one for check in checks for one in check.get("podSetUpdates") or () if one["name"] == replica_spec]
    specs = [flavor.get("spec") or {} for flavor in flavors]
    selectors = [*(one.get("nodeLabels") for one in specs), *(one.get("nodeSelector") for one in updates)]
    tolerated = [toleration for one in (*specs, *updates) for toleration in one.get("tolerations") or ()]
    return Grant(
        labels={**_joined(one.get("labels") for one in updates), WORKLOAD_LABEL: workload["metadata"]["name"]},
        annotations=_joined(one.get("annotations") for one in updates),
        node_selector=_joined(selectors),
        tolerations=tuple(one for at, one in enumerate(tolerated) if one not in tolerated[:at]),
    )


def _joined(tables: Any) -> dict[str, str]:
    return {name: value for table in tables for name, value in (table or {}).items()}
