"""P9: time from a fault of one of four ranks on two nodes to the next step of all ranks.

All contenders run ``benchmarks/recovery_trainer.py`` on one machine, with the same model, optimizer, loader and steps.
A stage ends when the last rank has finished it. Three steps later, the state of every rank is compared with an
undisturbed run.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.diary import Line
from benchmarks.parameters import Scene
from benchmarks.recovery_jobs import (
    ERROR,
    NODE,
    RANK,
    RANKS,
    Disturbed,
    Elastic,
    GoesOn,
    Torchft,
    Torchrun,
    Undisturbed,
    Warm,
    WarmNode,
)
from benchmarks.recovery_trainer import Task
from benchmarks.resize import durations
from benchmarks.rounds import Kind, missing

SPARE, OURS, AGAIN = "elastic run, a warm spare", "elastic run", "torchrun and dcp on tmpfs"
FT, FT_REST = "torchft, waits for the lost rank", "torchft, other ranks continue"
_EARLY = "{}: their next step"
_JOBS: dict[str, tuple[Kind, str]] = {
    SPARE: ("ours", "every=1, copies on the other node; a warm process on each node, or a warm node"),
    OURS: ("ours", "the same without a spare: a lost process or node is restarted"),
    AGAIN: ("opponent", "dcp.save after every step; monitor interval 10 ms, a silent node is lost after 3 s"),
    FT: ("opponent", "HTTPTransport, min_replicas: all; torchrun restarts lost ranks"),
    FT_REST: ("opponent", "PGTransport, min_replicas: 1; until all ranks have rejoined"),
}
_FAULTS: dict[str, dict[str, type[Disturbed]]] = {
    RANK: {SPARE: Warm, OURS: Elastic, AGAIN: Torchrun, FT: Torchft, FT_REST: GoesOn},
    NODE: {SPARE: WarmNode, OURS: Elastic, AGAIN: Torchrun, FT: Torchft},
    ERROR: {OURS: Elastic, AGAIN: Torchrun, FT: Torchft},
}
SCENES = (
    (RANK, "DDP", 16, "cpu"),
    (RANK, "FSDP2", 16, "cpu"),
    (NODE, "DDP", 16, "cpu"),
    (NODE, "FSDP2", 16, "cpu"),
    (ERROR, "DDP", 16, "cpu"),
    (RANK, "DDP", 2, "cpu"),
    (RANK, "FSDP2", 2, "cpu"),
    (RANK, "DDP", 2, "cuda"),
    (RANK, "FSDP2", 2, "cuda"),
)
"""Scenes: fault, model, divisor of the size, and device kind."""


@dataclass
class Recovered:
    """Outcome of one fault."""

    stages: dict[str, float]
    lost: int
    """Number of finished steps that had to run again."""
    step: int
    """Step after which the states were compared; -1 if ranks differ in the step."""
    sums: list[str]
    usual_s: float = 0.0
    """Median seconds of a step before the fault, with its save."""
    early_s: float | None = None
    """Seconds to the first step of the surviving ranks, if they continue alone."""
    same: bool = True
    trouble: str = field(default="")

    @property
    def total_s(self) -> float:
        return sum(self.stages.values())


def run(rank: int, scene: Scene, *, fault: str, model: str, device: str = "cpu") -> list[dict[str, Any]]:
    kinds = {name: kind for name, kind in _FAULTS[fault].items() if model == "DDP" or not issubclass(kind, Torchft)}
    if device == "cuda" and not torch.cuda.is_available():
        return [missing(name, "skipped: no GPU") for name in kinds]
    if scene.device:
        kinds = {OURS: kinds[OURS]}
    task = Task("", "", model, scene.size_bytes, device)
    found: dict[str, list[Recovered]] = {name: [] for name in kinds}
    failures: dict[str, list[str]] = {name: [] for name in kinds}
    names = list(kinds)
    for number in range(scene.rounds):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            try:
                found[name].append(_once(kinds[name], task, scene, number, fault))
            except RuntimeError as error:
                if _JOBS[name][0] == "ours":
                    raise
                failures[name].append(str(error))
    _compare(found, task, scene)
    totals = [row for name in names for row in _rows(name, found[name], failures[name])]
    return [*totals, *_by_stage(found)]


def _once(kind: type[Disturbed], task: Task, scene: Scene, number: int, fault: str) -> Recovered:
    folder = scene.folder / f"{kind.__name__.lower()}-{number}"
    folder.mkdir()
    try:
        with contextlib.closing(kind(folder, task)) as job:
            job.begin()
            job.until_going()
            at = job.disturb(fault)
            job.until_back(at)
            lines = job.lines()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return (healed if issubclass(kind, Torchft) else rebuilt)(lines, at, job.gone_at)


# -- from lines to stages ---------------------------------------------------------------------------------------------


def rebuilt(lines: Sequence[Line], at: float, gone_at: float) -> Recovered:
    """Return the outcome for a job whose ranks all leave the world and form a new one."""
    grouped = {line["pid"]: line["at"] for line in lines if line["what"] == "grouped" and line["at"] > at}
    new = [line for line in lines if line["at"] >= grouped.get(line["pid"], float("inf"))]
    before = [line for line in lines if line["at"] < grouped.get(line["pid"], float("inf"))]
    fresh = [line for line in before if line["what"] == "imported" and line["pid"] in grouped and line["at"] > at]
    heard = [line["at"] for line in before if line["what"] == "heard" and line["at"] > at]
    assigned = [line["at"] for line in before if line["what"] == "assigned" and line["at"] > at]
    ready = {line["pid"]: line["at"] for line in before if line["what"] == "ready"}
    imports = ("imports", max((line["at"] for line in fresh), default=at))
    if assigned:  # surviving ranks abort on their own, then wait for new processes
        known = {line["pid"] for line in before if line["at"] <= at}
        abort = max((ready[pid] for pid in grouped if pid in known), default=at)
        between = [("abort", abort), imports, ("rendezvous", max(assigned))]
    else:
        between = [("abort", gone_at), ("rendezvous", max(line["began"] for line in fresh)), imports]
    loaded = {line["step"] for line in new if line["what"] == "loaded"}
    stages, _ = durations(at, [("detect", max(heard, default=at)), *between, *_ends(new)])
    done = max(line["step"] for line in before if line["what"] == "stepped")
    step, sums = _seen(new)
    return Recovered(stages, done - min(loaded), step, sums, usual(before), same=len(loaded) == 1)


def healed(lines: Sequence[Line], at: float, gone_at: float) -> Recovered:
    """Return the outcome for torchft: a new rank receives the state while others may continue."""
    fresh = [line for line in lines if line["what"] == "imported" and line["at"] > at]
    there = max(line["at"] for line in fresh)
    heard = [line["at"] for line in lines if line["what"] in ("heard", "refused") and at < line["at"] < there]
    stepped = [line for line in lines if line["what"] == "stepped"]
    old = [line for line in stepped if line["at"] <= there]
    new = [line for line in lines if line["at"] > there and line.get("together", RANKS) == RANKS]
    stages, _ = durations(
        at,
        [
            ("detect", min(heard, default=at)),
            ("abort", gone_at),
            ("rendezvous", max(line["began"] for line in fresh)),
            ("imports", there),
            *_ends(new),
        ],
    )
    early = [line["at"] - at for line in old if line["at"] > at and line["together"] < RANKS]
    first = min(line["step"] for line in new if line["what"] == "stepped")
    step, sums = _seen(new)
    ended = {line["pid"]: line.get("error", "") for line in lines if line["what"] == "heard" and line["at"] > at}
    trouble = f"surviving ranks ended too ({next(iter(ended.values()))})" if ended else ""
    done = max(line["step"] for line in old)
    early_s = min(early, default=None)
    return Recovered(stages, max(0, done + 1 - first), step, sums, usual(old), early_s, trouble=trouble)


def usual(lines: Sequence[Line]) -> float:
    """Return the median seconds between the ends of two steps; 0 with fewer than two steps."""
    ends: dict[int, list[float]] = {}
    for line in lines:
        if line["what"] == "stepped" and line.get("together", RANKS) == RANKS:
            ends.setdefault(line["step"], []).append(line["at"])
    done = sorted(max(times) for times in ends.values() if len(times) == RANKS)
    return statistics.median(b - a for a, b in itertools.pairwise(done)) if len(done) > 1 else 0.0


_STAGES = {
    "grouped": "groups",
    "entered": "survivors",
    "built": "model",
    "loaded": "hydrate",
    "fed": "loader",
    "stepped": "first step",
}
"""Name of the stage that ends with each line."""


def _ends(new: Sequence[Line]) -> list[tuple[str, float]]:
    """Return, for each stage, the time at which its last rank first finished it."""
    ends = []
    for what, stage in _STAGES.items():
        firsts: dict[int, float] = {}
        for line in new:
            if line["what"] == what:
                firsts.setdefault(line["pid"], line["at"])
        ends.append((stage, max(firsts.values(), default=0.0)))
    return ends


def _seen(new: Sequence[Line]) -> tuple[int, list[str]]:
    """Return the step of the compared states, or -1 if ranks differ in it, and the checksums."""
    seen = {line["rank"]: (line["step"], line["sum"]) for line in new if line["what"] == "looked"}
    steps = {step for step, _ in seen.values()}
    return (steps.pop() if len(steps) == 1 and len(seen) == RANKS else -1), sorted(sum_ for _, sum_ in seen.values())


# -- comparing --------------------------------------------------------------------------------------------------------


def _compare(found: dict[str, list[Recovered]], task: Task, scene: Scene) -> None:
    """Compare with an undisturbed run; torchft has its own, because it adds sums in another order."""
    for kind, names in ((Undisturbed, (SPARE, OURS, AGAIN)), (Torchft, (FT,))):
        results = [one for name in names for one in found.get(name, ())]
        steps = {one.step for one in results if one.step >= 0}
        if not steps:
            continue
        folder = scene.folder / f"undisturbed-{kind.__name__.lower()}"
        folder.mkdir()
        with contextlib.closing(kind(folder, task)) as job:
            expected = job.reference(steps)
        shutil.rmtree(folder, ignore_errors=True)
        for one in results:
            one.same = one.same and one.sums == expected.get(one.step)
    for one in found.get(FT_REST, ()):
        one.same = one.step >= 0 and len(set(one.sums)) == 1
    for name in scene.spoil:
        for one in found.get(name, ()):
            one.same = False


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(name: str, results: list[Recovered], failures: list[str]) -> list[dict[str, Any]]:
    if not results:
        return [missing(name, f"did not recover: {failures[0].splitlines()[0]}")]
    lost = sorted({one.lost for one in results})
    notes = [_JOBS[name][1], f"Steps lost: {', '.join(map(str, lost))}"]
    notes += [f"Did not recover in {len(failures)} more rounds"] * bool(failures)
    troubles = [one.trouble for one in results if one.trouble]
    notes += [f"In {len(troubles)} of {len(results)} rounds {troubles[0]}"] if troubles else []
    if name == FT_REST:
        notes.append("Compared among its ranks only: steps without the lost rank's share differ from undisturbed ones")
    rows = [_row(name, name, [one.total_s for one in results], ". ".join(notes), all(one.same for one in results))]
    early = [one.early_s for one in results if one.early_s is not None]
    if early:
        rows.append(_row(_EARLY.format(name), name, early, "without the lost rank's share of the batch"))
    return rows


_ORDER = ("detect", "abort", "imports", "rendezvous", *_STAGES.values())
USUAL = "undisturbed step: {}"


def _by_stage(found: dict[str, list[Recovered]]) -> list[dict[str, Any]]:
    """Return the rows of all contenders, stage by stage."""
    there = {name: results for name, results in found.items() if results}
    stages = [
        _row(f"{stage}: {name}", name, [one.stages[stage] for one in results])
        for stage in _ORDER
        for name, results in there.items()
    ]
    return stages + [_row(USUAL.format(name), name, [one.usual_s for one in it]) for name, it in there.items()]


def _row(name: str, whose: str, samples: list[float], note: str = "", equal: bool | None = None) -> dict[str, Any]:
    return {
        "name": name, "kind": _JOBS[whose][0], "unit": "s", "first": None, "samples": samples, "equal": equal,
        "compared": equal is not None, "note": note,
    }  # fmt: skip
