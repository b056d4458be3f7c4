"""Kueue's side of a pass: what is admitted of a job, and what its Workloads are told. Nothing is kept but the version.

Every name is decided by the job and its sizes, and every write can be made again: whoever is killed in here leaves
nothing that the next pass does not see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from integration.hyperpod.operator import JobSpec
from integration.kubernetes.admission import Object, Plan, finished, plan_for, says, workload_of
from integration.kubernetes.cached import CachedCluster, CachedKueue
from integration.kubernetes.cluster import Cluster
from integration.kubernetes.errors import AbsentError, ConflictError, RefusedError
from integration.kubernetes.grants import Grant, flavors_of, grant_for
from integration.kubernetes.kueue import Kueue
from integration.kubernetes.pods import belongs_to
from integration.kubernetes.seeing import has_ended
from integration.kubernetes.workloads import Step, priority_class_of, queue_of, workload_for

_LOOK_AGAIN_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Queued:
    """A job that Kueue decides about, as it is in this pass."""

    kueue: Kueue | CachedKueue
    workloads: tuple[Object, ...]
    plan: Plan

    def without_new(self) -> Queued:
        """The same, and no Workload is made in this pass."""
        return replace(self, plan=replace(self.plan, create=()))

    def settle(self, job: Object) -> None:
        """Workloads are made, deleted, and told of their pods; :class:`RefusedError` where one cannot be made."""
        for workload, status in self.plan.statuses:
            self.kueue.write_workload_status(workload, status)
        for workload in self.plan.delete:
            _log.info("workload %s goes", workload["metadata"]["name"])
            self.kueue.delete_workload(workload)
        for step in self.plan.create:
            self._create(job, step)

    def finish(self, pods: Sequence[Object], now_s: float, *, succeeded: bool) -> bool:
        """The job is over: nothing of it waits or holds anything any more. Whether that is true of all of it now."""
        free = finished(self.workloads, pods, now_s, succeeded=succeeded)
        for workload, status in free:
            self.kueue.write_workload_status(workload, status)
        return len(free) == sum(not says(one, "Finished") for one in self.workloads)

    def grant(self, workload: Object, replica_spec: str) -> Grant:
        names = flavors_of(workload, replica_spec)
        try:
            return grant_for(workload, replica_spec, [self.kueue.flavor(name) for name in names])
        except AbsentError as absent:
            raise RefusedError(f"of workload {workload['metadata']['name']}: {absent}") from None

    def _create(self, job: Object, step: Step) -> None:
        named = priority_class_of(job, step)
        priority = 0 if named is None else self.kueue.priority(named)
        try:
            self.kueue.create_workload(workload_for(job, step, self.kueue.version, named, priority))
        except ConflictError:
            _log.info("workload %s is there already", step.name)  # the next pass sees it


class Queueing:
    """Finds out whether jobs are Kueue's business. Any thread may ask."""

    def __init__(self, cluster: Cluster | CachedCluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._kueue: Kueue | CachedKueue | None = None
        self._look_at_s = float("-inf")

    def look(self, job: Object, spec: JobSpec, pods: Sequence[Object], now_s: float) -> Queued | None:
        """``None`` for a job without a queue, without Kueue, or whose pods were made before Kueue was there."""
        if not queue_of(job) or any(not workload_of(pod) and not has_ended(pod) for pod in pods):
            return None
        kueue = self._known()
        if kueue is None:
            return None
        meta = job["metadata"]
        try:
            every = kueue.workloads(meta["namespace"], meta["name"])
        except AbsentError:
            self._kueue = None
            return None
        workloads = tuple(one for one in every if belongs_to(one, meta["uid"]))
        return Queued(kueue, workloads, plan_for(job, spec, workloads, pods, now_s))

    def _known(self) -> Kueue | CachedKueue | None:
        if self._kueue is None and self._clock() >= self._look_at_s:
            self._kueue = self._cluster.kueue()
            self._look_at_s = self._clock() + _LOOK_AGAIN_S
        return self._kueue
