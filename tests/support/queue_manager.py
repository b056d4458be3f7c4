"""Stand-in for Kueue with one queue on a real API server: grants quota and evicts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.support.kube_server import ApiRefusedError, KubeClient

WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
_PODS = "/api/v1/namespaces/default/pods?labelSelector=HPWorkload"
_BEAT_S = 0.2


class QueueManager:
    """Queue that admits workloads in list order and evicts in reverse order."""

    def __init__(self, kube: KubeClient, queue: str, *, flavor: str) -> None:
        self._kube, self._queue, self._flavor = kube, queue, flavor
        self.quota = 0
        self.overdrawn: list[str] = []
        """One message for each time that a Workload had more pods than quota."""
        self._ending = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="queue-manager")

    @contextlib.contextmanager
    def running(self) -> Iterator[QueueManager]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ending.set()
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def workloads(self) -> list[dict[str, Any]]:
        """Return the Workloads of its queue, in order of the number in their names."""
        found = [one for one in self._kube.list(WORKLOADS) if one["spec"].get("queueName") == self._queue]
        return sorted(found, key=lambda one: int(one["metadata"]["name"].split("-")[-2]))

    def used_quota(self) -> int:
        return sum(_pod_count(one) for one in self.workloads() if _is_admitted(one))

    def _run(self) -> None:
        try:
            while not self._ending.wait(_BEAT_S):
                self._sync()
        except BaseException as failure:  # ``running`` raises it
            self._failure = failure

    def _sync(self) -> None:
        self._evict_exceeding()
        there = self.workloads()
        used = sum(_pod_count(one) for one in there if _is_admitted(one))
        leaving = sum(_pod_count(one) for one in there if _is_admitted(one) and has_condition(one, "Evicted"))
        for one in reversed(there):
            if used - leaving > self.quota and _is_admitted(one) and not has_condition(one, "Evicted"):
                leaving += _pod_count(one)
                self._set_condition(one, "Preempted", "quota was reduced", Evicted=True, Preempted=True)
        for one in there:
            waits = not (_is_admitted(one) or has_condition(one, "Finished")) and one["spec"].get("active", True)
            if waits and used + _pod_count(one) <= self.quota:
                used += _pod_count(one)
                self._admit(one)
            elif waits and "status" not in one:
                self._set_condition(one, "Pending", "insufficient unused quota", QuotaReserved=False)

    def _evict_exceeding(self) -> None:
        held = {one["metadata"]["name"]: _pod_count(one) for one in self.workloads() if _is_admitted(one)}
        for name, uids in self._uids().items():
            if len(uids) > held.get(name, 0) and self._still_exceeds(name, uids):
                self.overdrawn.append(f"{name}: {len(uids)} pods, quota for {held.get(name, 0)}")

    def _still_exceeds(self, name: str, uids: set[str]) -> bool:
        """Whether the pods still exceed the quota when read again, as the first reads were not atomic."""
        held = sum(_pod_count(one) for one in self.workloads() if _is_admitted(one) and one["metadata"]["name"] == name)
        return len(uids) > held and self._uids().get(name, set()) >= uids

    def _uids(self) -> dict[str, set[str]]:
        """Return the uids of unfinished pods by Workload."""
        found: dict[str, set[str]] = {}
        for pod in self._kube.list(_PODS):
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                found.setdefault(pod["metadata"]["labels"]["HPWorkload"], set()).add(pod["metadata"]["uid"])
        return found

    def _admit(self, workload: dict[str, Any]) -> None:
        given = [
            {"name": one["name"], "count": one["count"], "flavors": {"cpu": self._flavor}}
            for one in workload["spec"]["podSets"]
        ]
        admission = {"clusterQueue": "all", "podSetAssignments": given}
        self._set_condition(
            workload, "Admitted", "quota reserved", admission, QuotaReserved=True, Admitted=True, Evicted=False
        )  # fmt: skip

    def _set_condition(
        self, workload: dict[str, Any], reason: str, message: str, admission: Any = None, **said: bool
    ) -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        old = workload.get("status", {}).get("conditions", [])
        new = [
            {"type": kind, "status": str(value), "reason": reason, "message": message, "lastTransitionTime": moment}
            for kind, value in said.items()
        ]
        status: dict[str, Any] = {"conditions": [*(one for one in old if one["type"] not in said), *new]}
        if admission is not None:
            status["admission"] = admission
        meta = workload["metadata"]
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": status}
        try:
            self._kube.patch(f"{WORKLOADS}/{meta['name']}/status", body)
        except ApiRefusedError as refused:
            if refused.status not in (404, 409):  # the controller wrote first: the next sync reads that
                raise


def has_condition(workload: dict[str, Any], kind: str) -> bool:
    found = workload.get("status", {}).get("conditions", [])
    return any(one["type"] == kind and one["status"] == "True" for one in found)


def _is_admitted(workload: dict[str, Any]) -> bool:
    return has_condition(workload, "QuotaReserved") and not has_condition(workload, "Finished")


def _pod_count(workload: dict[str, Any]) -> int:
    return sum(one["count"] for one in workload["spec"]["podSets"])
