"""What went wrong, in the words of whoever noticed it."""

from __future__ import annotations

from collections.abc import Sequence

from tieredckpt.goodput.model import Analysis, FaultView, Recovery
from tieredckpt.goodput.page.chart import where
from tieredckpt.goodput.page.markup import Markup, Part, rows, section, tag
from tieredckpt.goodput.page.scales import quantile
from tieredckpt.goodput.page.words import count, lasting, percent, since

_SHOWN = 100
_LONG = 400
_BRIEF = 25
_HOW = {
    "respawn": "started again",
    "replace": "a spare took its place",
    "restart": "all ranks started again",
    "shrink": "went on with fewer",
    "grow": "went on with more",
}
_Pair = tuple[FaultView, Recovery]


def faults(one: Analysis) -> Markup:
    pairs = [(fault, way) for way in one.recoveries for fault in way.faults]
    pairs.sort(key=lambda pair: (pair[0].at_us, pair[0].noticed_us))
    if not pairs:
        return section("faults", "Faults", _unnoticed(one), note="No fault was written down.")
    parts: list[Part] = []
    if len(pairs) > _BRIEF:
        parts.append(_by_kind(pairs))
    shown, note = pairs, f"{count(len(pairs), 'fault')}, in order of time"
    if len(pairs) > _SHOWN:
        costly = sorted(pairs, key=lambda pair: -pair[1].cost_s)[:_SHOWN]
        shown = sorted(costly, key=lambda pair: (pair[0].at_us, pair[0].noticed_us))
        note = f"{count(len(pairs), 'fault')}; each of the {_SHOWN} that cost most is listed"
    table = rows(
        ("at", "where", "what", "in its words", "went on", "back after", "steps lost"),
        [_row(one, fault, way, first=way.faults[0] is fault) for fault, way in shown],
        right=("at", "back after", "steps lost"),
    )
    many = len(shown) > _BRIEF
    parts.append(tag("details", tag("summary", f"{count(len(shown), 'fault')} one by one"), table) if many else table)
    return section("faults", "Faults", parts, _unnoticed(one), note=f"{note}.")


def _unnoticed(one: Analysis) -> Markup | None:
    """Faults that were made on purpose, and broke no world."""
    if not one.injections:
        return None
    body = [
        (
            since((each.at_us - one.start_us) / 1e6),
            f"{each.node}{f'/{each.local_rank}' if each.local_rank >= 0 else ''}",
            tag("span", f"injected: {each.kind}", class_="tag"),
            f"{each.step:,}" if each.step >= 0 else "",
            each.words,
        )
        for each in one.injections[:_SHOWN]
    ]
    head = ("at", "where", "what", "step", "in its words")
    table = rows(head, body, right=("at", "step"))
    return tag("div", tag("h3", f"{count(len(one.injections), 'injection')} that broke no world"), table)


def _row(one: Analysis, fault: FaultView, way: Recovery, *, first: bool) -> tuple[Part, ...]:
    noticed = (fault.noticed_us - fault.at_us) / 1e6
    after = tag("div", f"noticed after {lasting(noticed)}", class_="sub") if noticed > 0 else None
    injected = tag("div", tag("span", f"injected: {fault.injected}", class_="tag")) if fault.injected else None
    reason = fault.reason if len(fault.reason) <= _LONG else f"{fault.reason[:_LONG]}…"
    at = since((fault.at_us - one.start_us) / 1e6)
    what: Part = (fault.kind or "not said", injected)
    if not first:
        return at, where(fault), what, (reason, after), tag("span", "with the one before", class_="sub"), "", ""
    change = f"{way.ranks} → {way.next_ranks} ranks" if way.ranks != way.next_ranks else count(way.next_ranks, "rank")
    how: Part = (_HOW.get(way.how, way.how), tag("div", change, class_="sub"))
    if not way.resumed:
        how = "not yet" if one.live else "did not go on"
    return at, where(fault), what, (reason, after), how, lasting(way.seconds), f"{way.steps_lost:,}"


def _by_kind(pairs: Sequence[_Pair]) -> Markup:
    kinds: dict[str, list[_Pair]] = {}
    for pair in pairs:
        kinds.setdefault(pair[0].kind or "not said", []).append(pair)
    total = sum(way.cost_s for fault, way in pairs if way.faults[0] is fault) or 1.0
    body = []
    for kind, found in sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0])):
        took = [way.seconds for _, way in found]
        cost = sum(way.cost_s for fault, way in found if way.faults[0] is fault)
        usual = max(
            {pair[0].reason for pair in found}, key=lambda reason: (sum(p[0].reason == reason for p in found), reason)
        )
        nodes = {pair[0].node for pair in found}
        body.append(
            (
                kind,
                f"{len(found):,}",
                f"{len(nodes):,}",
                lasting(quantile(took, 0.5)),
                lasting(quantile(took, 0.99)),
                percent(cost / total if total else 0.0),
                tag("span", usual[:160], class_="sub"),
            )
        )
    head = ("what", "faults", "nodes", "p50", "p99", "of what faults cost", "most often")
    return rows(head, body, right=("faults", "nodes", "p50", "p99", "of what faults cost"))
