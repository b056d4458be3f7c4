"""Jobs of :mod:`tests.support.golden_training` with faults, compared with a run without faults."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic.fault_injection import FaultPlan, InjectionKind, InjectionPhase
from elastic.fault_injection.fault_actions import InjectionRecord
from elastic.fault_injection.fault_spec import INJECT_VARIABLE, NAN_PHASES
from elastic.reshard.state_checksum import ChecksumPart, RankChecksum, combine_checksums
from elastic.samples import SampleOrder
from tests.support.elastic_runs import ROOT, ElasticRun, kill
from tests.support.golden_training import BATCH, SAMPLES, SEED, ProcessSize
from tests.support.injections import injected_faults

HANG_KINDS = frozenset({InjectionKind.SIGSTOP, InjectionKind.HOLD_GIL, InjectionKind.HANG})
"""Faults that only a hang timeout detects."""
NON_FATAL_KINDS = frozenset({InjectionKind.AGENT, InjectionKind.SLOW})
"""Faults that do not end a world."""
TRAINER = ROOT / "tests/support/golden_training.py"
NPROC = {"ddp": 1, "fsdp": 1, "hsdp": 2, "plain": 1}
"""Ranks per node. Two nodes train and a third one is a spare."""
EVERY = {"ddp": 4, "fsdp": 1, "hsdp": 1, "plain": 4}
"""Save interval in steps. Steps since the last save are copied from a live rank or repeated."""
GAP = 3
"""Steps between two faults: enough for the hang detector to see progress before the next one."""
LAST_STEPS = 4
"""Minimum number of steps after the last fault.

Longer save intervals add ``2 * (EVERY - 1)`` steps: only a world's second save is sealed in the background.
"""
HANG_S, FIRST_S, SETTLE_S = 5.0, 30.0, 5.0

POLICY = """\
num_restart_before_full_job_restart: null
max_full_job_restarts: null
max_num_repeat_offenders_to_avoid: 0
restart_timeout_s: 90
abort_timeout_s: 15
"""


class GoldenRun(ElasticRun):
    """One job, its fault plan and its logs."""

    def __init__(self, folder: Path, name: str, how: str, faults: FaultPlan, *, backend: str = "gloo") -> None:
        super().__init__(folder, name)
        self.how, self.faults, self.backend = how, faults, backend
        steps = [one.step for one in faults.injections if one.step is not None]
        self.total = max(steps, default=0) + LAST_STEPS + 2 * (EVERY[how] - 1)
        self.environ |= {
            "OMP_NUM_THREADS": "1",
            "TIEREDCKPT_AGENT_DIRECTORY": str(folder / "agent"),  # used by one-node jobs, instead of the user's own
            "TIEREDCKPT_AGENT_BUDGET": "64MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "1",
            "TIEREDCKPT_AGENT_JOB_TTL_S": "60",  # keeps shards while all processes restart
            "TIEREDCKPT_EVENT_LOG": str(folder / "ledger"),
        }
        self.diary = folder / "diary"
        self.diary.mkdir(parents=True)
        self.record = InjectionRecord(folder / "run" / name)
        self._back: set[str] = set()
        self._joined = itertools.count()

    def start_run(self, nodes: int = 2, spare_nodes: int = 1, *, settle_s: float = SETTLE_S, total: int | None = None):
        self.total = total or self.total
        plan, policy = self.folder / "faults.json", self.folder / "policy.yaml"
        plan.write_text(self.faults.encode())
        policy.write_text(POLICY)
        if self.faults.injections:
            self.environ[INJECT_VARIABLE] = f"file:{plan}"
        hangs = any(one.kind in HANG_KINDS for one in self.faults.injections)
        patience = ("--hang-timeout", str(HANG_S), "--first-step-timeout", str(FIRST_S)) if hangs else ()
        return self.start(
            *("run", "-v", "--job", self.name, "--log-dir", str(self.folder / "logs"), "--policy", str(policy)),
            *("--nnodes", str(nodes), "--simulate-nodes", str(nodes + spare_nodes), "--nproc", str(NPROC[self.how])),
            *("--spares", "1" if spare_nodes else "0", "--max-restarts", "1000000", "--grow-after", "0.2", *patience),
            *(str(TRAINER), str(self.diary), str(self.total), self.how, str(settle_s), str(EVERY[self.how])),
            self.backend,
        )

    def wait_finished(self, run: Any, within_s: float) -> None:
        """Wait until the job ends; restart lost machines meanwhile."""
        deadline = time.monotonic() + within_s
        while run.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not end in {within_s:g} s: {self.failure_report()}")
            self.restart_lost_nodes()
            time.sleep(0.2)
        assert run.returncode == 0, self.failure_report()

    def restart_lost_nodes(self) -> None:
        for one in injected_faults(self.record):
            lost = one.injection.kind is InjectionKind.NODE and one.injection.name not in self._back
            if lost and not self.pids('"type":"node"', f'"node":"{one.node}"'):
                self._back.add(one.injection.name)
                self.start("join", self.name, "--node", one.node, "-v")

    def failure_report(self) -> str:
        """Return the injected faults and the ends of output and logs."""
        done = [
            f"{one.injected_at:.1f} {one.injection}: step {one.step}, rank {one.rank}"
            for one in injected_faults(self.record)
        ]
        logs = sorted((self.folder / "logs").glob("*/*.log"), key=lambda path: path.stat().st_mtime)[-4:]
        words = "\n".join(f"== {path}\n{path.read_text(errors='replace')[-2000:]}" for path in logs)
        return f"{self.folder}\ninjected:\n" + "\n".join(done) + f"\n{self.output()[-6000:]}\n{words}"

    def log_lines(self, what: str) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.diary.glob("*.jsonl")):
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found += [one for one in map(json.loads, lines) if one["what"] == what]
        return found

    def committed_steps(self, lost: Collection[int] = ()) -> list[dict[str, Any]]:
        """Return the result of each step in the world that did it last; its ranks agree on it.

        ``lost``: processes that a test killed at any moment. Such a process may take part in a step that the others
        complete and die before it logs the step. The step then has ``"unwritten"`` true.
        """
        worlds = defaultdict(list)
        pids = {(one["epoch"], one["rank"]): one["pid"] for one in self.log_lines("world")}
        for one in self.log_lines("step"):
            worlds[one["step"], one["epoch"]].append(one)
        found = []
        for step in range(self.total):
            last = max(epoch for at, epoch in worlds if at == step)
            ranks = sorted(worlds[step, last], key=lambda one: one["rank"])
            assert len({tuple(one.get(name) for name in BITS) for one in ranks}) == 1, step
            unwritten = {*range(ranks[0]["size"])} - {one["rank"] for one in ranks}
            assert {pids[last, rank] for rank in unwritten} <= {*lost}, step
            samples = [index for one in ranks for index in one["samples"]]
            known = {"samples": samples, "sum": state_sum(ranks, step), "unwritten": bool(unwritten)}
            found.append({**ranks[0], **known})
        return found

    def close(self) -> None:
        """Kill all processes of the job. After an unfinished run its agents would wait for a restart."""
        for one in self.started:
            if one.poll() is None:
                one.kill()
                one.wait()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        super().close()

    def persistent_pids(self) -> list[int]:
        """Return the pids of the coordinator and the supervisors."""
        return [*self.pids('"type":"coordinator"'), *self.pids('"type":"node"')]


BITS = ("loss", "norm", "rate")


def state_sum(ranks: Sequence[dict[str, Any]], step: int) -> int:
    """Return the checksum of all parameters and moments; fail if replicas differ."""
    whole = combine_checksums(RankChecksum(msgspec.convert(one["share"], dict[str, ChecksumPart])) for one in ranks)
    assert whole.diverged_names == (), step
    return whole.value


def assert_same_training(disturbed: Sequence[dict[str, Any]], quiet: Sequence[dict[str, Any]]) -> None:
    """Check that every step has the same samples and results: loss, norm, rate and state checksum."""
    assert len(disturbed) <= len(quiet)
    order = [int(index) for index in SampleOrder(SAMPLES, SEED, "full").indices(0, len(disturbed) * BATCH)]
    for step, (one, other) in enumerate(zip(disturbed, quiet, strict=False)):
        assert [one.get(name) for name in (*BITS, "sum")] == [other.get(name) for name in (*BITS, "sum")], step
        expected = order[step * BATCH : (step + 1) * BATCH]
        if one["unwritten"]:
            expected = [index for index in expected if index in one["samples"]]
        assert one["samples"] == expected, step


def assert_worlds_consistent(job: GoldenRun) -> None:
    """Check that a rank is one process, and that its worlds and steps only increase."""
    places, lives = {}, defaultdict(list)
    for one in job.log_lines("world"):
        assert places.setdefault((one["epoch"], one["rank"]), one["pid"]) == one["pid"], one
        lives[one["pid"]].append(one["epoch"])
    assert all(epochs == sorted(set(epochs)) for epochs in lives.values())
    begun = {(one["epoch"], one["rank"]): one["first"] for one in job.log_lines("world")}
    assert len({(epoch, first) for (epoch, _), first in begun.items()}) == len({epoch for epoch, _ in begun})
    steps = defaultdict(list)
    for one in job.log_lines("step"):
        steps[one["epoch"], one["rank"]].append(one["step"])
    for place, done in steps.items():
        assert done == [*range(begun[place], begun[place] + len(done))], place


def assert_all_injected_once(job: GoldenRun) -> None:
    done = [one.injection.name for one in injected_faults(job.record)]
    assert sorted(done) == sorted(one.name for one in job.faults.injections), job.failure_report()


def chain_faults(
    pairs: Iterable[tuple[InjectionKind, InjectionPhase]], ranks: int, *, first: int = 4, gap: int = GAP
) -> FaultPlan:
    """Return one plan for all pairs; faults between steps strike the recovery from a fault in a step."""
    steps, between = [], []
    for pair in pairs:
        (between if pair[1].is_between_steps else steps).append(pair)
    faults, step, turn = FaultPlan(), first, itertools.count(1)
    for kind, phase in steps:
        faults = faults.at(step=step, phase=phase, rank=next(turn) % ranks).inject(kind)
        step += gap
        if between and kind not in NON_FATAL_KINDS:
            next_kind, next_phase = between.pop()
            faults = faults.then(phase=next_phase, rank=next(turn) % ranks).inject(next_kind)
    while between:
        faults = faults.at(step=step, phase=InjectionPhase.OPTIMIZER, rank=next(turn) % ranks).exception()
        kind, phase = between.pop()
        faults = faults.then(phase=phase, rank=next(turn) % ranks).inject(kind)
        step += gap
    return faults


def all_pairs() -> list[tuple[InjectionKind, InjectionPhase]]:
    """Return every fault kind with every phase in which it exists."""
    return [
        (kind, phase)
        for kind in InjectionKind
        for phase in InjectionPhase
        if kind is not InjectionKind.NAN or phase in NAN_PHASES
    ]


@pytest.fixture
def golden_run(tmp_path):
    made: list[GoldenRun] = []

    def make_run(how: str, faults: FaultPlan, *, backend: str = "gloo") -> GoldenRun:
        folder = tmp_path / f"{how}-{len(made)}"
        folder.mkdir()
        made.append(GoldenRun(folder, how, how, faults, backend=backend))
        return made[-1]

    yield make_run
    for one in made:
        one.close()


def reference_run(folder: Path, total: int) -> list[dict[str, Any]]:
    """Return the steps of a fault-free run on one rank; the fixed tree gives every world this result."""
    one = GoldenRun(folder, "quiet", "fsdp", FaultPlan())
    try:
        one.wait_finished(one.start_run(1, 0, total=total), 120)
        return one.committed_steps()
    finally:
        one.close()


def process_size(pid: int) -> dict[str, int]:
    """Measure a process with :class:`tests.support.golden_training.ProcessSize`."""
    return ProcessSize.measure(pid)
