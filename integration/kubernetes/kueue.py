"""What the controller asks of Kueue's part of the API, in one of its versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from integration.kubernetes.errors import AbsentError, ConflictError, RefusedError
from integration.kubernetes.informer import Collection
from integration.kubernetes.names import JOB_LABEL, KUEUE_GROUP
from integration.kubernetes.workloads import PriorityClass

Object = Mapping[str, Any]


class Kueue:
    """Workloads of one cluster: ``ask`` and ``list_all`` are :class:`integration.kubernetes.cluster.Cluster`'s."""

    def __init__(
        self,
        ask: Callable[..., dict[str, Any]],
        list_all: Callable[[Collection], tuple[list[dict[str, Any]], str]],
        version: str,
    ) -> None:
        self._ask, self._list = ask, list_all
        self.version = version

    def workloads(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """:class:`AbsentError` where Kueue is no longer there."""
        found, _ = self._list(self.workloads_of(namespace, job))
        return found

    def workloads_in(self, namespace: str) -> Collection:
        """Those of jobs, whichever; of all namespaces with ""."""
        return Collection(self._all(namespace), selector=JOB_LABEL)

    def workloads_of(self, namespace: str, job: str) -> Collection:
        return Collection(self._all(namespace), selector=f"{JOB_LABEL}={job}")

    def create_workload(self, workload: Object) -> dict[str, Any]:
        """As it is now; :class:`ConflictError` where one of that name is there."""
        return self._ask("POST", self._all(workload["metadata"]["namespace"]), dict(workload))

    def delete_workload(self, workload: Object) -> None:
        """This very one, as it was read: one that has been admitted since is not deleted. It may be gone already."""
        meta = workload["metadata"]
        body = {
            "preconditions": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
            "propagationPolicy": "Background",
        }
        try:
            self._ask("DELETE", self._one(workload), body)
        except (AbsentError, ConflictError):
            return

    def write_workload_status(self, workload: Object, status: Object) -> dict[str, Any]:
        """If nobody has written since it was read: conditions are a list, and Kueue writes there, too."""
        body = {"metadata": {"resourceVersion": workload["metadata"]["resourceVersion"]}, "status": dict(status)}
        return self._ask("PATCH", f"{self._one(workload)}/status", body)

    def priority(self, named: PriorityClass) -> int:
        """How much a class is worth; :class:`RefusedError` where there is none of that name."""
        root = f"/apis/{KUEUE_GROUP}/{self.version}" if named.of_kueue else "/apis/scheduling.k8s.io/v1"
        path = f"{root}/{'workloadpriorityclasses' if named.of_kueue else 'priorityclasses'}/{named.name}"
        try:
            return int(self._ask("GET", path)["value"])
        except AbsentError:
            raise RefusedError(f"there is no {named.kind} {named.name}") from None

    def flavor(self, name: str) -> dict[str, Any]:
        """A ResourceFlavor: what its nodes are labelled with, and which of their taints are to be tolerated."""
        return self._ask("GET", f"/apis/{KUEUE_GROUP}/{self.version}/resourceflavors/{name}")

    def _all(self, namespace: str) -> str:
        within = f"/namespaces/{namespace}" if namespace else ""
        return f"/apis/{KUEUE_GROUP}/{self.version}{within}/workloads"

    def _one(self, workload: Object) -> str:
        return f"{self._all(workload['metadata']['namespace'])}/{workload['metadata']['name']}"
