"""An in-memory Kubernetes cluster and its agents, to simulate controllers quickly.

It answers as :class:`integration.kubernetes.api_client.ApiServerClient` does, including resource versions and
preconditions. Its agents go through their published states. Writes are counted: the controller dies at write
:attr:`cut_at`, as by SIGKILL, before the write or after it but before the response.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from integration.hyperpod.operator import (
    AgentState,
    AgentStatus,
    OperatorAction,
    ReleasePod,
    ReplacePod,
    ShutdownAgent,
    StartAgent,
    StartRequest,
    StopAgent,
)
from integration.hyperpod.operator.elastic_agent_client import AgentReply
from integration.kubernetes.errors import (
    ApiServerRefusedError,
    ApiServerUnreachableError,
    ResourceConflictError,
    ResourceNotFoundError,
)


class ControllerKilled(BaseException):
    """A simulated kill of the controller."""


class FakeKubernetes:
    """The API server and the agents, as one controller pass uses them."""

    def __init__(self, job: Mapping[str, Any], *, nodes: int = 4) -> None:
        self.now_s = 1_000_000.0
        self.health: dict[str, str] = {}
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.cut_at: int | None = None
        self.cut_after = False
        self.writes = 0
        self.events: list[str] = []
        self.starts: dict[str, list[StartRequest]] = {}
        """Bodies of the ``/start`` requests sent to each pod."""
        self._versions = itertools.count(2)
        self._uids = itertools.count()
        self._addresses = itertools.count(1)
        self._job: dict[str, Any] | None = copy.deepcopy(dict(job))
        self._pods: dict[str, dict[str, Any]] = {}
        self._agents: dict[str, _Agent] = {}
        self.unreachable = False
        self.refusal = ""
        self.queue: Any = None
        """A :class:`tests.support.fake_kueue.FakeKueue`, or ``None`` without Kueue."""

    # -- test helpers -------------------------------------------------------------------------------------------------

    def current_job(self) -> dict[str, Any]:
        assert self._job is not None
        return self._job

    @property
    def is_deleted(self) -> bool:
        return self._job is None

    def change_spec(self, **changes: Any) -> None:
        self.current_job()["spec"] |= changes
        self._touch()

    def pod_names(self, *, running: bool = True) -> list[str]:
        return sorted(
            name for name, pod in self._pods.items() if not running or pod["status"].get("phase") == "Running"
        )

    def current_pods(self) -> list[dict[str, Any]]:
        return list(self._pods.values())

    def node_of(self, pod: str) -> str:
        return self._pods[pod]["spec"]["nodeName"]

    def state_of(self, pod: str) -> AgentState:
        return self._agents[pod].state

    def crash(self, pod: str) -> None:
        self._agents[pod].state = AgentState.FAULTED

    def complete(self) -> None:
        for agent in self._agents.values():
            if agent.state is AgentState.RUNNING:
                agent.state = AgentState.COMPLETED

    def lose_pod(self, name: str) -> None:
        """Lose a pod's machine and agent; the API server still lists the pod."""
        del self._agents[name]

    def fail_pod(self, name: str) -> None:
        del self._agents[name]
        self._pods[name]["status"]["phase"] = "Failed"

    def tick(self, seconds: float = 1.0) -> None:
        """Advance the clock: kubelets delete and bind pods, and stopping agents become ready."""
        self.now_s += seconds
        for name, pod in list(self._pods.items()):
            if pod["metadata"].get("deletionTimestamp"):
                del self._pods[name]
                self._agents.pop(name, None)
            elif not pod["spec"].get("nodeName"):
                self._bind(name, pod)
        for agent in self._agents.values():
            if agent.state is AgentState.STOPPING:
                agent.state = AgentState.READY

    # -- the API server -----------------------------------------------------------------------------------------------

    def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        self.check_reachable()
        if self._job is None:
            raise ResourceNotFoundError(name)
        return copy.deepcopy(self._job)

    def confirm(self, job: Mapping[str, Any]) -> None:
        if self.get_job("", "")["metadata"] != job["metadata"]:
            raise ResourceConflictError("the object has been modified")

    def update_status(self, job: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
        def write() -> None:
            if self._job is None or self._job["metadata"]["resourceVersion"] != job["metadata"]["resourceVersion"]:
                raise ResourceConflictError("the object has been modified")
            self._job["status"] = merge_patch(self._job.get("status", {}), status)
            self._touch()

        self.write(write)
        return self.get_job("", "")

    def delete_job(self, job: Mapping[str, Any]) -> None:
        def delete() -> None:
            self._job = None

        self.write(delete)

    def list_pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        self.check_reachable()
        return copy.deepcopy(list(self._pods.values()))

    def create_pod(self, pod: Mapping[str, Any]) -> None:
        def create() -> None:
            if self.refusal:
                raise ApiServerRefusedError(self.refusal)
            name = pod["metadata"]["name"]
            if name in self._pods:
                raise ResourceConflictError(f"{name} exists")
            made = copy.deepcopy(dict(pod))
            made["metadata"]["uid"] = f"pod-{next(self._uids)}"
            made["status"] = {"phase": "Pending"}
            self._pods[name] = made

        self.write(create)

    def delete_pod(self, pod: Mapping[str, Any], *, grace_s: int | None = None) -> None:
        def delete() -> None:
            found = self._pods.get(pod["metadata"]["name"])
            if found is not None and found["metadata"]["uid"] == pod["metadata"]["uid"]:
                found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

        self.write(delete)

    def kueue_client(self) -> Any:
        self.check_reachable()
        return self.queue if self.queue is not None and self.queue.is_installed else None

    def post_event(self, job: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append(reason)

    # -- the agents ---------------------------------------------------------------------------------------------------

    def poll_all(self, addresses: Mapping[str, str]) -> dict[str, AgentReply]:
        return {name: AgentReply(self._agents[name].answer() if name in self._agents else None) for name in addresses}

    def send_all(self, actions: Iterable[OperatorAction], addresses: Mapping[str, str]) -> dict[str, str]:
        for action in actions:
            if action.pod in self._agents and not isinstance(action, (ReplacePod, ReleasePod)):
                self.write(lambda action=action: self._send_action(action))
        return {}

    def _send_action(self, action: OperatorAction) -> None:
        agent = self._agents[action.pod]
        if isinstance(action, StartAgent):
            self.starts.setdefault(action.pod, []).append(action.body)
            agent.start(action.body)
        elif isinstance(action, StopAgent):
            agent.stop()
        elif isinstance(action, ShutdownAgent):
            del self._agents[action.pod]
            self._pods[action.pod]["status"]["phase"] = "Succeeded"

    # -- internals ----------------------------------------------------------------------------------------------------

    def _bind(self, name: str, pod: dict[str, Any]) -> None:
        wishes = pod["spec"]["affinity"]["nodeAffinity"].get("preferredDuringSchedulingIgnoredDuringExecution", [])
        avoided = {
            node for wish in wishes for rule in wish["preference"]["matchExpressions"] for node in rule["values"]
        }
        taken = {one["spec"].get("nodeName") for one in self._pods.values() if one["status"]["phase"] == "Running"}
        for node in sorted(self.nodes, key=lambda node: node in avoided):
            if node not in taken and self.health.get(node, "Schedulable") == "Schedulable":
                pod["spec"]["nodeName"] = node
                pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{next(self._addresses)}"}
                self._agents[name] = _Agent()
                return

    def write(self, what: Any) -> None:
        self.check_reachable()
        cut, self.writes = self.cut_at == self.writes, self.writes + 1
        if cut and not self.cut_after:
            raise ControllerKilled
        what()
        if cut:
            raise ControllerKilled

    def check_reachable(self) -> None:
        if self.unreachable:
            raise ApiServerUnreachableError("connection refused")

    def _touch(self) -> None:
        self.current_job()["metadata"]["resourceVersion"] = str(next(self._versions))


class _Agent:
    """A HyperPod agent in process-level restart mode."""

    def __init__(self) -> None:
        self.state = AgentState.READY
        self.body: StartRequest | None = None

    def answer(self) -> AgentStatus:
        if self.body is None:
            return AgentStatus(state=self.state)
        return AgentStatus(state=self.state, version=self.body.version, rank=self.body.rank)

    def start(self, body: StartRequest) -> None:
        self.body = body
        if self.state is AgentState.READY:
            self.state = AgentState.RUNNING

    def stop(self) -> None:
        if self.state in {AgentState.RUNNING, AgentState.FAULTED, AgentState.COMPLETED}:
            self.state = AgentState.STOPPING


class FakeAgents:
    """An agent for every pod that has an address, created at its first poll."""

    def __init__(self) -> None:
        self._agents: dict[str, _Agent] = {}
        self._lock = threading.Lock()

    def poll_all(self, addresses: Mapping[str, str]) -> Mapping[str, AgentReply]:
        with self._lock:
            return {name: AgentReply(self._agents.setdefault(name, _Agent()).answer()) for name in addresses}

    def send_all(self, actions: Iterable[OperatorAction], addresses: Mapping[str, str]) -> Mapping[str, str]:
        with self._lock:
            for action in actions:
                agent = self._agents.get(action.pod)
                if agent is not None and isinstance(action, StartAgent):
                    agent.start(action.body)
                elif agent is not None and isinstance(action, StopAgent):
                    agent.stop()
                    agent.state = AgentState.READY
        return {}


def merge_patch(there: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    found = dict(there) if isinstance(there, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merge_patch(found.get(name), value)
    return found
