"""Section "golden": a rank is killed on NCCL, two ranks on one GPU; every loss compared bit for bit.

``python -m tests.gpu.golden [cpu|cuda] [SECONDS]`` runs it alone. Without a GPU the same cases run on the backend that
does what NCCL does.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.report import Check, Figure
from tests.support.elastic_runs import ROOT, ElasticRun, kill

TRAINER = ROOT / "tests/gpu/golden_trainer.py"
RANKS, TOTAL, FAULT_STEP = 2, 10, 5
CASE_S = 60.0
"""Seconds that one run may take."""
_CORES = 5
"""Cores that one run needs while its processes start."""
STAGES = ("leaves", "entered", "restored", "step")
"""Events of the survivor after the fault."""
GOAL_S = 2.0
"""Seconds from the fault to the next world with a warm spare."""


@dataclass(frozen=True)
class Case:
    """One run."""

    how: str
    when: str = "none"
    spares: int = 0

    @property
    def name(self) -> str:
        if self.when == "none":
            return f"{self.how}, no fault"
        return f"{self.how}, killed {self.when} the backward pass, {self.spares} spares"


CASES = (
    Case("ddp"),
    *(Case("ddp", when, spares) for spares in (1, 0) for when in ("inside", "before", "after")),
    Case("fsdp"),
    Case("fsdp", "inside", 1),
    Case("fsdp", "before", 0),
)
"""In the order of their worth, where the time is not enough for all."""


@dataclass(frozen=True)
class Ran:
    """The events of one run."""

    case: Case
    seconds: float
    why: str
    """Why it failed, or nothing."""
    events: list[dict[str, Any]]

    def of(self, what: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["what"] == what]

    @property
    def losses(self) -> dict[tuple[int, int], set[str]]:
        found: dict[tuple[int, int], set[str]] = {}
        for one in self.of("step"):
            found.setdefault((one["step"], one["rank"]), set()).add(one["loss"])
        return found

    @property
    def sums(self) -> list[tuple[int, int]]:
        return sorted((one["rank"], one["sum"]) for one in self.of("done"))

    def stages_s(self) -> dict[str, float]:
        """Seconds from the fault to each stage of the survivor."""
        fault = self.of("fault")
        if not fault:
            return {}
        at, dead = fault[0]["at"], fault[0]["pid"]
        survivors = {one["pid"] for one in self.of("entered") if one["at"] < at} - {dead}
        found = {}
        for stage in STAGES:
            later = [one["at"] for one in self.of(stage) if one["at"] > at and one["pid"] in survivors]
            if stage != "leaves":
                entered = [one["epoch"] for one in self.of("entered") if one["at"] > at]
                newest = min(entered, default=1)
                later = [one["at"] for one in self.of(stage) if one["epoch"] >= newest and one["pid"] in survivors]
            if later:
                found[stage] = min(later) - at
        return found


def run_case(case: Case, kind: str, out: Path, limit_s: float) -> Ran:
    """Run one case in a job of its own, and end all its processes."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="golden-"))  # a short path: sockets are in it
    job, why = ElasticRun(folder), ""
    events = folder / "events"
    events.mkdir()
    job.environ |= {
        "OMP_NUM_THREADS": "1",
        "TIEREDCKPT_AGENT_DIRECTORY": str(folder / "agent"),
        "TIEREDCKPT_AGENT_BUDGET": "256MiB",
        "TIEREDCKPT_AGENT_LINGER_S": "1",
    }
    try:
        process = job.start(
            *("run", "-v", "--job", job.name, "--log-dir", str(folder / "logs"), "--nnodes", "1"),
            *("--nproc", str(RANKS), "--spares", str(case.spares), "--max-restarts", "3", str(TRAINER), str(events)),
            *(case.how, kind, str(TOTAL), str(FAULT_STEP), case.when, str(RANKS + case.spares)),
        )
        try:
            status = process.wait(limit_s)
            why = f"status {status}" if status else ""
        except subprocess.TimeoutExpired:
            why = f"not finished in {limit_s:.0f} s"
        found = _read(events)
    finally:
        for one in job.started:
            if one.poll() is None:
                one.kill()
                one.wait()
        for pid in job.pids():
            kill(pid)
    if why:
        kept = out / case.name.replace(", ", "-").replace(" ", "-")
        shutil.copytree(folder / "logs", kept, dirs_exist_ok=True)
        (kept / "output.txt").write_text(job.output())
        why += f"; its logs are in {kept}"
    shutil.rmtree(folder, ignore_errors=True)
    return Ran(case, time.monotonic() - began, why, found)


def _read(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda one: one["at"])


def judged(ran: Ran, quiet: Ran | None, where: str) -> list[Check | Figure]:
    """Compare a run with the one without a fault, and report its stages."""
    problems = [ran.why] if ran.why else []
    if quiet is None or quiet.why:
        problems.append("the run without a fault failed: nothing to compare with")
    elif not ran.why:
        expected = quiet.losses
        wrong = sorted(key for key, one in ran.losses.items() if one != expected.get(key))
        missing = sorted(set(expected) - set(ran.losses))
        problems += [f"other losses at (step, rank) {wrong[:5]}"] if wrong else []
        problems += [f"no losses at (step, rank) {missing[:5]}"] if missing else []
        problems += [] if ran.sums == quiet.sums and ran.sums else ["the final parameters differ"]
    stages = ran.stages_s()
    if ran.case.when != "none" and not ran.why:
        problems += [] if stages else ["no fault happened"]
        problems += [] if "step" in stages else ["the survivor did not resume"]
    found: list[Check | Figure] = [
        Check(ran.case.name, "failed" if problems else "passed", round(ran.seconds, 1), "; ".join(problems))
    ]
    found += [Figure(f"{ran.case.name}: fault to {name}", value, "s", where) for name, value in stages.items()]
    return found


def run(device: str, out: Path, limit_s: float) -> list[Check | Figure]:
    """Run the cases for at most ``limit_s`` seconds; a case without time left is ``not run``."""
    out.mkdir(parents=True, exist_ok=True)
    kind = device.partition(":")[0]
    where = "CPU, a backend that does what NCCL does" if kind == "cpu" else f"{device}, {RANKS} ranks on one GPU, NCCL"
    until = time.monotonic() + limit_s
    workers = max(1, min(3, (os.cpu_count() or 1) // _CORES))

    def begin(case: Case) -> Ran | None:
        left_s = until - time.monotonic()
        return run_case(case, kind, out, min(CASE_S, left_s - 2)) if left_s > CASE_S / 4 else None

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        ran = list(pool.map(begin, CASES))
    quiet = {one.case.how: one for one in ran if one is not None and one.case.when == "none"}
    found: list[Check | Figure] = []
    for case, one in zip(CASES, ran, strict=True):
        if one is None:
            found.append(Check(case.name, "not run", why=f"no time left of {limit_s:g} s"))
        else:
            found += judged(one, quiet.get(case.how), where)
    return found


def main(arguments: Sequence[str]) -> int:
    kind = arguments[0] if arguments else "cpu"
    limit_s = float(arguments[1]) if len(arguments) > 1 else 180.0
    found = run(kind, ROOT / "build/gpu/golden", limit_s)
    for one in found:
        if isinstance(one, Check):
            print(f"{one.outcome:8} {one.seconds:6.1f} s  {one.name} {one.why}")
        else:
            print(f"                     {one.name}: {one.value:.2f} {one.unit}")
    return 1 if any(isinstance(one, Check) and one.outcome == "failed" for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
