"""Pods of the simulated operator: agents at known addresses, or agents started on this machine.

A local pod runs the command of the job's container. A ``hyperpodrun`` placed first on its PATH starts the real one on
loopback, in the pod's own folder. A file lists the pods, so that a restarted operator finds them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from elastic.control.run_directory import write_private_file
from integration.hyperpod.job_resource import JobSpec, JobSpecError, ReplicaGroup
from integration.hyperpod.operator.decision import DesiredPods, OperatorEvent
from peerstore.daemon_process import ProcessIdentity, process_start_time
from peerstore.message_codec import from_json
from peerstore.network_addresses import split_address


class PodEndpoint(NamedTuple):
    """One pod, without its agent's status."""

    name: str
    group: str
    node: str
    ip: str
    address: str
    """``HOST:PORT`` of its agent."""
    node_health_problem: str = ""
    terminating: bool = False


class PodProvider(Protocol):
    """Source of a job's pods.

    - A name is never used for two pods.
    - ``scale_to`` creates pods up to the desired number while there is room, and removes none.
    - No call waits for a pod.
    """

    can_replace: bool

    def endpoints(self, bad_nodes: Mapping[str, str]) -> Sequence[PodEndpoint]:
        """Return all existing pods. ``bad_nodes`` maps unschedulable nodes to their health."""

    def scale_to(self, wanted: DesiredPods, bad_nodes: Mapping[str, str]) -> None: ...

    def replace(self, name: str) -> None:
        """Remove the pod immediately."""

    def release(self, name: str) -> None:
        """Start the shutdown of the pod's agent."""

    def take_events(self) -> Sequence[OperatorEvent]:
        """Return the events of pods since the last call."""

    def close(self) -> None: ...


class ExternalAgents:
    """Agents started elsewhere, each a node by its address. They are never stopped."""

    can_replace = False

    def __init__(self, addresses: Sequence[str], group: str) -> None:
        self._endpoints = [
            PodEndpoint(endpoint, group, endpoint, split_address(endpoint)[0], endpoint) for endpoint in addresses
        ]

    def endpoints(self, bad_nodes: Mapping[str, str]) -> Sequence[PodEndpoint]:
        return [endpoint._replace(node_health_problem=bad_nodes.get(endpoint.node, "")) for endpoint in self._endpoints]

    def scale_to(self, wanted: DesiredPods, bad_nodes: Mapping[str, str]) -> None:
        """Do nothing: the number of agents is fixed."""

    def replace(self, name: str) -> None:
        """Do nothing: without a replacement, the agent counts again once it is healthy."""

    def release(self, name: str) -> None:
        """Do nothing: the agent waits and may be used again."""

    def take_events(self) -> Sequence[OperatorEvent]:
        return ()

    def close(self) -> None:
        """Do nothing: another process owns the agents."""


_LOCAL = "127.0.0.1"
_POD_ENV = "HYPERPOD_SIM_POD"
_GRACE_S = 15.0
_BACKOFF_S = 1.0
"""Seconds between two pods on one node. Doubles after each pod that crashed early, as on a cluster."""
_MAX_BACKOFF_S = 300.0
_CRASH_WINDOW_S = 60.0
_LOG_TAIL_BYTES = 600


class LocalPod(msgspec.Struct):
    name: str
    group: str
    node: str
    port: int
    folder: str
    pid: int
    started: int
    ends_by: float | None = None
    """Monotonic time until which it may exit; None if it is not released."""


class LocalPods:
    can_replace = True
    launcher = "integration.hyperpod.hyperpodrun"
    """Module that starts an agent."""

    def __init__(self, spec: JobSpec, nodes: int, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._nodes = [f"n{number}" for number in range(nodes)]
        self._file = folder / "pods.json"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._events: list[OperatorEvent] = []
        self._not_before: dict[str, float] = {}
        self._started_s: dict[str, float] = {}
        self._early_crashes: dict[str, int] = {}
        """Consecutive pods that crashed early, by node."""
        self._pods: dict[str, LocalPod] = {}
        self._next_number = max(
            (int(path.name.rpartition("-")[2]) + 1 for path in (folder / "pods").glob("*-*")), default=0
        )
        with contextlib.suppress(FileNotFoundError):
            stored = from_json(self._file.read_bytes(), list[LocalPod])
            self._pods = {pod.name: pod for pod in stored if process_start_time(pod.pid) == pod.started}
        for group in spec.groups:
            _container(group)

    def endpoints(self, bad_nodes: Mapping[str, str]) -> Sequence[PodEndpoint]:
        for pod in list(self._pods.values()):
            if not self._is_alive(pod):
                self._handle_exit(pod)
            elif pod.ends_by is not None and time.monotonic() >= pod.ends_by:
                self.replace(pod.name)
        return [
            PodEndpoint(
                pod.name, pod.group, pod.node, _LOCAL, f"{_LOCAL}:{pod.port}",
                bad_nodes.get(pod.node, ""), pod.ends_by is not None,
            )
            for pod in self._pods.values()
        ]  # fmt: skip

    def scale_to(self, wanted: DesiredPods, bad_nodes: Mapping[str, str]) -> None:
        for group in self._spec.groups:
            existing = sum(pod.group == group.name and pod.ends_by is None for pod in self._pods.values())
            for _ in range(wanted.pods.get(group.name, 0) - existing):
                node = self._free_node(set(bad_nodes), set(wanted.avoid_nodes))
                if node is None:
                    return
                self._start(group, node)

    def replace(self, name: str) -> None:
        pod = self._pods.get(name)
        if pod is not None:
            kill_pod_processes(Path(pod.folder))
            self._reap(pod)
            self._drop(pod)

    def release(self, name: str) -> None:
        pod = self._pods.get(name)
        if pod is not None and pod.ends_by is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pod.pid, signal.SIGTERM)
            pod.ends_by = time.monotonic() + _GRACE_S
            self._save_list()

    def take_events(self) -> Sequence[OperatorEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Kill all pods."""
        for name in list(self._pods):
            self.replace(name)
        self._file.unlink(missing_ok=True)

    def _free_node(self, bad: set[str], avoid: set[str]) -> str | None:
        """Return a node for a new pod, or None.

        A node to avoid is used if no other is free: the job might wait forever for a better one.
        """
        taken = {pod.node for pod in self._pods.values()}
        free = [node for node in self._nodes if node not in taken and node not in bad]
        better = [node for node in free if node not in avoid]
        now = time.monotonic()
        return next((node for node in better or free if self._not_before.get(node, 0.0) <= now), None)

    def _start(self, group: ReplicaGroup, node: str) -> None:
        name = f"{self._spec.name}-{group.name}-{self._next_number}"
        self._next_number += 1
        folder = self._folder / "pods" / name
        (folder / "bin").mkdir(parents=True)
        with socket.create_server((_LOCAL, 0)) as free:
            port = free.getsockname()[1]
        shim = folder / "bin" / "hyperpodrun"
        launcher = [sys.executable, "-m", self.launcher, "--loopback", f"--local-port={port}"]
        shim.write_text(f'#!/bin/sh\nexec {shlex.join([*launcher, f"--local-dir={folder}"])} "$@"\n')
        shim.chmod(0o700)
        container = _container(group)
        environ = self._environ(
            container, folder, {"spec.nodeName": node, "metadata.name": name, "status.podIP": _LOCAL}
        )
        words = (*(container.get("command") or ()), *(container.get("args") or ()))
        command = [expand_variables(str(word), environ) for word in words]
        if Path(command[0]).name == "hyperpodrun":
            command[0] = str(shim)
        with (folder / "agent.log").open("wb") as out:
            child = subprocess.Popen(  # noqa: S603 - runs the command of the job
                command,
                cwd=container.get("workingDir") or None,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._children[name] = child
        self._pods[name] = LocalPod(name, group.name, node, port, str(folder), child.pid, process_start_time(child.pid))
        self._started_s[name] = time.monotonic()
        self._not_before[node] = time.monotonic() + restart_backoff_s(self._early_crashes.get(node, 0))
        self._save_list()

    def _environ(self, container: Mapping[str, Any], folder: Path, pod_fields: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a pod.

        It contains the container's values, the pod's own fields, and ``$(NAME)`` of earlier variables. Values that only
        a cluster can resolve (secrets, config maps) are omitted.
        """
        nproc = {} if self._spec.nproc == "auto" else {"PET_NPROC_PER_NODE": self._spec.nproc}
        environ = {**os.environ, "NNODES": str(self._spec.policy.initial_nodes), **nproc}
        for variable in container.get("env") or ():
            field = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
            value = variable.get("value", pod_fields.get(str(field)))
            if value is not None:
                environ[str(variable["name"])] = expand_variables(str(value), environ)
        return {**environ, "PATH": f"{folder / 'bin'}:{environ.get('PATH', os.defpath)}", _POD_ENV: str(folder)}

    def _is_alive(self, pod: LocalPod) -> bool:
        child = self._children.get(pod.name)
        return child.poll() is None if child is not None else ProcessIdentity(pod.pid, pod.started).is_alive

    def _reap(self, pod: LocalPod) -> None:
        child = self._children.get(pod.name)
        if child is not None:
            child.wait()

    def _handle_exit(self, pod: LocalPod) -> None:
        child = self._children.get(pod.name)
        status = child.returncode if child is not None else 0
        if status and pod.ends_by is None:
            words = (Path(pod.folder) / "agent.log").read_text(errors="replace")[-_LOG_TAIL_BYTES:].strip()
            soon = status > 0 and time.monotonic() - self._started_s.get(pod.name, 0.0) < _CRASH_WINDOW_S
            self._early_crashes[pod.node] = self._early_crashes.get(pod.node, 0) + 1 if soon else 0
            pause_s = restart_backoff_s(self._early_crashes[pod.node])
            self._not_before[pod.node] = time.monotonic() + pause_s
            retry_text = f"; {pod.node} has another one in {pause_s:g} s"
            self._events.append(
                OperatorEvent("PodEnded", f"pod {pod.name} ended with {status}: {words}{retry_text}", warning=True)
            )
        kill_pod_processes(Path(pod.folder))
        self._drop(pod)

    def _drop(self, pod: LocalPod) -> None:
        self._pods.pop(pod.name, None)
        self._children.pop(pod.name, None)
        self._started_s.pop(pod.name, None)
        self._save_list()

    def _save_list(self) -> None:
        write_private_file(self._file, msgspec.json.encode(list(self._pods.values())))


def restart_backoff_s(failed: int) -> float:
    """Return the seconds before a node's next pod, after ``failed`` consecutive early crashes."""
    return min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0 ** min(failed, 10))


def expand_variables(text: str, known: Mapping[str, str]) -> str:
    """Expand ``$(NAME)`` as Kubernetes does: unknown names remain, ``$$(`` becomes ``$(``."""

    def value(found: re.Match[str]) -> str:
        if found[0].startswith("$$"):
            return found[0][1:]
        return known.get(found[1], found[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", value, text)


def _container(group: ReplicaGroup) -> Mapping[str, Any]:
    spec = group.template.get("spec") if isinstance(group.template, Mapping) else None
    containers = (spec or {}).get("containers") or []
    if not containers or not (containers[0].get("command") or containers[0].get("args")):
        raise JobSpecError(f"the first container of {group.name} has no command to start in its pods")
    return containers[0]


def kill_pod_processes(folder: Path) -> None:
    """Kill every process that has the pod's folder in its environment."""
    mark = f"{_POD_ENV}={folder}".encode()
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0") and process_start_time(int(path.parent.name)) >= 0:
                    found.append(int(path.parent.name))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
