"""Real HyperPod agents on this machine, driven like an operator drives them.

    with running_agents(2, script, folder=tmp_path) as pods:
        start_pods(pods)
        wait_for_states(pods, "completed")

Each agent is a node with ``nproc`` ranks, its own folder for their output and its own ``pod_resourceconfig.json``.
At the end all agents are shut down, and processes that remain are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.local_nodes import wait_until
from tests.support.ports import free_port, free_ports

ROOT = Path(__file__).parents[2]
_LOCAL = "127.0.0.1"
_PATIENCE_S = 240.0
_MARK = "TEST_POD"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class AgentPod:
    """One agent and its ranks."""

    def __init__(
        self,
        number: int,
        port: int,
        script: Sequence[str],
        folder: Path,
        *,
        nnodes: int,
        nproc: int,
        options: Sequence[str],
        environ: Mapping[str, str],
        launcher: str,
    ) -> None:
        self.number, self.port, self.folder = number, port, folder
        self.address = f"{_LOCAL}:{port}"
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", launcher, "--loopback", f"--server-port={port}",
            f"--resource-config-dir={folder / 'config'}", f"--nnodes={nnodes}", f"--nproc-per-node={nproc}",
            "--server-log-level=warning", "--monitor-interval=0.1", f"--rdzv-id=pod{number}",
            f"--log-dir={folder / 'logs'}", "--redirects=3", "--shutdown-timeout=5", *options, *script,
        ]  # fmt: skip
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), _MARK: str(folder)}
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HYPERPOD_", "TIEREDCKPT_"))}
        with (folder / "agent.log").open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**own, **quiet, **environ}, stdout=out, stderr=out, start_new_session=True
            )

    # -- an operator's requests ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the response of ``GET /status``, or ``{"status": "down"}`` if the agent does not respond."""
        try:
            with _DIRECT.open(f"http://{self.address}/status", timeout=30) as reply:
                found = json.loads(reply.read())
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return {"status": "down"}
        return found

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Send a POST request and return the response. Fail with the agent's message if it refuses."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.address}{path}", data=data, headers=headers, method="POST")
        try:
            with _DIRECT.open(request, timeout=30) as reply:
                return reply.read()
        except urllib.error.HTTPError as refusal:
            raise AssertionError(f"{path}: {refusal.code} {refusal.read().decode(errors='replace')}") from None

    def stop(self, *, mode: str | None = None, graceful: bool | None = None, timeout_s: int | None = None) -> None:
        body = {"restart_mode": mode, "is_graceful": graceful, "timeout": timeout_s}
        self.post("/stop", {name: value for name, value in body.items() if value is not None} or None)

    # -- local processes and files ------------------------------------------------------------------------------------

    def rank_output(self) -> str:
        """Return the output of the ranks, oldest file first."""
        files = sorted((self.folder / "logs").rglob("std*.log"), key=lambda path: path.stat().st_mtime_ns)
        return "\n".join(path.read_text(errors="replace") for path in files)

    def agent_log(self) -> str:
        """Return the output of the agent."""
        return (self.folder / "agent.log").read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Return the pids of all processes of this pod except the agent."""
        return [pid for pid in _processes_of(self.folder) if pid != self.process.pid]

    def kill(self) -> None:
        """Kill the agent and all processes below it, as a lost node does."""
        while doomed := _processes_of(self.folder):
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        self.process.wait()  # also reaps an agent that had ended by itself

    def close(self) -> None:
        """Shut the agent down if it responds, then kill what remains."""
        if self.process.poll() is None and self.status()["status"] != "down":
            with contextlib.suppress(AssertionError, OSError):
                self.post("/shutdown")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(200)
        self.kill()


@contextlib.contextmanager
def running_agents(
    count: int,
    script: Sequence[str | Path] | str | Path,
    *,
    folder: Path,
    nproc: int = 1,
    inprocess: bool = False,
    inprocess_timeout_s: int | None = None,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    ready: bool = True,
    launcher: str = "integration.hyperpod.hyperpodrun",
) -> Iterator[list[AgentPod]]:
    """Run ``count`` agents for ``script``, in process-level mode or with ``--inprocess-restart``.

    ``ready`` waits until all agents are READY. In in-process mode their ranks are at the barrier then.
    """
    words = [str(script)] if isinstance(script, (str, Path)) else [str(word) for word in script]
    mode = ["--inprocess-restart"] if inprocess else []
    if inprocess_timeout_s is not None:
        mode.append(f"--inprocess-timeout={inprocess_timeout_s}")
    pods: list[AgentPod] = []
    try:
        for number, port in enumerate(free_ports(count)):
            pods.append(
                AgentPod(
                    number,
                    port,
                    words,
                    folder / f"pod{number}",
                    nnodes=count,
                    nproc=nproc,
                    options=[*mode, *options],
                    environ=environ or {},
                    launcher=launcher,
                )
            )
        if ready:
            wait_for_states(pods, "ready")
        yield pods
    finally:
        for pod in pods:
            pod.close()


def wait_for_states(
    pods: Sequence[AgentPod], *states: str, any_of: bool = False, timeout_s: float = _PATIENCE_S
) -> list[str]:
    """Wait until all agents (``any_of``: one of them) are in one of ``states``; return all states."""

    def there() -> list[str]:
        for pod in pods:
            ended = pod.process.poll()
            assert ended is None or "down" in states, f"pod {pod.number} ended with {ended}\n{pod.agent_log()[-4000:]}"
        found = [pod.status()["status"] for pod in pods]
        good = (any if any_of else all)(one in states for one in found)
        return found if good else []

    try:
        return wait_until(there, f"agents are {' or '.join(states)}", timeout_s)
    except AssertionError as late:
        states_now = [pod.status() for pod in pods]
        raise AssertionError(f"{late}; their status is {states_now}\n{pods[-1].agent_log()[-2000:]}") from None


def start_pods(
    pods: Sequence[AgentPod],
    *,
    fault_count: int = 0,
    progress: Mapping[str, Any] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
    version: str | None = None,
    **more: Any,
) -> int:
    """Send ``/start`` to all agents, ranks in this order, and return the master's port."""
    port = free_port()
    for rank, pod in enumerate(pods):
        pod.post(
            "/start",
            {
                "rank": rank, "nnodes": len(pods), "faultCount": fault_count, "master_addr": _LOCAL,
                "master_port": str(port), "ipVersion": version or f"v{fault_count}-{port}",
                "rankIps": [{"rank": each, "ip": _LOCAL} for each in range(len(pods))],
                "progress": dict(progress or {}), "log_monitoring_configuration": list(rules) or None,
                "spare": False, **more,
            },
        )  # fmt: skip
    return port


def stop_pods(pods: Sequence[AgentPod], **how: Any) -> None:
    """Send ``/stop`` to all agents and wait until they are READY."""
    for pod in pods:
        pod.stop(**how)
    wait_for_states(pods, "ready", "completed") if how.get("graceful") else wait_for_states(pods, "ready")


def _processes_of(folder: Path) -> list[int]:
    """Return every process started for this pod, including reparented ones."""
    mark = f"{_MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
