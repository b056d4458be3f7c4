"""``tieredckpt simulate``: the expected goodput of a job under random faults."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from peerstore.sizes_and_durations import show_count
from tieredckpt.cli.command_output import CommandOutput, print_fields, text_table
from tieredckpt.cli.common_options import output_options, pass_output, with_exit_code_help
from tieredckpt.cli.exit_codes import ExitCode
from tieredckpt.errors import UsageError
from tieredckpt.event_log import read_event_log
from tieredckpt.event_log.event_types import STAGES
from tieredckpt.goodput import Analysis, TimeCategory, analyse
from tieredckpt.goodput.expected_goodput import (
    MTBF_PRESETS,
    CheckpointScheme,
    FaultCost,
    Mtbf,
    MtbfUnit,
    goodput_by_interval,
    has_best_interval,
    longest_recovery_s,
    restart_scheme,
    with_best_interval,
)
from tieredckpt.goodput.monte_carlo import MAX_SIMULATED_FAULTS, GoodputForecast

if TYPE_CHECKING:
    from tieredckpt.goodput.monte_carlo import SimulatedNodes

_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|h|d|y)?\s*", re.ASCII)
_BELOW = (("ms", 1.0), ("s", 120.0), ("min", 7200.0), ("h", 172800.0))
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``90``, ``1.5h`` or ``200 ms``."""
    match = _TIME.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a time: write for example 45s, 200ms, 10min, 1.5h, 30d or 5y")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def format_duration(seconds: float) -> str:
    """Return a duration with three digits in a suitable unit: ``1.5 h``."""
    if not math.isfinite(seconds):
        return "for ever"
    unit = next((unit for unit, below in _BELOW if seconds < below), "d")
    value = seconds / _SECONDS[unit]
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


class DurationType(click.ParamType):
    name = "TIME"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            seconds = parse_duration(value)
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)
        if not seconds and not self._zero:
            self.fail("must be more than 0", param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is too long", param, ctx)
        return seconds


class ShareType(click.ParamType):
    name = "SHARE"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            share = float(value[:-1]) / 100 if isinstance(value, str) and value.endswith("%") else float(value)
        except ValueError:
            self.fail(f"{value!r} is not a share: write for example 5% or 0.05", param, ctx)
        if not 0 <= share <= 1:
            self.fail(f"{value!r} is not between 0 and 1", param, ctx)
        return share


class MtbfType(click.ParamType):
    name = "TIME/gpu|node|job"

    def convert(self, value: str | Mtbf, param: click.Parameter | None, ctx: click.Context | None) -> Mtbf:
        if isinstance(value, Mtbf):
            return value
        if value in MTBF_PRESETS:
            return MTBF_PRESETS[value]
        text, slash, per = value.partition("/")
        try:
            seconds = parse_duration(text)
            mtbf = Mtbf(seconds, MtbfUnit(per.strip() if slash else "job"))
        except ValueError as wrong:
            known = "gpu, node or job"
            why = f"after the slash comes {known}, not {per!r}" if "Per" in str(wrong) else str(wrong)
            self.fail(f"{why}; or one of: {', '.join(MTBF_PRESETS)}", param, ctx)
        if not seconds or not math.isfinite(seconds):
            self.fail("must be more than 0", param, ctx)
        return mtbf


class StageDurationType(click.ParamType):
    """Parameter type for ``STAGE=TIME``."""

    name = "STAGE=TIME"

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def convert(
        self, value: str | tuple[str, float], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not equals or name not in self._names:
            self.fail(f"{value!r}: write STAGE=TIME, the stages are {', '.join(self._names)}", param, ctx)
        return name, DurationType(zero=True).convert(text, param, ctx)


@dataclass(frozen=True)
class MeasuredMeans:
    """Mean times of a measured run. Goodput depends on means."""

    recoveries: int
    stages: dict[str, float]
    """Mean seconds of each stage. Their sum is the mean recovery."""
    stall_s: float | None
    """Mean seconds that a save blocked training. ``None``: there were no saves."""


def measure_run(directory: Path) -> MeasuredMeans:
    """Return the means of the run with event log ``directory``.

    Raise the errors of :func:`read_event_log`, and :class:`UsageError` for a run without recoveries.
    """
    read = read_event_log(directory)
    found = measure_analysis(analyse(read.events))
    if not found.recoveries:
        raise UsageError(f"--event-log {directory}: that run has no recoveries; use --recovery or --stage")
    return found


def measure_analysis(analysis: Analysis) -> MeasuredMeans:
    """Return the means of an analysis. Only recoveries that resumed training count."""
    recoveries = [
        recovery for recovery in analysis.recoveries if recovery.category is TimeCategory.RECOVERY and recovery.resumed
    ]
    order = {name: place for place, name in enumerate(STAGES)}
    names = sorted(
        {name for recovery in recoveries for name in recovery.stages},
        key=lambda name: (order.get(name, len(order)), name),
    )
    stages = {name: sum(recovery.stages.get(name, 0.0) for recovery in recoveries) / len(recoveries) for name in names}
    saves = analysis.save_s
    return MeasuredMeans(len(recoveries), stages, saves.sum_s / saves.count if saves.count else None)


GoodputCurve = Sequence[tuple[CheckpointScheme, float]]
_WORDS = {
    "stalled": "saves",
    "repeated": "work that was repeated",
    "recovering": "recovery",
    "waiting": "waiting for a node",
    "smaller": "fewer nodes",
}
_MAX_DEVIATION_SIGMAS = 3.0
_BAR = 30


def time_shares(forecast: GoodputForecast) -> dict[str, float]:
    """Return the shares of the simulated time, which add up to 1. Empty: nothing was simulated."""
    simulated = forecast.simulated
    if simulated is None:
        return {}
    total = float(simulated.elapsed.sum())
    spent = {name: float(getattr(simulated, name).sum()) / total for name in _WORDS}
    return {"work": forecast.goodput, **spent}


def simulation_json(
    asked: SimulateOptions,
    answer: Mapping[str, GoodputForecast],
    at_best: CheckpointScheme | None,
    around: GoodputCurve,
) -> dict[str, Any]:
    forecast = answer["as asked"]
    nodes, scheme = forecast.nodes, forecast.scheme
    return {
        "gpus": asked.gpus,
        "nodes": nodes.count,
        "mtbf_s": nodes.mtbf_s,
        "step_s": scheme.step_s or None,
        "stages_s": asked.recovery_by_stage or None,
        "from": None if asked.event_log is None else str(asked.event_log),
        "runs": asked.runs,
        "seed": asked.seed,
        **_forecast_json(forecast),
        "best": None if at_best is None else _point(at_best, dict(_pairs(around))[at_best.interval_s]),
        "curve": [_point(one, worth) for one, worth in around],
        "policies": {name: _forecast_json(one) for name, one in answer.items()},
        "longest_recovery_s": {str(wanted): longest_recovery_s(nodes.mtbf_s, wanted) for wanted in (0.9, 0.99, 0.999)},
    }


def _pairs(around: GoodputCurve) -> list[tuple[float, float]]:
    return [(one.interval_s, worth) for one, worth in around]


def _point(scheme: CheckpointScheme, worth: float) -> dict[str, float]:
    return {"interval_s": scheme.interval_s, "goodput": worth}


def _forecast_json(one: GoodputForecast) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "goodput": one.goodput,
        "closed_form": one.closed_form,
        "interval_s": one.scheme.interval_s,
        "stall_s": one.scheme.stall_s,
        "recovery_s": one.scheme.mean_recovery_s,
        "work_s": one.work_s,
        "played": None,
    }
    if one.simulated is not None:
        low, high = one.simulated.percentiles(0.05, 0.95)
        fields["played"] = {
            "goodput": one.simulated.goodput,
            "within": one.confidence_95,
            "low": low,
            "high": high,
            "elapsed_s": float(one.simulated.elapsed.mean()),
            "faults": float(one.simulated.faults.mean()),
            "standard_errors_apart": one.deviation_sigmas if one.is_comparable else None,
            "shares": time_shares(one),
        }
    return fields


def print_simulation(
    out: Console,
    asked: SimulateOptions,
    answer: Mapping[str, GoodputForecast],
    at_best: CheckpointScheme | None,
    around: GoodputCurve,
) -> None:
    forecast = answer["as asked"]
    _show_asked(out, asked, forecast)
    out.print()
    _show_goodput(out, asked, forecast)
    out.print()
    _show_curve(out, forecast, at_best, around)
    out.print()
    _show_policies(out, answer)


def _show_asked(out: Console, asked: SimulateOptions, forecast: GoodputForecast) -> None:
    nodes, scheme = forecast.nodes, forecast.scheme
    size = f"{asked.gpus:,} GPUs on {show_count(nodes.count, 'node')}" if asked.gpus else "a job"
    out.print(f"[bold]{size}[/], a fault every {format_duration(nodes.mtbf_s)}, back after {_recoveries(scheme)}")
    if asked.recovery_by_stage:
        out.print(
            "  " + " + ".join(f"{name} {format_duration(seconds)}" for name, seconds in asked.recovery_by_stage.items())
        )
    if asked.measured is not None:
        out.print(f"  as {asked.event_log} has it: the mean of its {_recoveries_text(asked.measured.recoveries)}")
    steps = f" ({show_count(scheme.steps_per_interval, 'step')})" if scheme.steps_per_interval else ""
    out.print(
        f"saves every {format_duration(scheme.interval_s)}{steps}, each holds training up for "
        f"{format_duration(scheme.stall_s)}"
    )
    if nodes.node_loss_share:
        away = (
            f"{_percent(nodes.node_loss_share, 0)} of faults remove a node, for "
            f"{format_duration(nodes.repair_s)} on average"
        )
        lack = (
            f"the job continues with {nodes.min_nodes} or more nodes"
            if nodes.min_nodes < nodes.count
            else "without a spare the job waits"
        )
        out.print(f"{away}; {show_count(nodes.spares, 'spare')}, {lack}")


def _recoveries_text(number: int) -> str:
    return f"{number:,} recoveries" if number != 1 else "1 recovery"


def _recoveries(scheme: CheckpointScheme) -> str:
    known = {"live": scheme.live, "memory": scheme.snapshot, "durable": scheme.durable}
    there = {name: one for name, one in known.items() if one.share}
    if len({one.recovery_s for one in there.values()}) == 1 and "durable" not in there:
        text = format_duration(next(iter(there.values())).recovery_s)
        return text if "live" not in there else f"{text}, {_percent(scheme.live.share, 0)} with nothing lost"
    words = {"live": "with nothing lost", "memory": "from memory", "durable": "from the durable tier"}
    return ", ".join(
        f"{format_duration(one.recovery_s)} {words[name]} ({_percent(one.share, 1)})" for name, one in there.items()
    )


def _show_goodput(out: Console, asked: SimulateOptions, forecast: GoodputForecast) -> None:
    simulated = forecast.simulated
    lines = []
    if simulated is None:
        why = f"not played: more than {MAX_SIMULATED_FAULTS:,} faults in {format_duration(forecast.work_s)} of work"
        lines.append(("goodput", f"[bold]{_percent(forecast.closed_form)}[/] by the closed form; {why}"))
    else:
        low, high = simulated.percentiles(0.05, 0.95)
        within = f"± {100 * forecast.confidence_95:.2g} (95 %, {show_count(asked.runs, 'run')})"
        lines.append(("goodput", f"[bold]{_percent(simulated.goodput)}[/] {within}"))
        lines.append(("single runs", f"{_percent(low)} to {_percent(high)} (nine in ten)"))
        lines.append(("closed form", f"{_percent(forecast.closed_form)}, {_agreement(forecast)}"))
        took = f"{format_duration(forecast.work_s)} of work take {format_duration(float(simulated.elapsed.mean()))}"
        faults = f"{simulated.faults.mean():,.0f}"
        lines.append(("time", f"{took}, with {faults} fault{'' if faults == '1' else 's'}"))
    spent = {name: share for name, share in time_shares(forecast).items() if share > 0 and name != "work"}
    lines += [
        (_WORDS[name], f"{_percent(share):>8}  {_bar(share / sum(spent.values()))}") for name, share in spent.items()
    ]
    print_fields(out, lines)


def _agreement(forecast: GoodputForecast) -> str:
    if not forecast.is_comparable:
        return "which knows no missing nodes"
    if forecast.deviation_sigmas <= _MAX_DEVIATION_SIGMAS:
        return (
            f"{forecast.deviation_sigmas:.1f} standard errors away, within chance (up to {_MAX_DEVIATION_SIGMAS:.0f})"
        )
    return (
        f"[yellow]{forecast.deviation_sigmas:.1f} standard errors away[/]: another --seed or more --runs tell "
        f"whether by chance"
    )


def _show_curve(
    out: Console, forecast: GoodputForecast, at_best: CheckpointScheme | None, around: GoodputCurve
) -> None:
    lost = max(1 - worth for _, worth in around)
    rows = []
    for one, worth in around:
        mark = "best" if one == at_best else ""
        mark = f"{mark} as asked" if one == forecast.scheme and mark == "" else mark
        rows.append([format_duration(one.interval_s), _percent(worth), _bar((1 - worth) / lost), mark.strip()])
    out.print(text_table(["SAVE EVERY", "GOODPUT", "TIME LOST", ""], rows, right=("SAVE EVERY", "GOODPUT")))
    if at_best is not None and all(one != forecast.scheme for one, _ in around):
        out.print(f"best: every {format_duration(at_best.interval_s)}")


def _show_policies(out: Console, answer: Mapping[str, GoodputForecast]) -> None:
    rows = []
    for name, one in answer.items():
        within = "" if one.simulated is None else f"± {100 * one.confidence_95:.2g}"
        rows.append(
            [
                name,
                format_duration(one.scheme.mean_recovery_s),
                format_duration(one.scheme.interval_s),
                _percent(one.goodput),
                within,
                _percent(one.closed_form),
                format_duration(one.work_s / one.goodput) if one.goodput else "for ever",
            ]
        )
    columns = ["POLICY", "BACK AFTER", "SAVE EVERY", "GOODPUT", "", "CLOSED FORM", "TAKES"]
    out.print(text_table(columns, rows, right=columns[1:]))


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def _bar(share: float) -> str:
    return "█" * round(_BAR * share) or ("▏" if share > 0 else "")


_STALL_S = 0.5


@with_exit_code_help
@click.command("simulate", short_help="The goodput a job will have, and how often to save.")
@click.option("--gpus", type=click.IntRange(1), help="GPUs of the job.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True, help="GPUs of a node.")
@click.option(
    "--mtbf",
    type=MtbfType(),
    default="llama-3",
    show_default=True,
    help="Mean time between failures: 3h/job, 5y/gpu, 200d/node, or llama-3.",
)
@click.option(
    "--interval", type=DurationType(), help="Training time between saves (default the one with the best goodput)."
)
@click.option(
    "--stall",
    type=DurationType(zero=True),
    help="Time training is blocked per save (default from --event-log, or 500ms).",
)
@click.option(
    "--step",
    type=DurationType(),
    help="Duration of a step. Intervals are multiples of it; a live recovery repeats one step.",
)
@click.option("--recovery", type=DurationType(zero=True), help="Time from a fault to training again.")
@click.option(
    "--stage",
    "stages",
    multiple=True,
    type=StageDurationType(STAGES),
    help="Duration of one recovery stage; may be repeated.",
)
@click.option(
    "--event-log",
    "event_log",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Event log of a run, to take recovery stages and save stalls from.",
)
@click.option(
    "--live-share",
    type=ShareType(),
    default="0",
    help="Fraction of faults from which the surviving ranks recover without losing a step.",
)
@click.option(
    "--durable-share", type=ShareType(), default="0", help="Fraction of faults after which the durable tier is read."
)
@click.option(
    "--durable-every", type=click.IntRange(1), default=1, show_default=True, help="Every N-th save is also uploaded."
)
@click.option(
    "--durable-recovery", type=DurationType(zero=True), help="Recovery time from the durable tier (default --recovery)."
)
@click.option(
    "--node-loss",
    "node_loss_share",
    type=ShareType(),
    default="0",
    help="Fraction of faults that take the node away until it is repaired.",
)
@click.option(
    "--repair", type=DurationType(), default="1d", show_default=True, help="Mean time until the node is back."
)
@click.option("--spares", type=click.IntRange(0), default=0, show_default=True, help="Standby nodes.")
@click.option(
    "--min-nodes", type=click.IntRange(1), help="Smallest number of nodes to keep training with (default all)."
)
@click.option("--resize", type=DurationType(zero=True), default="5s", show_default=True, help="Pause to add a node.")
@click.option(
    "--restart",
    type=DurationType(zero=True),
    default="5min",
    show_default=True,
    help="Recovery time if the whole job restarts.",
)
@click.option("--work", type=DurationType(), default="30d", show_default=True, help="Training time without faults.")
@click.option("--runs", type=click.IntRange(2, 100_000), default=200, show_default=True, help="Simulated runs.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Random seed.")
@output_options
@pass_output
def simulate_command(screen: CommandOutput, /, **given: Any) -> ExitCode:
    """Predict a job's goodput: the share of its time in steps that it does not repeat.

    Simulates many runs event by event, with faults at random times, also during a recovery. Also prints the result of
    the closed formula. Set the length of a recovery with --recovery, or of its stages with --stage.
    """
    from tieredckpt.goodput.monte_carlo import forecast_goodput

    asked = SimulateOptions(**given)
    recovery_s = asked.recovery_s
    nodes = asked.nodes()
    scheme = asked.scheme(nodes.mtbf_s, recovery_s)
    policies = {name: one for name, one in asked.policies(scheme, nodes.mtbf_s).items() if one != scheme}
    with screen.spinner("playing the runs"):
        forecast = forecast_goodput(scheme, nodes, work_s=asked.work, runs=asked.runs, seed=asked.seed)
        others = {
            name: forecast_goodput(one, nodes, work_s=asked.work, runs=asked.runs, seed=asked.seed)
            for name, one in policies.items()
        }
    at_best = with_best_interval(scheme, nodes.mtbf_s) if has_best_interval(scheme) else None
    around = goodput_by_interval(at_best or scheme, nodes.mtbf_s)
    answer = {"as asked": forecast, **others}
    screen.result(
        simulation_json(asked, answer, at_best, around),
        lambda out: print_simulation(out, asked, answer, at_best, around),
    )
    return ExitCode.OK


@dataclass(frozen=True)
class SimulateOptions:
    """Options of the command line."""

    gpus: int | None
    gpus_per_node: int
    mtbf: Mtbf
    interval: float | None
    stall: float | None
    step: float | None
    recovery: float | None
    stages: tuple[tuple[str, float], ...]
    event_log: Path | None
    live_share: float
    durable_share: float
    durable_every: int
    durable_recovery: float | None
    node_loss_share: float
    repair: float
    spares: int
    min_nodes: int | None
    resize: float
    restart: float
    work: float
    runs: int
    seed: int

    @cached_property
    def measured(self) -> MeasuredMeans | None:
        return None if self.event_log is None else measure_run(self.event_log)

    @property
    def stall_s(self) -> float:
        if self.stall is not None:
            return self.stall
        known = None if self.measured is None else self.measured.stall_s
        return _STALL_S if known is None else known

    @property
    def recovery_s(self) -> float:
        if self.recovery is not None and (self.stages or self.event_log is not None):
            raise UsageError("--recovery replaces --stage and --event-log: use one of them")
        if self.recovery is None and not self.stages and self.event_log is None:
            raise UsageError(
                "the time of a recovery is missing: use --recovery TIME, --stage NAME=TIME for each stage, or "
                "--event-log DIR"
            )
        return self.recovery if self.recovery is not None else math.fsum(self.recovery_by_stage.values())

    @property
    def recovery_by_stage(self) -> dict[str, float]:
        """Seconds of each recovery stage, in order.

        ``--stage`` overrides the event log, and its last value wins.
        """
        known = {} if self.measured is None else self.measured.stages
        fields = {**known, **dict(self.stages)}
        names = (*STAGES, *sorted(fields.keys() - set(STAGES)))
        return {name: fields[name] for name in names if name in fields}

    @property
    def node_count(self) -> int:
        if self.gpus is None:
            return 1
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise UsageError(f"--gpus {self.gpus} is not a multiple of {self.gpus_per_node}: set --gpus-per-node")
        return max(1, self.gpus // self.gpus_per_node)

    def nodes(self) -> SimulatedNodes:
        from tieredckpt.goodput.monte_carlo import SimulatedNodes

        if self.gpus is None and (self.mtbf.per is not MtbfUnit.JOB or self.node_loss_share):
            raise UsageError("--gpus N is required, unless --mtbf is that of the job (3h/job) without --node-loss")
        if (self.spares or self.min_nodes is not None) and not self.node_loss_share:
            raise UsageError("--spares and --min-nodes need --node-loss SHARE")
        count = self.node_count
        min_nodes = count if self.min_nodes is None else self.min_nodes
        if min_nodes > count:
            raise UsageError(f"--min-nodes {min_nodes} is more than the job's {count} nodes")
        return SimulatedNodes(
            mtbf_s=self.mtbf.for_job(self.gpus or 1, min(self.gpus_per_node, self.gpus or 1)),
            count=count,
            spares=self.spares,
            min_nodes=min_nodes,
            node_loss_share=self.node_loss_share,
            repair_s=self.repair,
            resize_s=self.resize,
        )

    def scheme(self, mtbf_s: float, recovery: float) -> CheckpointScheme:
        if self.live_share + self.durable_share > 1:
            share = f"{self.live_share + self.durable_share:.0%}"
            raise UsageError(f"--live-share and --durable-share are {share} together, more than all faults")
        if self.durable_every > 1 and not self.durable_share:
            raise UsageError("--durable-every needs --durable-share SHARE")
        scheme = CheckpointScheme(
            interval_s=self.step or 1.0,
            stall_s=self.stall_s,
            snapshot=FaultCost(max(0.0, 1 - self.live_share - self.durable_share), recovery),
            live=FaultCost(self.live_share, recovery),
            durable=FaultCost(self.durable_share, recovery if self.durable_recovery is None else self.durable_recovery),
            durable_every=self.durable_every,
            step_s=self.step or 0.0,
        )
        if self.interval is not None:
            return scheme.with_interval(self.interval)
        if not has_best_interval(scheme):
            why = "no fault costs work" if self.live_share == 1 else "saves cost nothing (--stall 0)"
            raise UsageError(f"no interval is best, because {why}: use --interval TIME")
        return with_best_interval(scheme, mtbf_s)

    def policies(self, scheme: CheckpointScheme, mtbf_s: float) -> dict[str, CheckpointScheme]:
        """Return the schemes to compare with. The restart scheme uses its own best interval."""
        nothing, memory = scheme.live.recovery_s, scheme.snapshot.recovery_s
        left = 1 - scheme.durable.share
        restart = replace(restart_scheme(scheme.interval_s, scheme.stall_s, self.restart), step_s=scheme.step_s)
        return {
            "in process, nothing lost": replace(scheme, live=FaultCost(left, nothing), snapshot=FaultCost(0.0, memory)),
            "in process, from memory": replace(scheme, live=FaultCost(0.0, nothing), snapshot=FaultCost(left, memory)),
            "restart and load": with_best_interval(restart, mtbf_s) if has_best_interval(restart) else restart,
        }
