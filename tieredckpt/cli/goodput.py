"""``tieredckpt goodput``: a run's goodput as text, JSON, Prometheus metrics or an HTML report."""

from __future__ import annotations

import datetime as dt
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from peerstore.optional_packages import optional_imports
from peerstore.sizes_and_durations import show_count
from tieredckpt.agent.agent_api import ProtectionStatus
from tieredckpt.agent.job_health import describe_protection
from tieredckpt.cli.command_output import CommandOutput, format_age, literal, text_table
from tieredckpt.cli.common_options import output_options, pass_output, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.errors import UsageError
from tieredckpt.event_log import read_event_log
from tieredckpt.event_log.event_types import STAGES, LogEvent
from tieredckpt.event_log.log_reader import find_event_log
from tieredckpt.goodput import Analysis as GoodputAnalysis
from tieredckpt.goodput import TimeCategory as Category
from tieredckpt.goodput import TransitionRecord, analyse
from tieredckpt.goodput.analysis_result import Analysis, TimeCategory
from tieredckpt.goodput.traces import job_traces

_Sample = tuple[Mapping[str, str], float]


def prometheus_text(found: Analysis) -> str:
    """Return the analysis as Prometheus metrics.

    All are gauges: a later read of the log can lower their values.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import GaugeMetricFamily

    class Collector:
        def collect(self) -> Iterator[GaugeMetricFamily]:
            for name, help_text, samples in _families(found):
                family = GaugeMetricFamily(name, help_text)
                for labels, value in samples:
                    family.add_sample(name, {"job": found.job, **labels}, value)
                yield family

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


def _families(found: Analysis) -> Iterator[tuple[str, str, list[_Sample]]]:
    def one(name: str, help_text: str, value: float) -> tuple[str, str, list[_Sample]]:
        return f"tieredckpt_{name}", help_text, [({}, float(value))]

    yield one("ettr_ratio", "Share of the time that went into steps that count.", found.ettr)
    yield one("goodput_ratio", "The same of the capacity of the largest world.", found.goodput)
    yield (
        "tieredckpt_job_seconds",
        "The job's time by what it was spent on.",
        [({"category": name}, us / 1e6) for name, us in found.wall.by.items()],
    )
    yield (
        "tieredckpt_rank_seconds",
        "Time of ranks by what it was spent on.",
        [({"category": name}, us / 1e6) for name, us in found.capacity.by.items()],
    )
    yield (
        "tieredckpt_job_steps",
        "Steps that count, and that were lost.",
        [({"kind": "counted"}, float(found.steps_counted)), ({"kind": "lost"}, float(found.steps_lost))],
    )
    yield one("job_faults", "Faults of the job.", found.faults)
    yield one("job_world_changes", "Worlds that were formed.", found.worlds)
    yield one("job_running", "Whether it has no end yet.", found.is_running)
    for name, help_text, value in (
        ("mttr_seconds", "Mean time from a fault to the next step.", found.mttr_s),
        ("mtbf_seconds", "Time of steps per interruption.", found.mtbf_s),
    ):
        if value is not None:
            yield one(name, help_text, value)
    if found.protected_step is not None:
        yield one("job_protected_step", "The newest step that is protected; -1: none is.", found.protected_step)
        unprotected_us = sum(part.end_us - part.start_us for part in found.unprotected)
        yield one("job_unprotected_seconds", "Time in which newer saves were not.", unprotected_us / 1e6)
    for share in ("p50", "p99"):
        samples: list[_Sample] = [
            ({"category": stage.category.value, "stage": stage.name}, getattr(stage, f"{share}_s"))
            for stage in found.stages
            if stage.category in (TimeCategory.STARTUP, TimeCategory.RECOVERY, TimeCategory.RESIZE)
        ]
        if samples:
            yield (
                f"tieredckpt_transition_stage_{share}_seconds",
                f"A rank's way into a world, by stage: {share}.",
                samples,
            )


def summary_lines(found: GoodputAnalysis) -> Iterator[RenderableType]:
    """Yield the summary lines."""
    name, total_s = literal(found.job or "job"), found.wall.total / 1e6
    how = "is running or was killed" if found.is_running else found.runs[-1].how
    began = dt.datetime.fromtimestamp(found.start_us / 1e6, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    sizes = f"{show_count(found.worlds, 'world')}, at most {show_count(found.ranks, 'rank')}"
    runs = f", {show_count(len(found.runs), 'run')}" if len(found.runs) > 1 else ""
    yield Text.from_markup(f"[bold]{name}[/] {how}; {format_seconds(total_s)} since {began}{runs}, {sizes}")
    yield Text(
        f"goodput {format_share(found.goodput)} of the capacity, ETTR {format_share(found.ettr)} of the time: "
        f"{show_count(found.steps_counted, 'step')} that count, {found.steps_lost} lost"
    )
    each = f"{format_seconds(found.step_s.p50_s)} a step (p50), {format_seconds(found.step_s.p99_s)} (p99)"
    saves = f"a save blocks {format_seconds(found.save_s.p50_s)} (p50), {format_seconds(found.save_s.p99_s)} (p99)"
    yield Text("; ".join([*([each] if found.step_s.count else []), *([saves] if found.save_s.count else [])]))
    rate = [
        f"{number / total_s:,.0f} {what}/s"
        for number, what in ((found.tokens, "tokens"), (found.samples, "samples"))
        if number is not None and total_s
    ]
    if rate:
        yield Text(f"{' and '.join(rate)}, counting steps that count and all of the time")
    if found.mtbf_s is not None:
        mean = "none was recovered from" if found.mttr_s is None else f"MTTR {format_seconds(found.mttr_s)}"
        yield Text(f"{show_count(found.faults, 'fault')}: {mean}, MTBF {format_seconds(found.mtbf_s)}")
    if found.protected_step is not None:
        yield _protection(found, found.protected_step)


def _protection(found: GoodputAnalysis, step: int) -> Text:
    """Return the line about protection, worded as in status and log, with the total unprotected time."""
    since_us = found.unprotected_since_us
    left_out = found.unprotected[-1].left_out if since_us is not None else 0
    now = ProtectionStatus(step, None if since_us is None else since_us / 1e6, left_out)
    times = len(found.unprotected)
    before = ""
    if times:
        total_s = sum(one.end_us - one.start_us for one in found.unprotected) / 1e6
        before = f"; it was unprotected {'once' if times == 1 else f'{times} times'}, for {format_seconds(total_s)}"
    return Text(f"{describe_protection(now)}{before}", style="" if since_us is None else "bold yellow")


def time_tables(found: GoodputAnalysis) -> Iterator[RenderableType]:
    """Yield the tables of time by category, and of stages over all ranks."""
    rows = []
    for name in [*(one.value for one in Category), "missing"]:
        wall_us, ranks_us = found.wall.by.get(name, 0), found.capacity.by.get(name, 0)
        if wall_us or ranks_us:
            wall = (
                (format_seconds(wall_us / 1e6), format_share(found.wall.share(name)))
                if name != "missing"
                else ("-", "-")
            )
            rows.append([name, *wall, format_seconds(ranks_us / 1e6), format_share(found.capacity.share(name))])
    numbers = ("TIME", "SHARE", "RANK TIME", "OF CAPACITY")
    yield text_table(("SPENT ON", *numbers), rows, right=numbers)
    stages = [
        [one.category.value, one.name, str(one.count), *map(format_seconds, (one.p50_s, one.p99_s, one.most_s))]
        for one in found.stages
    ]
    if stages:
        columns = ("RANKS", "P50", "P99", "MOST")
        yield Text()
        yield text_table(("WAY", "STAGE", *columns), stages, right=columns)


def recovery_table(found: GoodputAnalysis) -> Iterator[RenderableType]:
    """Yield a table of the transitions, and below it their faults and reasons."""
    transitions = [one for one in found.recoveries if one.category is not Category.STARTUP or one.faults]
    if not transitions:
        yield Text("no fault and no resize")
        return
    names = sorted({name for one in transitions for name in one.stages}, key=_stage_order)
    rows = [_row(found, one, names) for one in transitions]
    numbers = ("AT", "RANKS", *(name.upper() for name in names), "TOTAL", "LOST STEPS", "LOST")
    yield text_table(("WAY", "HOW", *numbers), rows, right=numbers)
    for number, one in enumerate(transitions, start=1):
        for fault in one.faults:
            who = f"rank {fault.local_rank} of {fault.node}" if fault.local_rank >= 0 else fault.node
            injected = f" (injected: {fault.injected})" if fault.injected else ""
            seen_s = (fault.noticed_us - fault.at_us) / 1e6
            yield Text(
                f"{number}. {fault.kind or 'fault'} {who}{injected}: {fault.reason}, noticed after "
                f"{format_seconds(seen_s)}"
            )
        if not one.faults and one.reason:
            yield Text(f"{number}. {one.reason}")


def _row(found: GoodputAnalysis, one: TransitionRecord, names: list[str]) -> list[str]:
    ranks = f"{one.ranks} → {one.next_ranks}" if one.resumed else f"{one.ranks} → -"
    return [
        one.category.value,
        one.how or "-",
        f"+{format_seconds((one.start_us - found.start_us) / 1e6)}",
        ranks,
        *(format_seconds(one.stages[name]) if name in one.stages else "-" for name in names),
        format_seconds(one.seconds),
        str(one.steps_lost),
        format_seconds(one.lost_s),
    ]


def _stage_order(name: str) -> tuple[int, str]:
    return (STAGES.index(name) if name in STAGES else len(STAGES), name)


def format_share(share: float) -> str:
    return f"{100 * share:.1f} %"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: ``12.3 ms``, ``1 h 30 min``."""
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    if seconds < 1000:
        return f"{seconds:.0f} s"
    return format_age(seconds)


_REFRESH_S = 2.0
_TRACE_COMPLETE_S = 60.0
"""Seconds after the end of a trace in which ranks of a running job may still add to it."""


@with_exit_code_help
@click.command("goodput", short_help="Show a job's goodput and the cost of its faults.")
@click.argument("where", metavar="[DIR|JOB]", required=False)
@click.option("--faults", is_flag=True, help="List every recovery and resize with its stages.")
@click.option("--prometheus", is_flag=True, help="Print metrics in Prometheus' text format.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML report to FILE as well.")
@click.option("--otlp", is_flag=True, help="Send traces to $OTEL_EXPORTER_OTLP_ENDPOINT as well.")
@click.option("--watch", is_flag=True, help="Refresh the output every two seconds until Ctrl-C.")
@output_options
@pass_output
def goodput_command(
    screen: CommandOutput,
    *,
    where: str | None,
    faults: bool,
    prometheus: bool,
    html: Path | None,
    otlp: bool,
    watch: bool,
) -> ExitCode:
    """Show a job's goodput: its time in steps that count, and the causes of all lost time.

    Reads the event log of `elastic run`, even while the job runs. DIR is the job's log directory or the event log, and
    JOB is a directory in ./elastic-logs. Without either, the event log is $TIEREDCKPT_EVENT_LOG.
    """
    if prometheus and (screen.as_json or faults):
        raise UsageError("--prometheus prints nothing but metrics: leave out --json and --faults")
    if watch and (screen.as_json or prometheus or html is not None):
        raise UsageError("--watch is for people: leave out --json, --prometheus and --html, and call it again instead")
    traces = _SentTraces(screen) if otlp else None
    place = find_event_log(where)
    if watch and (screen.out.is_terminal or traces is not None):
        _live(screen.out, place, faults=faults, traces=traces)
        return traces.report() if traces is not None else ExitCode.OK
    found, events = read_analysis(place)
    if html is not None:
        write_html_report(html, found)
    if prometheus:
        sys.stdout.write(prometheus_text(found))
        sys.stdout.flush()
    else:
        screen.result(analysis_json(found), lambda out: out.print(render_analysis(found, faults=faults)))
    for warning in found.warnings:
        screen.info(f"{place}: {warning}")
    if traces is None:
        return ExitCode.OK
    traces.send(events, running=found.is_running)
    return traces.report()


class _SentTraces:
    """Traces of the job that were sent, and whether the last attempt failed."""

    def __init__(self, screen: CommandOutput) -> None:
        with optional_imports("goodput --otlp", "'tieredckpt[otlp]'"):
            from tieredckpt.cli.trace_export import TraceExporter
        self._screen, self._exporter, self._failed = screen, TraceExporter(), False

    def send(self, events: Sequence[LogEvent], *, running: bool) -> None:
        until_us = (time.time() - _TRACE_COMPLETE_S) * 1e6 if running else math.inf
        self._failed = not self._exporter.send(one for one in job_traces(events) if one.end_us <= until_us)

    def report(self) -> ExitCode:
        self._screen.info(f"sent {show_count(self._exporter.sent_spans, 'span')}")
        if self._failed:
            self._screen.info("some spans were not sent: check $OTEL_EXPORTER_OTLP_ENDPOINT")
        return ExitCode.FAILED if self._failed else ExitCode.OK


def read_analysis(place: Path) -> tuple[GoodputAnalysis, Sequence[LogEvent]]:
    """Return the analysis of an event log, and its events."""
    read = read_event_log(place)
    return analyse(read.events, warnings=read.warnings), read.events


def write_html_report(path: Path, found: GoodputAnalysis) -> None:
    """Write the HTML report atomically to ``path``, replacing an existing file."""
    from tieredckpt.goodput.html_report import html_report

    if path.is_dir() or not path.parent.is_dir():
        why = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise UsageError(f"--html {path}: {why}; name a file")
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(html_report(found), encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def analysis_json(found: GoodputAnalysis) -> dict[str, Any]:
    """Return the analysis for JSON, without the single steps."""
    value: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(found, step_views=()))
    del value["step_views"]
    return {**value, "live": found.is_running, "unstated_us": found.unattributed_us}


def render_analysis(found: GoodputAnalysis, *, faults: bool) -> RenderableType:
    parts: list[RenderableType] = [*summary_lines(found), Text(), *time_tables(found)]
    if faults:
        parts += [Text(), *recovery_table(found)]
    return Group(*parts)


def _live(out: Console, place: Path, *, faults: bool, traces: _SentTraces | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for background commands
    try:
        with Live(Text(f"reading {place}"), console=out, auto_refresh=False) as live:
            while True:
                found, events = read_analysis(place)
                warnings = [Text(warning, style="yellow") for warning in found.warnings]
                live.update(Group(render_analysis(found, faults=faults), *warnings), refresh=True)
                if traces is not None:
                    traces.send(events, running=found.is_running)
                if not found.is_running:
                    return
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:  # Ctrl-C ends the command
        return
