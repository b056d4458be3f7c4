"""Six rows of measurements for the README, each with its device and backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import blocked, recovery, resize
from benchmarks.goals import median, row
from benchmarks.recovery_jobs import NODE, RANK
from benchmarks.table import joined

Group = Mapping[str, Any]
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
_SAVE = "`Checkpointer.save`: training waits for"
_RESTORE = "`Checkpointer.restore` from memory, verified"
_GPU_SAVE, _GPU_RESTORE = "Checkpointer.save, tenth", "Checkpointer.restore, verified and proven, second"
_GPU_TORCH_SAVE = "torch's dcp.async_save, BlockingAsyncStager, its copy kept, third"
_GPU_TORCH_LOAD = "torch's dcp.load from tmpfs"


def readme_table(raws: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the block between the markers in README.md, from runs of `make bench` and of `make test-gpu`."""
    runs = {name: raw for name, raw in raws.items() if "groups" in raw}
    groups = joined(runs)
    rows = [cells for raw in raws.values() if "sections" in raw for cells in _gpu_rows(raw)]
    rows.append(_save_row(groups, next(iter(runs.values()))["machine"]["cores"]))
    rows += [_fault_row(groups, RANK), _fault_row(groups, NODE), _resize_row(groups)]
    lines = ["| | state, device, backend | here | without this project |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([*lines, "", f"Sources: {', '.join(f'`{source}`' for source in raws)}."])


def _gpu_rows(raw: Mapping[str, Any]) -> Iterator[list[str]]:
    figures = {one["name"]: one for section in raw["sections"] for one in section["figures"]}
    size = figures["bytes of the state"]
    where = f"{size['value']:.2f} {size['unit']}, one {raw['environment']['device']}, one rank"
    times = {name: seconds(one["value"]) for name, one in figures.items() if one["unit"] == "s"}
    yield [_SAVE, where, times[_GPU_SAVE], f"{times[_GPU_TORCH_SAVE]}: `dcp.async_save`, `BlockingAsyncStager`"]
    yield [_RESTORE, where, times[_GPU_RESTORE], f"{times[_GPU_TORCH_LOAD]}: `dcp.load` from tmpfs, no checksums"]


def _save_row(groups: Sequence[Group], cores: int) -> list[str]:
    """Return the row of a save of a Llama-like model with AdamW."""
    wanted = ("P1", "C", 1, cores)
    found = (one for one in groups if (one["subject"], one["state"], one["ranks"], one["threads"]) == wanted)
    group = _largest(found, blocked.OURS)
    theirs = f"{seconds(median(group, blocked.ASYNC))}: `dcp.async_save`, `DefaultStager` kept"
    where = f"{group['size_bytes'] / 2**30:g} GiB, CPU, {cores} cores, one rank"
    ours = f"{seconds(median(group, blocked.OVERLAPPED))} with the copy during the next step (default)"
    return [_SAVE, where, f"{ours}, {seconds(median(group, blocked.OURS))} without", theirs]


def _fault_row(groups: Sequence[Group], fault: str) -> list[str]:
    titled = (one for one in groups if one["subject"] == "P9" and f"FSDP2, {fault}" in one["title"])
    group = _largest(titled, recovery.SPARE)
    theirs = f"{seconds(median(group, recovery.AGAIN))}: `torchrun` restart, `dcp.load` from tmpfs"
    what = f"{fault.capitalize()}: time to the next step, with a spare"
    where = f"{_size(group)}, FSDP2, CPU, gloo, {group['ranks']} ranks"
    return [what, where, seconds(median(group, recovery.SPARE)), theirs]


def _resize_row(groups: Sequence[Group]) -> list[str]:
    titled = (one for one in groups if one["subject"] == "P13" and "2 ranks become 4" in one["title"])
    group = _largest(titled, resize.OURS)
    theirs = f"{seconds(median(group, resize.AGAIN))}: `torchrun` stopped and started"
    where = f"{_size(group)}, CPU, gloo"
    return ["2 ranks become 4: from the request to the next step", where, seconds(median(group, resize.OURS)), theirs]


def _largest(groups: Iterator[Group], name: str) -> Group:
    """Return the group with the largest state in which this row was measured."""
    found = max((one for one in groups if row(one, name)), key=lambda one: one["size_bytes"], default=None)
    if found is None:
        raise LookupError(f"no run has a suitable row {name!r}")
    return found


def _size(group: Group) -> str:
    return f"{group['size_bytes'] / 2**20:g} MiB"


def seconds(value: float) -> str:
    """Return a time with three digits, in milliseconds or seconds."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.2f} s"


def put_into(page: Path, table: str) -> None:
    """Replace the text between the markers."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        raise ValueError(f"{page} has no {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
