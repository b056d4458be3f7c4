"""Section "aborts": abort and re-create the communicators of two ranks up to 100 times in flat memory.

With a GPU, two ranks on one device use NCCL, for as many aborts as the time allows. Without a GPU, 25 aborts run on
gloo and on a fake of NCCL.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.report import Check, Figure
from tests.support import nccl_like
from tests.support.aborting_ranks import GROWTH, LEAST, REAL, SETTLED, STAGES, growth_of
from tests.support.elastic_runs import ROOT

TIMES = 100
_FAKES = ("gloo", nccl_like.NAME)
_END_S = 6.0
"""Seconds that the last abort may take after the time limit of the ranks."""

Line = dict[str, Any]


def run(device: str, out: Path, limit_s: float) -> Iterator[Check | Figure]:
    """Abort NCCL's communicators with a GPU, those of fakes without one."""
    if device == "cpu":
        why = "no accelerator: aborts run on gloo and on a fake of NCCL"
        yield Check(check_name(TIMES, "NCCL"), "not run", why=why)
    backends = REAL or _FAKES
    until = time.monotonic() + limit_s
    for number, backend in enumerate(backends):
        left_s = (until - time.monotonic()) / (len(backends) - number)
        lines, why = aborted(backend, TIMES if REAL else LEAST, out, left_s)
        yield from judged(backend, TIMES if REAL else LEAST, lines, why, device)


def aborted(backend: str, times: int, out: Path, limit_s: float) -> tuple[list[list[Line]], str]:
    """Run both ranks; return the lines of each, and why a rank failed or nothing."""
    import torch.distributed as dist

    out.mkdir(parents=True, exist_ok=True)
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    until = time.monotonic() + limit_s
    ranks, files = list[subprocess.Popen[bytes]](), list[Path]()
    for rank in range(2):
        name = out / f"aborts-{backend.replace(':', '-').replace(',', '-')}-{rank}"
        files.append(name.with_suffix(".jsonl"))
        words = [str(one) for one in (rank, *(store.port for store in stores), backend, times, until - _END_S)]
        with files[-1].open("wb") as lines, name.with_suffix(".txt").open("wb") as told:
            command = [sys.executable, "-m", "tests.support.aborting_ranks", *words]
            ranks.append(subprocess.Popen(command, cwd=ROOT, stdout=lines, stderr=told))
    problems = []
    for rank, process in enumerate(ranks):
        try:
            status = process.wait(max(0.0, until - time.monotonic()))
            problems += [f"rank {rank} ended with exit code {status}"] if status else []
        except subprocess.TimeoutExpired:
            problems.append(f"rank {rank} did not end in {limit_s:.0f} s")
        finally:
            process.kill()
            process.wait()
    return [read_lines(one) for one in files], "; ".join(problems)


def read_lines(file: Path) -> list[Line]:
    """Return the lines of one rank, without one that was cut."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def check_name(times: int, backend: str) -> str:
    return f"{times} aborts and re-creations of two ranks' communicators, memory flat, {backend}"


def judged(backend: str, times: int, ranks: Sequence[Sequence[Line]], why: str, where: str) -> Iterator[Check | Figure]:
    """Report the time of each stage, how often both ranks were aborted, and whether memory grew."""
    ended = [[one for one in lines if "sizes" in one] for lines in ranks]
    done = min(len(lines) for lines in ended) - 1
    problems = [why] if why else []
    for rank, lines in enumerate(ranks):
        if why and lines and "begins" in lines[-1]:
            problems.append(f"rank {rank} was in {lines[-1]['begins']!r} of epoch {lines[-1]['epoch']}")
    yield Figure(f"aborts and re-creations, {backend}", max(0, done), "times", where)
    for stage in STAGES:
        took = [one["stages"][stage] for lines in ended for one in lines[1:] if stage in one["stages"]]
        if took:
            name = f"{stage}, median of {len(took)}, {backend}"
            yield Figure(name, statistics.median(took), "s", where, note=f"most {max(took):.3f} s")
    took = [second for lines in ended for one in lines for second in one["took_s"]]
    if took:
        yield Figure(f"aborted to the next all-reduce, {backend}", statistics.median(took), "s", where)
    if done >= LEAST:
        for what, most in GROWTH.items():
            growth = max(growth_of({one["epoch"]: one["sizes"] for one in lines}, what, done) for lines in ended)
            problems += [f"{what} grew by {growth}"] if growth > most else []
            if what in ("rss", "device"):
                name = f"{what} memory grows in {done - SETTLED} aborts, {backend}"
                yield Figure(name, growth / 2**20, "MiB", where)
    elif not problems:
        why = f"the time was enough for {done}, and {LEAST} show whether memory grows"
        yield Check(check_name(times, backend), "not run", why=why)
        return
    name = check_name(times if done >= times else max(0, done), backend)
    yield Check(name, "failed" if problems else "passed", why="; ".join(problems))
    if not problems and done < times:
        yield Check(check_name(times, backend), "not run", why=f"the time was enough for {done}")
