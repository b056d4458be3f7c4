"""Tables and JSON of a job's nodes and steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.table import Table

from peerstore.sizes_and_durations import show_size
from tieredckpt.agent.agent_api import ClusterNode, ClusterStatus, DrainStatus
from tieredckpt.agent.job_health import describe_protection
from tieredckpt.cli.command_output import format_age, format_ranges, iso_time, literal, text_table
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import StepInventory
from tieredckpt.whatif.redundancy import StepRedundancy, UnderReplicatedParts, node_share, unknown_nodes

_COLOURS = {"alive": "green", "suspect": "yellow", "dead": "red", "stranger": "yellow"}
STATES = {
    "complete": "green",
    "superseded": "dim",
    "unknown": "yellow",
    "torn": "yellow",
    "lost": "red",
    "quarantined": "red",
    "damaged": "red",
    "unsupported": "red",
}
_MAX_UNDER_REPLICATED_LINES = 4


def node_label_levels(view: ClusterStatus) -> list[str]:
    """Return the label levels of all nodes, the outermost first."""
    given = {level for one in view.nodes for level, _ in one.node.labels}
    known = [level for level in view.levels if level in given]
    return [*known, *sorted(given.difference(known))]


def nodes_table(view: ClusterStatus, nodes: Sequence[ClusterNode]) -> Table:
    levels, paths = node_label_levels(view), any(one.path_bytes_per_s for one in nodes)
    rows = []
    for one in nodes:
        held = node_share(one)
        holds = (
            ["?"] * 4
            if one.unreachable
            else [str(held.steps), str(held.parts), show_size(held.own_bytes), show_size(held.copied_bytes)]
        )
        labels = dict(one.node.labels)
        rows.append(
            [
                literal(one.node.id),
                f"[{_COLOURS.get(one.state, 'yellow')}]{one.state}[/]" + (", standby" if one.standby else ""),
                *(literal(labels.get(level, "-")) for level in levels),
                *holds,
                *([f"{show_size(one.path_bytes_per_s)}/s" if one.path_bytes_per_s else "-"] if paths else []),
            ]
        )
    numbers = ["STEPS", "PARTS", "OWN", "COPIES", *(["PATH"] if paths else [])]
    return text_table(["NODE", "STATE", *map(str.upper, levels), *numbers], rows, right=numbers)


def unreachable_lines(view: ClusterStatus) -> list[str]:
    """Return a line for each node with unknown contents. Such a node is never shown as empty."""
    silent = {one.node.id for one in view.nodes if one.unreachable}
    lines = []
    for name, why in unknown_nodes(view).items():
        what = "is unavailable, and its contents are unknown" if name in silent else "may hold more"
        lines.append(f"[yellow]{literal(name)}[/] {what}: {literal(why)}")
    return lines


def steps_table(view: ClusterStatus, survey: StepInventory, steps: Sequence[StepRedundancy], now_ns: int) -> Table:
    or_more = bool(unknown_nodes(view))
    rows = [
        [
            str(one.version_id.version),
            f"[{STATES[one.state]}]{one.state}[/]",
            f"{one.parts_in_memory} of {one.parts}" if one.parts else "-",
            one.describe(or_more=or_more) if one.parts_in_memory else "-",
            "yes" if one.is_replicated else "no",
            durable_cell(one, survey),
            format_age((now_ns - one.saved_ns) / 1e9) if one.saved_ns else "-",
        ]
        for one in steps
    ]
    columns = ["STEP", "STATE", "PARTS", "IN MEMORY", "REPLICATED", "DURABLE", "AGE"]
    if not view.member_list_version:  # a single node has no replicas
        columns.remove("REPLICATED")
        rows = [row[:4] + row[5:] for row in rows]
    return text_table(columns, rows, right=("STEP", "AGE"))


def durable_cell(one: StepRedundancy, survey: StepInventory) -> str:
    if one.durable:
        return "yes"
    drain = one.drain
    if drain is not None and drain.state in ("waiting", "running"):
        done = f" {upload_percent(drain)} %" if drain.state == "running" and drain.bytes_total else ""
        return f"pending{done}"
    if drain is not None and drain.state in ("failed", "skipped"):
        return drain.state
    return "?" if Tier.DURABLE in survey.unreachable else "no"


def upload_percent(drain: DrainStatus) -> int:
    return 100 * drain.bytes_done // drain.bytes_total if drain.bytes_total else 0


def step_warnings(view: ClusterStatus, steps: Iterable[StepRedundancy]) -> list[str]:
    """Return lines about missing copies, damaged parts and quarantined steps."""
    lines = []
    for one in steps:
        name = f"step {one.version_id.version}"
        if one.quarantined:
            lines.append(f"[red]{name}[/] is quarantined: {literal(one.quarantined)}")
        lines += [
            f"[red]{name}[/] part {part} was damaged: {literal(why)}" for part, why in sorted(one.damaged.items())
        ]
        lines += [
            f"[yellow]{name}[/] {_under_replicated_line(weak, view)}"
            for weak in one.under_replicated[:_MAX_UNDER_REPLICATED_LINES]
        ]
        if len(one.under_replicated) > _MAX_UNDER_REPLICATED_LINES:
            more = sum(len(weak.parts) for weak in one.under_replicated[_MAX_UNDER_REPLICATED_LINES:])
            lines.append(f"[yellow]{name}[/] and {more} more parts with too few copies; --json has all")
    return lines


def _under_replicated_line(weak: UnderReplicatedParts, view: ClusterStatus) -> str:
    parts = f"part {weak.parts[0]}" if len(weak.parts) == 1 else f"parts {format_ranges(weak.parts)}"
    if weak.nodes:
        more = "+" if unknown_nodes(view) else ""
        return f"{parts}: {len(weak.nodes)}{more} of {view.copies} copies, on {literal(', '.join(weak.nodes))}"
    return f"{parts}: " + ("on no node that answered" if unknown_nodes(view) else "on no node")


def steps_to_show(steps: Sequence[StepRedundancy]) -> tuple[list[StepRedundancy], int]:
    """Return the steps to list, and the number of hidden ones.

    Of the steps without parts in memory only the newest is listed.
    """
    far = [one for one in steps if not one.parts_in_memory and not one.damaged]
    hidden = {one.version_id for one in far[:-1]}
    return [one for one in steps if one.version_id not in hidden], len(hidden)


def protection_line(view: ClusterStatus) -> str:
    """Return a line about the newest protected step, with a leading newline. Empty: no report."""
    if view.protected is None:
        return ""
    colour = "green" if view.protected.unprotected_since is None else "bold yellow"
    return f"\n[{colour}]{literal(describe_protection(view.protected))}[/]"


def node_json(one: ClusterNode) -> dict[str, object]:
    held = node_share(one)
    known: dict[str, object] = {
        "steps": held.steps,
        "parts": held.parts,
        "own_bytes": held.own_bytes,
        "copied_bytes": held.copied_bytes,
        "newest_replicated": one.newest_replicated.version if one.newest_replicated is not None else None,
        "epoch": one.epoch,
        "verifying": one.verifying,
    }
    return {
        "node": one.node.id,
        "address": one.node.address,
        "state": one.state,
        "standby": one.standby,
        "labels": dict(one.node.labels),
        "path_bytes_per_s": round(one.path_bytes_per_s) or None,
        "unreachable": one.unreachable or None,
        "holds": None if one.unreachable else known,
    }


def step_json(one: StepRedundancy) -> dict[str, Any]:
    drain = one.drain
    return {
        "step": one.version_id.version,
        "epoch": one.version_id.epoch,
        "attempt": one.version_id.attempt,
        "incarnation": one.version_id.incarnation,
        "state": one.state,
        "parts": one.parts or None,
        "parts_in_memory": one.parts_in_memory,
        "copies": one.copies,
        "domains": one.domains,
        "level": one.level,
        "under_replicated": [{"parts": list(weak.parts), "nodes": list(weak.nodes)} for weak in one.under_replicated],
        "replicated": one.is_replicated,
        "durable": one.durable,
        "drain": None if drain is None else drain_json(drain),
        "quarantined": one.quarantined or None,
        "damaged": {str(part): why for part, why in one.damaged.items()},
        "size_bytes": one.size_bytes,
        "saved": iso_time(one.saved_ns),
    }


def drain_json(drain: DrainStatus) -> dict[str, Any]:
    return {
        "step": drain.version_id.version,
        "state": drain.state,
        "bytes_done": drain.bytes_done,
        "bytes_total": drain.bytes_total,
        "error": drain.error or None,
    }


def cluster_json(view: ClusterStatus, survey: StepInventory, steps: Sequence[StepRedundancy]) -> dict[str, Any]:
    return {
        "job": view.job,
        "seen_from": view.this_node,
        "member_list_version": view.member_list_version,
        "quorum": view.quorum,
        "sees": view.sees,
        "protected": None if view.protected is None else msgspec.to_builtins(view.protected),
        "copies": view.copies,
        "levels": list(view.levels),
        "partners": list(view.partners),
        "sending": view.sending or None,
        "nodes": [node_json(one) for one in view.nodes],
        "complete": not unknown_nodes(view),
        "unreachable": {tier.value: text for tier, text in survey.unreachable.items()},
        "steps": [step_json(one) for one in steps],
        "plain_steps": list(survey.plain),
    }
