"""One pass over one job: look, decide, store, act. Nothing is kept between two passes but what is in the status.

A controller that is killed anywhere in here has either stored a decision, and the next one carries out what is not
seen to have happened; or it has not, and the next one decides again. Two controllers cannot both act on a decision:
the status is written only where nobody has written since it was read, before anything is done, and where there is
nothing to write it is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

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
    decide,
    read_job,
)
from integration.kubernetes.cluster import Cluster
from integration.kubernetes.errors import AbsentError, ClusterError, ConflictError
from integration.kubernetes.pods import belongs_to, pod_for, port_of
from integration.kubernetes.seeing import address_of, has_ended, is_leaving, missing_seats, situation_of
from integration.kubernetes.status import (
    DamagedStateError,
    differs,
    says_invalid,
    status_for,
    stored_state,
    with_invalid_spec,
)

Object = Mapping[str, Any]
_log = logging.getLogger(__name__)


class Agents(Protocol):
    """The agents of a job's pods, by ``host:port``."""

    def ask(self, addresses: Mapping[str, str]) -> Mapping[str, Answer | None]:
        """What each pod's agent says; nothing for one that does not answer."""

    def tell(self, addresses: Mapping[str, str], actions: Sequence[Action]) -> None:
        """Carry out. What an agent does not hear it is told again in the next pass."""


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
        cluster: Cluster,
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

    def once(self, namespace: str, name: str) -> Outcome:
        """Raises :class:`ClusterError` where the API server does not answer or refuses."""
        try:
            job = self._cluster.job(namespace, name)
        except AbsentError:
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
        now_s = self._clock()
        answers = self._agents.ask(addresses) if not state.phase.over or addresses else {}
        situation = situation_of(pods, answers, self._health, capacity=job["spec"].get("replicas"))
        decision = decide(spec, state, situation, now_s)
        status = status_for(spec, decision.state, situation, pods)
        if differs(job, status):
            job = self._cluster.write_status(job, status)  # whoever is second to write does nothing of this
        elif self._cluster.job(meta["namespace"], meta["name"])["metadata"] != meta:
            raise ConflictError(f"job {meta['name']} has changed since it was read")
        self._tell_people(job, decision)
        if decision.finished:
            return self._tidy(job, spec, decision.state, pods)
        self._act(job, decision, pods, every_pod, addresses)
        return Outcome(self._every_s)

    def _act(
        self,
        job: Object,
        decision: Decision,
        pods: Sequence[Object],
        every_pod: Sequence[Object],
        addresses: Mapping[str, str],
    ) -> None:
        self._agents.tell(addresses, [action for action in decision.actions if not isinstance(action, Replace)])
        named = {pod["metadata"]["name"]: pod for pod in pods}
        for action in decision.actions:
            if isinstance(action, (Replace, Release)) and (pod := named.get(action.pod)) and not is_leaving(pod):
                _log.info("pod %s goes: %s", action.pod, action.reason)
                # One that is lost has nothing to say goodbye to.
                self._cluster.delete_pod(pod, grace_s=1 if isinstance(action, Replace) else None)
        stored = msgspec.json.encode(decision.state)
        nodes = max(1, len(decision.state.members) or sum(decision.wanted.pods.values()))
        for seat in missing_seats(job["metadata"]["name"], decision.wanted, decision.state, every_pod, stored):
            try:
                self._cluster.create_pod(pod_for(job, seat, nodes=nodes, avoid=decision.wanted.avoid))
            except ConflictError:
                continue  # it is there; the next pass sees it

    def _tidy(self, job: Object, spec: JobSpec, state: JobState, pods: Sequence[Object]) -> Outcome:
        """``cleanPodPolicy`` and ``ttlSecondsAfterFinished``."""
        waiting = False
        for pod in pods:
            if is_leaving(pod):
                continue
            if spec.clean_pods == "All" or (spec.clean_pods == "OnlyComplete" and state.phase is Phase.SUCCEEDED):
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
