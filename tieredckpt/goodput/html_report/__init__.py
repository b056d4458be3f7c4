"""Self-contained HTML report of an analysis. Pure: equal analyses yield equal bytes."""

from __future__ import annotations

from tieredckpt.goodput.analysis_result import Analysis
from tieredckpt.goodput.html_report.charts import loss_section, throughput_section, timeline_section
from tieredckpt.goodput.html_report.elements import (
    Markup,
    duration_text,
    element,
    html_page,
    html_table,
    report_section,
    utc_text,
)
from tieredckpt.goodput.html_report.sections import (
    faults_section,
    other_transitions_section,
    recoveries_section,
    report_header,
    restores_section,
    saves_section,
    summary_section,
)

__all__ = ["html_report"]


def html_report(analysis: Analysis) -> str:
    """Return the HTML page of ``analysis``."""
    body = (
        report_header(analysis),
        summary_section(analysis),
        timeline_section(analysis),
        recoveries_section(analysis),
        faults_section(analysis),
        loss_section(analysis),
        throughput_section(analysis),
        saves_section(analysis),
        restores_section(analysis),
        other_transitions_section(analysis),
        _runs(analysis) if len(analysis.runs) > 1 else None,
        _warnings(analysis),
        element("footer", f"Written by tieredckpt from the event log of the job, {utc_text(analysis.end_us)}."),
    )
    return html_page(f"{analysis.job or 'a job'}: goodput", body)


def _runs(one: Analysis) -> Markup:
    body = [
        (
            utc_text(run.start_us),
            duration_text((run.end_us - run.start_us) / 1e6),
            run.how or "no end was recorded",
            run.words,
        )
        for run in one.runs
    ]
    return report_section("runs", "Runs", html_table(("began", "lasted", "ended", "message"), body, right=("lasted",)))


def _warnings(one: Analysis) -> Markup | None:
    if not one.warnings:
        return None
    return report_section("event-log", "The event log", element("ul", [element("li", each) for each in one.warnings]))
