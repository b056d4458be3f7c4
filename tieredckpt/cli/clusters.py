"""A job's nodes and steps as tables and as JSON: what ``status --cluster`` and ``top`` show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from peerstore.units import show_size
from tieredckpt.agent.protection import in_words
from tieredckpt.cli.screen import iso, ranges, show_age, table
from tieredckpt.holdings import Kept, Weak, share, unknown
from tieredckpt.node import ClusterView, DrainView, NodeView, Survey
from tieredckpt.resolve import Tier

_COLOURS = {"alive": "green", "suspect": "yellow", "dead": "red", "stranger": "yellow"}
STATES = {
    "whole": "green",
    "unknown": "yellow",
    "torn": "yellow",
    "lost": "red",
    "quarantined": "red",
    "damaged": "red",
}
_WEAK_SHOWN = 4


def labels_of(view: ClusterView) -> list[str]:
    """The labels that any node has, the outermost level first."""
    given = {level for one in view.nodes for level, _ in one.node.labels}
    known = [level for level in view.levels if level in given]
    return [*known, *sorted(given.difference(known))]


def nodes_table(view: ClusterView, nodes: Sequence[NodeView]) -> Table:
    levels, paths = labels_of(view), any(one.path_bytes_per_s for one in nodes)
    rows = []
    for one in nodes:
        held = share(one)
        holds = (
            ["?"] * 4
            if one.silent
            else [str(held.steps), str(held.parts), show_size(held.own_bytes), show_size(held.copied_bytes)]
        )
        labels = dict(one.node.labels)
        rows.append(
            [
                escape(one.node.id),
                f"[{_COLOURS.get(one.standing, 'yellow')}]{one.standing}[/]",
                *(escape(labels.get(level, "-")) for level in levels),
                *holds,
                *([f"{show_size(one.path_bytes_per_s)}/s" if one.path_bytes_per_s else "-"] if paths else []),
            ]
        )
    numbers = ["STEPS", "PARTS", "OWN", "COPIES", *(["PATH"] if paths else [])]
    return table(["NODE", "STANDING", *map(str.upper, levels), *numbers], rows, right=numbers)


def silent_lines(view: ClusterView) -> list[str]:
    """Who could not be asked, and why: never shown as holding nothing."""
    silent = {one.node.id for one in view.nodes if one.silent}
    lines = []
    for name, why in unknown(view).items():
        what = "could not be asked, what it holds is not known" if name in silent else "may hold more"
        lines.append(f"[yellow]{escape(name)}[/] {what}: {escape(why)}")
    return lines


# -- steps --------------------------------------------------------------------------------------------------------


def steps_table(view: ClusterView, survey: Survey, steps: Sequence[Kept], now_ns: int) -> Table:
    or_more = bool(unknown(view))
    rows = [
        [
            str(one.group.version),
            f"[{STATES[one.state]}]{one.state}[/]",
            f"{one.held} of {one.parts}" if one.parts else "-",
            one.in_words(or_more=or_more) if one.held else "-",
            "yes" if one.settled else "no",
            durable_cell(one, survey),
            show_age((now_ns - one.saved_ns) / 1e9) if one.saved_ns else "-",
        ]
        for one in steps
    ]
    columns = ["STEP", "STATE", "PARTS", "IN MEMORY", "SETTLED", "DURABLE", "AGE"]
    if not view.roster:  # nobody to settle anything with
        columns.remove("SETTLED")
        rows = [row[:4] + row[5:] for row in rows]
    return table(columns, rows, right=("STEP", "AGE"))


def durable_cell(one: Kept, survey: Survey) -> str:
    if one.durable:
        return "yes"
    drain = one.drain
    if drain is not None and drain.state in ("waiting", "running"):
        done = f" {percent(drain)} %" if drain.state == "running" and drain.bytes_total else ""
        return f"pending{done}"
    if drain is not None and drain.state in ("failed", "skipped"):
        return drain.state
    return "?" if Tier.DURABLE in survey.unreachable else "no"


def percent(drain: DrainView) -> int:
    return 100 * drain.bytes_done // drain.bytes_total if drain.bytes_total else 0


def step_notes(view: ClusterView, steps: Iterable[Kept]) -> list[str]:
    """Where copies are missing, and why a step must not be used."""
    lines = []
    for one in steps:
        name = f"step {one.group.version}"
        if one.quarantined:
            lines.append(f"[red]{name}[/] is quarantined: {escape(one.quarantined)}")
        lines += [f"[red]{name}[/] part {part} was damaged: {escape(why)}" for part, why in sorted(one.damaged.items())]
        lines += [f"[yellow]{name}[/] {_weak(weak, view)}" for weak in one.weak[:_WEAK_SHOWN]]
        if len(one.weak) > _WEAK_SHOWN:
            more = sum(len(weak.parts) for weak in one.weak[_WEAK_SHOWN:])
            lines.append(f"[yellow]{name}[/] and {more} more parts with too few copies; --json has all")
    return lines


def _weak(weak: Weak, view: ClusterView) -> str:
    parts = f"part {weak.parts[0]}" if len(weak.parts) == 1 else f"parts {ranges(weak.parts)}"
    if weak.nodes:
        more = "+" if unknown(view) else ""
        return f"{parts}: {len(weak.nodes)}{more} of {view.copies} copies, on {escape(', '.join(weak.nodes))}"
    return f"{parts}: " + ("not seen on any node that could be asked" if unknown(view) else "on no node")


def shown_steps(steps: Sequence[Kept]) -> tuple[list[Kept], int]:
    """Steps in memory and the newest that is not, and how many older ones there are."""
    far = [one for one in steps if not one.held and not one.damaged]
    hidden = {one.group for one in far[:-1]}
    return [one for one in steps if one.group not in hidden], len(hidden)


def protection_line(view: ClusterView) -> str:
    """Up to which step the job is protected and since when not, on a line of its own."""
    if view.protected is None:
        return ""
    colour = "green" if view.protected.unprotected_since is None else "bold yellow"
    return f"\n[{colour}]{escape(in_words(view.protected))}[/]"


# -- as JSON ------------------------------------------------------------------------------------------------------


def node_json(one: NodeView) -> dict[str, object]:
    held = share(one)
    known: dict[str, object] = {
        "steps": held.steps,
        "parts": held.parts,
        "own_bytes": held.own_bytes,
        "copied_bytes": held.copied_bytes,
        "settled": one.settled.version if one.settled is not None else None,
        "epoch": one.epoch,
        "verifying": one.verifying,
    }
    return {
        "node": one.node.id,
        "address": one.node.address,
        "standing": one.standing,
        "labels": dict(one.node.labels),
        "path_bytes_per_s": round(one.path_bytes_per_s) or None,
        "could_not_be_asked": one.silent or None,
        "holds": None if one.silent else known,
    }


def step_json(one: Kept) -> dict[str, Any]:
    drain = one.drain
    return {
        "step": one.group.version,
        "epoch": one.group.epoch,
        "attempt": one.group.attempt,
        "incarnation": one.group.incarnation,
        "state": one.state,
        "parts": one.parts or None,
        "parts_in_memory": one.held,
        "copies": one.copies,
        "domains": one.domains,
        "level": one.level,
        "weak": [{"parts": list(weak.parts), "nodes": list(weak.nodes)} for weak in one.weak],
        "settled": one.settled,
        "durable": one.durable,
        "drain": None if drain is None else drain_json(drain),
        "quarantined": one.quarantined or None,
        "damaged": {str(part): why for part, why in one.damaged.items()},
        "size_bytes": one.size_bytes,
        "saved": iso(one.saved_ns),
    }


def drain_json(drain: DrainView) -> dict[str, Any]:
    return {
        "step": drain.group.version,
        "state": drain.state,
        "bytes_done": drain.bytes_done,
        "bytes_total": drain.bytes_total,
        "error": drain.error or None,
    }


def cluster_json(view: ClusterView, survey: Survey, steps: Sequence[Kept]) -> dict[str, Any]:
    return {
        "job": view.job,
        "seen_from": view.me,
        "roster": view.roster,
        "quorum": view.quorum,
        "sees": view.sees,
        "protected": None if view.protected is None else msgspec.to_builtins(view.protected),
        "copies": view.copies,
        "levels": list(view.levels),
        "partners": list(view.partners),
        "sending": view.sending or None,
        "nodes": [node_json(one) for one in view.nodes],
        "complete": not unknown(view),
        "unreachable": {tier.value: text for tier, text in survey.unreachable.items()},
        "steps": [step_json(one) for one in steps],
        "plain_steps": list(survey.plain),
    }
