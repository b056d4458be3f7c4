"""Jobs on the test cluster with real agents in their pods, and a controller process to kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.kube_server import KubeClient
from tests.support.process_kubelet import ProcessKubelet

ROOT = Path(__file__).parents[2]
JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs"
PODS = "/api/v1/namespaces/default/pods"
PATIENCE_S = 240.0
_LOOK_S = 0.1


class ControllerProcess:
    """``python -m integration.kubernetes.controller``, as one account of one cluster."""

    def __init__(self, folder: Path, kubeconfig: Path, *options: str) -> None:
        self._command = [
            sys.executable, "-m", "integration.kubernetes.controller", "--namespace=default", "--every=0.2", *options,
        ]  # fmt: skip
        self._environ = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(ROOT), "no_proxy": "*"}
        self._log = folder / "controller.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def kill(self) -> None:
        """Kill the controller, as an eviction without a grace period does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def exit_status(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @contextlib.contextmanager
    def running(self) -> Iterator[ControllerProcess]:
        self.start()
        try:
            yield self
        finally:
            assert self._process is not None
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(200)
            self.kill()


class RunningJob:
    """A job whose ranks run :mod:`tests.support.kube_training`, or another script, in ``folder``."""

    script = ROOT / "tests" / "support" / "kube_training.py"
    options: Sequence[str] = ()
    """Additional options of the agent."""

    def __init__(
        self, kube: KubeClient, kubelet: ProcessKubelet, controller: ControllerProcess, folder: Path, name: str
    ) -> None:
        self.kube, self.kubelet, self.controller = kube, kubelet, controller
        self.folder = folder
        self.name = name
        self.path = f"{JOBS}/{name}"
        self._worlds = 0
        folder.mkdir()

    def resource(self, **spec: Any) -> dict[str, Any]:
        command = [
            sys.executable, "-m", "integration.hyperpod.hyperpodrun", "--server-host=$(POD_IP)",
            "--resource-config-dir=$(POD_FOLDER)/config", "--server-log-level=warning", "--monitor-interval=0.1",
            "--nnodes=$(NNODES)", "--nproc-per-node=1", "--log-dir=$(POD_FOLDER)/logs", "--redirects=3",
            "--shutdown-timeout=5", *self.options, str(self.script), str(self.folder),
        ]  # fmt: skip
        container = {"name": "pytorch", "image": "none", "command": command}
        template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": 5}}
        return {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": self.name, "namespace": "default"},
            "spec": {
                "nprocPerNode": "1",
                "replicaSpecs": [{"name": "workers", "replicas": 2, "maxReplicas": 3, "template": template}],
                **spec,
            },
        }

    def create(self, *, labels: Mapping[str, str] | None = None, **spec: Any) -> None:
        resource = self.resource(**spec)
        if labels is not None:
            resource["metadata"]["labels"] = dict(labels)
        self.kube.create(JOBS, resource)

    def status(self) -> dict[str, Any]:
        return self.kube.get(self.path).get("status") or {}

    def restarts(self) -> int:
        return self.status().get("restartCount", 0)

    def has_condition(self, condition: str) -> bool:
        found = [one for one in self.status().get("conditions", ()) if one["type"] == condition]
        return bool(found) and found[0]["status"] == "True"

    def pods(self) -> list[dict[str, Any]]:
        return self.kube.list(f"{PODS}?labelSelector=HPJob={self.name}")

    def nodes(self) -> set[str]:
        return {pod["spec"]["nodeName"] for pod in self.pods() if pod["status"].get("phase") == "Running"}

    def node_of_rank(self, rank: int) -> str:
        pod = self.worlds()[-1][rank]["pod"]
        return next(one["spec"]["nodeName"] for one in self.pods() if one["metadata"]["name"] == pod)

    def touch(self, word: str) -> None:
        (self.folder / word).touch()

    def rank_notes(self, what: str) -> list[dict[str, Any]]:
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [note for note in map(json.loads, lines) if note["what"] == what]

    def worlds(self) -> list[list[dict[str, Any]]]:
        """Return the start notes of each complete world, sorted by rank."""
        found: dict[int, list[dict[str, Any]]] = {}
        for note in self.rank_notes("begins"):
            found.setdefault(note["restart"], []).append(note)
        whole = [sorted(notes, key=lambda note: note["rank"]) for _, notes in sorted(found.items())]
        return [notes for notes in whole if len(notes) == notes[0]["world"]]

    def step(self) -> int:
        path = self.folder / "step"
        return int(path.read_text()) if path.exists() else 0

    def scale(self, nodes: int) -> None:
        """Set the number of nodes, as ``kubectl scale`` does."""
        self.kube.patch(f"{self.path}/scale", {"spec": {"replicas": nodes}})

    def wait_until(self, holds: Callable[[], Any], what: str) -> None:
        def there() -> Any:
            assert self.controller.exit_status() is None or self.controller.exit_status() == -signal.SIGKILL, (
                self.controller.log()
            )
            return holds()

        deadline = time.monotonic() + PATIENCE_S
        while not there():
            assert time.monotonic() < deadline, f"it did not happen: {what}\n{self._failure_report()}"
            time.sleep(_LOOK_S)

    def wait_world(self, size: int, *, restarts: int) -> None:
        """Wait until a new world of this size, since the last call, is past its first steps."""

        found: list[int] = []

        def there() -> bool:
            worlds = self.worlds()
            found[:] = [len(worlds)]
            return len(worlds) > self._worlds and len(worlds[-1]) == size and self.step() > worlds[-1][0]["step"] + 2

        self.wait_until(there, f"a world of {size}")
        (self._worlds,) = found
        self.wait_until(lambda: self.has_condition("Running") and self.restarts() == restarts, f"{restarts} restarts")

    def _failure_report(self) -> str:
        said = []
        for pod in self.pods():
            name, phase = pod["metadata"]["name"], pod["status"].get("phase")
            said.append(f"{name} on {pod['spec'].get('nodeName')}: {phase}")
            if phase != "Pending":
                said.append(self.kubelet.container(name).log()[-1500:])
        status = json.dumps(self.status(), indent=1)
        return "\n".join([status, *said, self.controller.log()[-4000:]])


def with_changes(document: dict[str, Any], changes: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a copy with other values at paths like ``spec.replicaSpecs.0.name``; ``...`` deletes one."""
    made = json.loads(json.dumps(document))
    for path, value in changes:
        *way, last = path.split(".")
        place = made
        for word in way:
            place = place[int(word)] if isinstance(place, list) else place[word]
        key: Any = int(last) if isinstance(place, list) else last
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return made
