"""Sections of the report: summary card, recoveries by stage, faults, saves and restores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from peerstore.sizes_and_durations import show_count, show_size
from tieredckpt.goodput.analysis_result import Analysis, FaultRecord, TimeCategory, TransitionRecord
from tieredckpt.goodput.html_report import charts
from tieredckpt.goodput.html_report.charts import describe_transition, fault_location
from tieredckpt.goodput.html_report.elements import (
    CATEGORY_KINDS,
    DISPLAY_KINDS,
    LinearScale,
    Markup,
    MarkupPart,
    color_legend,
    data_value,
    downsampled,
    duration_text,
    element,
    html_table,
    log_time_ticks,
    percent_text,
    quantile,
    report_section,
    round_up_tick,
    run_time_text,
    si_text,
    stage_kind,
    svg_number,
    tile,
    time_ticks,
    utc_text,
)

_GOOD, _POOR = 0.95, 0.8


def report_header(one: Analysis) -> Markup:
    if one.is_running:
        state, colour = "no end was recorded", "state"
    else:
        how = one.runs[-1].how
        state, colour = how, "state good" if how == "finished" else "state" if how == "stopped" else "state bad"
    began = f"{utc_text(one.start_us)}, for {duration_text((one.end_us - one.start_us) / 1e6)}"
    worlds = f"{show_count(one.ranks, 'rank')} at most, {show_count(one.worlds, 'world')}"
    runs = f", {show_count(len(one.runs), 'run')}" if len(one.runs) > 1 else ""
    return element(
        "header",
        element("h1", one.job or "a job without a name"),
        element("span", state, class_=colour),
        element("p", began, " · ", worlds, runs),
        element("p", one.runs[-1].words) if one.runs and one.runs[-1].words else None,
    )


def summary_section(one: Analysis) -> Markup:
    ring = _ring(one)
    tiles = element(
        "dl", [tile(name, value, more, look=look) for look, name, value, more in _tiles(one)], class_="tiles"
    )
    hero = element("div", ring, tiles, class_="hero")
    return report_section("summary", "Where the time went", hero, _spent(one), _legend(one))


def recovery_times(one: Analysis) -> list[float]:
    """Return the seconds of each recovery that resumed training."""
    return [
        transition.seconds
        for transition in one.recoveries
        if transition.category is TimeCategory.RECOVERY and transition.resumed
    ]


def _tiles(one: Analysis) -> list[tuple[str, str, MarkupPart, MarkupPart]]:
    took = recovery_times(one)
    colour = "good" if one.goodput >= _GOOD else "bad" if one.goodput < _POOR else "warn"
    between = f"one every {duration_text(one.mtbf_s)} of training" if one.mtbf_s else "none"
    tiles: list[tuple[str, str, MarkupPart, MarkupPart]] = [
        (
            colour,
            "goodput",
            data_value(percent_text(one.goodput), one.goodput),
            "of all ranks' time made steps that count",
        ),
        ("", "ETTR", data_value(percent_text(one.ettr), one.ettr), "of the time was spent in steps that count"),
        ("bad" if one.faults else "good", "faults", data_value(f"{one.faults:,}", one.faults), between),
    ]
    if took:
        median, slow = quantile(took, 0.5), quantile(took, 0.99)
        more = f"p99 {duration_text(slow)}, mean {duration_text(one.mttr_s or 0)}"
        tiles.append(("", "median recovery", data_value(duration_text(median), median), more))
    else:
        more = (
            "no faults"
            if not one.faults
            else "training has not resumed yet"
            if one.is_running
            else "training did not resume"
        )
        tiles.append(("", "median recovery", "-", more))
    lost_s = one.wall.by.get("lost", 0) / 1e6
    lost = f"{duration_text(lost_s)} with interrupted work" if lost_s else "no step was repeated"
    lost_colour = "warn" if one.steps_lost else "good"
    tiles.append((lost_colour, "steps lost", data_value(f"{one.steps_lost:,}", one.steps_lost), lost))
    usual = f"{duration_text(one.step_s.p50_s)} each (median)" if one.step_s.count else "none recorded"
    tiles.append(("", "steps", data_value(f"{one.steps_counted:,}", one.steps_counted), usual))
    seconds = one.wall.total / 1e6
    for name, value in (("tokens", one.tokens), ("samples", one.samples)):
        if value is not None and seconds:
            each = f"{si_text(value / seconds)} per second, pauses included"
            tiles.append(("", name, data_value(si_text(value), value), each))
            break
    if one.save_s.count:
        each = f"blocked, median of {show_count(one.save_s.count, 'save')}"
        tiles.append(("", "a save", data_value(duration_text(one.save_s.p50_s), one.save_s.p50_s), each))
    if one.protected_step is not None:
        tiles.append(_protected(one, one.protected_step))
    return tiles


def _protected(one: Analysis, step: int) -> tuple[str, str, MarkupPart, MarkupPart]:
    since_us, times = one.unprotected_since_us, len(one.unprotected)
    total_s = sum(part.end_us - part.start_us for part in one.unprotected) / 1e6
    more = (
        f"unprotected {show_count(times, 'time')}, for {duration_text(total_s)}"
        if times
        else "never unprotected for long"
    )
    if since_us is not None:
        more = f"unprotected since {utc_text(since_us)}"
    colour = "bad" if since_us is not None else "warn" if times else "good"
    return colour, "protected up to", data_value(f"step {step:,}" if step >= 0 else "no step", step), more


def _ring(one: Analysis) -> Markup:
    parts: list[Markup] = []
    turned = 0.0
    for kind in CATEGORY_KINDS:
        share = one.capacity.share(kind.name)
        if share > 0:
            parts.append(_slice(kind.name, turned, share, f"{kind.words}: {percent_text(share)}"))
            turned += share
    if not parts:
        parts.append(_slice("missing", 0.0, 1.0, "no time at all"))
    middle = element(
        "text", percent_text(one.goodput), x=106, y=113, text_anchor="middle", class_="big", fill="currentColor"
    )
    below = element("text", "goodput", x=106, y=137, text_anchor="middle", class_="small", fill="currentColor")
    return element("svg", parts, middle, below, viewBox="0 0 212 212", class_="ring", role="img", aria_label="goodput")


def _slice(name: str, turned: float, share: float, title: str) -> Markup:
    content = element("title", title)
    if share > 0.9999:
        ring = "M106 3a103 103 0 1 1 0 206a103 103 0 1 1 0 -206zM106 28a78 78 0 1 0 0 156a78 78 0 1 0 0 -156z"
        return element("path", content, d=ring, class_=f"f-{name}")
    (a, b), (c, d) = _at(103, turned), _at(103, turned + share)
    (e, f), (g, h) = _at(78, turned + share), _at(78, turned)
    far = int(share > 0.5)
    arc = f"M{a:.2f} {b:.2f}A103 103 0 {far} 1 {c:.2f} {d:.2f}L{e:.2f} {f:.2f}A78 78 0 {far} 0 {g:.2f} {h:.2f}z"
    return element("path", content, d=arc, class_=f"f-{name}")


def _at(radius: float, turned: float) -> tuple[float, float]:
    angle = 2 * math.pi * turned
    return 106 + radius * math.sin(angle), 106 - radius * math.cos(angle)


def _spent(one: Analysis) -> Markup:
    """Return the shares of wall-clock time as one bar."""
    pieces = [
        element("i", class_=f"f-{kind.name}", style=f"flex:{share:.6f}", title=f"{kind.words}: {percent_text(share)}")
        for kind in CATEGORY_KINDS
        if (share := one.wall.share(kind.name)) > 0
    ]
    return element("div", pieces, class_="spent")


def _legend(one: Analysis) -> Markup:
    keys = []
    for kind in CATEGORY_KINDS:
        spent = one.wall.by.get(kind.name, 0)
        if spent:
            content = data_value(f"{duration_text(spent / 1e6)}, {percent_text(one.wall.share(kind.name))}", spent)
            keys.append(element("span", element("i", class_=f"k f-{kind.name}"), kind.words, element("b", content)))
    missing = one.capacity.share("missing")
    if missing > 0:
        key = element("i", class_="k f-missing")
        keys.append(element("span", key, "missing ranks", element("b", f"{percent_text(missing)} of all ranks' time")))
    return element("p", keys, class_="legend")


_LEFT, _RIGHT = 240.0, 870.0
_ROW = 25.0
_EACH = 24
_SLOWEST = 10
_COLUMNS = 48
_FAR = 5.0
_APART = 60.0


def recoveries_section(one: Analysis) -> Markup:
    transitions = [transition for transition in one.recoveries if transition.category is TimeCategory.RECOVERY]
    title = "Recoveries"
    if not transitions:
        return report_section("recoveries", title, note="No recovery was recorded.")
    resumed = [transition for transition in transitions if transition.resumed]
    counted = show_count(len(transitions), "recovery").replace("recoverys", "recoveries")
    note = f"{counted}, from the fault to the next step"
    if len(resumed) < len(transitions):
        note += f"; {len(transitions) - len(resumed):,} not resumed{' yet' if one.is_running else ''}"
    parts: list[MarkupPart] = []
    if len(transitions) <= _EACH:
        parts.append(
            _bars(one, [(_label(transition, one), transition) for transition in transitions], _quantiles(resumed))
        )
    else:
        if resumed:
            parts += [element("h3", "durations"), _histogram(resumed)]
            parts += [element("h3", "one of each kind, by stages"), _bars(one, _typical(resumed), [])]
        slowest = sorted(transitions, key=lambda transition: -transition.seconds)[:_SLOWEST]
        parts += [
            element("h3", "the slowest"),
            _bars(one, [(_label(transition, one), transition) for transition in slowest], []),
        ]
    parts.append(color_legend({stage_kind(name) for transition in transitions for name in transition.stages}))
    parts.append(stage_table(one, TimeCategory.RECOVERY))
    return report_section(
        "recoveries",
        title,
        parts,
        note=f"{note}. Each bar is one recovery, divided by the stages of its slowest ranks.",
    )


def other_transitions_section(one: Analysis) -> Markup:
    """Return the section of transitions without a recovery: starts and resizes."""
    transitions = [transition for transition in one.recoveries if transition.category is not TimeCategory.RECOVERY]
    if not transitions:
        return report_section("resizes", "Starts and resizes", note="No start or resize was recorded.")
    shown = (
        transitions
        if len(transitions) <= _EACH
        else sorted(transitions, key=lambda transition: -transition.seconds)[:_EACH]
    )
    note = "From the last step of a world to the first of the next, where nothing was wrong"
    note += f"; the {_EACH} slowest of {len(transitions):,}." if len(transitions) > _EACH else "."
    bars = _bars(one, [(_label(transition, one), transition) for transition in shown], [])
    keys = color_legend({stage_kind(name) for transition in shown for name in transition.stages})
    return report_section("resizes", "Starts and resizes", bars, keys, note=note)


def _label(transition: TransitionRecord, one: Analysis) -> str:
    at = run_time_text((transition.start_us - one.start_us) / 1e6)
    if transition.faults:
        first = transition.faults[0]
        more = f" +{len(transition.faults) - 1}" if len(transition.faults) > 1 else ""
        return f"{at}  {_short(f'{first.node} {first.kind}'.strip() or 'a fault')}{more}"
    if transition.category is TimeCategory.STARTUP:
        return f"{at}  start of {transition.next_ranks}"
    return f"{at}  {transition.how or transition.category.value} {transition.ranks} → {transition.next_ranks}"


def _short(words: str, most: int = 22) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _typical(transitions: Sequence[TransitionRecord]) -> list[tuple[str, TransitionRecord]]:
    """Return the recoveries at the median, p90 and p99 of the durations."""
    ordered = sorted(transitions, key=lambda transition: transition.seconds)

    def at(share: float) -> TransitionRecord:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return [("median", at(0.5)), ("p90", at(0.9)), ("p99", at(0.99))]


def _quantiles(transitions: Sequence[TransitionRecord]) -> list[tuple[str, float]]:
    """Return p50 and p99 of the durations. Below three recoveries they would be meaningless: return none."""
    if len(transitions) < 3:
        return []
    took = [transition.seconds for transition in transitions]
    return [("p50", quantile(took, 0.5)), ("p99", quantile(took, 0.99))]


def _bars(
    one: Analysis, transitions: Sequence[tuple[str, TransitionRecord]], marks: Sequence[tuple[str, float]]
) -> Markup:
    longest = max(transition.seconds for _, transition in transitions)
    middle = quantile([transition.seconds for _, transition in transitions], 0.5)
    cut = round_up_tick(_FAR * middle) if len(transitions) > 2 and longest > 2 * _FAR * middle > 0 else longest
    scale = LinearScale(0.0, cut or 1.0, _LEFT, _RIGHT)
    top = 22.0
    bottom = top + _ROW * len(transitions)
    parts: list[MarkupPart] = []
    for value in time_ticks(scale.high, 6):
        x = scale(value)
        parts.append(element("path", d=f"M{svg_number(x)} {svg_number(top)}V{svg_number(bottom)}", class_="grid"))
        parts.append(element("text", duration_text(value), x=x, y=12, text_anchor="middle"))
    for place, (name, value) in enumerate(mark for mark in marks if mark[1] <= scale.high):
        x = scale(value)
        parts.append(element("path", d=f"M{svg_number(x)} {svg_number(top)}V{svg_number(bottom + 2)}", class_="mean"))
        parts.append(
            element("text", f"{name} {duration_text(value)}", x=x, y=bottom + 14 + 13 * place, text_anchor="middle")
        )
    for place, (label, transition) in enumerate(transitions):
        parts.append(_bar(one, label, transition, scale, top + place * _ROW))
    box = f"0 0 {svg_number(charts.CHART_WIDTH)} {svg_number(bottom + 6 + 13 * len(marks))}"
    picture = element("svg", element("title", "recoveries by stages"), parts, viewBox=box, class_="chart", role="img")
    return element("div", picture, class_="wide")


def _bar(one: Analysis, label: str, transition: TransitionRecord, scale: LinearScale, y: float) -> list[Markup]:
    parts = [element("text", label, x=_LEFT - 10, y=y + 16, text_anchor="end")]
    at = 0.0
    for name, seconds in _in_order(transition):
        first, last = scale(min(at, scale.high)), scale(min(at + seconds, scale.high))
        at += seconds
        if last > first:
            content = element("title", f"{name.replace('_', ' ')}: {duration_text(seconds)}")
            kind = f"bar f-{stage_kind(name)}"
            parts.append(element("rect", content, x=first, y=y + 3, width=last - first, height=_ROW - 7, class_=kind))
    end = scale(min(transition.seconds, scale.high))
    if transition.seconds > scale.high:
        edges = f"M{svg_number(end - 9)} {svg_number(y + 1)}l5 {svg_number(_ROW - 3)}m4 0l-5 -{svg_number(_ROW - 3)}"
        parts.append(element("path", d=edges, stroke="var(--card)", stroke_width=2.5, fill="none"))
    lost = f" · {show_count(transition.steps_lost, 'step')}" if transition.steps_lost else ""
    ended = "" if transition.resumed else " so far" if one.is_running else " · not resumed"
    words = element("title", describe_transition(transition, one))
    parts.append(
        element(
            "text", words, f"{duration_text(transition.seconds)}{lost}{ended}", x=end + 7, y=y + 16, class_="strong"
        )
    )
    return parts


def _in_order(transition: TransitionRecord) -> list[tuple[str, float]]:
    order = list(DISPLAY_KINDS)
    return sorted(transition.stages.items(), key=lambda item: (order.index(stage_kind(item[0])), item[0]))


def _histogram(transitions: Sequence[TransitionRecord]) -> Markup:
    """Return a histogram over the logarithm of the durations: some exceed others by a factor of 100."""
    took = [max(transition.seconds, 1e-3) for transition in transitions]
    low, high = math.log10(min(took)), math.log10(max(took))
    low, high = math.floor(low * 5) / 5, max(math.ceil(high * 5) / 5, math.floor(low * 5) / 5 + 0.2)
    counts = Counter(min(_COLUMNS - 1, int((math.log10(value) - low) / (high - low) * _COLUMNS)) for value in took)
    box = charts.plot_frame(round_up_tick(max(counts.values())), across=(low, high), tall=110)
    parts: list[MarkupPart] = [charts.value_grid(box, lambda value: f"{value:,.0f}" if value == int(value) else "", 3)]
    for place, there in sorted(counts.items()):
        first, last = (box.x(low + (high - low) * at / _COLUMNS) for at in (place, place + 1))
        y = box.y(there)
        parts.append(
            element(
                "rect",
                element("title", f"{there:,}"),
                x=first,
                y=y,
                width=last - first - 1,
                height=box.bottom - y,
                class_="hist",
            )
        )
    free = charts.PLOT_LEFT
    for value in log_time_ticks(10**low, 10**high):
        x = box.x(math.log10(value))
        if x >= free:
            free = x + _APART
            parts.append(element("text", duration_text(value), x=x, y=box.bottom + 17, text_anchor="middle"))
    for place, (name, value) in enumerate(_quantiles(transitions)):
        x = box.x(math.log10(max(value, 1e-3)))
        parts.append(
            element("path", d=f"M{svg_number(x)} {svg_number(box.top)}V{svg_number(box.bottom)}", class_="mean")
        )
        side = "start" if x < charts.PLOT_RIGHT - 90 else "end"
        shift = 5 if side == "start" else -5
        parts.append(
            element(
                "text",
                f"{name} {duration_text(value)}",
                x=x + shift,
                y=box.top + 10 + 13 * place,
                text_anchor=side,
                class_="strong",
            )
        )
    return charts.svg_chart(box, "durations of recoveries", parts)


def stage_table(one: Analysis, category: TimeCategory) -> Markup | None:
    stats = [stats for stats in one.stages if stats.category is category]
    if not stats:
        return None
    longest = max(stats.p99_s for stats in stats) or 1.0
    body = [
        (
            element("span", element("i", class_=f"k f-{stage_kind(each.name)}"), each.name.replace("_", " ")),
            f"{each.count:,}",
            duration_text(each.p50_s),
            duration_text(each.p99_s),
            duration_text(each.most_s),
            _meter(each.name, each.p50_s / longest, each.p99_s / longest),
        )
        for each in stats
    ]
    head = ("stage", "ranks", "p50", "p99", "most", "p50 to p99")
    table = html_table(head, body, right=("ranks", "p50", "p99", "most"))
    return element("details", element("summary", "stages, over all ranks"), table, open="")


def _meter(name: str, usual: float, most: float) -> Markup:
    style = f"width:{160 * usual:.0f}px"
    more = f"width:{160 * max(0.0, most - usual):.0f}px;opacity:.35"
    kind = f"meter f-{stage_kind(name)}"
    return element("span", element("i", class_=kind, style=style), element("i", class_=kind, style=more))


_SHOWN = 100
_LONG = 400
_BRIEF = 25
_HOW = {
    "respawn": "started again",
    "replace": "a spare took its place",
    "restart": "all ranks started again",
    "shrink": "continued with fewer nodes",
    "grow": "continued with more nodes",
}
_Pair = tuple[FaultRecord, TransitionRecord]


def faults_section(one: Analysis) -> Markup:
    pairs = [(fault, transition) for transition in one.recoveries for fault in transition.faults]
    pairs.sort(key=lambda pair: (pair[0].at_us, pair[0].noticed_us))
    if not pairs:
        return report_section("faults", "Faults", _unnoticed(one), note="No fault was recorded.")
    parts: list[MarkupPart] = []
    if len(pairs) > _BRIEF:
        parts.append(_by_kind(pairs))
    shown, note = pairs, f"{show_count(len(pairs), 'fault')}, in order of time"
    if len(pairs) > _SHOWN:
        costly = sorted(pairs, key=lambda pair: -pair[1].cost_s)[:_SHOWN]
        shown = sorted(costly, key=lambda pair: (pair[0].at_us, pair[0].noticed_us))
        note = f"{show_count(len(pairs), 'fault')}; each of the {_SHOWN} that cost most is listed"
    table = html_table(
        ("at", "where", "what", "message", "result", "resumed after", "steps lost"),
        [_row(one, fault, transition, first=transition.faults[0] is fault) for fault, transition in shown],
        right=("at", "resumed after", "steps lost"),
    )
    many = len(shown) > _BRIEF
    parts.append(
        element("details", element("summary", f"{show_count(len(shown), 'fault')} one by one"), table)
        if many
        else table
    )
    return report_section("faults", "Faults", parts, _unnoticed(one), note=f"{note}.")


def _unnoticed(one: Analysis) -> Markup | None:
    """Return the table of injections that broke no world."""
    if not one.injections:
        return None
    body = [
        (
            run_time_text((each.at_us - one.start_us) / 1e6),
            f"{each.node}{f'/{each.local_rank}' if each.local_rank >= 0 else ''}",
            element("span", f"injected: {each.kind}", class_="tag"),
            f"{each.step:,}" if each.step >= 0 else "",
            each.words,
        )
        for each in one.injections[:_SHOWN]
    ]
    head = ("at", "where", "what", "step", "message")
    table = html_table(head, body, right=("at", "step"))
    return element("div", element("h3", f"{show_count(len(one.injections), 'injection')} that broke no world"), table)


def _row(one: Analysis, fault: FaultRecord, transition: TransitionRecord, *, first: bool) -> tuple[MarkupPart, ...]:
    noticed = (fault.noticed_us - fault.at_us) / 1e6
    after = element("div", f"noticed after {duration_text(noticed)}", class_="sub") if noticed > 0 else None
    injected = element("div", element("span", f"injected: {fault.injected}", class_="tag")) if fault.injected else None
    reason = fault.reason if len(fault.reason) <= _LONG else f"{fault.reason[:_LONG]}…"
    at = run_time_text((fault.at_us - one.start_us) / 1e6)
    what: MarkupPart = (fault.kind or "not reported", injected)
    if not first:
        return (
            at,
            fault_location(fault),
            what,
            (reason, after),
            element("span", "with the previous fault", class_="sub"),
            "",
            "",
        )
    change = (
        f"{transition.ranks} → {transition.next_ranks} ranks"
        if transition.ranks != transition.next_ranks
        else show_count(transition.next_ranks, "rank")
    )
    how: MarkupPart = (_HOW.get(transition.how, transition.how), element("div", change, class_="sub"))
    if not transition.resumed:
        how = "not yet" if one.is_running else "did not resume"
    return (
        at,
        fault_location(fault),
        what,
        (reason, after),
        how,
        duration_text(transition.seconds),
        f"{transition.steps_lost:,}",
    )


def _by_kind(pairs: Sequence[_Pair]) -> Markup:
    kinds: dict[str, list[_Pair]] = {}
    for pair in pairs:
        kinds.setdefault(pair[0].kind or "not reported", []).append(pair)
    total = sum(transition.cost_s for fault, transition in pairs if transition.faults[0] is fault) or 1.0
    body = []
    for kind, found in sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0])):
        took = [transition.seconds for _, transition in found]
        cost = sum(transition.cost_s for fault, transition in found if transition.faults[0] is fault)
        usual = max(
            {pair[0].reason for pair in found}, key=lambda reason: (sum(p[0].reason == reason for p in found), reason)
        )
        nodes = {pair[0].node for pair in found}
        body.append(
            (
                kind,
                f"{len(found):,}",
                f"{len(nodes):,}",
                duration_text(quantile(took, 0.5)),
                duration_text(quantile(took, 0.99)),
                percent_text(cost / total if total else 0.0),
                element("span", usual[:160], class_="sub"),
            )
        )
    head = ("what", "faults", "nodes", "p50", "p99", "share of the cost", "most frequent message")
    return html_table(head, body, right=("faults", "nodes", "p50", "p99", "share of the cost"))


_DOTS = 600
_MODES = {
    "live": "the survivors' last step: nothing was lost",
    "snapshot": "the newest complete save",
    "nothing": "nothing was saved yet",
    "torn": "from nothing: no save was complete",
    "lost": "from nothing, on request: the complete steps are lost",
    "damaged": "from nothing, on request: the saved steps are damaged",
}
_TIERS = {"memory": "this node's memory", "peer": "another node's memory", "durable": "the durable tier"}
_COLOURS = ("productive", "hydrate", "lost", "save", "resize", "groups")


def saves_section(one: Analysis) -> Markup:
    told = one.save_s
    if not told.count:
        return report_section("saves", "Saves", note="No save was recorded.")
    seconds = (one.end_us - one.start_us) / 1e6
    blocked_us = one.wall.by.get(TimeCategory.SAVE.value, 0)
    share = percent_text(one.wall.share(TimeCategory.SAVE.value))
    note = (
        f"{show_count(told.count, 'save')}, of all ranks; the training was blocked for "
        f"{duration_text(blocked_us / 1e6)} in all"
    )
    body = [
        (
            data_value(f"{told.count:,}", told.count),
            data_value(duration_text(told.p50_s), told.p50_s),
            data_value(duration_text(told.p99_s), told.p99_s),
            data_value(duration_text(told.most_s), told.most_s),
        )
    ]
    head = ("saves", "p50", "p99", "longest")
    return report_section(
        "saves",
        "Saves",
        _blocked(one, seconds),
        html_table(head, body),
        note=f"{note}, {share} of the time.",
    )


def _blocked(one: Analysis, seconds: float) -> Markup | None:
    points = [
        ((each.end_us - one.start_us) / 1e6, each.duration_us / 1e6)
        for each in one.timeline
        if each.category is TimeCategory.SAVE and each.duration_us
    ]
    if not points:
        return None
    box = charts.plot_frame(round_up_tick(max(value for _, value in points)), across=(0.0, seconds), tall=90)
    dots = [
        element("circle", cx=box.x(x), cy=box.y(y), r=1.8, class_="point", opacity=0.55)
        for x, y in downsampled(points, _DOTS)
    ]
    return charts.svg_chart(
        box, "blocked by saves", charts.value_grid(box, duration_text, 3), dots, charts.time_axis(box, seconds)
    )


def restores_section(one: Analysis) -> Markup:
    total = sum(one.restores.values())
    if not total:
        return report_section("restores", "Restores", note="No restore was recorded.")
    note = f"{show_count(total, 'restore')} by ranks that joined a world."
    modes = html_table(
        ("resumed from", "", "ranks"),
        [
            (mode, element("span", _MODES.get(mode, ""), class_="sub"), data_value(f"{there:,}", there))
            for mode, there in one.restores.items()
        ],
        right=("ranks",),
    )
    return report_section("restores", "Restores", modes, _tiers(one), note=note)


def _tiers(one: Analysis) -> Markup | None:
    total = sum(one.restored_bytes.values())
    if not total:
        return None
    tiers = sorted(one.restored_bytes.items(), key=lambda item: (-item[1], item[0]))
    kinds = {tier: _COLOURS[place % len(_COLOURS)] for place, (tier, _) in enumerate(tiers)}
    bar = [
        element("i", class_=f"f-{kinds[tier]}", style=f"flex:{there / total:.6f}", title=tier) for tier, there in tiers
    ]
    keys = [
        element(
            "span",
            element("i", class_=f"k f-{kinds[tier]}"),
            _TIERS.get(tier, tier),
            element("b", data_value(f"{show_size(there)}, {percent_text(there / total)}", there)),
        )
        for tier, there in tiers
    ]
    return element(
        "div", element("h3", "read from"), element("div", bar, class_="spent"), element("p", keys, class_="legend")
    )
