"""P13: a change of a job's number of ranks by ``elastic run``, and by ``torchrun`` with ``dcp``.

All contenders run ``benchmarks/resize_trainer.py`` on one machine, with the same model, optimizer and steps. Nodes of
``elastic run`` are simulated, with an agent each. Nodes of ``torchrun`` are agents with two ranks each, and ``dcp``
saves to tmpfs. A stage ends when the last rank has finished it. The time to compare the state does not count.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.diary import Line
from benchmarks.parameters import Scene
from benchmarks.resize_jobs import Again, Agents, Elastic, Resizable
from benchmarks.rounds import Kind, byte_row

OURS, AGENTS, AGAIN = "elastic run", "torchrun, agents join and leave", "torchrun, stopped and started"
STILL = "{}: without training"
STORAGE = "elastic run: read from storage"
_JOBS: dict[str, tuple[Kind, type[Resizable], str]] = {
    OURS: ("ours", Elastic, "nodes outside the world wait with torch imported; sealed with a copy on another node"),
    AGENTS: (
        "opponent",
        Agents,
        "last call 1 s, a silent node is lost after 3 s (defaults: 30 s and 15 s); agents have torch imported",
    ),
    AGAIN: ("opponent", Again, "SIGTERM, then another torchrun with the new number of ranks"),
}
_BEFORE = 6
"""Number of steps that every rank of the old world finishes before the resize."""


@dataclass
class Resized:
    """Outcome of one resize."""

    stages: dict[str, float]
    still_s: float
    """Seconds from the last step of the old world to the first step of the new one."""
    same: bool
    """Whether the state before and after is the same, bit for bit."""
    tiers: dict[str, int] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.stages.values())


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    """Resize jobs from ``scene.writers`` to ``scene.ranks`` ranks."""
    found: dict[str, list[Resized]] = {name: [] for name in _JOBS}
    names = list(_JOBS)
    for number in range(scene.rounds):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            found[name].append(_once(name, _JOBS[name][1], scene, number))
    return [*_rows(found), *_bytes(found[OURS])]


def _once(name: str, kind: type[Resizable], scene: Scene, number: int) -> Resized:
    folder = scene.folder / f"{kind.__name__.lower()}-{number}"
    folder.mkdir()
    try:
        with contextlib.closing(kind(folder, scene.size_bytes)) as job:
            job.begin(scene.writers)
            job.until_done(scene.writers, _BEFORE, after=0.0)
            asked = job.resize(scene.ranks)
            job.until_done(scene.ranks, 1, after=asked)
            lines = job.lines()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    cut = _ours if kind is Elastic else _theirs
    resized = cut(World(lines, scene.writers, 0.0, asked), World(lines, scene.ranks, asked, 0.0), asked, job.gone_at)
    resized.same = resized.same and name not in scene.spoil
    return resized


# -- from lines to stages ---------------------------------------------------------------------------------------------


class World:
    """Events of one world's ranks, later than ``after``."""

    def __init__(self, lines: Sequence[Line], size: int, after: float, asked: float) -> None:
        self._lines = [line for line in lines if line.get("size") == size and line["at"] > after]
        self._asked = asked
        pids = {line["pid"] for line in self._lines if line["what"] == "stepped"}
        self.started = [line for line in lines if line["what"] == "imported" and line["pid"] in pids]

    def last(self, what: str) -> float:
        """Return the time at which the last rank first had this event after the resize request."""
        firsts: dict[int, float] = {}
        for line in self._of(what):
            if line["at"] > self._asked:
                firsts.setdefault(line["pid"], line["at"])
        return max(firsts.values())

    def latest(self, *whats: str) -> float:
        return max(line["at"] for what in whats for line in self._of(what))

    def sums(self, what: str, step: int) -> set[str]:
        return {line["sum"] for line in self._of(what) if line["step"] == step}

    def loaded(self) -> list[Line]:
        return self._of("loaded")

    def _of(self, what: str) -> list[Line]:
        return [line for line in self._lines if line["what"] == what]


def _ours(old: World, new: World, asked: float, _gone: float) -> Resized:
    stages, out_s = durations(
        asked,
        [
            ("all ranks are notified", old.last("heard")),
            ("a common step is reached", old.last("stopped")),
            ("", old.last("sealing")),
            ("sealed and copied", old.last("sealed")),
            ("the old world is left", old.last("ready")),
            ("the new world is assigned", new.last("assigned")),
            ("groups are formed", new.last("entered")),
            ("model and optimizer are made", new.last("built")),
            ("state is loaded", new.last("loaded")),
            ("", new.last("checked")),
            ("first step", new.last("stepped")),
        ],
    )
    tiers: dict[str, int] = {}
    for line in new.loaded():
        for tier, count in line["tiers"].items():
            tiers[tier] = tiers.get(tier, 0) + count
    still_s = new.last("stepped") - old.latest("stepped") - out_s
    return Resized(stages, still_s, _same(old, new), tiers)


def _theirs(old: World, new: World, asked: float, gone: float) -> Resized:
    stages, out_s = durations(
        asked,
        [
            ("old processes have ended", gone),
            ("rendezvous, new processes", max(line["began"] for line in new.started)),
            ("interpreter and imports", max(line["at"] for line in new.started)),
            ("groups are formed", new.last("entered")),
            ("model and optimizer are made", new.last("built")),
            ("state is loaded", new.last("loaded")),
            ("", new.last("checked")),
            ("first step", new.last("stepped")),
        ],
    )
    return Resized(stages, new.last("stepped") - old.latest("stepped", "sealing") - out_s, _same(old, new))


def durations(began: float, ends: Sequence[tuple[str, float]]) -> tuple[dict[str, float], float]:
    """Return the seconds of each stage, and of unnamed ones. A stage that ended early has 0 s."""
    stages: dict[str, float] = {}
    left_out_s = 0.0
    for name, end in ends:
        took_s = max(0.0, end - began)
        if name:
            stages[name] = took_s
        else:
            left_out_s += took_s
        began = max(began, end)
    return stages, left_out_s


def _same(old: World, new: World) -> bool:
    """Return whether all ranks resumed from one step with the state of its save."""
    steps = {line["step"] for line in new.loaded()}
    if len(steps) != 1:
        return False
    (step,) = steps
    before, after = old.sums("sealing", step), new.sums("checked", step)
    return len(before) == 1 and before == after


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(found: dict[str, list[Resized]]) -> list[dict[str, Any]]:
    rows = []
    for name, results in found.items():
        equal = all(one.same for one in results)
        rows.append(_row(name, name, [one.total_s for one in results], note=_JOBS[name][2], equal=equal))
    for name, results in found.items():
        rows.append(_row(STILL.format(name), name, [one.still_s for one in results], note="last step to first step"))
    for name, results in found.items():
        rows += [_row(f"{name}: {stage}", name, [one.stages[stage] for one in results]) for stage in results[0].stages]
    return rows


def _row(name: str, whose: str, samples: list[float], *, note: str = "", equal: bool | None = None) -> dict[str, Any]:
    return {
        "name": name, "kind": _JOBS[whose][0], "unit": "s", "first": None, "samples": samples, "equal": equal,
        "compared": equal is not None, "note": note,
    }  # fmt: skip


def _bytes(results: list[Resized]) -> list[dict[str, Any]]:
    def of(name: str, note: str, count: Callable[[dict[str, int]], int]) -> dict[str, Any]:
        return byte_row(name, "ours", [count(one.tiers) for one in results], note)

    return [
        of("elastic run: read from memory", "this node's", lambda tiers: tiers.get("memory", 0)),
        of("elastic run: read from peers", "other nodes' memory", lambda tiers: tiers.get("peer", 0)),
        of(STORAGE, "the durable tier has steps", lambda tiers: tiers.get("durable", 0)),
    ]
