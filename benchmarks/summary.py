"""The few lines of a run that the README shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import agent_start, blocked, drain, hydrate, load, planning, recovery, replicate, reshard, resize, save
from benchmarks.goals import MiB, beyond_a_step, median, ratio, row
from benchmarks.rounds import COPY
from benchmarks.table import joined

Group = Mapping[str, Any]
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
_STATES = ("A", "B", "C")


def readme_table(raws: Mapping[str, Mapping[str, Any]]) -> str:
    """Between the markers in README.md: one rank with the machine's cores, the rest as it comes."""
    groups, machine = joined(raws), next(iter(raws.values()))["machine"]
    sources = ", ".join(f"`{source}`" for source in raws)
    lines = [
        f"| 1 GiB, one rank, {machine['cores']} threads | A: 64 tensors | B: 4,096 tensors | C: Llama-like, AdamW |",
        "|---|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in _by_state(groups, machine["cores"])),
        "",
        *_others(groups),
        *_elastic(groups),
        "",
        "R is one copy of the same bytes on one thread, in the same round. Bit for bit equal in every row. Made by",
        f"`make bench` ({sources});",
        "[all figures](docs/benchmarks.md), also where a target was missed, and why.",
    ]
    return "\n".join(lines)


def _by_state(groups: Sequence[Group], threads: int) -> Iterator[list[str]]:
    def find(subject: str, state: str) -> Group:
        return next(
            group
            for group in groups
            if (group["subject"], group["state"], group["ranks"], group["threads"]) == (subject, state, 1, threads)
        )

    def cells(subject: str, show: str, upper: str, lower: str) -> list[str]:
        return [show.format(ratio(find(subject, state), upper, lower)) for state in _STATES]

    yield ["training waits for a save", *cells("P1", "{:.2f} R", blocked.OURS, COPY)]
    yield ["… `dcp.async_save`, its stager kept", *cells("P1", "{:.2f} R", blocked.ASYNC, COPY)]
    yield ["`dcp.save` to memory, checksummed", *cells("P2", "{:.2f} R", save.OURS, COPY)]
    yield ["… `FileSystemWriter` on tmpfs", *cells("P2", "{:.2f} R", save.FILES, COPY)]
    yield ["`dcp.load` from memory, verified", *cells("P3", "{:.2f} R", load.OURS, COPY)]
    yield ["… `FileSystemReader` on tmpfs, not verified", *cells("P3", "{:.2f} R", load.FILES, COPY)]


def _others(groups: Sequence[Group]) -> Iterator[str]:
    null, real = (
        next(group for group in groups if row(group, drain.PLAIN) and server in group["title"])
        for server in ("drops", "rclone")
    )
    steps = next(group for group in groups if row(group, drain.DRAINING))
    plans = next(group for group in groups if row(group, planning.OURS) and group["ranks"] == 2)
    agent = next(group for group in groups if row(group, agent_start.START))
    found = row(plans, planning.OURS)
    calls = max(found["collectives"]) if found else 0
    dropped, kept = (ratio(group, drain.RAW_PLAIN[0], drain.PLAIN) for group in (null, real))
    beside, plan_ms = ratio(steps, drain.DRAINING, drain.ALONE), median(plans, planning.OURS) * 1e3
    yield f"- Uploads have {dropped:.2f} of obstore's speed to a server that drops all, {kept:.2f} to a real one;"
    yield f"  a training step beside a drain takes {beside:.2f} times as long as one alone."
    yield f"- A save of 4,096 tensors on 2 ranks plans in {plan_ms:.0f} ms with {calls} collectives."
    yield from _peers(groups)
    yield (
        f"- The agent answers {median(agent, agent_start.START) * 1e3:.0f} ms after its start and takes "
        f"{median(agent, agent_start.IDLE) / MiB:.0f} MiB beside its shards."
    )


def _peers(groups: Sequence[Group]) -> Iterator[str]:
    """Runs from before there were other nodes have nothing to say here."""
    copied, fresh = ([group for group in groups if group["subject"] == subject] for subject in ("P4", "P5"))
    resharded = [group for group in groups if group["subject"] == "P6"]
    if copied and fresh:
        copies = _span(ratio(group, replicate.OURS, replicate.RAW[0]) for group in copied)
        reads = _span(ratio(group, hydrate.OURS, hydrate.RAW[0]) for group in fresh)
        yield f"- A sealed shard has its verified copy on another node in {copies} times what a bare socket takes for"
        yield f"  the bytes; a fresh rank has its state from another node's memory in {reads} times that, verified."
    if resharded:
        most = max(ratio(group, reshard.MOVED, reshard.NEEDED) for group in resharded)
        yield f"- A load by another number of ranks moves at most {most:.2f} times the bytes they need."


def _elastic(groups: Sequence[Group]) -> Iterator[str]:
    disturbed = [group for group in groups if group["subject"] == "P9"]
    resized = [group for group in groups if group["subject"] == "P13"]
    for size in _sizes(disturbed):
        for what in (recovery.RANK, recovery.NODE, recovery.ERROR):
            mine = [one for one in _of_size(disturbed, size) if what in one["title"]]
            if mine:
                yield from _recovered(f"{what[0].upper()}{what[1:]}, {size} of state", mine)
    for size in _sizes(resized):
        mine = _of_size(resized, size)
        times = _span(ratio(group, other, resize.OURS) for group in mine for other in (resize.AGENTS, resize.AGAIN))
        yield f"- Another number of ranks, {size} of state: `torchrun` takes {times} times as long."


def _recovered(what: str, groups: Sequence[Group]) -> Iterator[str]:
    """By a warm spare, where there is one to take."""
    times = {
        name: _span(ratio(group, recovery.AGAIN, name) for group in groups)
        for name in (recovery.SPARE, recovery.OURS)
        if all(row(group, name) for group in groups)
    }
    first = next(iter(times))
    took = _span(median(group, first) for group in groups)
    spare = " with a warm spare" if first == recovery.SPARE else ""
    yield f"- {what}: the next step has been done {took} s later{spare}. `torchrun` and `dcp.load` from tmpfs"
    cold = f", and {times[recovery.OURS]} times as long as we do without a spare" if spare else ""
    yield f"  take {times[first]} times as long{cold}."
    beyond = [beyond_a_step(group, first) for group in groups]
    if all(beyond):
        yield f"  Without the step itself, on both sides: {_span(beyond)} times as long."


def _sizes(groups: Sequence[Group]) -> list[str]:
    return sorted({group["title"].split(",")[0] for group in groups}, key=lambda size: float(size.split()[0]))


def _of_size(groups: Sequence[Group], size: str) -> list[Group]:
    return [group for group in groups if group["title"].startswith(f"{size},")]


def _span(ratios: Iterable[float]) -> str:
    values = sorted(ratios)
    return f"{values[0]:.2f} to {values[-1]:.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def put_into(page: Path, table: str) -> None:
    """Replace what stands between the markers."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        raise ValueError(f"{page} has no {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
