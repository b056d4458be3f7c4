"""One seed from beginning to end: its job is started, faults happen, it is brought to its end, and judged."""

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
ELSE = "not on a way"
"""Before anybody noticed, and in steps."""
_BORNE_STEPS = 3
"""After what no world has to end for, so many more steps are seen before anything else happens."""
_MOST_STARTS = 12
_TOGETHER_S = 0.05
_LEFT_S = 60.0


class FaultTiming(msgspec.Struct, frozen=True):
    """One fault, and how the job came out of it."""

    fault: AppliedFault
    seconds: float | None
    """Until the first step that nobody had done before it; ``None`` where none came any more, or the job was stopped.
    """
    stages: dict[str, float] = {}
    """What those seconds were spent on, as the ledger has it; with a clock that was set there is none."""


class SeedOutcome(msgspec.Struct, frozen=True):
    seed: int
    shape: JobShape
    took: tuple[FaultTiming, ...]
    missed: int
    """Faults for which nobody was there when they were due."""
    violations: tuple[Violation, ...]
    seconds: float
    load: float
    """Of the machine, over the last minute of it."""
    hosts: bool = False
    folder: str = ""
    """Where all of it is, where something was wrong."""


Tell = Callable[[str], None]


def reference_steps(steps: int, within_s: float) -> list[ReferenceStep]:
    """What one rank alone learns in so many steps."""
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
            raise RuntimeError(f"the undisturbed run ended with {run.status}: {run.words}; see {folder}")
        order = [int(index) for index in SampleOrder(SAMPLES, SEED, "full").indices(0, steps * BATCH)]
        known = []
        for one in sorted(job.steps, key=lambda one: one.step):
            if one.samples != order[one.step * BATCH : (one.step + 1) * BATCH]:
                raise RuntimeError(f"the undisturbed run did not take its samples in order; see {folder}")
            known.append(
                ReferenceStep(one.loss, one.norm, one.rate, int(sums[one.run, one.epoch, one.step]), one.samples)
            )
    finally:
        job.close()
    job.remove()
    return known


class FaultRun:
    """A job while faults happen to it."""

    def __init__(
        self, job: FaultJob, known: Sequence[ReferenceStep], proxy: FaultProxy | None, patience_s: float, tell: Tell
    ):
        self.job, self.known, self.proxy, self.patience_s, self.tell = job, known, proxy, patience_s, tell
        self.struck: list[tuple[ActiveFault, int, int]] = []
        self.missed = 0
        self.final = 0

    def run(self) -> str:
        """What it hung in; "" where it came to its end."""
        try:
            self.job.start()
            self._wait_until(lambda: self.job.newest >= 1, "its first steps")
            for planned in self.job.plan.faults:
                if planned.after_steps < 0:
                    time.sleep(planned.other * _TOGETHER_S)
                else:
                    self._recovered(planned.after_steps)
                if self.job.limit >= len(self.known) - 2 * AHEAD_STEPS:
                    break
                self._strike(planned)
            self._recovered(_BORNE_STEPS)
            for struck, _, _ in self.struck:
                struck.end()
            self._recovered(_BORNE_STEPS)
            self._finish()
        except HungError as hung:
            self.job.dump_stacks()
            return f"{hung}; it had come to step {self.job.newest}"
        return ""

    def _strike(self, planned: PlannedFault) -> None:
        struck = apply_fault(self.job, planned, self.proxy)
        if struck is None:
            self.missed += 1
            return
        self.job.read_diary()
        self.struck.append((struck, len(self.job.runs), self.job.newest))
        self.tell(f"  {struck.kind.value}: {struck.words}, step {self.job.newest}")

    def _recovered(self, more: int) -> None:
        """A step that nobody had done before the last fault, and some more."""
        before = max((newest for _, _, newest in self.struck), default=-1)
        self._wait_until(lambda: self.job.newest >= before + 1 + more, f"step {before + 1 + more}")

    def _finish(self) -> None:
        self.final = self.job.limit
        self.job.set_limit(self.final, end=True)
        self._wait_until(lambda: not self.job.is_running, f"its end at step {self.final}", ending=True)

    def _wait_until(self, ready: Callable[[], object], what: str, *, ending: bool = False) -> None:
        wait_until(ready, what, self.patience_s, lambda: self._tick(ending=ending))

    def _tick(self, *, ending: bool) -> None:
        job = self.job
        job.read_diary()
        if not ending:
            job.set_limit(min(max(job.limit, job.newest + AHEAD_STEPS), len(self.known)))
        for struck, _, _ in self.struck:
            if struck.due <= time.time():
                struck.end()
        run = job.finished_run()
        if run is None:
            return
        self.tell(f"  the command ended with {run.status}: {run.words[:200]}")
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
    tell: Tell,
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
    one = FaultRun(job, known, proxy, patience_s, tell)
    hung, left, keep = "", [], True
    try:
        with contextlib.suppress(EndedError):
            hung = one.run()
        succeeded = not hung and bool(job.runs) and job.runs[-1].status == 0
        left = job.left_behind(_LEFT_S) if succeeded else []
        job.read_diary()
        faults = tuple(struck.fault(n, run, step) for n, (struck, run, step) in enumerate(one.struck))
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
    new = min((one.at for one in job.steps if one.step > fault.step and one.at > fault.at), default=None)
    if new is None:
        return FaultTiming(fault, None)
    return FaultTiming(fault, new - fault.at, _stages(timeline, fault.at, new) if timeline else {})


def _timeline(ledger: Path) -> Sequence[TimeInterval]:
    try:
        return analyse(read_event_log(ledger).events).timeline
    except (EventLogNotFoundError, OSError):
        return ()


def _stages(timeline: Sequence[TimeInterval], began: float, ended: float) -> dict[str, float]:
    """The parts of that time that the job was on its way into another world, by what its slowest ranks were at."""
    first, last = int(began * 1e6), int(ended * 1e6)
    found: dict[str, float] = {}
    for one in timeline:
        if one.category in (TimeCategory.RECOVERY, TimeCategory.RESIZE) and one.end_us > first and one.start_us < last:
            seconds = (min(one.end_us, last) - max(one.start_us, first)) / 1e6
            found[one.stage] = found.get(one.stage, 0.0) + seconds
    return {**found, ELSE: max(0.0, ended - began - sum(found.values()))}


def stop_on_sigterm() -> None:
    """So that a driver that is ended ends what it has started."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
