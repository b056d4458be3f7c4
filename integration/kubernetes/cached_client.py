"""API server client that reads from informers and writes directly.

Reads are at least as new as this controller's writes. Pods and Workloads of a job are at least as new as the job
itself. After another client writes a job, its pods are listed before the new version is used. Without changes the
client sends no requests. While a watch is down, it reads each job from the server every few seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from integration.hyperpod.job_resource import NODE_HEALTH_LABEL
from integration.kubernetes.api_client import NODES, ApiServerClient, KueueClient, jobs_in, pods_in, pods_of
from integration.kubernetes.errors import ApiServerUnreachableError, ResourceConflictError, ResourceNotFoundError
from integration.kubernetes.informer import Informer, Key, ObjectIndex, ResourceCollection
from integration.kubernetes.kueue_admission import PriorityClass
from integration.kubernetes.labels import JOB_LABEL
from integration.kubernetes.pods import node_health_status

Object = Mapping[str, Any]
Changed = Callable[[str, str], None]
log = logging.getLogger(__name__)
_JOBS_LIST_TIMEOUT_S = 30.0
"""Seconds that a list of pods waits for the first list of jobs.

Without it, the pods of each job must be listed again.
"""
_DIRECT_READ_INTERVAL_S = 5.0
"""Minimum seconds between two reads of one job while a watch is down.

It protects the server from the reads of hundreds of jobs.
"""


class CachedApiClient:
    """API server client for the jobs of ``namespaces``; all for ``[""]``.

    ``changed`` is called with the namespace and name of a changed job.
    """

    def __init__(self, cluster: ApiServerClient, namespaces: Sequence[str], changed: Changed) -> None:
        self._cluster, self._changed = cluster, changed
        self._lock = threading.Lock()
        self._jobs = {name: ObjectIndex(_name_of, changed) for name in namespaces}
        self._pods = {name: ObjectIndex(_job_of, changed) for name in namespaces}
        self._informers: list[Informer] = []
        self._kueue: CachedKueueClient | None = None
        self._last_read_s: dict[tuple[int, Key], float] = {}

    def informers(self) -> list[Informer]:
        """Return the informers of jobs and pods.

        Jobs come first, so that the state of the pods is at least as new.
        """
        informers = [Informer(self._cluster, jobs_in(name), index) for name, index in self._jobs.items()]
        for name, index in self._pods.items():
            informers.append(self._informer_after_jobs(pods_in(name), name, index))
        return informers

    def _informer_after_jobs(self, what: ResourceCollection, namespace: str, index: ObjectIndex) -> Informer:
        jobs = self._jobs[namespace]

        def before() -> Callable[[], None]:
            jobs.until_listed(_JOBS_LIST_TIMEOUT_S)
            versions = jobs.versions()

            def after() -> None:
                index.cover(versions)
                for job in jobs.versions():  # their reconciles failed until now
                    self._changed(*job)

            return after

        return Informer(self._cluster, what, index, before_list=before)

    def start(self) -> None:
        with self._lock:
            self._informers = [informer.start() for informer in self.informers()]

    def close(self) -> None:
        with self._lock:
            for informer in self._informers:
                informer.close()

    @property
    def is_alive(self) -> bool:
        with self._lock:
            return all(informer.is_alive for informer in self._informers)

    def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        index = _index_for(self._jobs, namespace)
        if not index.is_listed:
            raise ApiServerUnreachableError("jobs have not been listed yet")
        if self._may_be_old(index, (namespace, name)):
            return self._read_job(namespace, name)
        job = index.get(namespace, name)
        if job is None:
            self._forget((namespace, name))
            raise ResourceNotFoundError(f"there is no job {namespace}/{name}")
        return dict(job)

    def confirm(self, job: Object) -> None:
        """Raise :class:`ResourceConflictError` if the job was written since ``job`` was read.

        This reads the job from the server.
        """
        meta = job["metadata"]
        current = self._read_job(meta["namespace"], meta["name"])["metadata"]
        if (current["uid"], current["resourceVersion"]) != (meta["uid"], meta["resourceVersion"]):
            raise ResourceConflictError(f"job {meta['name']} has changed since it was read")

    def list_pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        index = _index_for(self._pods, namespace)
        return [dict(pod) for pod in self._current(index, pods_of(namespace, job), (namespace, job))]

    def _current(self, index: ObjectIndex, what: ResourceCollection, job: Key) -> list[Object]:
        """Return the objects of a job that are at least as new as the job itself."""
        if not index.is_listed:
            raise ApiServerUnreachableError(f"{what.path} has not been listed yet")
        known = _index_for(self._jobs, job[0]).get(*job)
        version = "" if known is None else known["metadata"]["resourceVersion"]
        if self._may_be_old(index, job) or not index.covers(job, version):
            items, revision = self._cluster.list_all(what)
            index.replace_of_job(*job, items, revision)
            index.cover({job: version})
        return index.of_job(*job)

    def _may_be_old(self, index: ObjectIndex, job: Key) -> bool:
        """Return whether to read from the server: the watch is down and the last read is too old."""
        if index.is_followed:
            return False
        now_s, key = time.monotonic(), (id(index), job)
        if now_s - self._last_read_s.get(key, float("-inf")) < _DIRECT_READ_INTERVAL_S:
            return False
        self._last_read_s[key] = now_s
        return True

    def _read_job(self, namespace: str, name: str) -> dict[str, Any]:
        job = self._cluster.get_job(namespace, name)
        _index_for(self._jobs, namespace).answered(job)
        return job

    def update_status(self, job: Object, status: Object) -> dict[str, Any]:
        meta = job["metadata"]
        key = meta["namespace"], meta["name"]
        try:
            written = self._cluster.update_status(job, status)
        except ResourceConflictError:
            self._read_job(*key)  # the next reconcile reads the new version without waiting for the watch
            raise
        _index_for(self._jobs, key[0]).answered(written)
        for index in self._dependent_indexes(key[0]):
            if index.covers(key, meta["resourceVersion"]):
                index.cover({key: written["metadata"]["resourceVersion"]})
        return written

    def delete_job(self, job: Object) -> None:
        self._cluster.delete_job(job)
        _mark_leaving(_index_for(self._jobs, job["metadata"]["namespace"]), job)

    def create_pod(self, pod: Object) -> None:
        created = self._cluster.create_pod(pod)
        _index_for(self._pods, created["metadata"]["namespace"]).answered(created)

    def delete_pod(self, pod: Object, *, grace_s: int | None = None) -> None:
        self._cluster.delete_pod(pod, grace_s=grace_s)
        _mark_leaving(_index_for(self._pods, pod["metadata"]["namespace"]), pod)

    def post_event(self, job: Object, reason: str, message: str, *, warning: bool = False) -> None:
        self._cluster.post_event(job, reason, message, warning=warning)

    def kueue_client(self) -> CachedKueueClient | None:
        """Return a cached client of Kueue, or None. The first call starts the watches of Workloads."""
        plain = self._cluster.kueue_client()
        with self._lock:
            if self._kueue is not None and (plain is None or self._kueue.version != plain.version):
                for informer in self._kueue.informers:
                    informer.close()
                    self._informers.remove(informer)
                self._kueue = None
            if plain is not None and self._kueue is None:
                self._kueue = CachedKueueClient(plain, list(self._jobs), self)
                self._informers += [informer.start() for informer in self._kueue.informers]
            return self._kueue

    def _dependent_indexes(self, namespace: str) -> list[ObjectIndex]:
        kueue = self._kueue
        return [_index_for(self._pods, namespace), *([] if kueue is None else [_index_for(kueue.indexes, namespace)])]

    def _forget(self, job: Key) -> None:
        for index in self._dependent_indexes(job[0]):
            index.uncover(job)
            self._last_read_s.pop((id(index), job), None)
        self._last_read_s.pop((id(_index_for(self._jobs, job[0])), job), None)


class CachedKueueClient:
    """Kueue client that reads Workloads from an index."""

    def __init__(self, kueue: KueueClient, namespaces: Sequence[str], cluster: CachedApiClient) -> None:
        self._kueue, self._cluster = kueue, cluster
        self.version = kueue.version
        self.indexes = {name: ObjectIndex(_job_of, cluster._changed) for name in namespaces}
        self.informers = [
            cluster._informer_after_jobs(kueue.workloads_in(name), name, index) for name, index in self.indexes.items()
        ]

    def list_workloads(self, namespace: str, job: str) -> list[dict[str, Any]]:
        index = _index_for(self.indexes, namespace)
        if index.is_absent:
            raise ResourceNotFoundError("Kueue is no longer installed")
        what = self._kueue.workloads_of(namespace, job)
        return [dict(workload) for workload in self._cluster._current(index, what, (namespace, job))]

    def create_workload(self, workload: Object) -> None:
        created = self._kueue.create_workload(workload)
        _index_for(self.indexes, created["metadata"]["namespace"]).answered(created)

    def delete_workload(self, workload: Object) -> None:
        self._kueue.delete_workload(workload)

    def update_workload_status(self, workload: Object, status: Object) -> None:
        written = self._kueue.update_workload_status(workload, status)
        _index_for(self.indexes, written["metadata"]["namespace"]).answered(written)

    def priority_value(self, named: PriorityClass) -> int:
        return self._kueue.priority_value(named)

    def get_flavor(self, name: str) -> dict[str, Any]:
        return self._kueue.get_flavor(name)


class NodeHealthCache:
    """Health label of every node, by its name.

    ``changed`` is called if a label changes.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.said: dict[str, str] = {}
        self.is_followed = False
        self._changed = changed

    def informer(self, cluster: ApiServerClient) -> Informer:
        return Informer(cluster, NODES, self)

    def replace_all(self, items: Sequence[Object], revision: str) -> None:
        current = {node["metadata"]["name"]: node_health_status(node) for node in items}
        for name in {*self.said, *current}:
            self._note(name, current.get(name, ""))

    def heard(self, kind: str, node: Object) -> None:
        if kind != "BOOKMARK":
            self._note(node["metadata"]["name"], "" if kind == "DELETED" else node_health_status(node))

    def is_not_there(self) -> None:
        """Do nothing: nodes exist in every cluster."""

    def _note(self, name: str, health: str) -> None:
        if self.said.get(name, "") == health:
            return
        log.info("node %s: %s is %s", name, NODE_HEALTH_LABEL, health or "not there any more")
        if health:
            self.said[name] = health
        else:
            del self.said[name]
        self._changed()


def _index_for(indexes: Mapping[str, ObjectIndex], namespace: str) -> ObjectIndex:
    """Return the index of the namespace, or the one of all namespaces."""
    return indexes[namespace] if namespace in indexes else indexes[""]


def _mark_leaving(index: ObjectIndex, resource: Object) -> None:
    meta = resource["metadata"]
    index.leaves(meta["namespace"], meta["name"], meta["uid"])


def _name_of(job: Object) -> str:
    return str(job["metadata"]["name"])


def _job_of(resource: Object) -> str:
    return str((resource["metadata"].get("labels") or {}).get(JOB_LABEL, ""))
