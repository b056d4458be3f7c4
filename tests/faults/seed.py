"""The run of one seed: the job starts, faults are applied, the job ends and is judged."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from elastic.samples import SampleOrder
from tests.faults.hosts import HostJob
from tests.faults.job import AHEAD_STEPS, EndedError, FaultJob, HungError, wait_until
from tests.faults.judge import AppliedFault, CommandRun, Evidence, ReferenceStep, Violation, judge
from tests.faults.schedule import FaultKind, FaultPlan, JobShape, PlannedFault
from tests.faults.strike import ActiveFault, apply_fault
from tests.faults.training import BATCH
from tests.support.fault_proxy import FaultProxy
from tests.support.golden_training import SAMPLES, SEED
from tests.support.leaks import process_prefix
from tests.support.s3 import BUCKET
from tieredckpt.errors import EventLogNotFoundError
from tieredckpt.event_log.log_reader import read_event_log
from tieredckpt.goodput import analyse
from tieredckpt.goodput.analysis_result import TimeCategory, TimeInterval

PREFIX = "faults-test"
ELSE = "detection and steps"
_BREAKS_WORLD = (
    FaultKind.RANK_KILLED,
    FaultKind.RANK_SEGFAULT,
    FaultKind.RANK_OUT_OF_MEMORY,
    FaultKind.SUPERVISOR_KILLED,
    FaultKind.NODE_LOST,
)
"""Faults after which only a step of a later world counts as a recovery."""
"""Stage of the seconds outside a recovery: until the fault is detected, and in training steps."""
_CALM_STEPS = 3
"""New steps to wait for after the last fault."""
_MOST_STARTS = 12
_TOGETHER_S = 0.05
_LEFT_S = 60.0


class FaultTiming(msgspec.Struct, frozen=True):
    """One fault and the time of the recovery."""

    fault: AppliedFault
    seconds: float | None
    """Seconds until the first new step; ``None`` without a new step or for a stopped job."""
    stages: dict[str, float] = {}
    """Seconds of the recovery by stage, according to the event log. Empty if the seed sets clocks."""


class SeedOutcome(msgspec.Struct, frozen=True):
    seed: int
    shape: JobShape
    took: tuple[FaultTiming, ...]
    missed: int
    """Faults that had no target when they were due."""
    violations: tuple[Violation, ...]
    seconds: float
    load: float
    """The machine's load average over the last minute."""
    hosts: bool = False
    folder: str = ""
    """Folder of the job, which is kept if the job broke a rule."""


Log = Callable[[str], None]


def reference_steps(steps: int, within_s: float) -> list[ReferenceStep]:
    """Train one rank for a number of steps without faults, and return the results of each step."""
    shape = JobShape(1, 0, 1, 0, "ddp", 20)
    folder = Path(tempfile.mkdtemp(prefix=process_prefix("faults")))
    job = FaultJob(folder, FaultPlan(-1, shape, ()))
    try:
        job.set_limit(steps, end=True)
        job.start()
        run = wait_until(job.finished_run, "its end", within_s, job.read_diary)
        job.read_diary()
        sums = job.step_sums()
        if run.status != 0 or len(job.steps) != steps or not all(isinstance(one, int) for one in sums.values()):
            raise RuntimeError(f"The undisturbed run ended with status {run.status}: {run.words}. See {folder}.")
        order = [int(index) for index in SampleOrder(SAMPLES, SEED, "full").indices(0, steps * BATCH)]
        known = []
        for one in sorted(job.steps, key=lambda one: one.step):
            if one.samples != order[one.step * BATCH : (one.step + 1) * BATCH]:
                raise RuntimeError(f"The undisturbed run did not read its samples in order. See {folder}.")
            known.append(
                ReferenceStep(one.loss, one.norm, one.rate, int(sums[one.run, one.epoch, one.step]), one.samples)
            )
    finally:
        job.close()
    job.remove()
    return known


class FaultRun:
    """A job and the faults applied to it."""

    def __init__(
        self, job: FaultJob, known: Sequence[ReferenceStep], proxy: FaultProxy | None, patience_s: float, log: Log
    ):
        self.job, self.known, self.proxy, self.patience_s, self.log = job, known, proxy, patience_s, log
        self.applied: list[tuple[ActiveFault, int, int]] = []
        self.missed = 0
        self.final = 0

    def run(self) -> str:
        """Run the job with its faults. Return where it hung, or "" if it ended."""
        try:
            self.job.start()
            self._wait_until(lambda: self.job.newest >= 1, "its first steps")
            for planned in self.job.plan.faults:
                if planned.after_steps < 0:
                    time.sleep(planned.other * _TOGETHER_S)
                else:
                    self._wait_for_new_steps(planned.after_steps)
                if self.job.limit >= len(self.known) - 2 * AHEAD_STEPS:
                    break
                self._apply(planned)
            self._wait_for_new_steps(_CALM_STEPS)
            for fault, _, _ in self.applied:
                fault.end()
            self._wait_for_new_steps(_CALM_STEPS)
            self._finish()
        except HungError as hung:
            self.job.dump_stacks()
            return f"{hung}; its newest step was {self.job.newest}"
        return ""

    def _apply(self, planned: PlannedFault) -> None:
        fault = apply_fault(self.job, planned, self.proxy)
        if fault is None:
            self.missed += 1
            return
        self.job.read_diary()
        self.applied.append((fault, len(self.job.runs), self.job.newest))
        self.log(f"  {fault.kind.value}: {fault.words}, step {self.job.newest}")

    def _wait_for_new_steps(self, more: int) -> None:
        """Wait for the first step after the newest one before a fault, and some more."""
        before = max((newest for _, _, newest in self.applied), default=-1)
        self._wait_until(lambda: self.job.newest >= before + 1 + more, f"step {before + 1 + more}")

    def _finish(self) -> None:
        self.final = self.job.limit
        self.job.set_limit(self.final, end=True)
        self._wait_until(lambda: not self.job.is_running, f"its end at step {self.final}", ending=True)

    def _wait_until(self, ready: Callable[[], object], goal: str, *, ending: bool = False) -> None:
        wait_until(ready, goal, self.patience_s, lambda: self._tick(ending=ending))

    def _tick(self, *, ending: bool) -> None:
        job = self.job
        job.read_diary()
        if not ending:
            job.set_limit(min(max(job.limit, job.newest + AHEAD_STEPS), len(self.known)))
        for fault, _, _ in self.applied:
            if fault.due <= time.time():
                fault.end()
        run = job.finished_run()
        if run is None:
            return
        self.log(f"  the command ended with status {run.status}: {run.words[:200]}")
        if run.status in (7, 8) and len(job.runs) < _MOST_STARTS:
            job.start()
        elif not (ending and run.status == 0):
            raise EndedError


def run_seed(
    plan: FaultPlan,
    known: Sequence[ReferenceStep],
    *,
    proxy: FaultProxy | None,
    patience_s: float,
    log: Log,
    hosts: bool = False,
) -> SeedOutcome:
    began = time.time()
    folder = Path(tempfile.mkdtemp(prefix=process_prefix("faults")))
    durable = {"": "", "directory": str(folder / "durable"), "s3": f"s3://{BUCKET}/{folder.name}"}[plan.shape.durable]
    if hosts:
        job: FaultJob = HostJob(folder, plan)
    else:
        endpoint = proxy.endpoint if proxy is not None else ""
        job = FaultJob(folder, plan, durable=durable, endpoint=endpoint, own_memory=os.getuid() == 0)
    one = FaultRun(job, known, proxy, patience_s, log)
    hung, left, keep = "", [], True
    try:
        with contextlib.suppress(EndedError):
            hung = one.run()
        succeeded = not hung and bool(job.runs) and job.runs[-1].status == 0
        left = job.remaining_processes(_LEFT_S) if succeeded else []
        job.read_diary()
        faults = tuple(fault.fault(n, run, step) for n, (fault, run, step) in enumerate(one.applied))
        runs = job.runs or [CommandRun(None, "", began, time.time())]
        evidence = Evidence(
            job.worlds, job.steps, job.safe, faults, runs, job.step_sums(), job.sealed, job.lines(),
            one.final if succeeded else 0, left, job.remaining_memory() if succeeded else [], hung,
        )  # fmt: skip
        violations = tuple(judge(evidence, known, SAMPLES))
        timeline = () if plan.clocks else _timeline(job.folder / "ledger")
        took = tuple(_fault_timing(job, fault, timeline) for fault in faults)
        keep = bool(violations)
    finally:
        if keep:
            job.keep_logs()
        if proxy is not None:
            proxy.clear()
        job.close()
        if not keep:
            job.remove()
    load = os.getloadavg()[0]
    return SeedOutcome(
        plan.seed,
        plan.shape,
        took,
        one.missed,
        violations,
        time.time() - began,
        load,
        hosts,
        str(folder) if keep else "",
    )


def _fault_timing(job: FaultJob, fault: AppliedFault, timeline: Sequence[TimeInterval]) -> FaultTiming:
    if fault.kind is FaultKind.JOB_STOPPED:
        return FaultTiming(fault, None)
    later = {(one.run, one.epoch) for one in job.worlds if one.at > fault.at} if fault.kind in _BREAKS_WORLD else ()
    new = min(
        (
            one.at
            for one in job.steps
            if one.step > fault.step and one.at > fault.at and (not later or (one.run, one.epoch) in later)
        ),
        default=None,
    )
    if new is None:
        return FaultTiming(fault, None)
    return FaultTiming(fault, new - fault.at, _stages(timeline, fault.at, new) if timeline else {})


def _timeline(ledger: Path) -> Sequence[TimeInterval]:
    try:
        return analyse(read_event_log(ledger).events).timeline
    except (EventLogNotFoundError, OSError):
        return ()


def _stages(timeline: Sequence[TimeInterval], began: float, ended: float) -> dict[str, float]:
    """Return the seconds of recoveries and resizes in an interval, by the stage of the slowest ranks."""
    first, last = int(began * 1e6), int(ended * 1e6)
    found: dict[str, float] = {}
    for one in timeline:
        if one.category in (TimeCategory.RECOVERY, TimeCategory.RESIZE) and one.end_us > first and one.start_us < last:
            seconds = (min(one.end_us, last) - max(one.start_us, first)) / 1e6
            found[one.stage] = found.get(one.stage, 0.0) + seconds
    return {**found, ELSE: max(0.0, ended - began - sum(found.values()))}


def stop_on_sigterm() -> None:
    """Raise on SIGTERM, so that the driver ends the processes that it started."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
