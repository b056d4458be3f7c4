"""Reports of a run: Markdown for docs/benchmarks.md and tables for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.goals import Group, Verdict, failed, judge, row, setting
from benchmarks.rounds import COPY
from peerstore.sizes_and_durations import show_seconds, show_size

REASONS = Path(__file__).parent / "reasons.yaml"
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
            cells.append(f"{_ratio(one, copy):.2f}" if unit == copy["unit"] else "")
        same_unit = ours is not None and unit == ours["unit"] == "s" and len(ours["samples"]) == len(samples)
        cells.append(f"{_ratio(one, ours):.2f}" if same_unit else "")
        cells.append(show(statistics.median(samples), unit))
        cells.append(f"{show(min(samples), unit)} - {show(max(samples), unit)}")
        cells.append(show(one["first"], unit) if one["first"] is not None else "")
        yield (*cells, status(one), note)


def _ratio(upper: Mapping[str, Any], lower: Mapping[str, Any]) -> float:
    return statistics.median(a / b for a, b in zip(upper["samples"], lower["samples"], strict=True))


def verdict_cells(verdict: Verdict) -> Cells:
    bound = "at least" if verdict.least else "at most"
    goal = f"{bound} {verdict.goal:g} {verdict.unit}".rstrip()
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
    return [group for raw, left in zip(raws.values(), _overtaken(raws), strict=True) for group in _but(raw, left)]


def _scene(group: Group) -> tuple[str, str]:
    return group["subject"], setting(group)


def _overtaken(raws: Mapping[str, Mapping[str, Any]]) -> list[set[tuple[str, str]]]:
    """Return, for each run, the scenes that later runs measured again."""
    found: list[set[tuple[str, str]]] = [set()]
    for raw in reversed(list(raws.values())[1:]):
        found.append(found[-1] | set(map(_scene, raw["groups"])))
    return found[::-1]


def _but(raw: Mapping[str, Any], left: set[tuple[str, str]]) -> list[Group]:
    return [group for group in raw["groups"] if _scene(group) not in left]


def markdown(raws: Mapping[str, Mapping[str, Any]], *, reasons: Mapping[str, str]) -> str:
    """Return docs/benchmarks.md, from runs by the name of their file."""
    groups = joined(raws)
    parts = [_preamble(raws)]
    for subject, title in SUBJECTS.items():
        mine = [group for group in groups if group["subject"] == subject]
        if mine:
            parts.append(_section(subject, title, mine, reasons.get(subject, "")))
    return "\n".join(parts).rstrip() + "\n"


def _preamble(raws: Mapping[str, Mapping[str, Any]]) -> str:
    sources = " ".join(raws)
    parameters = next(iter(raws.values()))["parameters"]
    return f"""# Benchmarks

Made by `python -m benchmarks table {sources}`; do not edit.
The paragraphs "Why" come from `benchmarks/reasons.yaml`. `make bench` measures everything again.

**R** is one single-threaded copy of the same bytes between tensors and a populated shared mapping, measured in the same
round. All contenders of a table run in turn, once per round. A ratio is the median of the ratios within each round.

- `x R`: the contender's time divided by R.
- `x ours`: the contender's time divided by the time of the first row of this project.
- `first`: the first run of all, with cold pages and plans.
- `bits`: the result of a bit-for-bit comparison with the state. Loads are compared after every run, other contenders
  after their last run.

torch and this project's copier have the same number of threads in each rank.

States, {show_size(parameters["size_bytes"])} each over all ranks together:

- A: 64 equal fp32 tensors.
- B: fp32 tensors of 256 KiB.
- C: a Llama-like model with AdamW, 229 tensors and a few Python objects.
- U: tensors whose rows do not divide evenly among the ranks.

On several ranks every tensor with rows is a DTensor, `Shard(0)`. Several nodes are agents on one machine, each with its
own directory, that reach each other over loopback TCP.

{_runs(raws)}
"""


def _runs(raws: Mapping[str, Mapping[str, Any]]) -> str:
    """List the files: where and when each was measured, and the subjects taken from it."""
    items = []
    for (source, raw), left in zip(raws.items(), _overtaken(raws), strict=True):
        machine = raw["machine"]
        mine = dict.fromkeys(group["subject"] for group in _but(raw, left))
        rounds = raw["parameters"]["rounds"]
        packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
        items.append(
            f"""- {", ".join(mine)}: `{source}`, revision {machine["revision"]}, {machine["date"]}, load before the run
  {machine["load_before"]:.1f}, {rounds} rounds. {machine["cpu"]}, {machine["cores"]} cores,
  {show_size(machine["memory_bytes"])} of memory, Linux {machine["kernel"]}, Python {machine["python"]}.
  Packages: `{packages}`."""
        )
    return "\n".join(items)


def _section(subject: str, title: str, groups: Sequence[Group], reason: str) -> str:
    parts = [f"## {subject}: {title}", ""]
    parts += [*_table(_VERDICT_HEADINGS, map(verdict_cells, judge(groups))), ""]
    if reason:
        parts += [f"**Why.** {reason.strip()}", ""]
    for group in groups:
        parts += [f"### {subject}, {setting(group)}", "", *_table(headings(group), lines(group)), ""]
    return "\n".join(parts)


def _table(names: Cells, rows: Iterator[Cells]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for cells in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def read_reasons(path: Path = REASONS) -> dict[str, str]:
    return yaml.safe_load(path.read_text()) or {} if path.exists() else {}
