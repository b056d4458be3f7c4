"""Scenario of the demo: a job on simulated nodes, its faults and resizes, and its losses by step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from elastic.control.control_messages import ElasticJobStatus, ResizeRequest, StatusRequest
from elastic.control.coordinator_client import call_coordinator
from elastic.control.run_directory import RunDirectory, run_secret
from elastic.errors import ControlPlaneUnavailableError, ElasticError
from tieredckpt.demo import kill_demo_node
from tieredckpt.settings import RUN_DIRECTORY_VARIABLE

T = TypeVar("T")

ELASTIC_DEMO_NODES, ELASTIC_DEMO_NPROC, ELASTIC_DEMO_SPARES = 2, 2, 1
_LIMIT_S = 300.0
_POLL_S = 0.05
PROGRESS_S = 10.0
"""Seconds without output, after which the demo prints its progress."""
_MIN_STEPS = 12
"""Steps of every world before the next change."""


@dataclass(frozen=True)
class DemoAct:
    """One change of the job, and its effect."""

    what: str
    at: float
    """Seconds since the demo began."""
    before: int
    """Newest step at that time."""
    first: int = 0
    """First step after it."""
    seconds: float = 0.0
    """Seconds until that step was completed."""
    ranks: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Bytes that all ranks together read to resume, by tier."""


class DemoFailedError(ElasticError):
    """Raised if an expected event of the demo did not happen."""


class ElasticDemo:
    """Control of the demo: the job's processes, their events, and the changes of the job."""

    limit_s = _LIMIT_S
    """Seconds that the effect of a change may take."""

    def __init__(
        self, folder: Path, memory: Path, environ: Mapping[str, str], print_line: Callable[[str], None]
    ) -> None:
        self.folder, self._print_line = folder, print_line
        self.lines_folder, self.logs = folder / "events", folder / "logs"
        self.lines_folder.mkdir()
        self._run_directory = memory / "run"
        self._environ = {**environ, RUN_DIRECTORY_VARIABLE: str(self._run_directory), "OMP_NUM_THREADS": "1"}
        self._started: list[subprocess.Popen[bytes]] = []
        self._began = time.time()
        self._printed = time.monotonic()
        self.acts: list[DemoAct] = []

    def run(self) -> None:
        """Run the whole scenario, and return when every rank has finished."""
        job = self._start("run", *self._size(), "--job", ELASTIC_DEMO_JOB, "--log-dir", str(self.logs), *self._script())
        self._act("start two nodes, each with two ranks and a spare", lambda _: None, ranks=4)
        self._act("kill a rank; a spare replaces it", self._kill_rank, ranks=4)
        self._act("kill a node; its ranks and its memory are lost", self._kill_node, ranks=2)
        self._act("add a new node", lambda _: self._join(), ranks=4)
        self._act("shrink to one node", lambda _: self._resize(1), ranks=2)
        self._act("grow to all nodes", lambda _: self._resize(None), ranks=4)
        self._finish(job)

    def _act(self, what: str, do: Callable[[list[dict[str, Any]]], None], *, ranks: int) -> None:
        inside = self._newest()
        before = self.newest_step
        at = time.time()
        self._print(what)
        do(inside)
        epoch = inside[0]["epoch"] if inside else -1
        there = self._until(lambda: self._world(ranks, after=epoch), f"{ranks} ranks", what)
        first = there[0]["first"]
        done = self._until(lambda: self._done(first, there[0]["epoch"], ranks), f"step {first}", what)
        tiers: dict[str, int] = {}
        for one in there:
            for tier, count in one["tiers"].items():
                tiers[tier] = tiers.get(tier, 0) + count
        act = DemoAct(what, at - self._began, before, first, max(one["at"] for one in done) - at, ranks, tiers)
        self.acts.append(act)
        self._print(f"  {ranks} ranks completed step {first} after {act.seconds:.1f} s")
        self._until(lambda: self.newest_step >= first + _MIN_STEPS, f"step {first + _MIN_STEPS}", what)

    def _kill_rank(self, inside: list[dict[str, Any]]) -> None:
        os.kill(inside[1]["pid"], signal.SIGKILL)

    def _kill_node(self, inside: list[dict[str, Any]]) -> None:
        victim = inside[-1]
        os.kill(victim["ppid"], signal.SIGKILL)
        kill_demo_node(self._run_directory / ELASTIC_DEMO_JOB / victim["node"] / "agent")

    def _join(self) -> None:
        self._start("join", ELASTIC_DEMO_JOB)

    def _resize(self, nodes: int | None) -> None:
        self._call_coordinator(ResizeRequest(nodes, "the demo"))

    def _finish(self, job: subprocess.Popen[bytes]) -> None:
        """Let the ranks train some more steps, and wait for the job's end."""
        last = self.newest_step + 2 * _MIN_STEPS
        self._print(f"finish with step {last}")
        new = self.lines_folder / f"{LAST_STEP_FILE}.new"
        new.write_text(str(last))
        new.rename(self.lines_folder / LAST_STEP_FILE)
        deadline = time.monotonic() + self.limit_s
        while job.poll() is None:
            self._wait("the job's end", "finish", deadline)
        if job.returncode:
            raise DemoFailedError(f"the job failed with exit code {job.returncode}; see {self.folder}")

    def events(self, event: str) -> list[dict[str, Any]]:
        return [one for one in read_demo_events(self.lines_folder) if one["event"] == event]

    @property
    def newest_step(self) -> int:
        return max((one["step"] for one in self.events("step")), default=-1)

    def _newest(self) -> list[dict[str, Any]]:
        """Return the ranks of the newest world, in order."""
        worlds = self.events("world")
        newest = max((one["epoch"] for one in worlds), default=-1)
        return sorted((one for one in worlds if one["epoch"] == newest), key=lambda one: one["rank"])

    def _world(self, ranks: int, *, after: int) -> list[dict[str, Any]]:
        inside = self._newest()
        good = len(inside) == ranks and inside[0]["size"] == ranks and inside[0]["epoch"] > after
        return inside if good else []

    def _done(self, step: int, epoch: int, ranks: int) -> list[dict[str, Any]]:
        done = [one for one in self.events("step") if one["step"] == step and one["epoch"] == epoch]
        return done if len(done) == ranks else []

    def _until(self, there: Callable[[], T], what: str, act: str) -> T:
        deadline = time.monotonic() + self.limit_s
        while not (found := there()):
            if any(one.poll() is not None for one in self._started[:1]):
                raise DemoFailedError(f"{act}: the job ended before {what}; see {self.folder}")
            self._wait(what, act, deadline)
        return found

    def _wait(self, what: str, act: str, deadline: float) -> None:
        """Sleep for a moment. Prints the awaited event every ``PROGRESS_S`` seconds."""
        if time.monotonic() > deadline:
            raise DemoFailedError(f"{act}: waited {self.limit_s:g} s for {what}; see {self.folder}")
        if time.monotonic() > self._printed + PROGRESS_S:
            newest = self.newest_step
            so_far = f"the newest step is {newest}" if newest >= 0 else "processes start and import torch"
            self._print(f"  [dim]waiting for {what}; {so_far}[/]")
        time.sleep(_POLL_S)

    def _print(self, line: str) -> None:
        self._print_line(f"[dim]{time.time() - self._began:5.1f} s[/]  {line}")
        self._printed = time.monotonic()

    def _size(self) -> tuple[str, ...]:
        nodes = (
            "--simulate-nodes",
            str(ELASTIC_DEMO_NODES),
            "--nnodes",
            f"1:{ELASTIC_DEMO_NODES}",
            "--nproc",
            str(ELASTIC_DEMO_NPROC),
        )
        return (*nodes, "--spares", str(ELASTIC_DEMO_SPARES), "--shrink-after", "0.5", "--grow-after", "0.5")

    def _script(self) -> tuple[str, ...]:
        return ("-m", "elastic.demo.fsdp_trainer", str(self.lines_folder))

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"output-{len(self._started)}").open("wb") as out:
            one = subprocess.Popen(  # noqa: S603 - ours
                [sys.executable, "-m", "elastic", *words],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._started.append(one)
        return one

    def _call_coordinator(self, question: ResizeRequest | StatusRequest) -> ElasticJobStatus:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            run = RunDirectory(self._run_directory, ELASTIC_DEMO_JOB).read()
            try:
                return call_coordinator(run.coordinator, question, job=ELASTIC_DEMO_JOB, secret=run_secret(run))
            except ControlPlaneUnavailableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Stop all processes of the demo."""
        for one in reversed(self._started):
            if one.poll() is None:
                one.terminate()
        for one in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(_LIMIT_S)
            one.kill()
            one.wait()
        for agent in (self._run_directory / ELASTIC_DEMO_JOB).glob("*/agent"):
            kill_demo_node(agent)


def read_demo_events(folder: Path) -> Iterable[dict[str, Any]]:
    """Yield the complete lines of every process. A killed process may leave an incomplete line."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def losses_by_step(steps: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Return the loss of each step from the newest world that did it; all ranks of a world must agree."""
    worlds: dict[int, int] = {}
    found: dict[tuple[int, int], set[str]] = {}
    for one in steps:
        epoch = one.get("epoch", 0)
        worlds[one["step"]] = max(worlds.get(one["step"], -1), epoch)
        found.setdefault((one["step"], epoch), set()).add(one["loss"])
    split = [step for (step, _), losses in found.items() if len(losses) > 1]
    if split:
        raise DemoFailedError(f"ranks of one world found different losses at step {split[0]}")
    return {step: found[step, epoch].pop() for step, epoch in sorted(worlds.items())}


ELASTIC_DEMO_JOB = "elastic-demo"
LAST_STEP_FILE = "last-step"
"""File that names the last step. Without it the ranks continue to train."""
