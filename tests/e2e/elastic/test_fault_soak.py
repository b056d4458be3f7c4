"""A job survives hundreds of random faults, trains the same bits and leaks nothing.

In the environment, ``FAULTS`` sets the number of faults (default 300) and ``SEED`` their order. The printed folder has
the faults with their times and the duration of each recovery.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import pytest

from elastic.fault_injection import FaultPlan, InjectionKind
from tests.support.golden_runs import (
    GAP,
    NON_FATAL_KINDS,
    assert_all_injected_once,
    assert_same_training,
    assert_worlds_consistent,
    golden_run,
    process_size,
    reference_run,
)

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

__all__ = ["golden_run"]

COUNT = int(os.environ.get("FAULTS", "300"))
CHOSEN = int(os.environ.get("SEED", "1"))
QUICK = (InjectionKind.SIGKILL, InjectionKind.EXCEPTION, InjectionKind.SEGFAULT, InjectionKind.OOM, InjectionKind.NAN)
KINDS = (
    *(4 * QUICK),
    InjectionKind.NODE,
    InjectionKind.AGENT,
    InjectionKind.PARTITION,
    InjectionKind.SLOW,
    InjectionKind.SIGSTOP,
    InjectionKind.HOLD_GIL,
    InjectionKind.HANG,
)
"""Fault kinds that cost a time limit, which are rarer."""
STARTING = 30
"""Samples to skip, at two per second, because the process may have just started."""
MORE_THREADS, MORE_DESCRIPTORS, MORE_BYTES = 4, 12, 64 << 20
"""Growth that a process may have at its end, compared with the time after its first faults."""


@pytest.mark.timeout(COUNT * 60 + 600)
def test_job_survives_hundreds_of_random_faults(golden_run, tmp_path) -> None:
    faults = FaultPlan(CHOSEN).random(COUNT, ranks=2, first=4, gap=GAP, kinds=KINDS)
    job = golden_run("fsdp", faults)
    sizes: dict[int, list[dict[str, int]]] = {}
    run = job.start_run()
    deadline = time.monotonic() + COUNT * 60
    while run.poll() is None:
        assert time.monotonic() < deadline, job.failure_report()
        job.restart_lost_nodes()
        for pid in job.persistent_pids():
            try:
                sizes.setdefault(pid, []).append({**process_size(pid), "faults": len(job.record.done())})
            except OSError:  # the process has just ended
                continue
        time.sleep(0.5)
    took = recoveries(job)
    write_report(tmp_path, job, took, sizes)
    assert run.returncode == 0, job.failure_report()
    assert_all_injected_once(job)
    assert_worlds_consistent(job)
    assert_same_training(job.committed_steps(), reference_run(tmp_path / "quiet", job.total))
    assert "the job failed" not in job.output()
    for pid, seen in sizes.items():
        assert_constant(f"process {pid}", [one for one in seen[STARTING:] if one["faults"] >= 5])
    worlds = {}
    for one in job.log_lines("world"):
        worlds.setdefault(one["pid"], []).append(one)
    for pid, seen in worlds.items():
        assert_constant(f"rank {pid}", seen[3:])


def assert_constant(who: str, seen) -> None:
    """Compare the medians of the first and last quarter, because single samples vary."""
    if len(seen) < 4:
        return
    quarter = len(seen) // 4
    for what, more in (("threads", MORE_THREADS), ("descriptors", MORE_DESCRIPTORS), ("rss", MORE_BYTES)):
        first, last = (statistics.median(one[what] for one in part) for part in (seen[:quarter], seen[-quarter:]))
        assert last <= first + more, (who, what, first, last)


def recoveries(job) -> list[float]:
    """Return the seconds from each fault to the first step of a later world."""
    steps = sorted((one["at"], one["epoch"]) for one in job.log_lines("step"))
    found = []
    for one in job.record.done():
        epoch = max((epoch for at, epoch in steps if at <= one.at), default=-1)
        after = next((at for at, other in steps if at > one.at and other > epoch), None)
        if after is not None and one.injection.kind not in NON_FATAL_KINDS:
            found.append(after - one.at)
    return sorted(found)


def write_report(folder: Path, job, took: list[float], sizes) -> None:
    lines = [f"{one.at:.2f} {one.injection.name} {one.injection}: step {one.step}" for one in job.record.done()]
    (folder / "faults.log").write_text("\n".join(lines) + "\n")
    (folder / "sizes.json").write_text(json.dumps(sizes))
    if len(took) > 1:
        cuts = statistics.quantiles(took, n=100)
        print(f"{len(lines)} faults, seed {CHOSEN}: recovered in p50 {cuts[49]:.1f} s, p99 {cuts[98]:.1f} s; {folder}")
