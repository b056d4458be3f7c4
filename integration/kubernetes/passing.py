"""One pass over one job: look, decide, store, act. Nothing is kept between two passes but what is in the status.

A controller that is killed anywhere in here has either stored a decision, and the next one carries out what is not
seen to have happened; or it has not, and the next one decides again. Two controllers cannot both act on a decision:
the status is written only where nobody has written since it was read, before anything is done, and where there is
nothing to write it is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from integration.hyperpod.operator import (
    Action,
    Answer,
    Decision,
    JobSpec,
    JobSpecError,
    JobState,
    Phase,
    Release,
    Replace,
    Situation,
    decide,
    read_job,
)
from integration.hyperpod.operator.client import Heard
from integration.kubernetes.admission import placed
from integration.kubernetes.cached import CachedCluster
from integration.kubernetes.cluster import Cluster
from integration.kubernetes.errors import AbsentError, ClusterError, ConflictError, RefusedError
from integration.kubernetes.pods import Seat, belongs_to, pod_for, port_of
from integration.kubernetes.queueing import Queued, Queueing
from integration.kubernetes.refusals import Refusals
from integration.kubernetes.seeing import address_of, has_begun, has_ended, is_leaving, missing_seats, situation_of
from integration.kubernetes.status import (
    DamagedStateError,
    differs,
    says_invalid,
    status_for,
    stored_state,
    with_admission,
    with_invalid_spec,
)

Object = Mapping[str, Any]
_log = logging.getLogger(__name__)
_BUSY_S = 0.2
"""Until the next look while something is going on: agents do what they are told at once, and nobody says so."""
_PODS, _WORKLOADS = "PodRefused", "WorkloadRefused"


class Agents(Protocol):
    """The agents of a job's pods, as :class:`integration.hyperpod.operator.client.AgentClient` reaches them."""

    def ask_all(self, addresses: Mapping[str, str]) -> Mapping[str, Heard]: ...

    def tell_all(self, actions: Iterable[Action], addresses: Mapping[str, str]) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Outcome:
    """What became of a pass."""

    again_in_s: float | None
    """When to look again although nothing has been heard; never, where there is nothing more to do."""


_GONE = Outcome(None)


class Passing:
    """Passes over the jobs of one cluster. Any thread may make one; those over one job come one after the other."""

    def __init__(
        self,
        cluster: Cluster | CachedCluster,
        agents: Agents,
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
        self._queueing = Queueing(cluster, clock)
        self._refusals = Refusals(clock)

    def once(self, namespace: str, name: str) -> Outcome:
        """Raises :class:`ClusterError` where the API server does not answer or refuses."""
        try:
            job = self._cluster.job(namespace, name)
        except AbsentError:
            self._refusals.forget_all(namespace, name)
            return _GONE
        if job["metadata"].get("deletionTimestamp"):
            return _GONE  # the garbage collector takes the pods
        try:
            spec = read_job(job, **self._settings)
            state = stored_state(job) or JobState()
        except (JobSpecError, DamagedStateError) as problem:
            self._leave_alone(job, str(problem))
            return Outcome(None)
        return self._drive(job, spec, state)

    def _drive(self, job: Object, spec: JobSpec, state: JobState) -> Outcome:
        meta = job["metadata"]
        every_pod = self._cluster.pods(meta["namespace"], meta["name"])
        pods = [pod for pod in every_pod if belongs_to(pod, meta["uid"])]
        addresses = {
            pod["metadata"]["name"]: f"{address_of(pod)}:{port_of(pod)}"
            for pod in pods
            if address_of(pod) and not has_ended(pod)
        }
        now_s = max(self._clock(), state.since_s)
        heard = self._agents.ask_all(addresses)
        answers = {name: one.answer for name, one in heard.items()}
        queued = self._queueing.look(job, spec, pods, now_s)
        situation = self._situation(job, pods, answers, queued)
        decision = decide(spec, state, situation, now_s)
        missing = missing_seats(meta["name"], decision.wanted, decision.state, every_pod)
        with_room: Sequence[tuple[Seat, Object | None]] = [(seat, None) for seat in missing]
        said: list[Object] = []
        if queued is not None:
            with_room = placed(queued.plan, missing, pods, decision.state.replaced)
            said = with_admission(job, decision.state, queued.plan.waits, queued.plan.capacity, now_s)
        if with_room and not self._refusals.is_due(job, _PODS):
            with_room = []
        if queued is not None and not self._refusals.is_due(job, _WORKLOADS):
            queued = queued.without_new()
        status = status_for(spec, decision.state, situation, pods, said)
        idle = not (with_room or decision.actions) and (queued is None or queued.plan.is_settled)
        writes = differs(job, status)
        if writes:
            job = self._cluster.write_status(job, status)  # whoever is second to write does nothing of this
        elif not idle:
            self._cluster.confirm(job)
        self._tell_people(job, decision)
        if decision.finished:
            succeeded = decision.state.phase is Phase.SUCCEEDED
            free = queued is None or queued.finish(pods, now_s, succeeded=succeeded)
            outcome = self._tidy(job, spec, decision.state, pods)
            return outcome if free else Outcome(self._every_s)
        self._act(decision, pods, addresses)
        self._create(job, decision, with_room, queued)
        if queued is not None and not decision.state.phase.over:
            self._settle(job, queued, decision, pods)
        return Outcome(min(_BUSY_S, self._every_s) if writes or decision.actions else self._every_s)

    def _situation(
        self, job: Object, pods: Sequence[Object], answers: Mapping[str, Answer | None], queued: Queued | None
    ) -> Situation:
        by_hand = job["spec"].get("replicas")
        if queued is None:
            return situation_of(pods, answers, self._health, capacity=by_hand)
        admitted = queued.plan.capacity
        capacity = admitted if by_hand is None else min(admitted, by_hand)
        return situation_of(pods, answers, self._health, capacity=capacity, asked_back=queued.plan.asked_back)

    def _settle(self, job: Object, queued: Queued, decision: Decision, pods: Sequence[Object]) -> None:
        """Pods that are asked back go once they have no rank any more; then Workloads are told."""
        for pod in pods:
            name = pod["metadata"]["name"]
            if name in queued.plan.asked_back and name not in decision.state.members and not is_leaving(pod):
                _log.info("pod %s goes: its workload is not admitted any more", name)
                self._cluster.delete_pod(pod)
        try:
            queued.settle(job)
        except RefusedError as refused:  # a priority class that is not there, or a queue's name that is none
            self._complain(job, _WORKLOADS, str(refused))
        else:
            if queued.plan.create:
                self._refusals.forget(job, _WORKLOADS)

    def _act(self, decision: Decision, pods: Sequence[Object], addresses: Mapping[str, str]) -> None:
        for name, problem in self._agents.tell_all(decision.actions, addresses).items():
            _log.warning("pod %s: %s", name, problem)
        named = {pod["metadata"]["name"]: pod for pod in pods}
        for action in decision.actions:
            if isinstance(action, (Replace, Release)) and (pod := named.get(action.pod)) and not is_leaving(pod):
                _log.info("pod %s goes: %s", action.pod, action.reason)
                # One that is lost has nothing to say goodbye to.
                self._cluster.delete_pod(pod, grace_s=1 if isinstance(action, Replace) else None)

    def _create(
        self, job: Object, decision: Decision, seats: Sequence[tuple[Seat, Object | None]], queued: Queued | None
    ) -> None:
        nodes = max(1, len(decision.state.members) or sum(decision.wanted.pods.values()))
        for seat, workload in seats:
            try:
                grant = None if queued is None or workload is None else queued.grant(workload, seat.replica_spec)
                pod = pod_for(job, seat, nodes=nodes, avoid=decision.wanted.avoid, grant=grant)
                self._cluster.create_pod(pod)
            except ConflictError:
                _log.info("pod %s is there already", seat.pod_name(job["metadata"]["name"]))  # the next pass sees it
            except RefusedError as refused:  # a quota, or a template that is none
                self._complain(job, _PODS, str(refused))
                return
        if seats:
            self._refusals.forget(job, _PODS)

    def _complain(self, job: Object, reason: str, problem: str) -> None:
        """Once, as long as it stays the same."""
        if self._refusals.note(job, reason, problem):
            _log.warning("job %s: %s", job["metadata"]["name"], problem)
            self._cluster.say(job, reason, problem, warning=True)

    def _tidy(self, job: Object, spec: JobSpec, state: JobState, pods: Sequence[Object]) -> Outcome:
        """``cleanPodPolicy`` and ``ttlSecondsAfterFinished``."""
        waiting = False
        for pod in pods:
            if is_leaving(pod):
                continue
            cleaned = spec.clean_pods == "All" or (spec.clean_pods == "OnlyComplete" and state.phase is Phase.SUCCEEDED)
            if cleaned or not has_begun(pod):  # nobody could tell one that has not begun to end
                self._cluster.delete_pod(pod)
            waiting = waiting or not has_ended(pod)
        left_s = (state.ended_s or 0.0) + spec.ttl_s - self._clock() if spec.ttl_s > 0 else None
        if left_s is not None and left_s <= 0:
            self._cluster.delete_job(job)
            return _GONE
        return Outcome(self._every_s if waiting else left_s)

    def _tell_people(self, job: Object, decision: Decision) -> None:
        for event in decision.events:
            _log.info("%s: %s", event.reason, event.message)
            try:
                self._cluster.say(job, event.reason, event.message, warning=event.warning)
            except ClusterError as error:
                _log.warning("an event could not be posted: %s", error)

    def _leave_alone(self, job: Object, problem: str) -> None:
        if says_invalid(job, problem):
            return
        _log.warning("job %s is left alone: %s", job["metadata"]["name"], problem)
        self._cluster.write_status(job, with_invalid_spec(job, problem, self._clock()))
        self._cluster.say(job, "InvalidSpec", problem, warning=True)
