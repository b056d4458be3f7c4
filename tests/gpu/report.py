"""The report of ``make test-gpu``: sections with their checks and figures, as data and as HTML. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

import msgspec

_STYLE = """
body { font: 15px/1.5 system-ui; max-width: 76rem; margin: 2rem auto }
td, th { padding: .1rem .7rem; vertical-align: top; border-top: 1px solid #ddd; text-align: left }
td { white-space: pre-wrap }
pre { background: #f6f6f6; padding: .6rem; overflow-x: auto }
"""

ON_FAKES = "no accelerator: on fakes, which prove order and no speed"
_ORDER = ("failed", "not run", "passed")


class Fact(msgspec.Struct, frozen=True, tag=True):
    """A property of the machine or of the software on it."""

    name: str
    value: str


class Check(msgspec.Struct, frozen=True, tag=True):
    """One check and its outcome."""

    name: str
    outcome: str
    """``passed``, ``failed`` or ``not run``."""
    seconds: float = 0.0
    why: str = ""


class Figure(msgspec.Struct, frozen=True, tag=True):
    """One measured number."""

    name: str
    value: float
    unit: str
    where: str = ""
    """The device, and the backend of collectives."""
    ratio: float | None = None
    """The value divided by R, the time of the same bytes over the bus at its measured limit."""
    bits: str = ""
    """``equal``, the first difference, or empty for a row that moves no state."""
    note: str = ""


Finding = Fact | Check | Figure


class Section(msgspec.Struct, frozen=True):
    """One section that ran, or the reason why it did not."""

    name: str
    outcome: str
    """``finished``, ``not finished``, ``failed`` (it ended by itself, before its end) or ``not run``."""
    limit_s: float
    seconds: float = 0.0
    why: str = ""
    log: str = ""
    """The end of its log, where it did not finish."""
    checks: list[Check] = []
    figures: list[Figure] = []

    @property
    def passed(self) -> bool:
        """Whether nothing failed; a section that was not run proves nothing and fails nothing."""
        return self.outcome in ("finished", "not run") and all(one.outcome != "failed" for one in self.checks)


class Report(msgspec.Struct, frozen=True):
    """All sections of one run."""

    devices: list[str]
    """Empty where everything ran on fakes."""
    environment: dict[str, str]
    sections: list[Section]

    @property
    def passed(self) -> bool:
        return all(section.passed for section in self.sections)

    @property
    def title(self) -> str:
        where = ", ".join(self.devices) or ON_FAKES
        checks = [check for section in self.sections for check in section.checks]
        count = {kind: sum(one.outcome == kind for one in checks) for kind in ("passed", "failed", "not run")}
        cut = [one.name for one in self.sections if one.outcome in ("not finished", "failed")]
        ends = f"; not finished: {', '.join(cut)}" if cut else ""
        return f"{where}: " + ", ".join(f"{number} {kind}" for kind, number in count.items()) + ends


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def slug(device: str) -> str:
    """Return ``device`` as part of a file name: "NVIDIA H100 80GB HBM3" is "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def merged(earlier: Report, later: Report) -> Report:
    """Return ``later`` with the sections of ``earlier`` that it lacks."""
    names = {one.name for one in later.sections}
    kept = [one for one in earlier.sections if one.name not in names]
    return msgspec.structs.replace(later, sections=[*later.sections, *kept])


def page(report: Report) -> str:
    """Return the report as HTML, in one file."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>make test-gpu</title>",
        f"<style>{_STYLE}</style>",
        f"<h1>{html.escape(report.title)}</h1>",
        _table(report.environment.items()),
    ]
    for section in report.sections:
        took = f"{section.seconds:.1f} s of {section.limit_s:g} s"
        parts.append(f"<h2>{html.escape(section.name)}: {html.escape(section.outcome)} ({took})</h2>")
        if section.why:
            parts.append(f"<p>{html.escape(section.why)}</p>")
        if section.figures:
            parts.append(_table(map(_row, section.figures), ("what", "value", "of R", "bits", "where", "note")))
        if section.checks:
            bad_first = sorted(section.checks, key=lambda one: _ORDER.index(one.outcome))
            rows = [
                (one.outcome, one.name, f"{one.seconds:.2f} s" if one.seconds else "", one.why) for one in bad_first
            ]
            parts.append(_table(rows))
        if section.log:
            parts.append(f"<pre>{html.escape(section.log)}</pre>")
    return "\n".join(parts)


def _row(one: Figure) -> tuple[str, ...]:
    ratio = "" if one.ratio is None else f"{one.ratio:.2f} R"
    return one.name, f"{shown(one.value)} {one.unit}", ratio, one.bits, one.where, one.note


def _table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)] if head else []
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
