"""``make nightly``: run all tasks that take hours, one after the other.

``build/nightly/record.json`` has the results of this revision. A new run skips the tasks that passed and repeats those
that failed or were unavailable. Each task rewrites ``build/nightly/page.md``. With words as arguments only tasks whose
names contain one of them run; ``ARGS='"py310, torch 2.7"'`` is one word.

Each environment of the DCP contract takes 4 to 7 GB in ``.tox``. Set ``PIP_INDEX_URL`` or ``PIP_EXTRA_INDEX_URL`` to
torch's CPU builds to make them much smaller.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tests.nightly.record import FlakyTest, Outcome, Record, Result, Task, judged, page, remaining, resumed
from tests.support import namespaces
from tests.support.flaky import RECORD
from tests.support.revision import revision

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build/nightly"
MARKED = "nightly and not system"
_SCHEDULES, _AT_ONCE = {"simulation": 240_000, "worlds": 200_000}, 20_000
_TORCH, _PYTHON = ("2.7", "2.13", "2.14"), ("py310", "py311", "py312", "py313")
_CLONE = """clone=build/nightly/clone; trap "rm -rf $clone" EXIT
rm -rf $clone; git clone -q . $clone; make -C $clone demo ARGS="""
"""Run the demo in a fresh clone, with only the packages that it installs.

``ARGS`` is emptied because it has the arguments of ``make nightly``.
"""
_NOT_HERE = "could not find python interpreter|No matching distribution found for torch=="


def tasks() -> list[Task]:
    python = sys.executable
    pytest = (python, "-m", "pytest", "--hypothesis-profile", "patient")
    found = [Task(f"tests: {file}", (*pytest, "-m", MARKED, "--durations", "5", file), 6 * 3600.0) for file in _files()]
    found.append(Task("system: slow tests", (*pytest, "-m", "nightly and system"), 3600.0))
    found.append(Task("properties: all examples", (*pytest, "-m", "hypothesis and not nightly and not system")))
    found.append(Task("mutants: all are caught", (python, "-m", "tests.mutants"), 3600.0))
    for what, count in _SCHEDULES.items():
        for first in range(0, count, _AT_ONCE):
            command = (python, "-m", f"tests.{what}", "--seeds", str(first), str(first + _AT_ONCE))
            found.append(Task(f"{what}: schedules {first:,} to {first + _AT_ONCE:,}", command))
    found += random_faults(python)
    found += [Task(f"demo: {name}", (python, "-m", name, "demo"), 1800.0) for name in ("tieredckpt", "elastic")]
    found.append(Task("demo: make demo in a fresh clone", ("sh", "-ec", _CLONE), 3600.0, unavailable=_NOT_HERE))
    found.append(Task("release: both distributions", ("make", "release-check"), 3600.0, unavailable=_NOT_HERE))
    return found + contracts()


def random_faults(python: str) -> list[Task]:
    """Return fault tests with the date's own seeds, which follow those of the day before."""
    first = dt.datetime.now(dt.timezone.utc).date().toordinal() % 10_000 * 1_000
    command = (python, "-m", "tests.faults", "--first", str(first), "--out", str(PLACE / f"faults-{first}"))
    found = [Task("faults: 1,000 at random", (*command, "--faults", "1000"), 12 * 3600.0)]
    if not namespaces.missing_reason():
        found.append(Task("faults: 300 at random on hosts", (*command, "--faults", "300", "--hosts"), 6 * 3600.0))
    return found


def contracts() -> list[Task]:
    """Return one task per environment of ``tox.ini``: each Python and torch version, and frameworks."""
    tox = str(ROOT / ".venv/bin/tox")
    found = []
    for torch in _TORCH:
        for one in _PYTHON:
            command = (tox, "-e", f"dcp-{one}-torch{torch.replace('.', '')}")
            found.append(Task(f"DCP contract: {one}, torch {torch}", command, unavailable=_NOT_HERE))
    return [*found, *(Task(one, (tox, "-e", one), 3600.0) for one in ("deepspeed", "ray", "torchtitan"))]


def _files() -> list[str]:
    """Return the test files that have nightly tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", MARKED]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({line.split("::", 1)[0] for line in said.splitlines() if "::" in line})


def flaky_tests() -> list[FlakyTest]:
    """Read the flaky tests of all runs of ``make test`` in this checkout."""
    recorded = ROOT / RECORD
    lines = recorded.read_bytes().splitlines() if recorded.exists() else []
    return [msgspec.json.decode(line, type=FlakyTest) for line in lines]


def run(task: Task) -> Result:
    """Run a task in its own session and end the session with it."""
    began = time.monotonic()
    log = PLACE / "last.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            task.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            status: int | None = process.wait(task.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
    return judged(task, status, log.read_text(errors="replace"), time.monotonic() - began)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the task, then kill it: pytest needs time to end sessions that its tests started."""
    for sign, patience_s in ((signal.SIGINT, 30.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def main(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    PLACE.mkdir(parents=True, exist_ok=True)
    stored = PLACE / "record.json"
    found = msgspec.json.decode(stored.read_bytes(), type=Record) if stored.exists() else None
    record = resumed(found, revision(ROOT), _now())
    everything = tasks()
    wanted = [task for task in everything if not words or any(word in task.name for word in words)]
    if not wanted:
        sys.exit(f"no task has one of {words} in its name")
    written = PLACE / "page.md"
    written.write_text(page(everything, record, _now(), flaky_tests()))
    for task in remaining(wanted, record):
        print(f"{task.name} ...", end=" ", flush=True)
        result = run(task)
        print(f"{result.outcome.value} in {result.seconds:.0f} s", flush=True)
        record = record.having(task.name, result)
        new = stored.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(record))
        new.replace(stored)
        written.write_text(page(everything, record, _now(), flaky_tests()))
    print(f"see {written}")
    ended = [record.results[task.name].outcome for task in wanted]
    return int(Outcome.FAILED in ended)


def _now() -> str:
    return dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
