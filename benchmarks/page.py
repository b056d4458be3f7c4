"""docs/benchmarks.md from result files: a section per subject, with targets, reasons and tables."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.goals import Group, Verdict, judge, row
from benchmarks.rounds import COPY
from benchmarks.table import SUBJECTS, bound, joined, overtaken, ratio_to, remaining, show, status
from peerstore.sizes_and_durations import show_size

REASONS = Path(__file__).parent / "reasons.yaml"
Raws = Mapping[str, Mapping[str, Any]]


def markdown(raws: Raws, *, reasons: Mapping[str, str]) -> str:
    """Return docs/benchmarks.md, from runs by the name of their file."""
    groups = joined(raws)
    parts = [_preamble(raws, groups)]
    for subject, title in SUBJECTS.items():
        mine = [group for group in groups if group["subject"] == subject]
        if mine:
            parts.append("\n".join(_section(subject, title, mine, reasons.get(subject, ""))))
    return "\n".join(parts).rstrip() + "\n"


def read_reasons(path: Path = REASONS) -> dict[str, str]:
    return yaml.safe_load(path.read_text()) or {} if path.exists() else {}


# -- the head of the page ---------------------------------------------------------------------------------------------


def _preamble(raws: Raws, groups: Sequence[Group]) -> str:
    parameters = next(iter(raws.values()))["parameters"]
    return f"""# Benchmarks

Made by `python -m benchmarks table {" ".join(raws)}`; do not edit.
The paragraphs "Why" come from `benchmarks/reasons.yaml`. `make bench` measures everything again. The files have every
sample, and the stages of all contenders.

A cell has the median, the least and the most of all rounds, and a ratio: the median of the ratios within each round.

- `R`: divided by R, one single-threaded copy of the same bytes between tensors and a populated shared mapping.
- `x`: divided by the time of this project's first row in the table.
- `first`: the first run of all, with cold pages and plans.

All contenders of a table run in turn, once per round. torch and this project's copier have the same number of threads
in each rank. {_bits(groups)}

States, {show_size(parameters["size_bytes"])} each over all ranks together:

- A: 64 equal fp32 tensors.
- B: fp32 tensors of 256 KiB.
- C: a Llama-like model with AdamW, 229 tensors and a few Python objects.
- U: tensors whose rows do not divide evenly among the ranks.

On several ranks every tensor with rows is a DTensor, `Shard(0)`. Several nodes are agents on one machine, each with its
own directory, that reach each other over loopback TCP.

{_runs(raws)}
"""


def _bits(groups: Sequence[Group]) -> str:
    """Return how many results were compared bit for bit, and which differed."""
    rows = [one for group in groups for one in group["rows"] if one.get("compared") and one["samples"]]
    differ = [one["name"] for one in rows if one["equal"] is False]
    equal = sum(one["equal"] is True for one in rows)
    text = f"The results of {len(rows)} rows were compared with the state bit for bit, loads after every run: "
    return text + ("all were equal." if equal == len(rows) else f"{equal} were equal. Not equal: {', '.join(differ)}.")


def _runs(raws: Raws) -> str:
    """List the files: where and when each was measured, and the subjects taken from it."""
    items = []
    for (source, raw), later in zip(raws.items(), overtaken(raws), strict=True):
        machine = raw["machine"]
        mine = dict.fromkeys(group["subject"] for group in remaining(raw, later))
        rounds = raw["parameters"]["rounds"]
        packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
        items.append(
            f"""- {", ".join(mine)}: `{source}`, revision {machine["revision"]}, {machine["date"]}, load before the run
  {machine["load_before"]:.1f}, {rounds} rounds. {machine["cpu"]}, {machine["cores"]} cores,
  {show_size(machine["memory_bytes"])} of memory, Linux {machine["kernel"]}, Python {machine["python"]}.
  Packages: `{packages}`."""
        )
    return "\n".join(items)


# -- a section --------------------------------------------------------------------------------------------------------


def _section(subject: str, title: str, groups: Sequence[Group], reason: str) -> Iterator[str]:
    yield from (f"## {subject}: {title}", "")
    targets = list(_targets(judge(groups)))
    if targets:
        yield from (*_table(("target", "limit", "measured", "met in"), targets), "")
    if reason:
        yield from (f"**Why.** {reason.strip()}", "")
    for table in _tables(groups):
        yield from _one_table(subject, table)


def _targets(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, ...]]:
    """Yield one line for all settings of a target with the same limit."""
    by_target: dict[tuple[str, str], list[Verdict]] = {}
    for one in verdicts:
        by_target.setdefault((one.what, bound(one)), []).append(one)
    limits = [what for what, _ in by_target]
    for (what, limit), all_ in by_target.items():
        measured = [one for one in all_ if one.is_measured]
        states = ", ".join(dict.fromkeys(one.setting.partition(", ")[0] for one in all_))
        target = f"{what} ({states})" if limits.count(what) > 1 else what
        if not measured:
            yield (target, limit, "not measured", "")
            continue
        least, most = (f"{pick(one.value for one in measured):.2f}" for pick in (min, max))
        values = least if least == most else f"{least} to {most}"
        met = sum(one.met for one in measured)
        settings = f"{met} of {len(measured)} settings" if len(measured) > 1 else ("yes" if met else "no")
        yield (target, limit, f"{values} {measured[0].unit}".rstrip(), settings)


@dataclass
class SceneTable:
    """Scenes that are the columns of one table."""

    title: str
    columns: dict[str, Group]


def _tables(groups: Sequence[Group]) -> list[SceneTable]:
    """Return a subject's tables, whose columns are states, or the other differences without a state."""
    tables: dict[tuple[Any, ...], SceneTable] = {}
    for group in groups:
        ranks, threads = group["ranks"], group["threads"]
        counts = f"{ranks} rank{'s' * (ranks > 1)}, {threads} thread{'s' * (threads > 1)} each"
        size, _, scene = group["title"].rpartition("iB, ")
        title, column = f"{size}iB" if size else "", scene or counts
        if group["state"]:
            title, column = ", ".join([scene] * bool(scene) + [counts]), f"state {group['state']}"
        key = (title, () if title else tuple(_main_rows(group)))
        tables.setdefault(key, SceneTable(title, {})).columns[column] = group
    return list(tables.values())


def _one_table(subject: str, table: SceneTable) -> Iterator[str]:
    columns = table.columns
    if table.title:
        yield from (f"### {subject}, {table.title}", "")
    names = dict.fromkeys(name for group in columns.values() for name in _main_rows(group))
    cells = ((name, *(_cell(group, name) for group in columns.values())) for name in names)
    yield from (*_table(("", *columns), cells), "")
    notes = [line for name in names for line in _notes(name, columns)]
    if notes:
        yield from (*_table(("row", "column, if not all", "note"), notes), "")
    stages = {column: _stages(group) for column, group in columns.items()}
    there = dict.fromkeys(itertools.chain.from_iterable(stages.values()))
    if there:
        yield from ("The stages of the first row of this project in each column:", "")
        cells = ((one, *(found.get(one, "") for found in stages.values())) for one in there)
        yield from (*_table(("", *columns), cells), "")


def _details(group: Group) -> dict[str, tuple[str, str]]:
    """Return the contender and the stage of each row that is a part of another row."""
    names = {one["name"] for one in group["rows"]}
    found = {}
    for name in names:
        first, between, last = name.partition(": ")
        if between and (last in names or first in names):
            found[name] = (last, first) if last in names else (first, last)
    return found


def _main_rows(group: Group) -> list[str]:
    """Return the contenders' rows, and the only detail of an opponent that has one."""
    details = _details(group)
    contenders = [contender for contender, _ in details.values()]
    return [
        one["name"]
        for one in group["rows"]
        if one["name"] not in details or (one["kind"] != "ours" and contenders.count(details[one["name"]][0]) == 1)
    ]


def _stages(group: Group) -> dict[str, str]:
    """Return the time of each stage of this project's first row."""
    details, ours = _details(group), _ours(group)
    rows = [one for one in group["rows"] if ours is not None and details.get(one["name"], ("",))[0] == ours["name"]]
    return {details[one["name"]][1]: _times(one) for one in rows if one["samples"]}


def _ours(group: Group) -> Mapping[str, Any] | None:
    return next((one for one in group["rows"] if one["kind"] == "ours" and one["samples"]), None)


def _cell(group: Group, name: str) -> str:
    one = next((one for one in group["rows"] if one["name"] == name), None)
    if one is None:
        return ""
    if not one["samples"]:
        return status(one)
    copy, ours = row(group, COPY), _ours(group)
    base, sign = (ours, "x") if copy is None else (copy, "R")
    parts = [_times(one)]
    if base is not None and one is not base and _comparable(one, base):
        parts.append(f"{ratio_to(one, base):.2f} {sign}")
    if one["first"] is not None:
        parts.append(f"first {show(one['first'], one['unit'])}")
    return "; ".join([", ".join(parts), *["**not equal**"] * (one["equal"] is False)])


def _comparable(one: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    return one["unit"] == base["unit"] == "s" and len(one["samples"]) == len(base["samples"])


def _times(one: Mapping[str, Any]) -> str:
    """Return the median, and the least and the most if they differ from it."""
    unit, samples = one["unit"], one["samples"]
    middle, least, most = (show(pick(samples), unit) for pick in (statistics.median, min, max))
    if least == most:
        return middle
    least = least.split()[0] if least.split()[1:] == most.split()[1:] else least
    return f"{middle} ({least} to {most})"


def _notes(name: str, columns: Mapping[str, Group]) -> Iterator[tuple[str, str, str]]:
    """Yield the notes of a row that all its columns have, and then the others with their columns."""
    said: dict[str, list[str]] = {}
    there = 0
    for column, group in columns.items():
        found = next((one for one in group["rows"] if one["name"] == name), None)
        if found is None:
            continue
        there += 1
        counted = [f"{max(found['collectives'])} collectives"] if found.get("collectives") else []
        for sentence in (*counted, *found["note"].split(". ")):
            said.setdefault(sentence.strip(), []).append(column)
    said.pop("", None)
    common = [sentence for sentence, where in said.items() if len(where) == there]
    if common:
        yield (name, "", ". ".join(common))
    between = "; " if any("," in column for column in columns) else ", "
    yield from ((name, between.join(where), one) for one, where in said.items() if len(where) != there)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for cells in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
