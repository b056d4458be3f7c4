"""Targets and verdicts: pure functions of a run's groups of rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import (
    agent_start,
    blocked,
    drain,
    fetchers,
    fixed_tree,
    hydrate,
    load,
    meeting,
    memory,
    peer_memory,
    planning,
    recovery,
    replicate,
    reshard,
    resize,
    save,
)
from benchmarks.rounds import COPY

MiB = 1 << 20
Group = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    subject: str
    setting: str
    what: str
    value: float
    goal: float
    least: bool
    """Whether the goal is a lower bound."""
    unit: str

    @property
    def is_measured(self) -> bool:
        """Whether the group has the rows of this target; older results lack some."""
        return not math.isnan(self.value)

    @property
    def met(self) -> bool:
        return self.value >= self.goal if self.least else self.value <= self.goal

    @property
    def missed_by(self) -> float:
        """The gap as a share of the goal; 0 when the goal is met."""
        return 0.0 if self.met or not self.goal else abs(self.value - self.goal) / self.goal


def failed(group: Group) -> list[str]:
    """Return the rows whose result differs from the expected state."""
    return [row["name"] for row in group["rows"] if row["equal"] is False]


def unchecked(group: Group) -> list[str]:
    """Return the rows that should have been compared and were not."""
    return [row["name"] for row in group["rows"] if row.get("compared") and row["equal"] is None]


def setting(group: Group) -> str:
    ranks, threads = group["ranks"], group["threads"]
    parts = [f"state {group['state']}"] if group["state"] else []
    parts += [f"{ranks} rank{'s' * (ranks > 1)}", f"{threads} thread{'s' * (threads > 1)} each"]
    return ", ".join(([group["title"]] if group["title"] else []) + parts)


def row(group: Group, name: str) -> Mapping[str, Any] | None:
    """Return the row with this name, or None when it is absent or has no samples."""
    return next((one for one in group["rows"] if one["name"] == name and one["samples"]), None)


def median(group: Group, name: str) -> float:
    found = row(group, name)
    return statistics.median(found["samples"]) if found else float("nan")


def ratio(group: Group, upper: str, lower: str) -> float:
    """Return the median of the ratios within each round."""
    above, below = row(group, upper), row(group, lower)
    if above is None or below is None:
        return float("nan")
    pairs = zip(above["samples"], below["samples"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def judge(groups: Sequence[Group]) -> list[Verdict]:
    return [verdict for group in groups for verdict in _JUDGES[group["subject"]](group)]


def _p1(group: Group) -> Iterator[Verdict]:
    where, state = setting(group), group["state"]
    copies = {"A": 1.25, "B": 1.6, "C": 1.25}[state]
    yield Verdict("P1", where, "trainer blocked, blocking", ratio(group, blocked.OURS, COPY), copies, False, "R")
    yield Verdict(
        "P1", where, "trainer blocked, copy overlapped", ratio(group, blocked.OVERLAPPED, COPY), 0.1, False, "R"
    )
    slower = ratio(group, blocked.STEP_WITH_SAVE, blocked.STEP)
    yield Verdict("P1", where, "step with a save, compared with one without", slower, 1.1, False, "times")
    times = {"A": 1.4, "B": 2.5, "C": 1.0}[state]
    yield Verdict("P1", where, "less than async_save", ratio(group, blocked.ASYNC, blocked.OURS), times, True, "times")


def _p2(group: Group) -> Iterator[Verdict]:
    times = {"A": 3.5, "B": 7.0, "C": 3.5}[group["state"]]
    value = ratio(group, save.FILES, save.OURS)
    yield Verdict("P2", setting(group), "faster than FileSystemWriter", value, times, True, "times")


def _p3(group: Group) -> Iterator[Verdict]:
    where, state = setting(group), group["state"]
    if state in ("A", "C"):
        bare = load.UNPROVEN.format(load.OURS)
        beyond = ratio(group, bare if row(group, bare) else load.OURS, COPY) - ratio(group, load.VERIFY, COPY)
        yield Verdict("P3", where, "beyond verification's read", beyond, 1.5, False, "R")
    if state in ("A", "B"):
        value = ratio(group, load.FILES, load.OURS)
        yield Verdict("P3", where, "faster than FileSystemReader", value, {"A": 3.0, "B": 8.0}[state], True, "times")
    if row(group, load.UNPROVEN.format(load.RESTORE)):
        proof = ratio(group, load.RESTORE, COPY) - ratio(group, load.UNPROVEN.format(load.RESTORE), COPY)
        yield Verdict("P3", where, "restore proof", proof, 0.3, False, "R")


def _p4(group: Group) -> Iterator[Verdict]:
    where = setting(group)
    for raw in replicate.RAW:
        yield Verdict("P4", where, f"compared with {raw}", ratio(group, replicate.OURS, raw), 1.3, False, "times")
    sent = ratio(group, replicate.DELTA_SENT, replicate.DELTA_CHANGED)
    yield Verdict("P4", where, "bytes sent per changed byte", sent, 1.05, False, "times")


def _p5(group: Group) -> Iterator[Verdict]:
    where = setting(group)
    for raw in hydrate.RAW:
        yield Verdict("P5", where, f"compared with {raw}", ratio(group, hydrate.OURS, raw), 1.3, False, "times")
    there = [name for name in fetchers.HTTP if row(group, name)]
    if there and group["state"] in ("A", "B"):
        best = min(there, key=lambda name: median(group, name))
        yield Verdict("P5", where, f"faster than {best}", ratio(group, best, hydrate.OURS), 1.0, True, "times")


def _p6(group: Group) -> Iterator[Verdict]:
    moved = ratio(group, reshard.MOVED, reshard.NEEDED)
    yield Verdict("P6", setting(group), "bytes moved per needed byte", moved, 1.05, False, "times")


def _p7(group: Group) -> Iterator[Verdict]:
    where = group["title"]
    if row(group, drain.DRAINING):
        value = ratio(group, drain.DRAINING, drain.ALONE)
        yield Verdict("P7", where, "step while draining", value, 1.05, False, "times a step alone")
        return
    for ours, others in ((drain.PLAIN, drain.RAW_PLAIN), (drain.SUMMED, drain.RAW_SUMMED)):
        there = [name for name in others if row(group, name)]
        if there:
            best = min(there, key=lambda name: median(group, name))
            what = f"{ours}, compared with {best}"
            yield Verdict("P7", where, what, ratio(group, best, ours), 0.9, True, "of its speed")


def _p8(group: Group) -> Iterator[Verdict]:
    found = row(group, planning.OURS)
    if found:
        where = f"{found['tensors']} tensors, {group['ranks']} rank{'s' * (group['ranks'] > 1)}"
        yield Verdict("P8", where, "collectives", max(found["collectives"]), 0, False, "")
        yield Verdict("P8", where, "planning and lease", median(group, planning.OURS) * 1e3, 20, False, "ms")


def _p9(group: Group) -> Iterator[Verdict]:
    for ours in (recovery.SPARE, recovery.OURS):
        mine, theirs = row(group, ours), row(group, recovery.AGAIN)
        if mine and theirs:
            paired = len(mine["samples"]) == len(theirs["samples"])  # else not every round had a result
            medians = median(group, recovery.AGAIN) / median(group, ours)
            value = ratio(group, recovery.AGAIN, ours) if paired else medians
            yield Verdict("P9", group["title"], f"{ours}: less than {recovery.AGAIN}", value, 10, True, "times")
            value = beyond_a_step(group, ours) if paired else 0.0
            if value:
                what = f"{ours}, beyond a step: less than {recovery.AGAIN}"
                yield Verdict("P9", group["title"], what, value, 10, True, "times")


def beyond_a_step(group: Group, ours: str) -> float:
    """Return the ratio of torchrun's to our time beyond an undisturbed step; 0 without such a step."""
    theirs, mine = ([*_added(group, name)] for name in (recovery.AGAIN, ours))
    return statistics.median(a / b for a, b in zip(theirs, mine, strict=True)) if theirs and mine else 0.0


def _added(group: Group, name: str) -> Iterator[float]:
    total, step = row(group, name), row(group, recovery.USUAL.format(name))
    if total and step:
        yield from (max(1e-3, a - b) for a, b in zip(total["samples"], step["samples"], strict=True))


def _p10(group: Group) -> Iterator[Verdict]:
    yield Verdict("P10", "", "start", median(group, agent_start.START), 0.5, False, "s")
    yield Verdict("P10", "", "idle", median(group, agent_start.IDLE) / MiB, 60, False, "MiB")
    found = row(group, agent_start.START)
    mapped = float(found is not None and found["note"] != "torch is not mapped")
    yield Verdict("P10", "", "torch in the agent", mapped, 0, False, "")


def _p11(group: Group) -> Iterator[Verdict]:
    for stage in memory.STAGES:
        found = row(group, stage)
        if found:
            buffer = group["part_bytes"] if stage == memory.STAGES[4] else 0
            goal = (64 * MiB * group["ranks"] + buffer) / MiB
            yield Verdict("P11", setting(group), stage, max(found["samples"]) / MiB, goal, False, "MiB")
    for private, shared in (pair for what in peer_memory.NODES for pair in peer_memory.row_names(what)):
        there = [found for name in (private, shared) if (found := row(group, name))]
        if there:
            most = sum(max(found["samples"]) for found in there) / MiB
            what = f"{private.partition(':')[0]}, without its slots"
            yield Verdict("P11", setting(group), what, most, 64, False, "MiB")


def _p12(group: Group) -> Iterator[Verdict]:
    value = ratio(group, fixed_tree.OURS, fixed_tree.DDP)
    yield Verdict("P12", setting(group), "a step, compared with DDP's", value, 1.5, False, "times")


def _p13(group: Group) -> Iterator[Verdict]:
    where = group["title"]
    for others in (resize.AGENTS, resize.AGAIN):
        value = ratio(group, others, resize.OURS)
        yield Verdict("P13", where, f"faster than {others}", value, 5, True, "times")
        value = ratio(group, resize.STILL.format(others), resize.STILL.format(resize.OURS))
        yield Verdict("P13", where, f"without training: less than {others}", value, 5, True, "times")
    found = row(group, resize.STORAGE)
    if found:
        yield Verdict("P13", where, "read from storage", max(found["samples"]) / MiB, 0, False, "MiB")


def _p14(group: Group) -> Iterator[Verdict]:
    for names in ("{}", meeting.LAZY):
        value = ratio(group, names.format(meeting.OURS), names.format(meeting.ONE))
        what = f"{names.format(meeting.OURS)}, compared with {meeting.ONE}"
        yield Verdict("P14", group["title"], what, value, 1, False, "times")


_JUDGES: dict[str, Callable[[Group], Iterator[Verdict]]] = {
    "P1": _p1, "P2": _p2, "P3": _p3, "P4": _p4, "P5": _p5, "P6": _p6, "P7": _p7, "P8": _p8, "P9": _p9, "P10": _p10,
    "P11": _p11, "P12": _p12, "P13": _p13, "P14": _p14,
}  # fmt: skip
