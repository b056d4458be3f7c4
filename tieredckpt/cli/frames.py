"""One picture of ``tieredckpt top``. Pure: what was seen in, what to show out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peerstore.units import show_seconds, show_size
from tieredckpt.cli.clusters import (
    cluster_json,
    drain_json,
    nodes_table,
    percent,
    protection_line,
    shown_steps,
    silent_lines,
    step_notes,
    steps_table,
)
from tieredckpt.cli.screen import count, iso
from tieredckpt.holdings import Kept, kept, newest_settled, pending, unknown
from tieredckpt.node import ClusterView, DrainView, NodeView, Survey
from tieredckpt.traffic import Moment, Rates, rates

_STEPS_SHOWN = 6
_NOTES_SHOWN = 4
_DRAINS_SHOWN = 3
_FIXED_LINES = 15
"""Everything but the nodes, and a little air."""
_NODES_LEAST = 3


@dataclass(frozen=True)
class Frame:
    """What one look saw."""

    view: ClusterView
    survey: Survey
    drains: tuple[DrainView, ...]
    moment: Moment
    at_ns: int


def lacking(steps: Sequence[Kept]) -> int:
    """Parts with too few copies, of steps that are still to be settled."""
    return sum(len(weak.parts) for one in steps for weak in one.weak)


def behind(view: ClusterView, steps: Sequence[Kept]) -> int:
    """Whole steps that are newer than the settled one."""
    settled = newest_settled(view)
    return len({s.group for s in steps if s.state == "whole" and s.held and (settled is None or s.group > settled)})


def frame(seen: Frame, before: Sequence[Moment], height: int) -> RenderableType:
    """``height`` lines at most where that is possible: nodes in trouble are shown before those that are well."""
    view, steps = seen.view, kept(seen.view, seen.survey, seen.drains)
    shown = shown_steps(steps)[0][-_STEPS_SHOWN:]
    notes = [*silent_lines(view)[:_NOTES_SHOWN], *step_notes(view, shown)[:_NOTES_SHOWN]]
    drains = pending(seen.drains, seen.survey)[-_DRAINS_SHOWN:]
    room = max(_NODES_LEAST, height - _FIXED_LINES - len(shown) - len(notes) - len(drains))
    nodes = troubled_first(view.nodes)[:room]
    parts: list[RenderableType] = [_head(seen, steps), Text(), nodes_table(view, nodes)]
    if len(nodes) < len(view.nodes):
        parts.append(Text(f"and {count(len(view.nodes) - len(nodes), 'more node')}", style="dim"))
    parts += [Text(), steps_table(view, seen.survey, shown, seen.at_ns) if shown else Text("no steps are saved yet")]
    parts += [Text.from_markup(line) for line in notes]
    parts += [Text(), _traffic(seen, rates(before, seen.moment), drains)]
    return Group(*parts)


def troubled_first(nodes: Sequence[NodeView]) -> list[NodeView]:
    return sorted(nodes, key=lambda one: one.standing == "alive" and not one.silent)


def _head(seen: Frame, steps: Sequence[Kept]) -> Text:
    view = seen.view
    at = datetime.fromtimestamp(seen.at_ns / 1e9).astimezone().strftime("%H:%M:%S")
    lines = [f"[bold]{escape(view.job)}[/]  {at}  {escape(view.me)} {escape(view.sees or 'is the only node')}"]
    if not view.quorum:
        lines[0] = f"{lines[0]}  [bold yellow]no quorum[/]"
    if view.protected is not None:
        lines.append(protection_line(view).strip())
    if view.roster:
        settled = newest_settled(view)
        newer = behind(view, steps)
        text = f"settled step {settled.version}" if settled is not None else "no step is settled yet"
        text += f", {count(newer, 'newer one')} not yet" if newer else ""
        few = lacking(steps)
        weak = f"[yellow]{count(few, 'part')} with too few copies[/]" if few else "no copies lacking"
        most = "up to " if unknown(view) and few else ""  # who could not be asked may have them
        lines.append(f"{text}   {most}{weak}")
    return Text.from_markup("\n".join(lines))


def _traffic(seen: Frame, speed: Rates | None, drains: Sequence[DrainView]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    view = seen.view
    if view.roster:
        grid.add_row("copies", escape(f"sending {view.sending}" if view.sending else "nothing to send"))
        if view.lag_s:
            grid.add_row("lag", f"the last copy was there {show_seconds(view.lag_s)} after its seal")
    for number, one in enumerate(drains):
        grid.add_row("drain" if not number else "", _drain(one))
    if not drains:
        grid.add_row("drain", "nothing to upload")
    if speed is not None:
        pairs = [
            ("saved", speed.saved),
            ("copies out", speed.sent),
            ("in", speed.received),
            ("uploaded", speed.drained),
        ]
        told = ", ".join(f"{name} {show_size(value)}/s" for name, value in pairs)
        grid.add_row("this node", told)
    return grid


def _drain(one: DrainView) -> RenderableType:
    name = f"step {one.group.version}"
    if one.state == "running" and one.bytes_total:
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=one.bytes_total, completed=min(one.bytes_done, one.bytes_total), width=20)
        row.add_row(name, bar, f"{percent(one)} % of {show_size(one.bytes_total)}")
        return row
    error = f": {one.error}" if one.error else ""
    return Text(f"{name} {one.state}{error}", style="red" if one.state == "failed" else "")


def frame_json(seen: Frame, before: Sequence[Moment]) -> dict[str, Any]:
    steps = kept(seen.view, seen.survey, seen.drains)
    speed = rates(before, seen.moment)
    return {
        "at": iso(seen.at_ns),
        **cluster_json(seen.view, seen.survey, steps),
        "settled": settled.version if (settled := newest_settled(seen.view)) is not None else None,
        "steps_behind": behind(seen.view, steps),
        "parts_lacking_copies": lacking(steps),
        "copy_lag_s": seen.view.lag_s,
        "drains": [drain_json(one) for one in seen.drains],
        "bytes_per_s": None if speed is None else {name: round(value) for name, value in vars(speed).items()},
    }
