"""The coordinator's page for a browser: the world, its nodes, and its recoveries. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType

from elastic.control.control_messages import ElasticJobStatus, NodeSummary
from elastic.coordinator.world_changes import WorldChange
from elastic.world.world_state import WorldPhase
from peerstore.sizes_and_durations import show_count
from tieredckpt.event_log.event_types import FaultEvent
from tieredckpt.goodput.html_report.elements import (
    DISPLAY_KINDS,
    Markup,
    MarkupPart,
    color_legend,
    duration_text,
    element,
    html_page,
    html_table,
    quantile,
    report_section,
    stage_kind,
    tile,
    utc_text,
)

_REFRESH_S = 3
_MOST_NODES = 64
_MOST_CHANGES = 20
_MOST_FAULTS = 3
_MOST_WAITED = 8
_BAR_PX = 160.0
_PHASES = MappingProxyType(
    {
        WorldPhase.FORMING: ("forming", ""),
        WorldPhase.WAITING: ("waiting for nodes", "bad"),
        WorldPhase.RUNNING: ("training", "good"),
        WorldPhase.PAUSING: ("pausing", ""),
        WorldPhase.STOPPED: ("stopped", ""),
        WorldPhase.FINISHED: ("finished", "good"),
        WorldPhase.FAILED: ("failed", "bad"),
    }
)
_WORKING = ("training", "pausing", "sealed", "finished")


def coordinator_page(status: ElasticJobStatus, changes: Sequence[WorldChange] | None, now_us: int) -> str:
    """Return the page, which a browser loads again every few seconds.

    ``changes`` are in order of time; ``None`` means that no event log is written.
    """
    state, look = _PHASES[status.phase]
    body = (
        element(
            "header",
            element("h1", status.job),
            element("span", state, class_=f"state {look}".strip()),
            element("p", f"Coordinator of the job, as of {utc_text(now_us)}"),
        ),
        _world(status),
        _nodes(status),
        _recoveries(changes),
        element("footer", "The same in a terminal: elastic status. For programs: /status."),
    )
    return html_page(f"{status.job}: coordinator", body, refresh_s=_REFRESH_S)


def describe_wait(status: ElasticJobStatus) -> str:
    """Return what the job waits for, or ""."""
    if status.phase.is_over:
        return ""
    if status.phase is WorldPhase.PAUSING or (status.phase is WorldPhase.RUNNING and status.pause is not None):
        late = [node.node for node in _ranked(status) if node.state not in ("sealed", "finished")]
        left = None if status.pause is None else status.pause.within_s
        limit = "" if left is None else f", for at most {duration_text(left)}"
        return f"The ranks stop at a common step and save it{limit}. Waiting for {_listed(late)}." if late else ""
    if status.phase is WorldPhase.RUNNING:
        return f"The job could use {show_count(status.requested_nodes, 'more node')}." if status.requested_nodes else ""
    ready = sum(node.state == "standby" for node in status.nodes)
    text = f"{ready} of {show_count(status.target_nodes, 'node')} ready for the next world."
    if status.replacement_wait is not None:
        text += f" The job {status.replacement_wait}."
    late = [f"{node.node} ({node.state})" for node in status.nodes if node.state in ("starting", "disconnected")]
    return f"{text} Waiting for {_listed(late)}." if late else text


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_WAITED
    return ", ".join(names[:_MOST_WAITED]) + (f" and {show_count(more, 'more node')}" if more > 0 else "")


def _ranked(status: ElasticJobStatus) -> list[NodeSummary]:
    return [node for node in status.nodes if node.node_rank is not None]


def _world(status: ElasticJobStatus) -> Markup:
    placed = len(_ranked(status))
    size = f"{show_count(placed, 'node')} with {show_count(status.nproc, 'rank')} each" if placed else "no world runs"
    limit = f", at most {status.max_nodes}" if status.max_nodes is not None else ""
    tiles = (
        tile("world", str(status.epoch) if status.epoch >= 0 else "none yet"),
        tile("ranks", str(placed * status.nproc), size),
        tile("step reached", _step(status.step), "by every rank"),
        tile("sealed step", _step(status.sealed), "by every rank") if status.sealed >= 0 else None,
        tile("target size", show_count(status.target_nodes, "node"), f"of the next world{limit}"),
        tile("restarts", str(status.restarts), look="warn" if status.restarts else ""),
    )
    reason = f"Last change: {status.reason}." if status.reason else ""
    note = " ".join(filter(None, (reason, describe_wait(status))))
    return report_section("world", "World", element("dl", tiles, class_="tiles"), note=note)


def _step(step: int) -> str:
    return str(step) if step >= 0 else "none"


def _nodes(status: ElasticJobStatus) -> Markup:
    if not status.nodes:
        return report_section("nodes", "Nodes", note="No node has joined.")
    ordered = sorted(status.nodes, key=lambda node: (node.state in _WORKING, node.node_rank is None, node.node_rank))
    rows = [
        (
            node.node,
            node.state,
            _ranks(node, status.nproc),
            str(node.spares),
            _step(node.step),
            _step(node.sealed),
            duration_text(node.last_heartbeat_s),
        )
        for node in ordered[:_MOST_NODES]
    ]
    more = len(status.nodes) - len(rows)
    return report_section(
        "nodes",
        "Nodes",
        html_table(
            ("node", "state", "ranks", "spares", "step", "sealed", "last heartbeat"),
            rows,
            right=("spares", "step", "sealed", "last heartbeat"),
        ),
        element("p", f"and {show_count(more, 'more node')}", class_="note") if more else None,
    )


def _ranks(node: NodeSummary, nproc: int) -> str:
    if node.node_rank is None:
        return "-"
    first = node.node_rank * nproc
    return str(first) if nproc == 1 else f"{first} to {first + nproc - 1}"


def _recoveries(changes: Sequence[WorldChange] | None) -> Markup:
    title = "Recoveries and resizes"
    if changes is None:
        return report_section("recoveries", title, note="This coordinator writes no event log.")
    if not changes:
        return report_section("recoveries", title, note="No world has formed yet.")
    shown = changes[: -_MOST_CHANGES - 1 : -1]
    slowest_s = max((change.seconds or 0.0 for change in shown), default=0.0)
    took = [change.seconds for change in changes if change.faults and change.seconds is not None]
    median = f"The median recovery took {duration_text(quantile(took, 0.5))}. " if took else ""
    more = len(changes) - len(shown)
    return report_section(
        "recoveries",
        title,
        html_table(
            ("time", "change", "ranks", "until the next step", "stages", "message"),
            (_row(change, slowest_s) for change in shown),
            right=("until the next step",),
        ),
        color_legend({stage_kind(name) for change in shown for name, _ in change.stages}),
        element("p", f"and {more:,} before them", class_="note") if more else None,
        note=f"{median}Each bar is divided by the stages of the slowest ranks.",
    )


def _row(change: WorldChange, slowest_s: float) -> Iterator[MarkupPart]:
    yield utc_text(change.at_us)
    yield f"{change.how}, world {change.epoch}" if change.epoch is not None else "no world yet"
    before, after = change.ranks_before, change.ranks
    yield f"{before} to {after}" if before and change.epoch is not None else str(before or after)
    unknown = "-" if change.epoch is not None else "not yet"
    yield unknown if change.seconds is None else duration_text(change.seconds)
    yield _bar(change, slowest_s)
    yield _causes(change)


def _bar(change: WorldChange, slowest_s: float) -> Markup | None:
    if not change.stages or not change.seconds:
        return None
    pieces = [
        element(
            "i",
            class_=f"meter f-{stage_kind(name)}",
            style=f"flex:{seconds:.6f}",
            title=f"{DISPLAY_KINDS[stage_kind(name)].words}: {duration_text(seconds)}",
        )
        for name, seconds in change.stages
        if seconds
    ]
    return element("div", pieces, style=f"display:flex;width:{_BAR_PX * change.seconds / slowest_s:.0f}px")


def _causes(change: WorldChange) -> MarkupPart:
    if not change.faults:
        return change.reason or "-"
    more = len(change.faults) - _MOST_FAULTS
    return (
        [element("div", _location(fault), ": ", fault.reason or fault.kind) for fault in change.faults[:_MOST_FAULTS]],
        element("div", f"and {show_count(more, 'more fault')}", class_="sub") if more > 0 else None,
    )


def _location(fault: FaultEvent) -> str:
    rank = f" local rank {fault.local_rank}" if fault.local_rank >= 0 else ""
    return f"{fault.node or 'unknown node'}{rank}"
