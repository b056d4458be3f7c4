"""Tables of a run for a terminal, and the runs that several result files make together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.goals import Group, Verdict, failed, judge, row, setting
from benchmarks.rounds import COPY
from peerstore.sizes_and_durations import show_seconds, show_size

SUBJECTS = {
    "P1": "Time a save blocks the trainer",
    "P2": "A whole save to memory",
    "P3": "A whole load from memory",
    "P4": "From a seal to a verified copy on another node",
    "P5": "A fresh rank from another node's memory",
    "P6": "A load from memory on a different number of ranks",
    "P7": "Draining to S3",
    "P8": "Planning in steady state",
    "P9": "From a fault to the next step",
    "P10": "The node agent",
    "P11": "Memory in addition to state and slots",
    "P12": "Gradients with the same bits on any number of ranks",
    "P13": "A change of the number of ranks",
    "P14": "From no process group to the first all-reduce",
}
Cells = tuple[str, ...]


def show(value: float, unit: str) -> str:
    return show_size(value) if unit == "B" else show_seconds(value)


def status(one: Mapping[str, Any]) -> str:
    """Return the outcome of the row's comparison."""
    if one["equal"] is False:
        return "FAILED"
    if one["equal"]:
        return "equal"
    if not one["samples"]:
        return "did not run"
    return "not compared" if one.get("compared") else "-"


def headings(group: Group) -> Cells:
    copies = ("x R",) if row(group, COPY) else ()
    return ("", *copies, "x ours", "median", "least - most", "first", "bits", "")


def lines(group: Group) -> Iterator[Cells]:
    """Yield a line for every row of a group; ratios are medians of the ratios within each round."""
    copy = row(group, COPY)
    ours = next((one for one in group["rows"] if one["kind"] == "ours" and one["samples"]), None)
    for one in group["rows"]:
        samples, unit = one["samples"], one["unit"]
        note = one["note"]
        if one.get("collectives"):
            note = f"{max(one['collectives'])} collectives; {note}"
        if not samples:
            yield (one["name"], *(("",) if copy else ()), "", "", "", "", status(one), note)
            continue
        cells = [one["name"]]
        if copy:
            cells.append(f"{ratio_to(one, copy):.2f}" if unit == copy["unit"] else "")
        same_unit = ours is not None and unit == ours["unit"] == "s" and len(ours["samples"]) == len(samples)
        cells.append(f"{ratio_to(one, ours):.2f}" if same_unit else "")
        cells.append(show(statistics.median(samples), unit))
        cells.append(f"{show(min(samples), unit)} - {show(max(samples), unit)}")
        cells.append(show(one["first"], unit) if one["first"] is not None else "")
        yield (*cells, status(one), note)


def ratio_to(upper: Mapping[str, Any], lower: Mapping[str, Any]) -> float:
    """Return the median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(upper["samples"], lower["samples"], strict=True))


def bound(verdict: Verdict) -> str:
    """Return the limit of a target, such as ``at most 1.3 times``."""
    return f"{'at least' if verdict.least else 'at most'} {verdict.goal:g} {verdict.unit}".rstrip()


def verdict_cells(verdict: Verdict) -> Cells:
    goal = bound(verdict)
    if not verdict.is_measured:
        return (verdict.what, verdict.setting, "", goal, "not measured")
    said = "met" if verdict.met else f"missed by {verdict.missed_by:.0%}" if verdict.goal else "missed"
    return (verdict.what, verdict.setting, f"{verdict.value:.2f} {verdict.unit}".rstrip(), goal, said)


_VERDICT_HEADINGS = ("", "setting", "measured", "target", "")


def print_group(console: Console, group: Group) -> None:
    table = Table(*headings(group), title=f"{group['subject']} {setting(group)}", title_justify="left")
    for cells in lines(group):
        table.add_row(*cells, style="bold red" if "FAILED" in cells else None)
    console.print(table)


def print_verdicts(console: Console, groups: Sequence[Group]) -> None:
    table = Table("", *_VERDICT_HEADINGS, title="Targets", title_justify="left")
    for verdict in judge(groups):
        table.add_row(verdict.subject, *verdict_cells(verdict))
    console.print(table)
    for group in groups:
        for name in failed(group):
            console.print(f"FAILED: {group['subject']} {setting(group)}: {name}", style="bold red")


def joined(raws: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """Return the groups of several runs; a scene in more than one comes from the last."""
    return [group for raw, later in zip(raws.values(), overtaken(raws), strict=True) for group in remaining(raw, later)]


def overtaken(raws: Mapping[str, Mapping[str, Any]]) -> list[set[tuple[str, str]]]:
    """Return, for each run, the scenes that later runs measured again."""
    found: list[set[tuple[str, str]]] = [set()]
    for raw in reversed(list(raws.values())[1:]):
        found.append(found[-1] | set(map(_scene, raw["groups"])))
    return found[::-1]


def remaining(raw: Mapping[str, Any], later: set[tuple[str, str]]) -> list[Group]:
    """Return the groups of a run without those in ``later``."""
    return [group for group in raw["groups"] if _scene(group) not in later]


def _scene(group: Group) -> tuple[str, str]:
    return group["subject"], setting(group)
