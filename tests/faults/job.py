"""A real job under faults: its start, its processes, its diary and its leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from elastic.control.control_messages import CoordinatorRequest, ElasticJobStatus
from elastic.control.coordinator_client import call_coordinator
from elastic.control.run_directory import RunDirectory, run_secret
from elastic.errors import ElasticError
from elastic.reshard.state_checksum import ChecksumPart, RankChecksum, combine_checksums
from peerstore.daemon_process import process_start_time
from tests.faults.judge import CommandRun, RankStep, RankWorld, SafeStep, Sealed, names_older_step
from tests.faults.schedule import FaultPlan
from tests.faults.training import JOB
from tests.support.elastic_runs import ROOT
from tests.support.elastic_runs import ElasticRun as Commands
from tests.support.s3 import ACCESS_KEY, REGION, SECRET_KEY

TRAINER = ROOT / "tests/faults/training.py"
CLOCK = ROOT / "tests/faults/clock"
MARK = "FAULTS_JOB"
"""Environment variable of all processes of a job; its value is the job's folder."""
MEMORY_BYTES = 64 << 20
PACE_S, AHEAD_STEPS, DURABLE_EVERY = 0.02, 40, 12
_ENDS_S = 20.0

POLICY = """\
num_restart_before_full_job_restart: null
max_full_job_restarts: null
max_num_repeat_offenders_to_avoid: 0
"""


class JobProcess(NamedTuple):
    """A process of a job, as listed in /proc."""

    pid: int
    started: int
    role: str
    """``rank`` (or spare), ``agent``, ``supervisor``, ``coordinator``, ``store`` or ``launcher``."""
    node: str
    command: str

    def signal(self, number: int) -> bool:
        """Send a signal. Return ``False`` if the process has ended, even if another process has its number."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if process_start_time(self.pid) != self.started:
                return False
            signal.pidfd_send_signal(fd, number)
            if number == signal.SIGKILL:
                select.select([fd], [], [], _ENDS_S)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


_TASK_NODE = re.compile(r'"node":"([^"]+)"')
_ROLES = (
    ("-m elastic coordinator", "coordinator"),
    ('"type":"coordinator"', "coordinator"),
    ('"type":"node"', "supervisor"),
    ("tieredckpt.agent", "agent"),
    ("elastic.rendezvous.store_process", "store"),
    ("-m elastic ", "launcher"),
    (str(TRAINER), "rank"),
)


def processes(mark: str) -> list[JobProcess]:
    """List all processes that have ``mark`` in their environment, with their roles."""
    wanted, found = f"{MARK}={mark}\0".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ = b"\0" + (path / "environ").read_bytes()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if b"\0" + wanted not in environ:
            continue
        pid = int(path.name)
        role = next((role for word, role in _ROLES if word in command), "other")
        names = dict(word.partition(b"=")[::2] for word in environ.split(b"\0"))
        node = names.get(b"ELASTIC_NODE", names.get(b"TIEREDCKPT_AGENT_NODE", b"")).decode()
        if role == "supervisor" and (task := _TASK_NODE.search(command)):
            node = task[1]
        if (started := process_start_time(pid)) >= 0:
            found.append(JobProcess(pid, started, role, node, command))
    return found


class HungError(Exception):
    """A wait that timed out."""


class EndedError(Exception):
    """A job that ended too early."""


def resume_line(output: str) -> str:
    """Return the line that names the step to resume from, or the last line of ``output``."""
    lines = [line for line in output.splitlines() if line.strip()]
    found = (line for line in reversed(lines) if "resumes from" in line or "resumes it" in line)
    return next(found, lines[-1] if lines else "")


class FaultJob:
    """One job with its folder and all starts of its command."""

    def __init__(
        self, folder: Path, plan: FaultPlan, *, durable: str = "", endpoint: str = "", own_memory: bool = False
    ):
        self.folder, self.plan, self.shape = folder, plan, plan.shape
        self.mark = str(folder)
        self.diary = folder / "diary"
        self.diary.mkdir(parents=True)
        self.clock = folder / "clock"
        self.commands = Commands(folder, JOB)
        self.commands.environ |= {
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "FAULTS_DURABLE": durable,
            "TIEREDCKPT_AGENT_DIRECTORY": str(folder / "agent"),
            "TIEREDCKPT_AGENT_BUDGET": "32MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "1",
            "TIEREDCKPT_AGENT_JOB_TTL_S": "600",
            "TIEREDCKPT_EVENT_LOG": str(folder / "ledger"),
        }
        if endpoint:
            self.commands.environ |= {
                "TIEREDCKPT_DURABLE_OPTIONS": f"endpoint={endpoint},region={REGION}",
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        if plan.clocks:
            path = f"{CLOCK}{os.pathsep}{self.commands.environ['PYTHONPATH']}"
            self.commands.environ |= {"FAULTS_CLOCK": str(self.clock), "PYTHONPATH": path}
            self.commands.environ["PYTHONUTF8"] = "1"  # so that no process is a fork, which reads no sitecustomize
        self.durable = bool(durable)
        self.own_memory = own_memory
        self.runs: list[CommandRun] = []
        self._began = 0.0
        self.launcher: subprocess.Popen[bytes] | None = None
        self._read: dict[Path, int] = {}
        self.worlds: list[RankWorld] = []
        self.steps: list[RankStep] = []
        self.safe: list[SafeStep] = []
        self.sealed: list[Sealed] = []
        self.newest = -1
        self.last_world: tuple[int, int] = (-1, -1)
        self._limit = (0, "")
        self.set_limit(AHEAD_STEPS)
        if own_memory:
            for name in self.shape.names:
                mount(self.memory(name))

    # -- the command --------------------------------------------------------------------------------------------------

    def memory(self, node: str) -> Path:
        """Return the folder with the memory of ``node``, which survives the end of its processes."""
        return self.folder / "run" / JOB / node

    def arena(self, node: str) -> Path:
        one_node = len(self.shape.names) == 1
        return self.folder / "agent" if one_node else self.memory(node) / "agent"

    @property
    def elasticity(self) -> list[str]:
        """Return the options for the job's size and timeouts."""
        shape = self.shape
        policy = self.folder / "policy.yaml"
        policy.write_text(POLICY if shape.budget is None else "{}\n")
        budget = [] if shape.budget is None else ["--max-restarts", str(shape.budget)]
        return [
            *("--nnodes", f"1:{shape.nodes}", "--nproc", str(shape.nproc), "--policy", str(policy)),
            *("--grow-after", "0.5", "--shrink-after", "2", "--pause-timeout", "60", *budget),
            *("--hang-timeout", "15", "--first-step-timeout", "120"),
        ]

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the training."""
        durable = DURABLE_EVERY if self.durable else 0
        return [str(self.diary), self.shape.how, str(self.shape.every), str(durable), str(PACE_S)]

    @property
    def command(self) -> list[str]:
        nodes = len(self.shape.names)
        return [
            *("run", "-v", "--job", JOB, "--log-dir", str(self.folder / "logs"), *self.elasticity),
            *("--spares", str(self.shape.spares)),
            *(("--simulate-nodes", str(nodes)) if nodes > 1 else ("--node", "n0")),
            *(str(TRAINER), *self.arguments),
        ]

    def start(self) -> None:
        self.commands.environ["FAULTS_RUN"] = str(len(self.runs))
        self._began = time.time()
        self.launcher = self.commands.start(*self.command)

    def join(self, node: str) -> None:
        """Let a returned machine join the job."""
        self.commands.start("join", JOB, "--node", node, "-v")

    @property
    def is_running(self) -> bool:
        return self.launcher is not None

    def stop(self) -> bool:
        """Send SIGTERM to the command, and return whether it ran."""
        if self.launcher is None or self.launcher.poll() is not None:
            return False
        self.launcher.send_signal(signal.SIGTERM)
        return True

    def lose_node(self, node: str) -> int:
        """Kill all processes of a node and clear its memory. Return the number of processes."""
        running = [one for one in self.processes(node=node) if one.role not in ("launcher", "coordinator")]
        for one in running:
            one.signal(signal.SIGSTOP)  # no process sends a last message
        for one in running:
            one.signal(signal.SIGKILL)
        self.clear_memory(node)
        return len(running)

    def clear_memory(self, node: str) -> None:
        for path in self.memory(node).iterdir():
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)

    def finished_run(self) -> CommandRun | None:
        """Return the finished run, or ``None`` while the command runs."""
        if self.launcher is None or self.launcher.poll() is None:
            return None
        output = self.folder / f"output-{self.commands.started.index(self.launcher)}"
        words = resume_line(output.read_text(errors="replace"))
        run = CommandRun(self.launcher.returncode, words, self._began, time.time())
        self.runs.append(run)
        self.launcher = None
        return run

    def send_request(self, request: CoordinatorRequest) -> ElasticJobStatus | None:
        """Call the coordinator, and return ``None`` if it does not answer."""
        with contextlib.suppress(ElasticError, OSError):
            run = RunDirectory(self.folder / "run", JOB).read()
            return call_coordinator(run.coordinator, request, job=run.job, secret=run_secret(run), timeout_s=5.0)
        return None

    # -- progress -----------------------------------------------------------------------------------------------------

    def set_limit(self, step: int, *, end: bool = False) -> None:
        if (step, "end" if end else "") != self._limit:
            self._limit = (step, "end" if end else "")
            new = self.diary / "limit.new"
            new.write_text(f"{step}{' end' if end else ''}")
            new.replace(self.diary / "limit")

    @property
    def limit(self) -> int:
        return self._limit[0]

    def read_diary(self) -> None:
        """Read the complete lines that ranks have written since the last call."""
        for path in sorted(self.diary.glob("*.jsonl")):
            at = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                text = file.read()
            lines = text[: text.rfind(b"\n") + 1]
            self._read[path] = at + len(lines)
            for line in lines.splitlines():
                self._add_line(json.loads(line))

    def _add_line(self, line: dict[str, Any]) -> None:
        kind = line.pop("what")
        if kind == "world":
            self.worlds.append(msgspec.convert(line, RankWorld))
            self.last_world = max(self.last_world, (line["run"], line["epoch"]))
        elif kind == "step":
            self.steps.append(msgspec.convert(line, RankStep))
            self.newest = max(self.newest, line["step"])
        elif kind == "safe":
            self.safe.append(msgspec.convert(line, SafeStep))
        elif kind == "sealed":
            self.sealed.append(msgspec.convert(line, Sealed))

    def lines(self) -> list[str]:
        """Return the lines in outputs and logs that report repeated steps."""
        paths = [*self.folder.glob("output-*"), *(one for one in (self.folder / "logs").rglob("*") if one.is_file())]
        lines = (line for path in paths for line in path.read_text(errors="replace").splitlines())
        return [line for line in lines if names_older_step(line)]

    def newest_world_pids(self) -> set[int]:
        """Return the process IDs of all ranks that were in the newest world."""
        return {one.pid for one in self.worlds if (one.run, one.epoch) == self.last_world}

    def processes(self, role: str = "", node: str = "") -> list[JobProcess]:
        return [
            one for one in processes(self.mark) if (not role or one.role == role) and (not node or one.node == node)
        ]

    def step_sums(self) -> dict[tuple[int, int, int], int | str]:
        by_step: dict[tuple[int, int, int], dict[int, RankStep]] = {}
        for one in self.steps:
            by_step.setdefault((one.run, one.epoch, one.step), {})[one.rank] = one
        return {key: _state_sum(list(ranks.values())) for key, ranks in by_step.items() if _is_complete(ranks)}

    # -- the end ------------------------------------------------------------------------------------------------------

    def remaining_processes(self, within_s: float) -> list[str]:
        """Describe the processes that a successful job has not ended within some time."""
        deadline = time.monotonic() + within_s
        while True:
            running = [one for one in self.processes() if one.role != "agent" or not self._may_agent_stay()]
            found = [f"process {one.pid}, a {one.role} of {one.node}: {one.command[:200]}" for one in running]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def _may_agent_stay(self) -> bool:
        """Return whether the agents serve all jobs of their machines and still hold shards."""
        return self.are_agents_shared and bool(self.remaining_memory())

    @property
    def are_agents_shared(self) -> bool:
        """Whether an agent that a killed supervisor started is not the job's own."""
        return len(self.shape.names) == 1

    def remaining_memory(self) -> list[str]:
        """Describe the slots that remain in memory."""
        counts = {node: sum(path.is_file() for path in self.arena(node).glob("slots/*")) for node in self.shape.names}
        return [f"{count} slots of {node}" for node, count in counts.items() if count]

    def keep_logs(self) -> None:
        """Copy the agents' logs, which are in memory, to the folder of logs."""
        for node in self.shape.names:
            for path in self.arena(node).glob("*.log"):
                shutil.copy(path, self.folder / "logs" / f"agent-{node}-{path.name}")

    def close(self) -> None:
        """Kill all processes of the job."""
        for one in self.commands.started:
            if one.poll() is None:
                one.kill()
            one.wait()
        while left := self.processes():
            for one in left:
                one.signal(signal.SIGKILL)
        if self.own_memory:
            for name in self.shape.names:
                unmount(self.memory(name))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def dump_stacks(self) -> None:
        """Let the ranks write their stacks to their logs."""
        for one in self.processes("rank"):
            one.signal(signal.SIGUSR2)


def wait_until(ready: Callable[[], Any], goal: str, within_s: float, tick: Callable[[], None]) -> Any:
    """Return the result of ``ready`` once it is true. Call ``tick`` while waiting."""
    deadline = time.monotonic() + within_s
    while True:
        tick()
        if found := ready():
            return found
        if time.monotonic() > deadline:
            raise HungError(f"the job did not reach {goal} within {within_s:.0f} s")
        time.sleep(0.03)


def _is_complete(ranks: dict[int, RankStep]) -> bool:
    return sorted(ranks) == list(range(next(iter(ranks.values())).size))


def _state_sum(ranks: list[RankStep]) -> int | str:
    total = combine_checksums(RankChecksum(msgspec.convert(one.share, dict[str, ChecksumPart])) for one in ranks)
    return f"replicas differ in {total.diverged_names}" if total.diverged_names else total.value


def mount(place: Path) -> None:
    """Mount a tmpfs of limited size, which can be filled without using up the machine's memory."""
    for folder in (place.parent.parent, place.parent, place):
        folder.mkdir(mode=0o700, exist_ok=True)
    options = f"size={MEMORY_BYTES},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "faults", str(place)], check=True, timeout=200)


def unmount(place: Path) -> None:
    for _ in range(50):
        if not place.is_mount():
            return
        if subprocess.run(["umount", str(place)], capture_output=True, timeout=200).returncode:
            time.sleep(0.1)  # a killed process closes its files a moment later
    subprocess.run(["umount", "-l", str(place)], check=False, timeout=200)


def unmount_leftovers(prefix: str) -> None:
    """Unmount what killed drivers left mounted. A path names its driver as ``PREFIX-PID-...``."""
    for line in Path("/proc/mounts").read_text().splitlines():
        place = line.split()[1]
        owner = re.search(rf"/{re.escape(prefix)}-(\d+)-", place)
        if owner and process_start_time(int(owner[1])) < 0:
            unmount(Path(place))
