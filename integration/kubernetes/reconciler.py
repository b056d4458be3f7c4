"""One reconcile of one job: read, observe, ``decide_job``, store, act; including Kueue.

After a controller is killed, the next reconcile carries out the missing actions of a stored decision. If the decision
was not stored, the next reconcile decides again. Two controllers cannot both act on a decision: before any action, the
status is written only if the job is unchanged since it was read. If the status does not change, the job is read again.

All names derive from the job and its sizes, and every write can be repeated. The next reconcile therefore sees
everything that a killed controller left behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from integration.hyperpod.operator import (
    AgentStatus,
    JobPhase,
    JobSpec,
    JobSpecError,
    JobState,
    ObservedJob,
    OperatorAction,
    OperatorDecision,
    ReleasePod,
    ReplacePod,
    decide_job,
    parse_job_resource,
)
from integration.hyperpod.operator.elastic_agent_client import AgentReply
from integration.kubernetes.api_client import ApiServerClient, KueueClient
from integration.kubernetes.cached_client import CachedApiClient, CachedKueueClient
from integration.kubernetes.errors import (
    ApiServerError,
    ApiServerRefusedError,
    ResourceConflictError,
    ResourceNotFoundError,
)
from integration.kubernetes.kueue_admission import (
    AdmissionPlan,
    WorkloadStep,
    assign_workloads,
    build_workload,
    finished_workload_statuses,
    has_condition,
    plan_admission,
    priority_class_for,
    queue_name,
    workload_name_of,
)
from integration.kubernetes.labels import KubeObject
from integration.kubernetes.pods import (
    PodAdmission,
    ReplicaSlot,
    agent_port,
    build_pod,
    flavor_names,
    has_begun,
    has_ended,
    is_owned_by,
    is_terminating,
    missing_slots,
    observe_job,
    pod_address,
    pod_admission,
)
from integration.kubernetes.refusal_backoff import RefusalBackoff
from integration.kubernetes.resource_status import (
    DamagedStateError,
    admission_conditions,
    build_job_status,
    invalid_spec_status,
    is_marked_invalid,
    load_job_state,
    status_differs,
)

log = logging.getLogger(__name__)
_ACTIVE_POLL_S = 0.2
"""Seconds until the next reconcile after an action. Agents act at once but send no notification."""
_POD_REFUSED, _WORKLOAD_REFUSED = "PodRefused", "WorkloadRefused"


class AgentApi(Protocol):
    """The methods of an agent client that a reconciler needs.

    :class:`integration.hyperpod.operator.elastic_agent_client.ElasticAgentClient` implements them.
    """

    def poll_all(self, addresses: Mapping[str, str]) -> Mapping[str, AgentReply]: ...

    def send_all(self, actions: Iterable[OperatorAction], addresses: Mapping[str, str]) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class ReconcileResult:
    """Result of one reconcile."""

    requeue_after_s: float | None
    """Seconds until the next reconcile without an event; None if nothing remains to do."""


_DONE = ReconcileResult(None)


class JobReconciler:
    """Reconciler of the jobs of one cluster.

    Any thread may call it, but reconciles of one job must not overlap.
    """

    def __init__(
        self,
        cluster: ApiServerClient | CachedApiClient,
        agents: AgentApi,
        *,
        health: Mapping[str, str],
        clock: Callable[[], float],
        every_s: float = 1.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._cluster = cluster
        self._agents = agents
        self._health = health
        self._clock = clock
        self._every_s = every_s
        self._settings = dict(settings or {})
        self._queueing = KueueQueue(cluster, clock)
        self._refusals = RefusalBackoff(clock)

    def reconcile(self, namespace: str, name: str) -> ReconcileResult:
        """Reconcile one job. Raise :class:`ApiServerError` if the API server does not respond or refuses."""
        try:
            job = self._cluster.get_job(namespace, name)
        except ResourceNotFoundError:
            self._refusals.forget_all(namespace, name)
            return _DONE
        if job["metadata"].get("deletionTimestamp"):
            return _DONE  # the garbage collector takes the pods
        try:
            spec = parse_job_resource(job, **self._settings)
            state = load_job_state(job) or JobState()
        except (JobSpecError, DamagedStateError) as error:
            self._mark_invalid(job, str(error))
            return ReconcileResult(None)
        return self._drive(job, spec, state)

    def _drive(self, job: KubeObject, spec: JobSpec, state: JobState) -> ReconcileResult:
        meta = job["metadata"]
        all_pods = self._cluster.list_pods(meta["namespace"], meta["name"])
        pods = [pod for pod in all_pods if is_owned_by(pod, meta["uid"])]
        addresses = {
            pod["metadata"]["name"]: f"{pod_address(pod)}:{agent_port(pod)}"
            for pod in pods
            if pod_address(pod) and not has_ended(pod)
        }
        now_s = max(self._clock(), state.current.since_s)
        replies = self._agents.poll_all(addresses)
        answers = {name: reply.status for name, reply in replies.items()}
        queued = self._queueing.queued_job(job, spec, pods, now_s)
        observed = self._observe(job, pods, answers, queued)
        decision = decide_job(spec, state, observed, now_s)
        missing = missing_slots(meta["name"], decision.wanted, decision.state, all_pods)
        to_create: Sequence[tuple[ReplicaSlot, KubeObject | None]] = [(slot, None) for slot in missing]
        conditions: list[KubeObject] = []
        if queued is not None:
            to_create = assign_workloads(queued.plan, missing, pods, decision.state.replaced_pods)
            conditions = admission_conditions(job, decision.state, queued.plan.waiting_for, queued.plan.capacity, now_s)
        if to_create and not self._refusals.is_due(job, _POD_REFUSED):
            to_create = []
        if queued is not None and not self._refusals.is_due(job, _WORKLOAD_REFUSED):
            queued = queued.without_new()
        status = build_job_status(spec, decision.state, observed, pods, conditions)
        idle = not (to_create or decision.actions) and (queued is None or queued.plan.is_empty)
        writes = status_differs(job, status)
        if writes:
            job = self._cluster.update_status(job, status)  # of two controllers, the second one fails here
        elif not idle:
            self._cluster.confirm(job)
        self._publish_events(job, decision)
        if decision.finished:
            succeeded = decision.state.phase is JobPhase.SUCCEEDED
            free = queued is None or queued.release_quota(pods, now_s, succeeded=succeeded)
            outcome = self._clean_up(job, spec, decision.state, pods)
            return outcome if free else ReconcileResult(self._every_s)
        self._carry_out(decision, pods, addresses)
        self._create(job, decision, to_create, queued)
        if queued is not None and not decision.state.phase.is_final:
            self._update_admission(job, queued, decision, pods)
        return ReconcileResult(min(_ACTIVE_POLL_S, self._every_s) if writes or decision.actions else self._every_s)

    def _observe(
        self,
        job: KubeObject,
        pods: Sequence[KubeObject],
        answers: Mapping[str, AgentStatus | None],
        queued: QueuedJob | None,
    ) -> ObservedJob:
        manual_size = job["spec"].get("replicas")
        if queued is None:
            return observe_job(pods, answers, self._health, capacity=manual_size)
        admitted = queued.plan.capacity
        capacity = admitted if manual_size is None else min(admitted, manual_size)
        return observe_job(pods, answers, self._health, capacity=capacity, asked_back=queued.plan.preempted_pods)

    def _update_admission(
        self, job: KubeObject, queued: QueuedJob, decision: OperatorDecision, pods: Sequence[KubeObject]
    ) -> None:
        """Delete preempted pods that have no rank, then update the Workloads."""
        for pod in pods:
            name = pod["metadata"]["name"]
            if name in queued.plan.preempted_pods and name not in decision.state.members and not is_terminating(pod):
                log.info("deleting pod %s: its workload is no longer admitted", name)
                self._cluster.delete_pod(pod)
        try:
            queued.apply_plan(job)
        except ApiServerRefusedError as error:  # missing priority class or invalid queue name
            self._report_refusal(job, _WORKLOAD_REFUSED, str(error))
        else:
            if queued.plan.create:
                self._refusals.forget(job, _WORKLOAD_REFUSED)

    def _carry_out(self, decision: OperatorDecision, pods: Sequence[KubeObject], addresses: Mapping[str, str]) -> None:
        for name, problem in self._agents.send_all(decision.actions, addresses).items():
            log.warning("pod %s: %s", name, problem)
        pod_by_name = {pod["metadata"]["name"]: pod for pod in pods}
        for action in decision.actions:
            if (
                isinstance(action, (ReplacePod, ReleasePod))
                and (pod := pod_by_name.get(action.pod))
                and not is_terminating(pod)
            ):
                log.info("pod %s goes: %s", action.pod, action.reason)
                # A replaced pod is lost and needs no grace period.
                self._cluster.delete_pod(pod, grace_s=1 if isinstance(action, ReplacePod) else None)

    def _create(
        self,
        job: KubeObject,
        decision: OperatorDecision,
        slots: Sequence[tuple[ReplicaSlot, KubeObject | None]],
        queued: QueuedJob | None,
    ) -> None:
        nodes = max(1, len(decision.state.members) or sum(decision.wanted.pods.values()))
        for slot, workload in slots:
            try:
                grant = (
                    None
                    if queued is None or workload is None
                    else queued.pod_admission_for(workload, slot.replica_spec)
                )
                pod = build_pod(job, slot, nodes=nodes, avoid=decision.wanted.avoid_nodes, grant=grant)
                self._cluster.create_pod(pod)
            except ResourceConflictError:
                log.info("pod %s exists already", slot.pod_name(job["metadata"]["name"]))  # the next pass sees it
            except ApiServerRefusedError as error:  # exceeded quota or invalid template
                self._report_refusal(job, _POD_REFUSED, str(error))
                return
        if slots:
            self._refusals.forget(job, _POD_REFUSED)

    def _report_refusal(self, job: KubeObject, reason: str, problem: str) -> None:
        """Report a refusal once, until it changes."""
        if self._refusals.note(job, reason, problem):
            log.warning("job %s: %s", job["metadata"]["name"], problem)
            self._cluster.post_event(job, reason, problem, warning=True)

    def _clean_up(self, job: KubeObject, spec: JobSpec, state: JobState, pods: Sequence[KubeObject]) -> ReconcileResult:
        """Apply ``cleanPodPolicy`` and ``ttlSecondsAfterFinished``."""
        waiting = False
        for pod in pods:
            if is_terminating(pod):
                continue
            cleaned = spec.clean_pod_policy == "All" or (
                spec.clean_pod_policy == "OnlyComplete" and state.phase is JobPhase.SUCCEEDED
            )
            if cleaned or not has_begun(pod):  # an agent that has not started cannot shut down
                self._cluster.delete_pod(pod)
            waiting = waiting or not has_ended(pod)
        remaining_s = (state.ended_s or 0.0) + spec.ttl_s - self._clock() if spec.ttl_s > 0 else None
        if remaining_s is not None and remaining_s <= 0:
            self._cluster.delete_job(job)
            return _DONE
        return ReconcileResult(self._every_s if waiting else remaining_s)

    def _publish_events(self, job: KubeObject, decision: OperatorDecision) -> None:
        for event in decision.events:
            log.info("%s: %s", event.reason, event.message)
            try:
                self._cluster.post_event(job, event.reason, event.message, warning=event.warning)
            except ApiServerError as error:
                log.warning("an event could not be posted: %s", error)

    def _mark_invalid(self, job: KubeObject, problem: str) -> None:
        if is_marked_invalid(job, problem):
            return
        log.warning("job %s is left alone: %s", job["metadata"]["name"], problem)
        self._cluster.update_status(job, invalid_spec_status(job, problem, self._clock()))
        self._cluster.post_event(job, "InvalidSpec", problem, warning=True)


_KUEUE_CHECK_S = 30.0


@dataclass(frozen=True)
class QueuedJob:
    """A job that Kueue manages, as seen in one reconcile."""

    kueue: KueueClient | CachedKueueClient
    workloads: tuple[KubeObject, ...]
    plan: AdmissionPlan

    def without_new(self) -> QueuedJob:
        """Return a copy with a plan that creates no Workload."""
        return replace(self, plan=replace(self.plan, create=()))

    def apply_plan(self, job: KubeObject) -> None:
        """Update, delete and create Workloads.

        Raise :class:`ApiServerRefusedError` if one cannot be created.
        """
        for workload, status in self.plan.status_updates:
            self.kueue.update_workload_status(workload, status)
        for workload in self.plan.delete:
            log.info("workload %s goes", workload["metadata"]["name"])
            self.kueue.delete_workload(workload)
        for step in self.plan.create:
            self._create(job, step)

    def release_quota(self, pods: Sequence[KubeObject], now_s: float, *, succeeded: bool) -> bool:
        """Finish the Workloads of an ended job that have no pods. Return whether all are finished."""
        finished = finished_workload_statuses(self.workloads, pods, now_s, succeeded=succeeded)
        for workload, status in finished:
            self.kueue.update_workload_status(workload, status)
        return len(finished) == sum(not has_condition(workload, "Finished") for workload in self.workloads)

    def pod_admission_for(self, workload: KubeObject, replica_spec: str) -> PodAdmission:
        names = flavor_names(workload, replica_spec)
        try:
            return pod_admission(workload, replica_spec, [self.kueue.get_flavor(name) for name in names])
        except ResourceNotFoundError as error:
            raise ApiServerRefusedError(f"of workload {workload['metadata']['name']}: {error}") from None

    def _create(self, job: KubeObject, step: WorkloadStep) -> None:
        named = priority_class_for(job, step)
        priority = 0 if named is None else self.kueue.priority_value(named)
        try:
            self.kueue.create_workload(build_workload(job, step, self.kueue.version, named, priority))
        except ResourceConflictError:
            log.info("workload %s exists already", step.name)  # the next pass sees it


class KueueQueue:
    """Detection of the jobs that Kueue manages. Any thread may use it."""

    def __init__(self, cluster: ApiServerClient | CachedApiClient, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._kueue: KueueClient | CachedKueueClient | None = None
        self._next_check_s = float("-inf")

    def queued_job(self, job: KubeObject, spec: JobSpec, pods: Sequence[KubeObject], now_s: float) -> QueuedJob | None:
        """Return the queued job.

        Return None for a job without a queue, without Kueue, or with pods created before Kueue was installed.
        """
        if not queue_name(job) or any(not workload_name_of(pod) and not has_ended(pod) for pod in pods):
            return None
        kueue = self._current_kueue()
        if kueue is None:
            return None
        meta = job["metadata"]
        try:
            all_workloads = kueue.list_workloads(meta["namespace"], meta["name"])
        except ResourceNotFoundError:
            self._kueue = None
            return None
        workloads = tuple(workload for workload in all_workloads if is_owned_by(workload, meta["uid"]))
        return QueuedJob(kueue, workloads, plan_admission(job, spec, workloads, pods, now_s))

    def _current_kueue(self) -> KueueClient | CachedKueueClient | None:
        if self._kueue is None and self._clock() >= self._next_check_s:
            self._kueue = self._cluster.kueue_client()
            self._next_check_s = self._clock() + _KUEUE_CHECK_S
        return self._kueue
