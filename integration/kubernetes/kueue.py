"""What the controller asks of Kueue's part of the API, in one of its versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from integration.kubernetes.errors import AbsentError, ConflictError, RefusedError
from integration.kubernetes.names import JOB_LABEL, KUEUE_GROUP
from integration.kubernetes.workloads import PriorityClass

Object = Mapping[str, Any]


class Kueue:
    """Workloads of one cluster. ``ask`` is :meth:`integration.kubernetes.cluster.Cluster.ask`."""

    def __init__(self, ask: Callable[..., dict[str, Any]], version: str) -> None:
        self._ask = ask
        self.version = version

    def workloads(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """:class:`AbsentError` where Kueue is no longer there."""
        query = {"labelSelector": f"{JOB_LABEL}={job}"}
        return self._ask("GET", self._all(namespace), query=query)["items"]

    def create_workload(self, workload: Object) -> None:
        """:class:`ConflictError` where one of that name is there."""
        self._ask("POST", self._all(workload["metadata"]["namespace"]), dict(workload))

    def delete_workload(self, workload: Object) -> None:
        """This very one; it may be gone already."""
        body = {"preconditions": {"uid": workload["metadata"]["uid"]}, "propagationPolicy": "Background"}
        try:
            self._ask("DELETE", self._one(workload), body)
        except (AbsentError, ConflictError):
            return

    def write_workload_status(self, workload: Object, status: Object) -> None:
        """If nobody has written since it was read: conditions are a list, and Kueue writes there, too."""
        body = {"metadata": {"resourceVersion": workload["metadata"]["resourceVersion"]}, "status": dict(status)}
        self._ask("PATCH", f"{self._one(workload)}/status", body)

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
        return f"/apis/{KUEUE_GROUP}/{self.version}/namespaces/{namespace}/workloads"

    def _one(self, workload: Object) -> str:
        return f"{self._all(workload['metadata']['namespace'])}/{workload['metadata']['name']}"
