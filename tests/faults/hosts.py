"""A job on network namespaces that can be cut from each other, each with its own memory. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from elastic.control.control_messages import CoordinatorRequest, ElasticJobStatus
from elastic.control.coordinator_client import call_coordinator
from elastic.errors import ElasticError
from peerstore.transport.authentication import generate_secret, read_secret
from tests.faults.job import TRAINER, FaultJob, mount, resume_line, unmount
from tests.faults.judge import CommandRun
from tests.faults.schedule import FaultPlan
from tests.faults.training import JOB
from tests.support import namespaces
from tests.support.hosts import network

PORT = 7400
HEAD = "head"
_ENDED = (0, 6, 7, 8)
"""Exit statuses of a coordinator that ended on purpose. After any other status it is restarted."""


class HostJob(FaultJob):
    """A job with ``elastic run --coordinator`` on every host and its coordinator on another host."""

    def __init__(self, folder: Path, plan: FaultPlan, **_: object) -> None:
        super().__init__(folder, plan)
        self._undo = ExitStack()
        self.net = self._undo.enter_context(network())
        self._head = self.net.host(HEAD)
        self._secret = folder / "secret"
        self._secret.touch(0o600)
        self._secret.write_bytes(generate_secret())
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._leader: subprocess.Popen[bytes] | None = None
        self._over: int | None = None
        for name in self.shape.names:
            self.net.host(name)
            mount(self.memory(name))
            self._undo.callback(unmount, self.memory(name))

    def memory(self, node: str) -> Path:
        return self.folder / "m" / node

    def arena(self, node: str) -> Path:
        return self.memory(node) / "agent"

    @property
    def are_agents_shared(self) -> bool:
        return True  # one agent for all jobs of a host

    @property
    def is_running(self) -> bool:
        return self._leader is not None or bool(self._nodes)

    def start(self) -> None:
        self.commands.environ["FAULTS_RUN"] = str(len(self.runs))
        self._began, self._over = time.time(), None
        self._start_coordinator()
        for name in self.shape.names:
            self.join(name)

    def _start_coordinator(self) -> None:
        elasticity, _ = self._options()
        words = ("--listen", f"{self._head.address}:{PORT}", "--job", JOB, "--secret", f"file:{self._secret}", "-v")
        self._leader = self._start_on_host(HEAD, "coordinator", *elasticity, *words)

    def join(self, node: str) -> None:
        """Start the command on a host, or restart it after a loss."""
        before = self._nodes.pop(node, None)
        if before is not None:
            before.kill()
            before.wait()
        elasticity, spares = self._options()
        words = ("--coordinator", f"{self._head.address}:{PORT}", "--secret", f"file:{self._secret}", "--node", node)
        logs = ("--job", JOB, "--log-dir", str(self.folder / "logs"), "-v")
        self._nodes[node] = self._start_on_host(
            node, "run", *elasticity, *spares, *words, *logs, str(TRAINER), *self.arguments
        )

    def _options(self) -> tuple[list[str], list[str]]:
        return self.elasticity, ["--spares", str(self.shape.spares)]

    def _start_on_host(self, host: str, *words: str) -> subprocess.Popen[bytes]:
        memory = self.memory(host)
        memory.mkdir(parents=True, exist_ok=True)
        environ = {
            **self.commands.environ,
            "ELASTIC_RUN_DIRECTORY": str(memory / "run"),
            "TIEREDCKPT_AGENT_DIRECTORY": str(memory / "agent"),
            "TIEREDCKPT_AGENT_NODE": host,
            "GLOO_SOCKET_IFNAME": "eth0",  # all hosts have this machine's name, which leads to loopback
        }
        with (self.folder / f"output-{host}").open("ab") as output:
            return self.net.hosts[host].start(
                [sys.executable, "-m", "elastic", *words], cwd=self.folder, env=environ, stdout=output, stderr=output
            )

    def finished_run(self) -> CommandRun | None:
        """Return the finished run once the coordinator and every host's command have ended."""
        for name, one in list(self._nodes.items()):
            if one.poll() is not None and self._over is not None:
                del self._nodes[name]
        if self._leader is not None and self._leader.poll() is not None:
            if self._leader.returncode in _ENDED:
                self._over, self._leader = self._leader.returncode, None
            else:
                self._start_coordinator()
        if self._over is None or self._nodes:
            return None
        output = (self.folder / f"output-{HEAD}").read_text(errors="replace")
        run = CommandRun(self._over, resume_line(output), self._began, time.time())
        self._over = None
        self.runs.append(run)
        return run

    def lose_node(self, node: str) -> int:
        namespace = self.net.hosts[node].namespace
        pids = namespaces.processes_in(namespace)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        while namespaces.processes_in(namespace):
            time.sleep(0.01)
        self.clear_memory(node)
        return len(pids)

    def send_request(self, request: CoordinatorRequest) -> ElasticJobStatus | None:
        secret = read_secret(self._secret)

        def call() -> ElasticJobStatus:
            return call_coordinator(f"{self._head.address}:{PORT}", request, job=JOB, secret=secret, timeout_s=5.0)

        with suppress(ElasticError, OSError):
            return namespaces.run_inside(self._head.namespace, call)
        return None

    def close(self) -> None:
        super().close()
        self._undo.close()
