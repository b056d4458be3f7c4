"""What the first hour on a GPU has shown: checks and figures, for people and for programs. Pure."""

from __future__ import annotations

import html

import msgspec

_STYLE = """
body { font: 15px/1.5 system-ui; max-width: 70rem; margin: 2rem auto }
td { padding: .1rem .7rem; vertical-align: top; border-top: 1px solid #ddd; white-space: pre-wrap }
td:first-child { white-space: nowrap }
"""


_ORDER = ("failed", "not run", "passed")


class Check(msgspec.Struct, frozen=True):
    """One thing that was tried, or was not."""

    name: str
    outcome: str
    """``passed``, ``failed`` or ``not run``."""
    seconds: float = 0.0
    why: str = ""


class Figure(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str
    where: str = ""
    """The device, and the backend of what communicates."""


class Report(msgspec.Struct, frozen=True):
    """``devices`` is empty where everything ran on fakes."""

    devices: list[str]
    environment: dict[str, str]
    checks: list[Check]
    figures: list[Figure]

    @property
    def passed(self) -> bool:
        """Nothing failed. What was not run is said, and proves nothing."""
        return not any(check.outcome == "failed" for check in self.checks)

    @property
    def title(self) -> str:
        where = ", ".join(self.devices) or "no accelerator: on fakes, which prove order and no speed"
        count = {kind: sum(one.outcome == kind for one in self.checks) for kind in ("passed", "failed", "not run")}
        return f"{where}: " + ", ".join(f"{number} {kind}" for kind, number in count.items())


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def page(report: Report) -> str:
    """The report as HTML, in one file."""

    def table(rows: list[tuple[str, ...]]) -> str:
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"

    figures = [(one.name, f"{shown(one.value)} {one.unit}", one.where) for one in report.figures]
    bad_first = sorted(report.checks, key=lambda one: _ORDER.index(one.outcome))
    checks = [(one.outcome, one.name, f"{one.seconds:.2f} s" if one.seconds else "", one.why) for one in bad_first]
    return "\n".join(
        (
            "<!doctype html><meta charset=utf-8><title>The first hour on a GPU</title>",
            f"<style>{_STYLE}</style>",
            f"<h1>{html.escape(report.title)}</h1>",
            "<h2>Environment</h2>",
            table(list(report.environment.items())),
            "<h2>Figures</h2>",
            table(figures) if figures else "<p>None.</p>",
            "<h2>Checks</h2>",
            table(checks),
        )
    )
