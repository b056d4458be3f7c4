"""Section "golden": all kinds of faults, and resizes, on NCCL with several ranks on one GPU.

``python -m tests.gpu.golden [cpu|cuda] [SECONDS] [WORD ...]`` runs it alone, or only the jobs whose names have one of
the words. Without a GPU the same jobs run on the backend that does what NCCL does.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from tests.gpu.golden_jobs import (
    Event,
    GoldenEvents,
    GoldenJob,
    GoldenRun,
    faulty_jobs,
    judged_job,
    judged_quiet,
    quiet_jobs,
    same_tree,
)
from tests.gpu.report import Check, Figure
from tests.gpu.supervise import processes_with
from tests.support.elastic_runs import ROOT, ElasticRun, kill
from tests.support.golden_runs import POLICY

TRAINER = ROOT / "tests/gpu/golden_trainer.py"
IN_A_COLLECTIVE = "tests/e2e/elastic/test_aborted_collectives.py"
HANG_S, FIRST_STEP_S = 6.0, 60.0
SLOT_S, LEAST_SLOT_S = 75.0, 22.0
"""Most and least seconds that one job gets for its start and its faults."""
LAST_FAULT_S = 25.0
"""Seconds that a job may take after its slot: its last fault may have just happened."""
_END_S = 5.0
"""Seconds that a job usually takes after its slot."""
_CORES = 4
"""Cores that one run needs while its processes start."""
_POLL_S = 0.1
_DEMO, _DEMO_MARK = "elastic demo", "GOLDEN_DEMO"

Finding = Check | Figure


class RunningJob(ElasticRun):
    """One run in a folder of its own."""

    def __init__(self, folder: Path, job: GoldenJob, kind: str) -> None:
        super().__init__(folder)
        self.job, self._kind = job, kind
        self.events_folder = folder / "events"
        self.events_folder.mkdir()
        self._answered: set[str] = set()
        """Faults that this process has reacted to."""
        self.environ |= {
            "OMP_NUM_THREADS": "1",
            "TIEREDCKPT_AGENT_DIRECTORY": str(folder / "agent"),
            "TIEREDCKPT_AGENT_BUDGET": "256MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "1",
            "TIEREDCKPT_AGENT_JOB_TTL_S": "60",
        }

    def begin(self, until: float) -> subprocess.Popen[bytes]:
        job, plan, policy = self.job, self.folder / "job.json", self.folder / "policy.yaml"
        plan.write_bytes(msgspec.json.encode(job))
        policy.write_text(POLICY)
        nodes = f"1:{job.nodes}" if job.resizes else str(job.nodes)
        simulated = ("--simulate-nodes", str(job.nodes + job.spare_nodes)) if job.nodes > 1 else ()
        hangs = any(one.kind in ("hang", "sigstop", "hold_gil") for one in job.faults)
        patience = (str(HANG_S), str(FIRST_STEP_S)) if hangs else ("off", "off")
        return self.start(
            *("run", "-v", "--job", self.name, "--log-dir", str(self.folder / "logs"), "--policy", str(policy)),
            *("--nnodes", nodes, *simulated, "--nproc", str(job.nproc), "--spares", str(job.spares)),
            *("--grow-after", "0.2", "--max-restarts", "1000"),
            *("--hang-timeout", patience[0], "--first-step-timeout", patience[1]),
            *(str(TRAINER), str(self.events_folder), self._kind, str(until), str(plan)),
        )

    def wait(self, process: subprocess.Popen[bytes], limit_s: float) -> str:
        """Wait for the job's end and bring lost nodes back meanwhile; return why the job failed, or nothing."""
        deadline = time.monotonic() + limit_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                return f"not finished in {limit_s:.0f} s"
            events = self.read_events()
            self._rejoin(events)
            self._resize(events)
            time.sleep(_POLL_S)
        return f"exit code {process.returncode}" if process.returncode else ""

    def read_events(self) -> list[Event]:
        paths = list(self.events_folder.glob("*.jsonl"))
        lines = [line for path in paths for line in path.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _rejoin(self, events: Sequence[Event]) -> None:
        for one in events:
            lost = one["what"] == "fault" and one["kind"] == "node" and one["name"] not in self._answered
            if lost and not self.pids('"type":"node"', f'"node":"{one["node"]}"'):
                self._answered.add(one["name"])
                self.start("join", self.name, "--node", one["node"], "-v")

    def _resize(self, events: Sequence[Event]) -> None:
        """Request a resize once all ranks hold."""
        for fault in self.job.faults:
            holds = [one for one in events if one["what"] == "holds" and one["name"] == fault.file]
            if fault.kind != "resize" or fault.file in self._answered or not holds:
                continue
            epoch = max(one["epoch"] for one in holds)
            size = next(one["size"] for one in events if one["what"] == "entered" and one["epoch"] == epoch)
            if len({one["rank"] for one in holds if one["epoch"] == epoch}) == size:
                self._answered.add(fault.file)
                named = {"name": fault.file, "kind": "resize", "step": fault.step, "epoch": epoch, "rank": 0}
                line = {"what": "fault", "at": time.time(), "pid": 0, **named}
                with (self.events_folder / "resizes.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                self.start("resize", "--nodes", str(fault.nodes or "max"), "--job", self.name)

    def end(self) -> None:
        """Kill all processes of the job."""
        for one in self.started:
            if one.poll() is None:
                one.kill()
                one.wait()
        while pids := self.pids():
            for pid in pids:
                with_lost_pid(kill, pid)
            time.sleep(_POLL_S)


def with_lost_pid(call: Callable[[int], None], pid: int) -> None:
    """Call with a process that may have ended."""
    try:
        call(pid)
    except ProcessLookupError:
        return


def run_job(job: GoldenJob, kind: str, out: Path, slot_s: float, limit_s: float) -> GoldenRun:
    """Run one job and end all its processes."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="golden-"))  # a short path: sockets are in it
    running = RunningJob(folder, job, kind)
    try:
        process = running.begin(time.time() + slot_s)
        why = running.wait(process, limit_s)
        events = GoldenEvents(running.read_events())
    finally:
        running.end()
    if why:
        kept = out / job.name.replace(",", "").replace(" ", "-")
        for name in ("logs", "events"):
            shutil.copytree(folder / name, kept / name, dirs_exist_ok=True)
        (kept / "output.txt").write_text(running.output())
        why += f"; its logs are in {kept}"
    shutil.rmtree(folder, ignore_errors=True)
    return GoldenRun(job, time.monotonic() - began, why, events)


def run_demo(out: Path, limit_s: float, where: str) -> list[Finding]:
    """Run ``elastic demo``: it compares all its losses itself."""
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    environ = {**os.environ, _DEMO_MARK: folder.name, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "elastic", "demo", "--json", "--keep", str(folder / "kept")]
    began, why, found = time.monotonic(), "", list[Finding]()
    with (out / "demo.json").open("wb") as answer, (out / "demo.txt").open("wb") as told:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=answer, stderr=told)
    try:
        status = process.wait(limit_s)
        why = f"exit code {status}; {out}/demo.txt has its output" if status else ""
    except subprocess.TimeoutExpired:
        why = f"not finished in {limit_s:.0f} s; {out}/demo.txt has its output"
        process.kill()
        process.wait()
    finally:
        for pid in processes_with(_DEMO_MARK, folder.name):
            with_lost_pid(lambda one: os.kill(one, signal.SIGKILL), pid)
    if not why:
        summary = json.loads((out / "demo.json").read_text())
        why = "" if summary["equal"] else f"steps {summary['different'][:5]} differ"
        for act in summary.get("acts", []):
            found.append(Figure(f"{_DEMO}: {act['what']}", round(act["seconds"], 3), "s", where))
    shutil.rmtree(folder, ignore_errors=True)
    outcome = "failed" if why else "passed"
    return [Check(f"{_DEMO}: all losses and the state", outcome, round(time.monotonic() - began, 1), why), *found]


def run_in_collective(out: Path, limit_s: float) -> list[Finding]:
    """Run the test that kills a rank inside an all-reduce while the host runs ahead of the device."""
    name = "a rank is killed inside an all-reduce, the host runs ahead"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "device", IN_A_COLLECTIVE]
    began = time.monotonic()
    with (out / "in-collective.txt").open("wb") as told:
        process = subprocess.Popen(command, cwd=ROOT, stdout=told, stderr=told, start_new_session=True)
    try:
        status = process.wait(limit_s)
        why = f"exit code {status}; {out}/in-collective.txt has its output" if status else ""
    except subprocess.TimeoutExpired:
        why = f"not finished in {limit_s:.0f} s; {out}/in-collective.txt has its output"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return [Check(name, "failed" if why else "passed", round(time.monotonic() - began, 1), why)]


class Budget:
    """The time of the section, divided among the jobs that have not begun."""

    def __init__(self, limit_s: float, workers: int, jobs: int) -> None:
        self._until, self._workers, self._left = time.monotonic() + limit_s, workers, jobs
        self._lock = threading.Lock()

    def slot_s(self) -> tuple[float, float]:
        """Return the next job's seconds for faults (0: do not start it) and all remaining seconds."""
        with self._lock:
            jobs, self._left = self._left, self._left - 1
        left_s = self._until - time.monotonic()
        slot_s = min(SLOT_S, max(LEAST_SLOT_S, left_s * self._workers / jobs - _END_S))
        slot_s = min(slot_s, left_s - LAST_FAULT_S)
        return (slot_s, left_s) if slot_s >= LEAST_SLOT_S else (0.0, left_s)


def run(device: str, out: Path, limit_s: float, words: Sequence[str] = ()) -> Iterator[Finding]:
    """Run the jobs for at most ``limit_s`` seconds; report checks without time left as ``not run``."""
    out.mkdir(parents=True, exist_ok=True)
    kind = device.partition(":")[0]
    where = "CPU, a backend that does what NCCL does" if kind == "cpu" else f"{device}, ranks on one GPU, NCCL"
    faulty = [one for one in faulty_jobs() if not words or any(word in one.name for word in words)]
    quiet = quiet_jobs(faulty)
    workers = max(1, min(4, (os.cpu_count() or 1) // _CORES))
    others = 0 if words else 2
    budget = Budget(limit_s, workers, len(quiet) + len(faulty) + others)

    def begin(job: GoldenJob) -> GoldenRun | None:
        slot_s, left_s = budget.slot_s()
        most_s = min(slot_s + LAST_FAULT_S, left_s) if job.faults else left_s  # nothing counts without its reference
        return run_job(job, kind, out, slot_s, most_s) if slot_s else None

    def other(name: str, call: Callable[[float], list[Finding]]) -> list[Finding]:
        slot_s, left_s = budget.slot_s()
        return call(left_s) if slot_s else [Check(name, "not run", why=f"no time left of {limit_s:g} s")]

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        references = [pool.submit(begin, job) for job in quiet]
        ran = [pool.submit(begin, job) for job in faulty[:5]]
        told = [pool.submit(other, _DEMO, lambda left_s: run_demo(out, left_s, where))] if others else []
        ran += [pool.submit(begin, job) for job in faulty[5:]]
        if others and kind != "cpu":
            told.append(pool.submit(other, IN_A_COLLECTIVE, lambda left_s: run_in_collective(out, left_s)))
        found = [one for one in (future.result() for future in references) if one is not None]
        for one in found:
            yield from judged_quiet(one)
        yield from same_tree(found)
        by_ranks = {one.job.ranks: one for one in found}
        for job, future in zip(faulty, ran, strict=True):
            one = future.result()
            if one is None:
                yield Check(job.name, "not run", why=f"no time left of {limit_s:g} s")
            else:
                yield from judged_job(one, by_ranks.get(job.ranks), where)
        for future in told:
            yield from future.result()
    if others and kind == "cpu":
        yield Check(IN_A_COLLECTIVE, "not run", why="no accelerator: make test runs it on a fake of NCCL")


def main(arguments: Sequence[str]) -> int:
    kind = arguments[0] if arguments else "cpu"
    limit_s = float(arguments[1]) if len(arguments) > 1 else 180.0
    is_good = True
    for one in run(kind, ROOT / "build/gpu/golden", limit_s, arguments[2:]):
        if isinstance(one, Check):
            is_good = is_good and one.outcome != "failed"
            print(f"{one.outcome:8} {one.seconds:6.1f} s  {one.name} {one.why}", flush=True)
        else:
            print(f"                     {one.name}: {one.value:.2f} {one.unit}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
