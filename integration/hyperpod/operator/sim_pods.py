"""Pods of the simulated operator: running agents at given addresses, or agents started on this machine.

They run what the job's container runs, with a ``hyperpodrun`` that comes first on their path: the real one, on loopback
and in the pod's own folder. A list of them is kept in a file, so that an operator that is started anew finds them.
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
from integration.hyperpod.operator.decision import DesiredPods, OperatorEvent
from integration.hyperpod.operator.job_spec import JobSpec, JobSpecError, ReplicaGroup
from peerstore.daemon_process import ProcessIdentity, process_start_time
from peerstore.message_codec import from_json
from peerstore.network_addresses import split_address


class PodEndpoint(NamedTuple):
    """One pod, without what its agent says."""

    name: str
    group: str
    node: str
    ip: str
    address: str
    """Where its agent listens."""
    node_health_problem: str = ""
    terminating: bool = False


class PodProvider(Protocol):
    """Whoever has the pods of a job.

    - A name is never used for two pods.
    - ``scale_to`` makes pods, as many as are wanted and there is room for, and takes none away.
    - No call waits for a pod.
    """

    can_replace: bool

    def endpoints(self, bad_nodes: Mapping[str, str]) -> Sequence[PodEndpoint]:
        """All that are there now; ``bad_nodes``: machines with another health than schedulable."""

    def scale_to(self, wanted: DesiredPods, bad_nodes: Mapping[str, str]) -> None: ...

    def replace(self, name: str) -> None:
        """Away with it at once."""

    def release(self, name: str) -> None:
        """Its agent may end what it does."""

    def take_events(self) -> Sequence[OperatorEvent]:
        """What has happened to pods since the last time."""

    def close(self) -> None: ...


class ExternalAgents:
    """Agents that run already. They are left to whoever started them, and are a node each by their address."""

    can_replace = False

    def __init__(self, addresses: Sequence[str], group: str) -> None:
        self._places = [PodEndpoint(one, group, one, split_address(one)[0], one) for one in addresses]

    def endpoints(self, bad_nodes: Mapping[str, str]) -> Sequence[PodEndpoint]:
        return [one._replace(node_health_problem=bad_nodes.get(one.node, "")) for one in self._places]

    def scale_to(self, wanted: DesiredPods, bad_nodes: Mapping[str, str]) -> None:
        """There are as many as there are."""

    def replace(self, name: str) -> None:
        """None comes for it: it counts again once it is well."""

    def release(self, name: str) -> None:
        """It waits, and may be used again."""

    def take_events(self) -> Sequence[OperatorEvent]:
        return ()

    def close(self) -> None:
        """They are not ours."""


_LOCAL = "127.0.0.1"
_POD_ENV = "HYPERPOD_SIM_POD"
_GRACE_S = 15.0
_BACKOFF_S = 1.0
"""Between two pods on one node; twice as long after each that ended by itself soon, as a cluster does."""
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
    """Until then it may end by itself."""


class LocalPods:
    can_replace = True
    launcher = "integration.hyperpod.hyperpodrun"
    """The module that starts an agent."""

    def __init__(self, spec: JobSpec, nodes: int, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._nodes = [f"n{number}" for number in range(nodes)]
        self._file = folder / "pods.json"
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._told: list[OperatorEvent] = []
        self._not_before: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self._failed_soon: dict[str, int] = {}
        """By node, how many pods in a row."""
        self._pods: dict[str, LocalPod] = {}
        self._born = max((int(path.name.rpartition("-")[2]) + 1 for path in (folder / "pods").glob("*-*")), default=0)
        with contextlib.suppress(FileNotFoundError):
            kept = from_json(self._file.read_bytes(), list[LocalPod])
            self._pods = {pod.name: pod for pod in kept if process_start_time(pod.pid) == pod.started}
        for group in spec.groups:
            _container(group)

    def endpoints(self, bad_nodes: Mapping[str, str]) -> Sequence[PodEndpoint]:
        for pod in list(self._pods.values()):
            if not self._lives(pod):
                self._gone(pod)
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
            here = sum(pod.group == group.name and pod.ends_by is None for pod in self._pods.values())
            for _ in range(wanted.pods.get(group.name, 0) - here):
                node = self._free_node(set(bad_nodes), set(wanted.avoid_nodes))
                if node is None:
                    return
                self._start(group, node)

    def replace(self, name: str) -> None:
        pod = self._pods.get(name)
        if pod is not None:
            kill_pod_processes(Path(pod.folder))
            self._reap(pod)
            self._forget(pod)

    def release(self, name: str) -> None:
        pod = self._pods.get(name)
        if pod is not None and pod.ends_by is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pod.pid, signal.SIGTERM)
            pod.ends_by = time.monotonic() + _GRACE_S
            self._keep_list()

    def take_events(self) -> Sequence[OperatorEvent]:
        found, self._told = self._told, []
        return found

    def close(self) -> None:
        """None of them runs on."""
        for name in list(self._pods):
            self.replace(name)
        self._file.unlink(missing_ok=True)

    # -- processes ----------------------------------------------------------------------------------------------------

    def _free_node(self, bad: set[str], avoid: set[str]) -> str | None:
        """One to avoid is taken where there is no other: a job that waits for a better one may wait for ever."""
        taken = {pod.node for pod in self._pods.values()}
        free = [node for node in self._nodes if node not in taken and node not in bad]
        better = [node for node in free if node not in avoid]
        now = time.monotonic()
        return next((node for node in better or free if self._not_before.get(node, 0.0) <= now), None)

    def _start(self, group: ReplicaGroup, node: str) -> None:
        name = f"{self._spec.name}-{group.name}-{self._born}"
        self._born += 1
        folder = self._folder / "pods" / name
        (folder / "bin").mkdir(parents=True)
        with socket.create_server((_LOCAL, 0)) as free:
            port = free.getsockname()[1]
        shim = folder / "bin" / "hyperpodrun"
        ours = [sys.executable, "-m", self.launcher, "--loopback", f"--local-port={port}"]
        shim.write_text(f'#!/bin/sh\nexec {shlex.join([*ours, f"--local-dir={folder}"])} "$@"\n')
        shim.chmod(0o700)
        container = _container(group)
        own = self._environ(container, folder, {"spec.nodeName": node, "metadata.name": name, "status.podIP": _LOCAL})
        said = (*(container.get("command") or ()), *(container.get("args") or ()))
        command = [expand_variables(str(word), own) for word in said]
        if Path(command[0]).name == "hyperpodrun":
            command[0] = str(shim)
        with (folder / "agent.log").open("wb") as out:
            child = subprocess.Popen(  # noqa: S603 - what the job says is run is run
                command,
                cwd=container.get("workingDir") or None,
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._children[name] = child
        self._pods[name] = LocalPod(name, group.name, node, port, str(folder), child.pid, process_start_time(child.pid))
        self._begun[name] = time.monotonic()
        self._not_before[node] = time.monotonic() + restart_backoff_s(self._failed_soon.get(node, 0))
        self._keep_list()

    def _environ(self, container: Mapping[str, Any], folder: Path, facts: Mapping[str, str]) -> dict[str, str]:
        """As a pod has it: values, what is known of the pod itself, and ``$(NAME)`` of what comes before.

        What only a cluster could look up (secrets, tables) is left out.
        """
        nproc = {} if self._spec.nproc == "auto" else {"PET_NPROC_PER_NODE": self._spec.nproc}
        own = {**os.environ, "NNODES": str(self._spec.policy.initial_nodes), **nproc}
        for one in container.get("env") or ():
            field = ((one.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
            value = one.get("value", facts.get(str(field)))
            if value is not None:
                own[str(one["name"])] = expand_variables(str(value), own)
        return {**own, "PATH": f"{folder / 'bin'}:{own.get('PATH', os.defpath)}", _POD_ENV: str(folder)}

    def _lives(self, pod: LocalPod) -> bool:
        child = self._children.get(pod.name)
        return child.poll() is None if child is not None else ProcessIdentity(pod.pid, pod.started).is_alive

    def _reap(self, pod: LocalPod) -> None:
        child = self._children.get(pod.name)
        if child is not None:
            child.wait()

    def _gone(self, pod: LocalPod) -> None:
        child = self._children.get(pod.name)
        status = child.returncode if child is not None else 0
        if status and pod.ends_by is None:
            words = (Path(pod.folder) / "agent.log").read_text(errors="replace")[-_LOG_TAIL_BYTES:].strip()
            soon = status > 0 and time.monotonic() - self._begun.get(pod.name, 0.0) < _CRASH_WINDOW_S
            self._failed_soon[pod.node] = self._failed_soon.get(pod.node, 0) + 1 if soon else 0
            pause_s = restart_backoff_s(self._failed_soon[pod.node])
            self._not_before[pod.node] = time.monotonic() + pause_s
            again = f"; {pod.node} has another one in {pause_s:g} s"
            self._told.append(
                OperatorEvent("PodEnded", f"pod {pod.name} ended with {status}: {words}{again}", warning=True)
            )
        kill_pod_processes(Path(pod.folder))
        self._forget(pod)

    def _forget(self, pod: LocalPod) -> None:
        self._pods.pop(pod.name, None)
        self._children.pop(pod.name, None)
        self._begun.pop(pod.name, None)
        self._keep_list()

    def _keep_list(self) -> None:
        write_private_file(self._file, msgspec.json.encode(list(self._pods.values())))


def restart_backoff_s(failed: int) -> float:
    """Until a node has its next pod, after so many in a row that ended soon."""
    return min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0 ** min(failed, 10))


def expand_variables(text: str, known: Mapping[str, str]) -> str:
    """``$(NAME)`` as Kubernetes has it: of a name that is not known nothing is made, ``$$(`` is a ``$(``."""

    def value(found: re.Match[str]) -> str:
        if found[0].startswith("$$"):
            return found[0][1:]
        return known.get(found[1], found[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", value, text)


def _container(group: ReplicaGroup) -> Mapping[str, Any]:
    spec = group.template.get("spec") if isinstance(group.template, Mapping) else None
    containers = (spec or {}).get("containers") or []
    if not containers or not (containers[0].get("command") or containers[0].get("args")):
        raise JobSpecError(
            f"the first container of {group.name} has no command: there is nothing to start for its pods"
        )
    return containers[0]


def kill_pod_processes(folder: Path) -> None:
    """Every process of the pod, whoever its parent is by now."""
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
