"""What ``tieredckpt simulate`` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tieredckpt.cli.foretelling import facts
from tieredckpt.cli.quantities import show_time
from tieredckpt.cli.screen import count, table
from tieredckpt.goodput.closed_form import longest_recovery
from tieredckpt.goodput.foretold import MOST_FAULTS, Forecast
from tieredckpt.goodput.scheme import Scheme

if TYPE_CHECKING:
    from tieredckpt.cli.simulating import Asked

Curve = Sequence[tuple[Scheme, float]]
_WORDS = {
    "stalled": "saves",
    "repeated": "work that was repeated",
    "recovering": "recovery",
    "waiting": "waiting for a node",
    "smaller": "fewer nodes",
}
_AGREE = 3.0
_BAR = 30


def shares(forecast: Forecast) -> dict[str, float]:
    """Where the time of all runs went; they add up to 1."""
    played = forecast.played
    if played is None:
        return {}
    total = float(played.elapsed.sum())
    spent = {name: float(getattr(played, name).sum()) / total for name in _WORDS}
    return {"work": forecast.goodput, **spent}


def as_json(asked: Asked, answer: Mapping[str, Forecast], at_best: Scheme | None, around: Curve) -> dict[str, Any]:
    forecast = answer["as asked"]
    nodes, scheme = forecast.nodes, forecast.scheme
    return {
        "gpus": asked.gpus,
        "nodes": nodes.count,
        "mtbf_s": nodes.mtbf_s,
        "step_s": scheme.step_s or None,
        "stages_s": asked.by_stage or None,
        "from": None if asked.ledger is None else str(asked.ledger),
        "runs": asked.runs,
        "seed": asked.seed,
        **_forecast_json(forecast),
        "best": None if at_best is None else _point(at_best, dict(_pairs(around))[at_best.interval_s]),
        "curve": [_point(one, worth) for one, worth in around],
        "policies": {name: _forecast_json(one) for name, one in answer.items()},
        "longest_recovery_s": {str(wanted): longest_recovery(nodes.mtbf_s, wanted) for wanted in (0.9, 0.99, 0.999)},
    }


def _pairs(around: Curve) -> list[tuple[float, float]]:
    return [(one.interval_s, worth) for one, worth in around]


def _point(scheme: Scheme, worth: float) -> dict[str, float]:
    return {"interval_s": scheme.interval_s, "goodput": worth}


def _forecast_json(one: Forecast) -> dict[str, Any]:
    said: dict[str, Any] = {
        "goodput": one.goodput,
        "closed_form": one.expected,
        "interval_s": one.scheme.interval_s,
        "stall_s": one.scheme.stall_s,
        "recovery_s": one.scheme.mean_recovery_s,
        "work_s": one.work_s,
        "played": None,
    }
    if one.played is not None:
        low, high = one.played.between(0.05, 0.95)
        said["played"] = {
            "goodput": one.played.goodput,
            "within": one.error,
            "low": low,
            "high": high,
            "elapsed_s": float(one.played.elapsed.mean()),
            "faults": float(one.played.faults.mean()),
            "standard_errors_apart": one.apart if one.comparable else None,
            "shares": shares(one),
        }
    return said


def show(out: Console, asked: Asked, answer: Mapping[str, Forecast], at_best: Scheme | None, around: Curve) -> None:
    forecast = answer["as asked"]
    _show_asked(out, asked, forecast)
    out.print()
    _show_goodput(out, asked, forecast)
    out.print()
    _show_curve(out, forecast, at_best, around)
    out.print()
    _show_policies(out, answer)


def _show_asked(out: Console, asked: Asked, forecast: Forecast) -> None:
    nodes, scheme = forecast.nodes, forecast.scheme
    size = f"{asked.gpus:,} GPUs on {count(nodes.count, 'node')}" if asked.gpus else "a job"
    out.print(f"[bold]{size}[/], a fault every {show_time(nodes.mtbf_s)}, back after {_recoveries(scheme)}")
    if asked.by_stage:
        out.print("  " + " + ".join(f"{name} {show_time(seconds)}" for name, seconds in asked.by_stage.items()))
    if asked.measured is not None:
        out.print(f"  as {asked.ledger} has it: the mean of its {_recovered(asked.measured.recoveries)}")
    steps = f" ({count(scheme.steps, 'step')})" if scheme.steps else ""
    out.print(
        f"saves every {show_time(scheme.interval_s)}{steps}, each holds training up for {show_time(scheme.stall_s)}"
    )
    if nodes.broken:
        away = f"{_percent(nodes.broken, 0)} of faults take a node away, for {show_time(nodes.repair_s)} on average"
        lack = f"goes on with {nodes.least} or more" if nodes.least < nodes.count else "waits where none is left"
        out.print(f"{away}; {count(nodes.spares, 'spare')}, {lack}")


def _recovered(number: int) -> str:
    return f"{number:,} recoveries" if number != 1 else "1 recovery"


def _recoveries(scheme: Scheme) -> str:
    known = {"live": scheme.live, "memory": scheme.snapshot, "durable": scheme.durable}
    there = {name: one for name, one in known.items() if one.share}
    if len({one.recovery_s for one in there.values()}) == 1 and "durable" not in there:
        text = show_time(next(iter(there.values())).recovery_s)
        return text if "live" not in there else f"{text}, {_percent(scheme.live.share, 0)} with nothing lost"
    words = {"live": "with nothing lost", "memory": "from memory", "durable": "from the durable tier"}
    return ", ".join(
        f"{show_time(one.recovery_s)} {words[name]} ({_percent(one.share, 1)})" for name, one in there.items()
    )


def _show_goodput(out: Console, asked: Asked, forecast: Forecast) -> None:
    played = forecast.played
    lines = []
    if played is None:
        why = f"not played: more than {MOST_FAULTS:,} faults in {show_time(forecast.work_s)} of work"
        lines.append(("goodput", f"[bold]{_percent(forecast.expected)}[/] by the closed form; {why}"))
    else:
        low, high = played.between(0.05, 0.95)
        within = f"± {100 * forecast.error:.2g} (95 %, {count(asked.runs, 'run')})"
        lines.append(("goodput", f"[bold]{_percent(played.goodput)}[/] {within}"))
        lines.append(("single runs", f"{_percent(low)} to {_percent(high)} (nine in ten)"))
        lines.append(("closed form", f"{_percent(forecast.expected)}, {_agreement(forecast)}"))
        took = f"{show_time(forecast.work_s)} of work take {show_time(float(played.elapsed.mean()))}"
        lines.append(("time", f"{took}, with {played.faults.mean():,.0f} faults"))
    spent = {name: share for name, share in shares(forecast).items() if share > 0 and name != "work"}
    lines += [
        (_WORDS[name], f"{_percent(share):>8}  {_bar(share / sum(spent.values()))}") for name, share in spent.items()
    ]
    facts(out, lines)


def _agreement(forecast: Forecast) -> str:
    if not forecast.comparable:
        return "which knows no missing nodes"
    if forecast.apart <= _AGREE:
        return f"{forecast.apart:.1f} standard errors away: they agree"
    return f"[yellow]{forecast.apart:.1f} standard errors away[/]: another --seed or more --runs tell whether by chance"


def _show_curve(out: Console, forecast: Forecast, at_best: Scheme | None, around: Curve) -> None:
    lost = max(1 - worth for _, worth in around)
    rows = []
    for one, worth in around:
        mark = "best" if one == at_best else ""
        mark = f"{mark} as asked" if one == forecast.scheme and mark == "" else mark
        rows.append([show_time(one.interval_s), _percent(worth), _bar((1 - worth) / lost), mark.strip()])
    out.print(table(["SAVE EVERY", "GOODPUT", "TIME LOST", ""], rows, right=("SAVE EVERY", "GOODPUT")))
    if at_best is not None and all(one != forecast.scheme for one, _ in around):
        out.print(f"best: every {show_time(at_best.interval_s)}")


def _show_policies(out: Console, answer: Mapping[str, Forecast]) -> None:
    rows = []
    for name, one in answer.items():
        within = "" if one.played is None else f"± {100 * one.error:.2g}"
        rows.append(
            [
                name,
                show_time(one.scheme.mean_recovery_s),
                show_time(one.scheme.interval_s),
                _percent(one.goodput),
                within,
                _percent(one.expected),
                show_time(one.work_s / one.goodput) if one.goodput else "for ever",
            ]
        )
    columns = ["POLICY", "BACK AFTER", "SAVE EVERY", "GOODPUT", "", "CLOSED FORM", "TAKES"]
    out.print(table(columns, rows, right=columns[1:]))


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def _bar(share: float) -> str:
    return "█" * round(_BAR * share) or ("▏" if share > 0 else "")
