"""Times, shares and failure rates as people write them on a command line."""

from __future__ import annotations

import math
import re

import click

from tieredckpt.goodput.failing import PRESETS, Mtbf, Per

_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|h|d|y)?\s*", re.ASCII)
_BELOW = (("ms", 1.0), ("s", 120.0), ("min", 7200.0), ("h", 172800.0))
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400}


def parse_time(text: str) -> float:
    """``"90"``, ``"1.5h"``, ``"200 ms"``: seconds."""
    match = _TIME.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a time: write for example 45s, 200ms, 10min, 1.5h, 30d or 5y")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def show_time(seconds: float) -> str:
    """``5400`` as ``1.5 h``: three digits, in the unit they fit."""
    if not math.isfinite(seconds):
        return "for ever"
    unit = next((unit for unit, below in _BELOW if seconds < below), "d")
    value = seconds / _SECONDS[unit]
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


class Time(click.ParamType):
    name = "TIME"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            seconds = parse_time(value)
        except ValueError as wrong:
            self.fail(str(wrong), param, ctx)
        if not seconds and not self._zero:
            self.fail("must be more than 0", param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is too long", param, ctx)
        return seconds


class Share(click.ParamType):
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
        if value in PRESETS:
            return PRESETS[value]
        text, slash, per = value.partition("/")
        try:
            seconds = parse_time(text)
            mtbf = Mtbf(seconds, Per(per.strip() if slash else "job"))
        except ValueError as wrong:
            known = "gpu, node or job"
            why = f"after the slash comes {known}, not {per!r}" if "Per" in str(wrong) else str(wrong)
            self.fail(f"{why}; or one of: {', '.join(PRESETS)}", param, ctx)
        if not seconds or not math.isfinite(seconds):
            self.fail("must be more than 0", param, ctx)
        return mtbf


class StageTime(click.ParamType):
    """``NAME=TIME``."""

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
        return name, Time(zero=True).convert(text, param, ctx)
