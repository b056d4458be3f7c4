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
from peerstore.sizes_and_durations import show_count, show_seconds, show_size
from tieredckpt.agent.agent_api import ClusterNode, ClusterStatus, DrainStatus
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
from tieredckpt.cli.command_output import CommandOutput, iso_time, literal
from tieredckpt.cli.common_options import ANY_JOB, pass_output, settings_from_options, tier_options, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.cli.tier_client import open_tier_client, require_agent, resolve_job_name
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.step_inventory import StepInventory
from tieredckpt.whatif.redundancy import (
    StepRedundancy,
    newest_replicated,
    pending_drains,
    redundancy_by_step,
    unknown_nodes,
)


@dataclass(frozen=True)
class TrafficCounters:
    """Traffic counters of a node at one time."""

    at_s: float
    sealed_bytes: float
    sent_bytes: float
    received_bytes: float
    drained: Mapping[VersionId, int]
    """Bytes uploaded by step. A repeated drain of a step begins at 0."""

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
    """Traffic of a node in bytes per second."""

    saved: float
    sent: float
    received: float
    drained: float


def traffic_rates(before: Sequence[TrafficCounters], now: TrafficCounters) -> TrafficRates | None:
    """Return the rates since the first of ``before``. ``None``: no earlier counters.

    A counter below its earlier value comes from a new agent, which began at 0.
    """
    moments = [*before, now]
    seconds = now.at_s - moments[0].at_s
    if seconds <= 0:
        return None
    sums = [0.0, 0.0, 0.0, 0.0]
    for one, other in itertools.pairwise(moments):
        sums[0] += _increase(one.sealed_bytes, other.sealed_bytes)
        sums[1] += _increase(one.sent_bytes, other.sent_bytes)
        sums[2] += _increase(one.received_bytes, other.received_bytes)
        sums[3] += sum(_increase(one.drained.get(group, 0), done) for group, done in other.drained.items())
    return TrafficRates(*(total / seconds for total in sums))


def _increase(before: float, now: float) -> float:
    return now - before if now >= before else now


_MAX_STEPS = 6
_MAX_NOTES = 4
_MAX_DRAINS = 3
_FIXED_LINES = 15
"""Lines other than nodes, steps, notes and drains, with some reserve."""
_MIN_NODES = 3


@dataclass(frozen=True)
class ClusterSample:
    """State of a job as of one refresh."""

    view: ClusterStatus
    survey: StepInventory
    drains: tuple[DrainStatus, ...]
    counters: TrafficCounters
    at_ns: int


def count_missing_copies(steps: Sequence[StepRedundancy]) -> int:
    """Return the number of under-replicated parts of all steps."""
    return sum(len(weak.parts) for one in steps for weak in one.under_replicated)


def count_steps_behind(view: ClusterStatus, steps: Sequence[StepRedundancy]) -> int:
    """Return the number of complete steps in memory that are newer than the replicated one."""
    replicated = newest_replicated(view)
    return len(
        {
            s.version_id
            for s in steps
            if s.state == "complete" and s.parts_in_memory and (replicated is None or s.version_id > replicated)
        }
    )


def render_sample(seen: ClusterSample, before: Sequence[TrafficCounters], height: int) -> RenderableType:
    """Render a sample in at most ``height`` lines, if possible. Unhealthy nodes are listed first."""
    view, steps = seen.view, redundancy_by_step(seen.view, seen.survey, seen.drains)
    shown = steps_to_show(steps)[0][-_MAX_STEPS:]
    notes = [*unreachable_lines(view)[:_MAX_NOTES], *step_warnings(view, shown)[:_MAX_NOTES]]
    drains = pending_drains(seen.drains, seen.survey)[-_MAX_DRAINS:]
    room = max(_MIN_NODES, height - _FIXED_LINES - len(shown) - len(notes) - len(drains))
    nodes = unhealthy_first(view.nodes)[:room]
    parts: list[RenderableType] = [_head(seen, steps), Text(), nodes_table(view, nodes)]
    if len(nodes) < len(view.nodes):
        parts.append(Text(f"and {show_count(len(view.nodes) - len(nodes), 'more node')}", style="dim"))
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
        text += f", {show_count(newer, 'newer one')} not yet" if newer else ""
        few = count_missing_copies(steps)
        weak = f"[yellow]{show_count(few, 'part')} with too few copies[/]" if few else "no copies lacking"
        most = "up to " if unknown_nodes(view) and few else ""  # a node that did not answer may have them
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
        rates = ", ".join(f"{name} {show_size(value)}/s" for name, value in pairs)
        grid.add_row("this node", rates)
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
"""Refreshes over which rates are averaged. A copy counts when it is complete, so counters jump."""


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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for background commands
    with open_tier_client(settings_from_options(agent_dir, durable, job or ANY_JOB)) as client:
        agent, name = require_agent(client), resolve_job_name(client, job)
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
        except KeyboardInterrupt:  # Ctrl-C ends the command
            return ExitCode.OK
    return ExitCode.OK


def sample_cluster(agent: NodeAgentClient, job: str) -> ClusterSample:
    """Return the state as the agent knows it, without a new listing of the durable tier."""
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
    """Yield a sample per second, with the counters of the previous ones."""
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
                # The agent may restart. Until then the last sample stays on screen, below this message.
                away = Text.from_markup(f"[bold red]the agent does not answer:[/] {literal(str(error))}")
                live.update(Group(away, last), refresh=True)
                time.sleep(_REFRESH_S)
