"""A kubelet whose containers are processes of this machine.

Each pod bound to a node runs its container's command in a process group. Each has its own address in 127.0.0.0/8, so
every pod can listen on the same port. Phase, addresses, readiness and exit codes are reported like a kubelet does. A
terminating pod gets SIGTERM, its grace period, SIGKILL, and only then is removed. Volumes, probes and init containers
are not supported.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.kube_server import ApiRefusedError, KubeClient

_BEAT_S = 0.2
_MARK = "PROCESS_KUBELET_POD"
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass
class Container:
    """The one process of a pod, with its identity."""

    uid: str
    name: str
    node: str
    address: str
    folder: Path
    process: subprocess.Popen[bytes] | None
    said: str = ""
    kill_at_s: float | None = None
    started: str = ""
    gone: bool = False

    @property
    def exit_code(self) -> int | None:
        """Exit code in shell notation, such as 137 for SIGKILL."""
        code = 127 if self.process is None else self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


class ProcessKubelet:
    """Kubelet of all nodes, in one thread."""

    def __init__(
        self, kube: KubeClient, folder: Path, *, environ: Mapping[str, str], namespace: str = "default"
    ) -> None:
        self._kube = kube
        self._folder = folder
        self._environ = dict(environ)
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._mine: dict[str, Container] = {}
        self._lost: set[str] = set()
        self._addresses = 1
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="process-kubelet")

    @contextlib.contextmanager
    def running(self) -> Iterator[ProcessKubelet]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ending.set()
            self._thread.join()
            for container in self._mine.values():
                _kill(container)
        if self.failure is not None:
            raise self.failure

    def container(self, name: str) -> Container:
        """Return the newest container of a pod's name."""
        with self._lock:
            return [one for one in self._mine.values() if one.name == name][-1]

    def lose_node(self, node: str) -> None:
        """Kill all containers of a node and report nothing more about them."""
        with self._lock:
            self._lost.add(node)
            for container in self._mine.values():
                if container.node == node:
                    _kill(container)

    def recover_node(self, node: str) -> None:
        """Bring a node back, so that its terminating pods are removed."""
        with self._lock:
            self._lost.discard(node)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending.wait(_BEAT_S):
                with self._lock:
                    self._sync_all()
        except BaseException as failure:  # ``running`` raises it
            self.failure = failure

    def _sync_all(self) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in self._kube.list(self._pods)}
        for uid, pod in pods.items():
            node = pod["spec"].get("nodeName")
            if not node or node in self._lost:
                continue
            with contextlib.suppress(_Gone):
                self._sync_pod(uid, pod, node)
        for uid, container in self._mine.items():
            if uid not in pods and not container.gone:
                _kill(container)  # the pod was force-deleted
                container.gone = True

    def _sync_pod(self, uid: str, pod: Mapping[str, Any], node: str) -> None:
        container = self._mine.get(uid)
        if pod["metadata"].get("deletionTimestamp"):
            self._end(pod, container)
        elif container is None:
            self._mine[uid] = container = self._start(uid, pod, node)
            self._report(pod, container)
        elif container.exit_code is not None and pod["status"].get("phase") == "Running":
            self._report(pod, container)

    def _start(self, uid: str, pod: Mapping[str, Any], node: str) -> Container:
        name, (spec,) = pod["metadata"]["name"], pod["spec"]["containers"]
        address = f"127.{1 + os.getpid() % 200}.{self._addresses // 250}.{self._addresses % 250 + 1}"
        self._addresses += 1
        folder = self._folder / uid
        folder.mkdir(parents=True)
        environ = {**self._environ, "POD_FOLDER": str(folder), _MARK: uid}
        for variable in spec.get("env", []):
            value = _value(variable, pod, address)
            environ[variable["name"]] = _expand(value, environ)
        command = [_expand(word, environ) for word in [*spec.get("command", []), *spec.get("args", [])]]
        container = Container(uid, name, node, address, folder, None, started=_now())
        try:
            with (folder / "log").open("wb") as out:
                container.process = subprocess.Popen(
                    command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            container.said = str(error)
        return container

    def _report(self, pod: Mapping[str, Any], container: Container) -> None:
        code = container.exit_code
        if code is None:
            phase, state = "Running", {"running": {"startedAt": container.started}}
        else:
            phase = "Failed" if code else "Succeeded"
            ended = {"exitCode": code, "startedAt": container.started, "finishedAt": _now(), "message": container.said}
            state = {"terminated": {**ended, "reason": "Error" if code else "Completed"}}
        ready = code is None
        spec = pod["spec"]["containers"][0]
        status = {
            "phase": phase,
            "podIP": container.address,
            "podIPs": [{"ip": container.address}],
            "hostIP": "127.0.0.1",
            "startTime": container.started,
            "conditions": [{"type": kind, "status": str(ready)} for kind in ("Ready", "ContainersReady")],
            "containerStatuses": [
                {
                    "name": spec["name"], "image": spec.get("image", ""), "imageID": "", "ready": ready,
                    "started": ready, "restartCount": 0, "state": state,
                }
            ],
        }  # fmt: skip
        self._patch(f"{self._pods}/{container.name}/status", container.uid, {"status": status})

    def _end(self, pod: Mapping[str, Any], container: Container | None) -> None:
        meta = pod["metadata"]
        if container is not None and container.exit_code is None:
            process = container.process
            assert process is not None
            if container.kill_at_s is None:
                container.kill_at_s = time.monotonic() + meta.get("deletionGracePeriodSeconds", 0)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            if time.monotonic() < container.kill_at_s:
                return
        if container is not None:
            _kill(container)
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        with contextlib.suppress(ApiRefusedError):
            self._kube.request("DELETE", f"{self._pods}/{meta['name']}", body)

    def _patch(self, path: str, uid: str, body: dict[str, Any]) -> None:
        try:
            self._kube.patch(path, {**body, "metadata": {"uid": uid}})
        except ApiRefusedError as refused:
            if refused.status in (404, 409):
                raise _Gone from None  # another pod has that name now
            raise


class _Gone(Exception):
    pass


def _value(variable: Mapping[str, Any], pod: Mapping[str, Any], address: str) -> str:
    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    if path is None:
        return variable.get("value", "")
    if path.startswith("metadata.labels["):
        return pod["metadata"]["labels"][path[len("metadata.labels['") : -2]]
    known = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"],
        "spec.nodeName": pod["spec"]["nodeName"],
        "status.podIP": address,
        "status.hostIP": "127.0.0.1",
    }
    return known[path]


def _expand(text: str, environ: Mapping[str, str]) -> str:
    return _REFERENCE.sub(lambda found: environ.get(found[1], found[0]), text)


def _kill(container: Container) -> None:
    """Kill the container's process and all its descendants, including reparented ones."""
    while doomed := _processes_of(container.uid):
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if container.process is not None:
            container.process.wait()
    if container.process is not None:  # a process that ended by itself has lost its mark but still needs a wait
        container.process.wait()


def _processes_of(uid: str) -> list[int]:
    mark = f"{_MARK}={uid}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
