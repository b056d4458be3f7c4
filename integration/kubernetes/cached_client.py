"""The API server client that reads from informers and writes directly.

Whatever is read is at least as new as what this controller has written, and the pods and Workloads of a job at least
as new as the job itself: a version of a job that somebody else has written is believed only after its pods were listed
once more. Nothing is asked for while nothing changes. While a watch is down the server is asked for each job, every few
seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from integration.kubernetes.api_client import NODES, ApiServerClient, KueueClient, jobs_in, pods_in, pods_of
from integration.kubernetes.errors import ApiServerUnreachableError, ResourceConflictError, ResourceNotFoundError
from integration.kubernetes.informer import Informer, Key, ObjectIndex, ResourceCollection
from integration.kubernetes.kueue_admission import PriorityClass
from integration.kubernetes.labels import JOB_LABEL, NODE_HEALTH_STATUS_LABEL
from integration.kubernetes.pods import node_health_status

Object = Mapping[str, Any]
Changed = Callable[[str, str], None]
log = logging.getLogger(__name__)
_JOBS_S = 30.0
"""Pods that are listed before the jobs are listed once more for each of them."""
_UNHEARD_S = 5.0
"""How often the server itself is asked for one job while a watch is down: a hundred jobs must not hold it down."""


class CachedApiClient:
    """``namespaces``: whose jobs; all with ``[""]``. ``changed`` is called with the namespace and name of a job."""

    def __init__(self, cluster: ApiServerClient, namespaces: Sequence[str], changed: Changed) -> None:
        self._cluster, self._changed = cluster, changed
        self._lock = threading.Lock()
        self._jobs = {name: ObjectIndex(_name_of, changed) for name in namespaces}
        self._pods = {name: ObjectIndex(_job_of, changed) for name in namespaces}
        self._informers: list[Informer] = []
        self._kueue: CachedKueueClient | None = None
        self._asked_s: dict[tuple[int, Key], float] = {}

    def informers(self) -> list[Informer]:
        """Jobs before their pods: what is known of the pods is then as new as the jobs."""
        found = [Informer(self._cluster, jobs_in(name), index) for name, index in self._jobs.items()]
        for name, index in self._pods.items():
            found.append(self._beside(pods_in(name), name, index))
        return found

    def _beside(self, what: ResourceCollection, namespace: str, index: ObjectIndex) -> Informer:
        jobs = self._jobs[namespace]

        def before() -> Callable[[], None]:
            jobs.until_listed(_JOBS_S)
            versions = jobs.versions()

            def after() -> None:
                index.cover(versions)
                for job in jobs.versions():  # they could not be looked at before
                    self._changed(*job)

            return after

        return Informer(self._cluster, what, index, before_list=before)

    def start(self) -> None:
        with self._lock:
            self._informers = [one.start() for one in self.informers()]

    def close(self) -> None:
        with self._lock:
            for one in self._informers:
                one.close()

    @property
    def is_alive(self) -> bool:
        with self._lock:
            return all(one.is_alive for one in self._informers)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        index = _of(self._jobs, namespace)
        if not index.is_listed:
            raise ApiServerUnreachableError("jobs have not been listed yet")
        if self._may_be_old(index, (namespace, name)):
            return self._job_now(namespace, name)
        found = index.get(namespace, name)
        if found is None:
            self._forget((namespace, name))
            raise ResourceNotFoundError(f"there is no job {namespace}/{name}")
        return dict(found)

    def confirm(self, job: Object) -> None:
        """:class:`ResourceConflictError` where somebody has written since ``job`` was read: the server itself is
        asked.
        """
        meta = job["metadata"]
        now = self._job_now(meta["namespace"], meta["name"])["metadata"]
        if (now["uid"], now["resourceVersion"]) != (meta["uid"], meta["resourceVersion"]):
            raise ResourceConflictError(f"job {meta['name']} has changed since it was read")

    def list_pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        index = _of(self._pods, namespace)
        return [dict(one) for one in self._current(index, pods_of(namespace, job), (namespace, job))]

    def _current(self, index: ObjectIndex, what: ResourceCollection, job: Key) -> list[Object]:
        """What there is of a job, as new as the job is."""
        if not index.is_listed:
            raise ApiServerUnreachableError(f"{what.path} has not been listed yet")
        known = _of(self._jobs, job[0]).get(*job)
        version = "" if known is None else known["metadata"]["resourceVersion"]
        if self._may_be_old(index, job) or not index.covers(job, version):
            items, revision = self._cluster.list_all(what)
            index.replace_of_job(*job, items, revision)
            index.cover({job: version})
        return index.of_job(*job)

    def _may_be_old(self, index: ObjectIndex, job: Key) -> bool:
        """Nothing has been heard, or asked, for a while."""
        if index.is_followed:
            return False
        now_s, about = time.monotonic(), (id(index), job)
        if now_s - self._asked_s.get(about, float("-inf")) < _UNHEARD_S:
            return False
        self._asked_s[about] = now_s
        return True

    def _job_now(self, namespace: str, name: str) -> dict[str, Any]:
        found = self._cluster.get_job(namespace, name)
        _of(self._jobs, namespace).answered(found)
        return found

    # -- writing ------------------------------------------------------------------------------------------------------

    def update_status(self, job: Object, status: Object) -> dict[str, Any]:
        meta = job["metadata"]
        key = meta["namespace"], meta["name"]
        try:
            written = self._cluster.update_status(job, status)
        except ResourceConflictError:
            self._job_now(*key)  # the next pass begins with what there is, and need not wait to hear of it
            raise
        _of(self._jobs, key[0]).answered(written)
        for index in self._others(key[0]):
            if index.covers(key, meta["resourceVersion"]):
                index.cover({key: written["metadata"]["resourceVersion"]})
        return written

    def delete_job(self, job: Object) -> None:
        self._cluster.delete_job(job)
        _leaves(_of(self._jobs, job["metadata"]["namespace"]), job)

    def create_pod(self, pod: Object) -> None:
        made = self._cluster.create_pod(pod)
        _of(self._pods, made["metadata"]["namespace"]).answered(made)

    def delete_pod(self, pod: Object, *, grace_s: int | None = None) -> None:
        self._cluster.delete_pod(pod, grace_s=grace_s)
        _leaves(_of(self._pods, pod["metadata"]["namespace"]), pod)

    def post_event(self, job: Object, reason: str, message: str, *, warning: bool = False) -> None:
        self._cluster.post_event(job, reason, message, warning=warning)

    # -- Kueue --------------------------------------------------------------------------------------------------------

    def kueue_client(self) -> CachedKueueClient | None:
        """Its Workloads are watched from when it is first asked for."""
        plain = self._cluster.kueue_client()
        with self._lock:
            if self._kueue is not None and (plain is None or self._kueue.version != plain.version):
                for one in self._kueue.informers:
                    one.close()
                    self._informers.remove(one)
                self._kueue = None
            if plain is not None and self._kueue is None:
                self._kueue = CachedKueueClient(plain, list(self._jobs), self)
                self._informers += [one.start() for one in self._kueue.informers]
            return self._kueue

    def _others(self, namespace: str) -> list[ObjectIndex]:
        kueue = self._kueue
        return [_of(self._pods, namespace), *([] if kueue is None else [_of(kueue.indexes, namespace)])]

    def _forget(self, job: Key) -> None:
        for index in self._others(job[0]):
            index.uncover(job)
            self._asked_s.pop((id(index), job), None)
        self._asked_s.pop((id(_of(self._jobs, job[0])), job), None)


class CachedKueueClient:
    """Of Kueue's objects, Workloads are read from an index."""

    def __init__(self, kueue: KueueClient, namespaces: Sequence[str], cluster: CachedApiClient) -> None:
        self._kueue, self._cluster = kueue, cluster
        self.version = kueue.version
        self.indexes = {name: ObjectIndex(_job_of, cluster._changed) for name in namespaces}
        self.informers = [
            cluster._beside(kueue.workloads_in(name), name, index) for name, index in self.indexes.items()
        ]

    def list_workloads(self, namespace: str, job: str) -> list[dict[str, Any]]:
        index = _of(self.indexes, namespace)
        if index.is_absent:
            raise ResourceNotFoundError("Kueue is not there any more")
        what = self._kueue.workloads_of(namespace, job)
        return [dict(one) for one in self._cluster._current(index, what, (namespace, job))]

    def create_workload(self, workload: Object) -> None:
        made = self._kueue.create_workload(workload)
        _of(self.indexes, made["metadata"]["namespace"]).answered(made)

    def delete_workload(self, workload: Object) -> None:
        self._kueue.delete_workload(workload)

    def update_workload_status(self, workload: Object, status: Object) -> None:
        written = self._kueue.update_workload_status(workload, status)
        _of(self.indexes, written["metadata"]["namespace"]).answered(written)

    def priority_value(self, named: PriorityClass) -> int:
        return self._kueue.priority_value(named)

    def get_flavor(self, name: str) -> dict[str, Any]:
        return self._kueue.get_flavor(name)


class NodeHealthCache:
    """What the health label of every node says, by its name; ``changed`` is called where one says something else."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.said: dict[str, str] = {}
        self.is_followed = False
        self._changed = changed

    def informer(self, cluster: ApiServerClient) -> Informer:
        return Informer(cluster, NODES, self)

    def replace_all(self, items: Sequence[Object], revision: str) -> None:
        now = {one["metadata"]["name"]: node_health_status(one) for one in items}
        for name in {*self.said, *now}:
            self._note(name, now.get(name, ""))

    def heard(self, kind: str, one: Object) -> None:
        if kind != "BOOKMARK":
            self._note(one["metadata"]["name"], "" if kind == "DELETED" else node_health_status(one))

    def is_not_there(self) -> None:
        """There is no cluster without nodes."""

    def _note(self, name: str, said: str) -> None:
        if self.said.get(name, "") == said:
            return
        log.info("node %s: %s is %s", name, NODE_HEALTH_STATUS_LABEL, said or "not there any more")
        if said:
            self.said[name] = said
        else:
            del self.said[name]
        self._changed()


def _of(indexes: Mapping[str, ObjectIndex], namespace: str) -> ObjectIndex:
    """That of the namespace, or of all."""
    return indexes[namespace] if namespace in indexes else indexes[""]


def _leaves(index: ObjectIndex, one: Object) -> None:
    meta = one["metadata"]
    index.leaves(meta["namespace"], meta["name"], meta["uid"])


def _name_of(job: Object) -> str:
    return str(job["metadata"]["name"])


def _job_of(one: Object) -> str:
    return str((one["metadata"].get("labels") or {}).get(JOB_LABEL, ""))
