"""``make test-gpu``: checks and figures of a GPU, in one command of under 8 minutes and one report.

``build/gpu/report.json`` and ``report.html`` are written after every section, so a run that is killed leaves them.
Without a GPU the sections run on fakes and on the CPU, and the report names them. This process imports no torch: a
driver that hangs costs one section, and not the report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.gpu.report import ON_FAKES, Fact, Report, Section, merged, page, shown, slug
from tests.gpu.supervise import ROOT, supervised

PLACE = ROOT / "build/gpu"
RESULTS = ROOT / "benchmarks/results"
TOTAL_S = 470.0


class Planned(NamedTuple):
    """One section: its name, description, share of the time and module."""

    name: str
    what: str
    limit_s: float
    file: str

    @property
    def module(self) -> str:
        return f"tests.gpu.{self.file.removesuffix('.py')}"


SECTIONS = (
    Planned("environment", "driver, torch, NCCL, memory, revision", 30.0, "environment.py"),
    Planned("seam", "contract of the device seam, staging, loading, slots, seeds", 30.0, "seam.py"),
    Planned("copies", "GB/s within the host and to each device", 30.0, "copies.py"),
    Planned("saves", "saves and restores beside torch's own, as multiples of R", 95.0, "saves.py"),
    Planned("golden", "faults under DDP, FSDP2 and HSDP, resizes, the demo; bits compared", 200.0, "golden.py"),
    Planned("aborts", "up to 100 aborts and re-creations with flat memory", 85.0, "aborts.py"),
)


def limits(chosen: Sequence[Planned], took_s: Sequence[float]) -> float:
    """Return the limit of the next section: its own, and the unused time of earlier sections."""
    spare_s = sum(one.limit_s for one in chosen[: len(took_s)]) - sum(took_s)
    return round(chosen[len(took_s)].limit_s + max(0.0, spare_s), 1)


def run_sections(chosen: Sequence[Planned], place: Path, limit_s: float | None = None) -> Report:
    """Run the sections one after the other and write the report after each."""
    report, took_s = Report([], {}, []), list[float]()
    for planned in chosen:
        limit = limits(chosen, took_s) if limit_s is None else limit_s
        print(f"{planned.name}: at most {limit:g} s ...", flush=True)
        if (ROOT / "tests/gpu" / planned.file).is_file():
            section, facts = supervised(planned.name, planned.module, place / planned.name, limit)
        else:
            section = Section(planned.name, "not run", limit, why=f"tests/gpu/{planned.file} is missing")
            facts = []
        took_s.append(section.seconds)
        report = added(report, section, facts)
        write(report, place)
        tell(section)
    return report


def added(report: Report, section: Section, facts: Sequence[Fact]) -> Report:
    """Return the report with one more section and the facts that it found."""
    found = {fact.name: fact.value for fact in facts}
    devices = [one for one in found.pop("devices", "").split(",") if one] or report.devices
    return Report(devices, {**report.environment, **found}, [*report.sections, section])


def write(report: Report, place: Path) -> None:
    """Write ``report.json`` and ``report.html``, each whole or not at all."""
    texts = {
        "report.json": msgspec.json.format(msgspec.json.encode(report), indent=2),
        "report.html": page(report).encode(),
    }
    for name, text in texts.items():
        (place / f"{name}.new").write_bytes(text)
        (place / f"{name}.new").replace(place / name)


def tell(section: Section) -> None:
    """Print the outcome of a section: its figures, and each check that did not pass."""
    print(f"{section.name}: {section.outcome} in {section.seconds:g} s {section.why}".rstrip())
    for one in section.figures:
        ratio = "" if one.ratio is None else f" = {one.ratio:.2f} R"
        print(f"  {one.name}: {shown(one.value)} {one.unit}{ratio} {one.bits} {one.note}".rstrip())
    for check in section.checks:
        if check.outcome != "passed":
            print(f"  {check.outcome}: {check.name}: {check.why.splitlines()[-1] if check.why else ''}")
    if section.log:
        print("  the end of its log:\n" + section.log)
    print(f"  {sum(one.outcome == 'passed' for one in section.checks)} checks passed", flush=True)


def keep_result(report: Report, folder: Path, date: str) -> Path | None:
    """Write the result of a run on a device; sections of an earlier run of that day and revision stay."""
    if not report.devices:
        return None
    name = slug(report.environment.get("device", "") or report.devices[0])
    file = folder / f"gpu-{name}-{date}.json"
    if file.exists():
        earlier = msgspec.json.decode(file.read_bytes(), type=Report)
        same = earlier.environment.get("revision") == report.environment.get("revision")
        report = merged(earlier, report) if same else report
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return file


def chosen_from(names: str) -> list[Planned]:
    """Return the sections that a comma-separated list names; the environment comes always."""
    wanted = [name for name in names.split(",") if name]
    known = {one.name for one in SECTIONS}
    if unknown := [name for name in wanted if name not in known]:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [one for one in SECTIONS if one.name in wanted or one.name == "environment"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, print and write the report; return 1 when a section failed or did not finish."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Checks and figures of a GPU.")
    parser.add_argument("--list", action="store_true", help="List the sections and exit.")
    parser.add_argument("--only", type=chosen_from, default=list(SECTIONS), help="Run these sections (a,b).")
    parser.add_argument("--limit", type=float, help="Stop each section after this many seconds.")
    parser.add_argument("--size", help="Size of the state that is saved (4GiB; 64MiB without a GPU).")
    parser.add_argument("--out", type=Path, default=PLACE, help="Folder of the report.")
    options = parser.parse_args(arguments)
    if options.list:
        for one in SECTIONS:
            print(f"{one.name:12} {one.limit_s:4g} s  {one.what}")
        return 0
    if options.size:
        os.environ["TEST_GPU_SIZE"] = options.size
    place = options.out.resolve()
    place.mkdir(parents=True, exist_ok=True)
    report = run_sections(options.only, place, options.limit)
    print(report.title)
    result = keep_result(report, RESULTS, datetime.now(timezone.utc).date().isoformat())
    print(f"{place}/report.html and report.json have all of it")
    print(f"The result to commit: {result.relative_to(ROOT)}" if result else f"No result is kept: {ON_FAKES}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
