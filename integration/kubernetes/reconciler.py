"""One reconcile of one job: read, observe, ``decide_job``, store, act; and Kueue's part in it.

A controller that is killed anywhere in here has either stored a decision, and the next one carries out what is not
seen to have happened; or it has not, and the next one decides again. Two controllers cannot both act on a decision:
the status is written only where nobody has written since it was read, before anything is done, and where there is
nothing to write it is read again.

Every name is decided by the job and its sizes, and every write can be made again: whoever is killed in here leaves
nothing that the next pass does not see.
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
_BUSY_S = 0.2
"""Until the next look while something is going on: agents do what they are told at once, and nobody says so."""
_PODS, _WORKLOADS = "PodRefused", "WorkloadRefused"


class AgentApi(Protocol):
    """The agents of a job's pods, as :class:`integration.hyperpod.operator.elastic_agent_client.ElasticAgentClient`
    reaches them.
    """

    def poll_all(self, addresses: Mapping[str, str]) -> Mapping[str, AgentReply]: ...

    def send_all(self, actions: Iterable[OperatorAction], addresses: Mapping[str, str]) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class ReconcileResult:
    """What became of a pass."""

    requeue_after_s: float | None
    """When to look again although nothing has been heard; never, where there is nothing more to do."""


_GONE = ReconcileResult(None)


class JobReconciler:
    """Passes over the jobs of one cluster. Any thread may make one; those over one job come one after the other."""

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
        """Raises :class:`ApiServerError` where the API server does not answer or refuses."""
        try:
            job = self._cluster.get_job(namespace, name)
        except ResourceNotFoundError:
            self._refusals.forget_all(namespace, name)
            return _GONE
        if job["metadata"].get("deletionTimestamp"):
            return _GONE  # the garbage collector takes the pods
        try:
            spec = parse_job_resource(job, **self._settings)
            state = load_job_state(job) or JobState()
        except (JobSpecError, DamagedStateError) as problem:
            self._leave_alone(job, str(problem))
            return ReconcileResult(None)
        return self._drive(job, spec, state)

    def _drive(self, job: KubeObject, spec: JobSpec, state: JobState) -> ReconcileResult:
        meta = job["metadata"]
        every_pod = self._cluster.list_pods(meta["namespace"], meta["name"])
        pods = [pod for pod in every_pod if is_owned_by(pod, meta["uid"])]
        addresses = {
            pod["metadata"]["name"]: f"{pod_address(pod)}:{agent_port(pod)}"
            for pod in pods
            if pod_address(pod) and not has_ended(pod)
        }
        now_s = max(self._clock(), state.phase_since_s)
        heard = self._agents.poll_all(addresses)
        answers = {name: one.status for name, one in heard.items()}
        queued = self._queueing.queued_job(job, spec, pods, now_s)
        situation = self._situation(job, pods, answers, queued)
        decision = decide_job(spec, state, situation, now_s)
        missing = missing_slots(meta["name"], decision.wanted, decision.state, every_pod)
        with_room: Sequence[tuple[ReplicaSlot, KubeObject | None]] = [(slot, None) for slot in missing]
        said: list[KubeObject] = []
        if queued is not None:
            with_room = assign_workloads(queued.plan, missing, pods, decision.state.replaced_pods)
            said = admission_conditions(job, decision.state, queued.plan.waiting_for, queued.plan.capacity, now_s)
        if with_room and not self._refusals.is_due(job, _PODS):
            with_room = []
        if queued is not None and not self._refusals.is_due(job, _WORKLOADS):
            queued = queued.without_new()
        status = build_job_status(spec, decision.state, situation, pods, said)
        idle = not (with_room or decision.actions) and (queued is None or queued.plan.is_empty)
        writes = status_differs(job, status)
        if writes:
            job = self._cluster.update_status(job, status)  # whoever is second to write does nothing of this
        elif not idle:
            self._cluster.confirm(job)
        self._tell_people(job, decision)
        if decision.finished:
            succeeded = decision.state.phase is JobPhase.SUCCEEDED
            free = queued is None or queued.release_quota(pods, now_s, succeeded=succeeded)
            outcome = self._tidy(job, spec, decision.state, pods)
            return outcome if free else ReconcileResult(self._every_s)
        self._act(decision, pods, addresses)
        self._create(job, decision, with_room, queued)
        if queued is not None and not decision.state.phase.is_final:
            self._settle(job, queued, decision, pods)
        return ReconcileResult(min(_BUSY_S, self._every_s) if writes or decision.actions else self._every_s)

    def _situation(
        self,
        job: KubeObject,
        pods: Sequence[KubeObject],
        answers: Mapping[str, AgentStatus | None],
        queued: QueuedJob | None,
    ) -> ObservedJob:
        by_hand = job["spec"].get("replicas")
        if queued is None:
            return observe_job(pods, answers, self._health, capacity=by_hand)
        admitted = queued.plan.capacity
        capacity = admitted if by_hand is None else min(admitted, by_hand)
        return observe_job(pods, answers, self._health, capacity=capacity, asked_back=queued.plan.preempted_pods)

    def _settle(
        self, job: KubeObject, queued: QueuedJob, decision: OperatorDecision, pods: Sequence[KubeObject]
    ) -> None:
        """Pods that are preempted go once they have no rank any more; then Workloads are told."""
        for pod in pods:
            name = pod["metadata"]["name"]
            if name in queued.plan.preempted_pods and name not in decision.state.members and not is_terminating(pod):
                log.info("pod %s goes: its workload is not admitted any more", name)
                self._cluster.delete_pod(pod)
        try:
            queued.apply_plan(job)
        except ApiServerRefusedError as refused:  # a priority class that is not there, or a queue's name that is none
            self._complain(job, _WORKLOADS, str(refused))
        else:
            if queued.plan.create:
                self._refusals.forget(job, _WORKLOADS)

    def _act(self, decision: OperatorDecision, pods: Sequence[KubeObject], addresses: Mapping[str, str]) -> None:
        for name, problem in self._agents.send_all(decision.actions, addresses).items():
            log.warning("pod %s: %s", name, problem)
        named = {pod["metadata"]["name"]: pod for pod in pods}
        for action in decision.actions:
            if (
                isinstance(action, (ReplacePod, ReleasePod))
                and (pod := named.get(action.pod))
                and not is_terminating(pod)
            ):
                log.info("pod %s goes: %s", action.pod, action.reason)
                # One that is lost has nothing to say goodbye to.
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
                log.info("pod %s is there already", slot.pod_name(job["metadata"]["name"]))  # the next pass sees it
            except ApiServerRefusedError as refused:  # a quota, or a template that is none
                self._complain(job, _PODS, str(refused))
                return
        if slots:
            self._refusals.forget(job, _PODS)

    def _complain(self, job: KubeObject, reason: str, problem: str) -> None:
        """Once, as long as it stays the same."""
        if self._refusals.note(job, reason, problem):
            log.warning("job %s: %s", job["metadata"]["name"], problem)
            self._cluster.post_event(job, reason, problem, warning=True)

    def _tidy(self, job: KubeObject, spec: JobSpec, state: JobState, pods: Sequence[KubeObject]) -> ReconcileResult:
        """``cleanPodPolicy`` and ``ttlSecondsAfterFinished``."""
        waiting = False
        for pod in pods:
            if is_terminating(pod):
                continue
            cleaned = spec.clean_pod_policy == "All" or (
                spec.clean_pod_policy == "OnlyComplete" and state.phase is JobPhase.SUCCEEDED
            )
            if cleaned or not has_begun(pod):  # nobody could tell one that has not begun to end
                self._cluster.delete_pod(pod)
            waiting = waiting or not has_ended(pod)
        left_s = (state.ended_s or 0.0) + spec.ttl_s - self._clock() if spec.ttl_s > 0 else None
        if left_s is not None and left_s <= 0:
            self._cluster.delete_job(job)
            return _GONE
        return ReconcileResult(self._every_s if waiting else left_s)

    def _tell_people(self, job: KubeObject, decision: OperatorDecision) -> None:
        for event in decision.events:
            log.info("%s: %s", event.reason, event.message)
            try:
                self._cluster.post_event(job, event.reason, event.message, warning=event.warning)
            except ApiServerError as error:
                log.warning("an event could not be posted: %s", error)

    def _leave_alone(self, job: KubeObject, problem: str) -> None:
        if is_marked_invalid(job, problem):
            return
        log.warning("job %s is left alone: %s", job["metadata"]["name"], problem)
        self._cluster.update_status(job, invalid_spec_status(job, problem, self._clock()))
        self._cluster.post_event(job, "InvalidSpec", problem, warning=True)


_KUEUE_CHECK_S = 30.0


@dataclass(frozen=True)
class QueuedJob:
    """A job that Kueue decides about, as it is in this pass."""

    kueue: KueueClient | CachedKueueClient
    workloads: tuple[KubeObject, ...]
    plan: AdmissionPlan

    def without_new(self) -> QueuedJob:
        """The same, and no Workload is made in this pass."""
        return replace(self, plan=replace(self.plan, create=()))

    def apply_plan(self, job: KubeObject) -> None:
        """Workloads are made, deleted, and told of their pods; :class:`ApiServerRefusedError` where one cannot be
        made.
        """
        for workload, status in self.plan.status_updates:
            self.kueue.update_workload_status(workload, status)
        for workload in self.plan.delete:
            log.info("workload %s goes", workload["metadata"]["name"])
            self.kueue.delete_workload(workload)
        for step in self.plan.create:
            self._create(job, step)

    def release_quota(self, pods: Sequence[KubeObject], now_s: float, *, succeeded: bool) -> bool:
        """The job is over: nothing of it waits or holds anything any more. Whether that is true of all of it now."""
        free = finished_workload_statuses(self.workloads, pods, now_s, succeeded=succeeded)
        for workload, status in free:
            self.kueue.update_workload_status(workload, status)
        return len(free) == sum(not has_condition(one, "Finished") for one in self.workloads)

    def pod_admission_for(self, workload: KubeObject, replica_spec: str) -> PodAdmission:
        names = flavor_names(workload, replica_spec)
        try:
            return pod_admission(workload, replica_spec, [self.kueue.get_flavor(name) for name in names])
        except ResourceNotFoundError as absent:
            raise ApiServerRefusedError(f"of workload {workload['metadata']['name']}: {absent}") from None

    def _create(self, job: KubeObject, step: WorkloadStep) -> None:
        named = priority_class_for(job, step)
        priority = 0 if named is None else self.kueue.priority_value(named)
        try:
            self.kueue.create_workload(build_workload(job, step, self.kueue.version, named, priority))
        except ResourceConflictError:
            log.info("workload %s is there already", step.name)  # the next pass sees it


class KueueQueue:
    """Finds out whether jobs are Kueue's business. Any thread may ask."""

    def __init__(self, cluster: ApiServerClient | CachedApiClient, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._kueue: KueueClient | CachedKueueClient | None = None
        self._look_at_s = float("-inf")

    def queued_job(self, job: KubeObject, spec: JobSpec, pods: Sequence[KubeObject], now_s: float) -> QueuedJob | None:
        """``None`` for a job without a queue, without Kueue, or whose pods were made before Kueue was there."""
        if not queue_name(job) or any(not workload_name_of(pod) and not has_ended(pod) for pod in pods):
            return None
        kueue = self._known()
        if kueue is None:
            return None
        meta = job["metadata"]
        try:
            every = kueue.list_workloads(meta["namespace"], meta["name"])
        except ResourceNotFoundError:
            self._kueue = None
            return None
        workloads = tuple(one for one in every if is_owned_by(one, meta["uid"]))
        return QueuedJob(kueue, workloads, plan_admission(job, spec, workloads, pods, now_s))

    def _known(self) -> KueueClient | CachedKueueClient | None:
        if self._kueue is None and self._clock() >= self._look_at_s:
            self._kueue = self._cluster.kueue_client()
            self._look_at_s = self._clock() + _KUEUE_CHECK_S
        return self._kueue
