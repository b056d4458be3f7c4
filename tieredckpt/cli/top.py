"""``tieredckpt top``: a job's nodes, steps, uploads and transfer rates, refreshed every second."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peerstore.errors import PeerStoreError
from peerstore.shard_records import StoreStatus, VersionId
from peerstore.sizes_and_durations import show_seconds, show_size
from tieredckpt.agent.agent_api import ClusterNode, ClusterStatus, DrainStatus, StepInventory
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.cli.cluster_tables import (
    cluster_json,
    drain_json,
    nodes_table,
    protection_line,
    step_warnings,
    steps_table,
    steps_to_show,
    unreachable_lines,
    upload_percent,
)
from tieredckpt.cli.command_output import CommandOutput, iso_time, literal, pluralized
from tieredckpt.cli.common_options import ANY_JOB, pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import open_tier_client, require_agent, resolve_job_name
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.whatif.redundancy import (
    StepRedundancy,
    newest_replicated,
    pending_drains,
    redundancy_by_step,
    unknown_nodes,
)


@dataclass(frozen=True)
class TrafficCounters:
    """What a node has counted by now."""

    at_s: float
    sealed_bytes: float
    sent_bytes: float
    received_bytes: float
    drained: Mapping[VersionId, int]
    """Bytes uploaded by step: a step that is drained again begins at 0."""

    @classmethod
    def from_view(
        cls, at_s: float, view: ClusterStatus, drains: Iterable[DrainStatus], state: StoreStatus
    ) -> TrafficCounters:
        counted = state.counters
        return cls(
            at_s,
            counted.get("sealed_bytes", 0),
            view.sent_bytes,
            counted.get("replica_bytes_received", 0),
            {one.version_id: one.bytes_done for one in drains},
        )


@dataclass(frozen=True)
class TrafficRates:
    """Bytes per second."""

    saved: float
    sent: float
    received: float
    drained: float


def traffic_rates(before: Sequence[TrafficCounters], now: TrafficCounters) -> TrafficRates | None:
    """Since the first of ``before``; ``None`` while there is nothing to compare with.

    Counters that are lower than before are those of a new agent: what it counted is all since then.
    """
    moments = [*before, now]
    seconds = now.at_s - moments[0].at_s
    if seconds <= 0:
        return None
    sums = [0.0, 0.0, 0.0, 0.0]
    for one, other in itertools.pairwise(moments):
        sums[0] += _more(one.sealed_bytes, other.sealed_bytes)
        sums[1] += _more(one.sent_bytes, other.sent_bytes)
        sums[2] += _more(one.received_bytes, other.received_bytes)
        sums[3] += sum(_more(one.drained.get(group, 0), done) for group, done in other.drained.items())
    return TrafficRates(*(total / seconds for total in sums))


def _more(before: float, now: float) -> float:
    return now - before if now >= before else now


_STEPS_SHOWN = 6
_NOTES_SHOWN = 4
_DRAINS_SHOWN = 3
_FIXED_LINES = 15
"""Everything but the nodes, and a little air."""
_NODES_LEAST = 3


@dataclass(frozen=True)
class ClusterSample:
    """What one look saw."""

    view: ClusterStatus
    survey: StepInventory
    drains: tuple[DrainStatus, ...]
    counters: TrafficCounters
    at_ns: int


def count_missing_copies(steps: Sequence[StepRedundancy]) -> int:
    """Parts with too few copies, of steps that are still to be replicated."""
    return sum(len(weak.parts) for one in steps for weak in one.under_replicated)


def count_steps_behind(view: ClusterStatus, steps: Sequence[StepRedundancy]) -> int:
    """Whole steps that are newer than the replicated one."""
    replicated = newest_replicated(view)
    return len(
        {
            s.version_id
            for s in steps
            if s.state == "whole" and s.parts_in_memory and (replicated is None or s.version_id > replicated)
        }
    )


def render_sample(seen: ClusterSample, before: Sequence[TrafficCounters], height: int) -> RenderableType:
    """``height`` lines at most where that is possible: nodes in trouble are shown before those that are well."""
    view, steps = seen.view, redundancy_by_step(seen.view, seen.survey, seen.drains)
    shown = steps_to_show(steps)[0][-_STEPS_SHOWN:]
    notes = [*unreachable_lines(view)[:_NOTES_SHOWN], *step_warnings(view, shown)[:_NOTES_SHOWN]]
    drains = pending_drains(seen.drains, seen.survey)[-_DRAINS_SHOWN:]
    room = max(_NODES_LEAST, height - _FIXED_LINES - len(shown) - len(notes) - len(drains))
    nodes = unhealthy_first(view.nodes)[:room]
    parts: list[RenderableType] = [_head(seen, steps), Text(), nodes_table(view, nodes)]
    if len(nodes) < len(view.nodes):
        parts.append(Text(f"and {pluralized(len(view.nodes) - len(nodes), 'more node')}", style="dim"))
    parts += [Text(), steps_table(view, seen.survey, shown, seen.at_ns) if shown else Text("no steps are saved yet")]
    parts += [Text.from_markup(line) for line in notes]
    parts += [Text(), _traffic(seen, traffic_rates(before, seen.counters), drains)]
    return Group(*parts)


def unhealthy_first(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    return sorted(nodes, key=lambda one: one.state == "alive" and not one.unreachable)


def _head(seen: ClusterSample, steps: Sequence[StepRedundancy]) -> Text:
    view = seen.view
    at = datetime.fromtimestamp(seen.at_ns / 1e9).astimezone().strftime("%H:%M:%S")
    lines = [
        f"[bold]{literal(view.job)}[/]  {at}  {literal(view.this_node)} {literal(view.sees or 'is the only node')}"
    ]
    if not view.quorum:
        lines[0] = f"{lines[0]}  [bold yellow]no quorum[/]"
    if view.protected is not None:
        lines.append(protection_line(view).strip())
    if view.member_list_version:
        replicated = newest_replicated(view)
        newer = count_steps_behind(view, steps)
        text = f"replicated step {replicated.version}" if replicated is not None else "no step is replicated yet"
        text += f", {pluralized(newer, 'newer one')} not yet" if newer else ""
        few = count_missing_copies(steps)
        weak = f"[yellow]{pluralized(few, 'part')} with too few copies[/]" if few else "no copies lacking"
        most = "up to " if unknown_nodes(view) and few else ""  # who could not be asked may have them
        lines.append(f"{text}   {most}{weak}")
    return Text.from_markup("\n".join(lines))


def _traffic(seen: ClusterSample, speed: TrafficRates | None, drains: Sequence[DrainStatus]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    view = seen.view
    if view.member_list_version:
        grid.add_row("copies", literal(f"sending {view.sending}" if view.sending else "nothing to send"))
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


def _drain(one: DrainStatus) -> RenderableType:
    name = f"step {one.version_id.version}"
    if one.state == "running" and one.bytes_total:
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=one.bytes_total, completed=min(one.bytes_done, one.bytes_total), width=20)
        row.add_row(name, bar, f"{upload_percent(one)} % of {show_size(one.bytes_total)}")
        return row
    error = f": {one.error}" if one.error else ""
    return Text(f"{name} {one.state}{error}", style="red" if one.state == "failed" else "")


def sample_json(seen: ClusterSample, before: Sequence[TrafficCounters]) -> dict[str, Any]:
    steps = redundancy_by_step(seen.view, seen.survey, seen.drains)
    speed = traffic_rates(before, seen.counters)
    return {
        "at": iso_time(seen.at_ns),
        **cluster_json(seen.view, seen.survey, steps),
        "newest_replicated": replicated.version if (replicated := newest_replicated(seen.view)) is not None else None,
        "steps_behind": count_steps_behind(seen.view, steps),
        "parts_lacking_copies": count_missing_copies(steps),
        "copy_lag_s": seen.view.lag_s,
        "drains": [drain_json(one) for one in seen.drains],
        "bytes_per_s": None if speed is None else {name: round(value) for name, value in vars(speed).items()},
    }


_REFRESH_S = 1.0
_WINDOW = 5
"""Refreshes that rates are averaged over: a copy is counted when it is there, which comes in jumps."""


@with_exit_code_help
@click.command("top", short_help="Watch a job's nodes, copies and drains.")
@click.argument("job", required=False)
@click.option("--once", is_flag=True, help="Print once and exit (default when output is not a terminal).")
@tier_options
@pass_output
def top_command(
    screen: CommandOutput, *, job: str | None, once: bool, agent_dir: Path | None, durable: str | None
) -> ExitCode:
    """Watch the nodes of JOB: members, transfers, replicated steps, missing copies.

    Refreshes every second until Ctrl-C; --json prints one object a line. JOB is optional if the agent has only one.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts it in the background ignores it
    with open_tier_client(settings_from_options(agent_dir, durable, job or ANY_JOB)) as sight:
        agent, name = require_agent(sight), resolve_job_name(sight, job)
        if once or not (screen.as_json or screen.out.is_terminal):
            seen = sample_cluster(agent, name)
            screen.result(
                sample_json(seen, []), lambda out: out.print(render_sample(seen, [], out.height), soft_wrap=False)
            )
            return ExitCode.OK
        try:
            if screen.as_json:
                _stream(agent, name)
            else:
                _live(screen.out, agent, name)
        except KeyboardInterrupt:  # the way out
            return ExitCode.OK
    return ExitCode.OK


def sample_cluster(agent: NodeAgentClient, job: str) -> ClusterSample:
    """One look: what the agent knows by now. The durable tier is not listed anew for it."""
    view = agent.cluster_status(job)
    survey = agent.list_steps(job)
    drains = agent.drain_status(job)
    return ClusterSample(
        view,
        survey,
        drains,
        TrafficCounters.from_view(time.monotonic(), view, drains, agent.store.status()),
        time.time_ns(),
    )


def _samples(agent: NodeAgentClient, job: str) -> Iterator[tuple[ClusterSample, list[TrafficCounters]]]:
    """A look a second, and what was seen before it; each begins a second after the one before it began."""
    before: deque[TrafficCounters] = deque(maxlen=_WINDOW)
    while True:
        began = time.monotonic()
        seen = sample_cluster(agent, job)
        yield seen, list(before)
        before.append(seen.counters)
        time.sleep(max(0.0, began + _REFRESH_S - time.monotonic()))


def _stream(agent: NodeAgentClient, job: str) -> None:
    for seen, before in _samples(agent, job):
        sys.stdout.write(json.dumps(sample_json(seen, before)) + "\n")
        sys.stdout.flush()


def _live(out: Console, agent: NodeAgentClient, job: str) -> None:
    last: RenderableType = Text(f"asking the nodes of {job}")
    with Live(last, console=out, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for seen, before in _samples(agent, job):
                    last = render_sample(seen, before, out.height)
                    live.update(last, refresh=True)
            except (PeerStoreError, TieredCheckpointError, OSError) as error:
                # It may come back; until then what was seen last stays, and says that it is old.
                away = Text.from_markup(f"[bold red]the agent does not answer:[/] {literal(str(error))}")
                live.update(Group(away, last), refresh=True)
                time.sleep(_REFRESH_S)
