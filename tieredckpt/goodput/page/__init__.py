"""An analysis as one HTML page that needs nothing else: pictures first, the same bytes for the same ledger. Pure."""

from __future__ import annotations

from tieredckpt.goodput.model import Analysis
from tieredckpt.goodput.page.curves import losses, throughput
from tieredckpt.goodput.page.faults import faults
from tieredckpt.goodput.page.hero import header, summary
from tieredckpt.goodput.page.markup import Markup, rows, section, tag
from tieredckpt.goodput.page.storing import restores, saves
from tieredckpt.goodput.page.style import style_sheet
from tieredckpt.goodput.page.timeline import timeline
from tieredckpt.goodput.page.ways import others, recoveries
from tieredckpt.goodput.page.words import clock, lasting

__all__ = ["page"]


def page(analysis: Analysis) -> str:
    """The whole file."""
    title = f"{analysis.job or 'a job'}: goodput"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(style_sheet())),
    )
    body = (
        header(analysis),
        summary(analysis),
        timeline(analysis),
        recoveries(analysis),
        faults(analysis),
        losses(analysis),
        throughput(analysis),
        saves(analysis),
        restores(analysis),
        others(analysis),
        _runs(analysis) if len(analysis.runs) > 1 else None,
        _complaints(analysis),
        tag("footer", f"Written by tieredckpt from the ledger of the job, {clock(analysis.end_us)}."),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', body)), lang='en')}\n"


def _runs(one: Analysis) -> Markup:
    body = [
        (
            clock(run.start_us),
            lasting((run.end_us - run.start_us) / 1e6),
            run.how or "no end is written down",
            run.words,
        )
        for run in one.runs
    ]
    return section("runs", "Runs", rows(("began", "lasted", "ended", "in its words"), body, right=("lasted",)))


def _complaints(one: Analysis) -> Markup | None:
    if not one.complaints:
        return None
    return section("ledger", "The ledger", tag("ul", [tag("li", each) for each in one.complaints]))
