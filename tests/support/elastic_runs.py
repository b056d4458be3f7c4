"""Jobs under ``elastic run`` with ranks that start fast, compute nothing and print events."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic.control.child_processes import STACKS_SIGNAL
from elastic.control.control_messages import ElasticJobStatus, StatusRequest
from elastic.control.coordinator_client import call_coordinator
from elastic.control.run_directory import RunDirectory, run_secret
from elastic.errors import ControlPlaneUnavailableError
from peerstore.daemon_process import process_start_time
from tests.support.agents import stop_agent
from tests.support.local_nodes import wait_until
from tests.support.zygote import has_ended

ROOT = Path(__file__).parents[2]
RANK = ROOT / "tests/e2e/control/rank.py"


class ElasticRun:
    """One job: its folder and the commands started in it."""

    def __init__(self, folder: Path, name: str = "job") -> None:
        self.folder, self.name = folder, name
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ELASTIC_", "TIEREDCKPT_"))},
            "PYTHONPATH": str(ROOT),
            "ELASTIC_RUN_DIRECTORY": str(folder / "run"),
        }
        self.inside: tuple[str, ...] = ()
        """Command prefix for everything started here."""
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        output = (self.folder / f"output-{len(self.started)}").open("wb")
        with output:
            one = subprocess.Popen(
                [*self.inside, sys.executable, "-m", "elastic", *words],
                cwd=self.folder,
                env=self.environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append(one)
        return one

    def run(self, *options: str) -> subprocess.Popen[bytes]:
        """Start ``elastic run`` with the test ranks."""
        quick = ("--no-agent", "--store", "nowhere:1", "--job", self.name, "--log-dir", str(self.folder / "logs"), "-v")
        return self.start("run", *quick, *options, str(RANK), str(self.folder))

    def run_json(self, *words: str) -> Any:
        """Run an ``elastic`` command with ``--json`` and return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "elastic", *words, "--json"],
            cwd=self.folder, env=self.environ, capture_output=True, check=False, timeout=200,
        )  # fmt: skip
        return json.loads(done.stdout)

    def status(self) -> ElasticJobStatus | None:
        """Return the job's status, or ``None`` while its coordinator does not answer."""
        try:
            run = RunDirectory(self.folder / "run", self.name).read()
            return call_coordinator(run.coordinator, StatusRequest(), job=self.name, secret=run_secret(run))
        except ControlPlaneUnavailableError:
            return None

    def is_in_phase(self, phase: str) -> bool:
        status = self.status()
        return status is not None and status.phase.value == phase

    def touch(self, name: str) -> Path:
        path = self.folder / name
        path.touch()
        return path

    def finish(self) -> None:
        self.touch("finish")

    # -- rank output --------------------------------------------------------------------------------------------------

    def rank_messages(self, what: str, **wanted: Any) -> list[dict[str, Any]]:
        """Return the ranks' messages of kind ``what`` that have these values."""
        found = []
        for log in sorted((self.folder / "logs").glob("*/*.log")):
            for line in log.read_text().splitlines(keepends=True):
                if line.endswith("\n") and line.startswith("{"):
                    one = json.loads(line)
                    if one["what"] == what and all(one[name] == value for name, value in wanted.items()):
                        found.append(one)
        return found

    def wait_world(self, size: int, *, after: int = -1) -> list[dict[str, Any]]:
        """Wait for a world of ``size`` ranks after epoch ``after``; return its ranks' messages by rank."""

        def newest() -> list[dict[str, Any]]:
            inside = [one for one in self.rank_messages("in", size=size) if one["epoch"] > after]
            last = max((one["epoch"] for one in inside), default=-1)
            members = [one for one in inside if one["epoch"] == last]
            return members if len(members) == size else []

        try:
            return sorted(wait_until(newest, f"a world of {size} ranks"), key=lambda one: one["rank"])
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("output-*")))

    def pids(self, *words: str) -> list[int]:
        """Return this job's processes whose command line has all these words."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(self.folder) in line and all(word in line for word in words):
                    found.append(int(path.parent.name))
        return [pid for pid in found if process_start_time(pid) >= 0]

    def coordinator_pid(self) -> int:
        (pid,) = self.pids('"type":"coordinator"')
        return pid

    def candidate_pid(self, node: str) -> int:
        """Return the pid of the coordinator candidate that this node's supervisor started."""
        (pid,) = [pid for pid in self.pids('"type":"coordinator"', f'"candidate":"{node}-') if self._is_task(pid)]
        return pid

    def _is_task(self, pid: int) -> bool:
        """Return whether it is a coordinator: a supervisor only quotes those words on its command line."""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return any(word.startswith(b'{"type":"coordinator"') for word in words)

    def supervisor_pid(self, node: str) -> int:
        (pid,) = self.pids('"type":"node"', f'"node":"{node}"')
        return pid

    def wait_ended(self, one: subprocess.Popen[bytes]) -> int:
        try:
            return one.wait(200)
        except subprocess.TimeoutExpired:
            stacks = self.rank_stacks()
            raise AssertionError(f"it did not end\n{self.output()}\n{stacks}") from None

    def rank_stacks(self) -> str:
        """End the ranks that write their stacks at the end, and return the last lines of all ranks."""
        ended = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                if int(caught, 16) >> (STACKS_SIGNAL - 1) & 1:
                    kill(pid, STACKS_SIGNAL)
                    ended.append(pid)
        for pid in ended:
            has_ended(pid, 20)
        logs = sorted((self.folder / "logs").glob("*/*.log"))
        return "\n".join(f"{log}:\n" + "\n".join(log.read_text().splitlines()[-150:]) for log in logs)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def lose_memory(self, node: str) -> None:
        """Kill the agent of ``node`` and delete its memory, as if the machine were lost."""
        agent = self.folder / "run" / self.name / node / "agent"
        stop_agent(agent, signal.SIGKILL)
        shutil.rmtree(agent, ignore_errors=True)

    def lose_node(self, node: str) -> None:
        """Kill the node's supervisor, and so its ranks, and delete its memory, without notice."""
        for pid in self.pids('"type":"node"', f'"node":"{node}"'):
            kill(pid)
        self.lose_memory(node)

    def node_output(self, node: str) -> str:
        """Return the output of all ranks of ``node``."""
        return "\n".join(path.read_text() for path in sorted((self.folder / "logs" / node).glob("*.log")))

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill the started commands and their agents, and wait until no process of the job is left."""
        for one in self.started:
            if one.poll() is None:
                one.send_signal(signal.SIGKILL)
                one.wait()
        for agent in (self.folder / "run").glob("*/*/agent"):
            stop_agent(agent)
        deadline = time.monotonic() + 200
        while left := self.pids():
            assert time.monotonic() < deadline, f"left: {left}"
            time.sleep(0.01)


@contextlib.contextmanager
def elastic_job() -> Iterator[ElasticRun]:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(ElasticRun(Path(folder))) as job:
        yield job


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
