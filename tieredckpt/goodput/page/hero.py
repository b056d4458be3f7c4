"""The top of the page: how much of the time was work that stays, and the few numbers that say why."""

from __future__ import annotations

import math

from tieredckpt.goodput.model import Analysis, Category
from tieredckpt.goodput.page.kinds import CATEGORIES
from tieredckpt.goodput.page.markup import Markup, Part, data, section, tag
from tieredckpt.goodput.page.scales import quantile
from tieredckpt.goodput.page.words import amount, clock, count, lasting, percent

_GOOD, _POOR = 0.95, 0.8


def header(one: Analysis) -> Markup:
    if one.live:
        state, colour = "no end is written down", "state"
    else:
        how = one.runs[-1].how
        state, colour = how, "state good" if how == "finished" else "state" if how == "stopped" else "state bad"
    began = f"{clock(one.start_us)}, for {lasting((one.end_us - one.start_us) / 1e6)}"
    worlds = f"{count(one.ranks, 'rank')} at most, {count(one.worlds, 'world')}"
    runs = f", {count(len(one.runs), 'run')}" if len(one.runs) > 1 else ""
    return tag(
        "header",
        tag("h1", one.job or "a job without a name"),
        tag("span", state, class_=colour),
        tag("p", began, " · ", worlds, runs),
        tag("p", one.runs[-1].words) if one.runs and one.runs[-1].words else None,
    )


def summary(one: Analysis) -> Markup:
    ring = _ring(one)
    tiles = tag("dl", [_tile(*parts) for parts in _tiles(one)], class_="tiles")
    hero = tag("div", ring, tiles, class_="hero")
    return section("summary", "Where the time went", hero, _spent(one), _legend(one))


def recovered(one: Analysis) -> list[float]:
    """Seconds from fault to training again, of each recovery that got there."""
    return [way.seconds for way in one.recoveries if way.category is Category.RECOVERY and way.resumed]


def _tiles(one: Analysis) -> list[tuple[str, str, Part, Part]]:
    took = recovered(one)
    colour = "good" if one.goodput >= _GOOD else "bad" if one.goodput < _POOR else "warn"
    between = f"one every {lasting(one.mtbf_s)} of training" if one.mtbf_s else "none"
    tiles: list[tuple[str, str, Part, Part]] = [
        (colour, "goodput", data(percent(one.goodput), one.goodput), "of all ranks' time made steps that count"),
        ("", "ETTR", data(percent(one.ettr), one.ettr), "of the time did, with whatever ranks there were"),
        ("bad" if one.faults else "good", "faults", data(f"{one.faults:,}", one.faults), between),
    ]
    if took:
        median, slow = quantile(took, 0.5), quantile(took, 0.99)
        more = f"p99 {lasting(slow)}, mean {lasting(one.mttr_s or 0)}"
        tiles.append(("", "median recovery", data(lasting(median), median), more))
    else:
        more = (
            "nothing was recovered from"
            if not one.faults
            else "training did not go on yet"
            if one.live
            else "training did not go on"
        )
        tiles.append(("", "median recovery", "-", more))
    lost_s = one.wall.by.get("lost", 0) / 1e6
    lost = f"{lasting(lost_s)} with what was interrupted" if lost_s else "no step was done twice"
    lost_colour = "warn" if one.steps_lost else "good"
    tiles.append((lost_colour, "steps lost", data(f"{one.steps_lost:,}", one.steps_lost), lost))
    usual = f"{lasting(one.step_s.p50_s)} each (median)" if one.step_s.count else "none was written down"
    tiles.append(("", "steps", data(f"{one.steps_counted:,}", one.steps_counted), usual))
    seconds = one.wall.total / 1e6
    for name, value in (("tokens", one.tokens), ("samples", one.samples)):
        if value is not None and seconds:
            each = f"{amount(value / seconds)} a second, pauses included"
            tiles.append(("", name, data(amount(value), value), each))
            break
    if one.save_s.count:
        each = f"blocked, median of {count(one.save_s.count, 'save')}"
        tiles.append(("", "a save", data(lasting(one.save_s.p50_s), one.save_s.p50_s), each))
    if one.protected_step is not None:
        tiles.append(_protected(one, one.protected_step))
    return tiles


def _protected(one: Analysis, step: int) -> tuple[str, str, Part, Part]:
    since_us, times = one.unprotected_since_us, len(one.unprotected)
    total_s = sum(part.end_us - part.start_us for part in one.unprotected) / 1e6
    more = f"unprotected {count(times, 'time')}, for {lasting(total_s)}" if times else "and never without for long"
    if since_us is not None:
        more = f"unprotected since {clock(since_us)}"
    colour = "bad" if since_us is not None else "warn" if times else "good"
    return colour, "protected up to", data(f"step {step:,}" if step >= 0 else "no step", step), more


def _tile(colour: str, name: str, value: Part, more: Part) -> Markup:
    said = (tag("dt", name), tag("dd", value, class_="value"), tag("dd", more, class_="more"))
    return tag("div", said, class_=f"tile {colour}".strip())


def _ring(one: Analysis) -> Markup:
    parts: list[Markup] = []
    turned = 0.0
    for kind in CATEGORIES:
        share = one.capacity.share(kind.name)
        if share > 0:
            parts.append(_slice(kind.name, turned, share, f"{kind.words}: {percent(share)}"))
            turned += share
    if not parts:
        parts.append(_slice("missing", 0.0, 1.0, "no time at all"))
    middle = tag("text", percent(one.goodput), x=106, y=113, text_anchor="middle", class_="big", fill="currentColor")
    below = tag("text", "goodput", x=106, y=137, text_anchor="middle", class_="small", fill="currentColor")
    return tag("svg", parts, middle, below, viewBox="0 0 212 212", class_="ring", role="img", aria_label="goodput")


def _slice(name: str, turned: float, share: float, title: str) -> Markup:
    said = tag("title", title)
    if share > 0.9999:
        ring = "M106 3a103 103 0 1 1 0 206a103 103 0 1 1 0 -206zM106 28a78 78 0 1 0 0 156a78 78 0 1 0 0 -156z"
        return tag("path", said, d=ring, class_=f"f-{name}")
    (a, b), (c, d) = _at(103, turned), _at(103, turned + share)
    (e, f), (g, h) = _at(78, turned + share), _at(78, turned)
    far = int(share > 0.5)
    arc = f"M{a:.2f} {b:.2f}A103 103 0 {far} 1 {c:.2f} {d:.2f}L{e:.2f} {f:.2f}A78 78 0 {far} 0 {g:.2f} {h:.2f}z"
    return tag("path", said, d=arc, class_=f"f-{name}")


def _at(radius: float, turned: float) -> tuple[float, float]:
    angle = 2 * math.pi * turned
    return 106 + radius * math.sin(angle), 106 - radius * math.cos(angle)


def _spent(one: Analysis) -> Markup:
    """The same of the clock's time, as one bar."""
    pieces = [
        tag("i", class_=f"f-{kind.name}", style=f"flex:{share:.6f}", title=f"{kind.words}: {percent(share)}")
        for kind in CATEGORIES
        if (share := one.wall.share(kind.name)) > 0
    ]
    return tag("div", pieces, class_="spent")


def _legend(one: Analysis) -> Markup:
    keys = []
    for kind in CATEGORIES:
        spent = one.wall.by.get(kind.name, 0)
        if spent:
            said = data(f"{lasting(spent / 1e6)}, {percent(one.wall.share(kind.name))}", spent)
            keys.append(tag("span", tag("i", class_=f"k f-{kind.name}"), kind.words, tag("b", said)))
    missing = one.capacity.share("missing")
    if missing > 0:
        key = tag("i", class_="k f-missing")
        keys.append(tag("span", key, "missing ranks", tag("b", f"{percent(missing)} of all ranks' time")))
    return tag("p", keys, class_="legend")
