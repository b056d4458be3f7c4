"""An in-memory Kueue: its part of the API, and the Workload changes that tests trigger.

It admits and evicts Workloads. :meth:`FakeKueue.admit_all_that_fit` stays within the quota.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from integration.kubernetes.errors import ApiServerRefusedError, ResourceConflictError, ResourceNotFoundError
from integration.kubernetes.kueue_admission import PriorityClass
from tests.support.fake_cluster import FakeKubernetes, merge_patch


class FakeKueue:
    """One queue with room for ``quota`` pods."""

    def __init__(self, kube: FakeKubernetes, *, quota: int = 0, version: str = "v1beta2") -> None:
        self.version = version
        self.quota = quota
        self.is_installed = True
        self.classes = {"high": 1000}
        self.flavors: dict[str, dict[str, Any]] = {}
        self.gives = "spot"
        """Flavor assigned to GPUs."""
        self._kube = kube
        self._there: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)
        kube.queue = self

    # -- the API ------------------------------------------------------------------------------------------------------

    def list_workloads(self, namespace: str, job: str) -> list[dict[str, Any]]:
        self._kube.check_reachable()
        if not self.is_installed:
            raise ResourceNotFoundError("workloads")
        return copy.deepcopy(list(self._there.values()))

    def create_workload(self, workload: Mapping[str, Any]) -> None:
        def create() -> None:
            made = copy.deepcopy(dict(workload))
            if made["metadata"]["name"] in self._there:
                raise ResourceConflictError("it exists")
            self._there[made["metadata"]["name"]] = made
            made["metadata"]["uid"] = f"workload-{next(self._numbers)}"
            self._touch(made)

        self._kube.write(create)

    def delete_workload(self, workload: Mapping[str, Any]) -> None:
        def delete() -> None:
            name = workload["metadata"]["name"]
            if name in self._there and self._there[name]["metadata"]["uid"] == workload["metadata"]["uid"]:
                del self._there[name]

        self._kube.write(delete)

    def update_workload_status(self, workload: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        def write() -> None:
            there = self._there.get(workload["metadata"]["name"])
            if there is None:
                raise ResourceNotFoundError("it is gone")
            if there["metadata"]["resourceVersion"] != workload["metadata"]["resourceVersion"]:
                raise ResourceConflictError("the object has been modified")
            there["status"] = merge_patch(there.get("status", {}), status)
            self._touch(there)

        self._kube.write(write)

    def priority_value(self, named: PriorityClass) -> int:
        if named.name not in self.classes:
            raise ApiServerRefusedError(f"there is no {named.kind} {named.name}")
        return self.classes[named.name]

    def get_flavor(self, name: str) -> dict[str, Any]:
        if name not in self.flavors:
            raise ResourceNotFoundError(name)
        return self.flavors[name]

    # -- Kueue's actions ----------------------------------------------------------------------------------------------

    def workload_names(self) -> list[str]:
        """Return the names of all workloads, smallest size first."""
        return sorted(self._there, key=lambda name: int(name.split("-")[-2]))

    def workload(self, name: str) -> dict[str, Any]:
        return self._there[name]

    def has_condition(self, name: str, kind: str) -> bool:
        found = self._there[name].get("status", {}).get("conditions", [])
        return any(one["type"] == kind and one["status"] == "True" for one in found)

    def pod_count(self, name: str) -> int:
        return sum(one["count"] for one in self._there[name]["spec"]["podSets"])

    def used_quota(self) -> int:
        return sum(
            self.pod_count(name)
            for name in self._there
            if self.has_condition(name, "QuotaReserved") and not self.has_condition(name, "Finished")
        )

    def admit_all_that_fit(self) -> None:
        for name in list(self._there):
            waits = not (self.has_condition(name, "QuotaReserved") or self.has_condition(name, "Finished"))
            if (
                waits
                and self._there[name]["spec"].get("active", True)
                and self.used_quota() + self.pod_count(name) <= self.quota
            ):
                self.admit(name)

    def admit(self, name: str) -> None:
        pod_sets = self._there[name]["spec"]["podSets"]
        flavors = {"nvidia.com/gpu": self.gives} if self.flavors else {}
        given = [{"name": one["name"], "count": one["count"], "flavors": flavors} for one in pod_sets]
        self._there[name].setdefault("status", {})["admission"] = {"clusterQueue": "all", "podSetAssignments": given}
        self.set_conditions(name, QuotaReserved=True, Admitted=True, Evicted=False)

    def evict(self, name: str, reason: str = "Preempted") -> None:
        self.set_conditions(name, reason, Evicted=True)

    def set_conditions(self, name: str, reason: str = "AsItIs", message: str = "", **conditions: bool) -> None:
        status = self._there[name].setdefault("status", {})
        kept = [one for one in status.get("conditions", []) if one["type"] not in conditions]
        time = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
        new = [
            {"type": kind, "status": str(value), "reason": reason, "message": message, **time}
            for kind, value in conditions.items()
        ]
        status["conditions"] = [*kept, *new]
        self._touch(self._there[name])

    def _touch(self, workload: dict[str, Any]) -> None:
        workload["metadata"]["resourceVersion"] = str(next(self._numbers))
