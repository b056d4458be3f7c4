"""The agent's page for a browser: memory, steps, replicas and uploads of this node's jobs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from peerstore.shard_records import ArenaStatus, JobStatus, ShardInfo, StoreStatus, VersionId
from peerstore.sizes_and_durations import show_count, show_size
from tieredckpt.agent.agent_api import DrainStatus, ProtectionStatus
from tieredckpt.agent.job_health import describe_protection
from tieredckpt.goodput.html_report.elements import (
    Markup,
    MarkupPart,
    duration_text,
    element,
    html_page,
    html_table,
    report_section,
    tile,
    utc_text,
)

_REFRESH_S = 3
_MOST_JOBS = 20
_MOST_STEPS = 8
_MOST_NODES = 32
_MOST_REPORTS = 8


@dataclass(frozen=True)
class JobOnNode:
    """State of a job on this node, without queries to other nodes or the durable tier."""

    status: JobStatus
    protection: ProtectionStatus
    shards: Sequence[ShardInfo]
    uploads: Sequence[DrainStatus]
    peers: Mapping[str, Any] | None
    """The job's ``peers`` in ``/status``; ``None`` if the job's shards are not replicated."""
    replicated: VersionId | None
    """The newest step with all its replicas, as far as this node knows."""

    @property
    def is_protected(self) -> bool:
        return self.protection.unprotected_since is None and not self.protection.upload_problem


def live_page(node: str, writer: str, store: StoreStatus, jobs: Sequence[JobOnNode], now_ns: int) -> str:
    """Return the page, which a browser loads again every few seconds."""
    unprotected = sum(not one.is_protected for one in jobs)
    state = f"{show_count(unprotected, 'job')} unprotected" if unprotected else "good"
    body = (
        element(
            "header",
            element("h1", node),
            element("span", state, class_=f"state {'bad' if unprotected else 'good'}"),
            element("p", f"Node agent of {writer}, as of {utc_text(now_ns // 1000)}"),
        ),
        _memory(store.arena, store.verifying),
        [_job(one, now_ns) for one in jobs[:_MOST_JOBS]],
        element("p", f"and {show_count(len(jobs) - _MOST_JOBS, 'more job')}") if len(jobs) > _MOST_JOBS else None,
        None if jobs else report_section("jobs", "Jobs", element("p", "No job has saved a step here.")),
        _damage(store),
        element("footer", "All nodes of a job: tieredckpt top JOB. For programs: /metrics and /status."),
    )
    return html_page(f"{node}: node agent", body, refresh_s=_REFRESH_S)


def _memory(arena: ArenaStatus, verifying: int) -> Markup:
    share = arena.allocated_bytes / arena.budget_bytes if arena.budget_bytes else 0.0
    tiles = (
        tile("in slots", show_size(arena.allocated_bytes), f"{100 * share:.0f} % of the budget"),
        tile("sealed", show_size(arena.sealed_bytes)),
        tile("budget", show_size(arena.budget_bytes)),
        tile(
            "slots", str(arena.slots), f"{arena.free_slots} free, {arena.leases} being written, {arena.pins} being read"
        ),
        tile("not verified yet", show_count(verifying, "shard"), look="warn") if verifying else None,
    )
    return report_section("memory", "Memory", element("dl", tiles, class_="tiles"))


def _job(one: JobOnNode, now_ns: int) -> Markup:
    protection = one.protection
    note = [describe_protection(protection)]
    if protection.upload_problem:
        note.append(f"The last upload failed: {protection.upload_problem}")
    newest = one.status.newest_committed
    tiles = (
        tile("newest complete step", "none" if newest is None else str(newest)),
        tile(
            "protected step",
            str(protection.step) if protection.step >= 0 else "none",
            "" if one.is_protected else "newer steps would be lost with this node",
            look="good" if one.is_protected else "bad",
        ),
        tile("processes", str(one.status.clients), "" if one.status.clients else _expiry(one.status)),
    )
    return report_section(
        f"job-{one.status.job}",
        one.status.job,
        element("dl", tiles, class_="tiles"),
        element("h3", "Steps in this node's memory"),
        html_table(
            ("step", "state", "parts", "size", "replicated", "durable", "age"),
            _steps(one, now_ns),
            right=("step", "size", "age"),
        ),
        _nodes(one.peers) if one.peers is not None else None,
        note=". ".join(note),
    )


def _expiry(status: JobStatus) -> str:
    return (
        "" if status.expires_in_s is None else f"memory is released in {duration_text(max(0.0, status.expires_in_s))}"
    )


def _steps(one: JobOnNode, now_ns: int) -> Iterator[Sequence[MarkupPart]]:
    """Yield the rows of the newest steps, the newest first."""
    uploads = {upload.version_id: upload for upload in one.uploads}
    shards = sorted(one.shards, key=lambda shard: shard.key.version_id, reverse=True)
    for number, (version_id, group) in enumerate(groupby(shards, key=lambda shard: shard.key.version_id)):
        if number == _MOST_STEPS:
            return
        held = list(group)
        own = sum(not shard.holders for shard in held)
        parts = [f"{own} own"] if own else []
        parts += [f"{show_count(len(held) - own, 'replica')}"] if len(held) > own else []
        complete = len(held) >= held[0].parts or any(shard.marked_committed for shard in held)
        sealed_ns = max(shard.sealed_ns for shard in held)
        yield (
            str(version_id.version),
            "complete" if complete else "not complete yet",
            f"{', '.join(parts)}, of {held[0].parts}",
            show_size(sum(shard.size_bytes for shard in held)),
            _replicated(one, version_id),
            _durable(uploads.get(version_id)),
            duration_text(max(0.0, (now_ns - sealed_ns) / 1e9)),
        )


def _replicated(one: JobOnNode, version_id: VersionId) -> str:
    """Return whether the step is replicated; this node does not know it of older steps."""
    if one.peers is None or (one.replicated is not None and version_id < one.replicated):
        return "-"
    return "yes" if version_id == one.replicated else "not yet"


def _durable(upload: DrainStatus | None) -> MarkupPart:
    if upload is None:
        return "-"
    if upload.state == "running" and upload.bytes_total:
        share = min(1.0, upload.bytes_done / upload.bytes_total)
        bar = element("i", class_="meter f-hydrate", style=f"width:{60 * share:.0f}px")
        return (bar, f" {100 * share:.0f} % of {show_size(upload.bytes_total)}")
    words = {"done": "yes", "waiting": "waits", "running": "is being uploaded"}.get(upload.state, upload.state)
    return (words, element("div", upload.error, class_="sub")) if upload.error else words


def _nodes(peers: Mapping[str, Any]) -> MarkupPart:
    nodes: Mapping[str, str] = peers["nodes"]
    partners = peers["partners"]
    rows = [
        (
            name,
            state,
            "this node" if name == peers["node"] else "holds this node's replicas" if name in partners else "",
        )
        for name, state in sorted(nodes.items(), key=lambda one: (one[1] == "alive", one[0]))[:_MOST_NODES]
    ]
    more = len(nodes) - len(rows)
    quorum = "" if peers["quorum"] else ", which is no quorum"
    return (
        element("h3", "Nodes"),
        element("p", f"This node {peers['sees'] or 'is alone'}{quorum}.", class_="note"),
        html_table(("node", "state", ""), rows),
        element("p", f"and {show_count(more, 'more node')}", class_="note") if more else None,
        element("p", f"Sending {peers['sending']}", class_="note") if peers["sending"] else None,
    )


def _damage(store: StoreStatus) -> Markup | None:
    if not store.damage_reports:
        return None
    rows = [
        (one.job, one.what, one.reason, utc_text(one.at_ns // 1000)) for one in store.damage_reports[-_MOST_REPORTS:]
    ]
    return report_section(
        "damage",
        "Damaged copies",
        html_table(("job", "copy", "message", "found"), reversed(rows)),
        note="The agent no longer uses these copies. If this repeats, look for failing memory.",
    )
