"""Saves and restores: how long training was blocked, and where the bytes came from."""

from __future__ import annotations

from tieredckpt.goodput.model import Analysis, Category
from tieredckpt.goodput.page import chart
from tieredckpt.goodput.page.markup import Markup, data, rows, section, tag
from tieredckpt.goodput.page.scales import above, thinned
from tieredckpt.goodput.page.words import count, lasting, percent, size

_DOTS = 600
_MODES = {
    "live": "the step the survivors stood at: nothing was lost",
    "snapshot": "the newest save that was whole",
    "nothing": "there was nothing yet",
    "torn": "from nothing: no save had come to be whole",
    "lost": "from nothing, on purpose: what was whole is lost",
    "damaged": "from nothing, on purpose: what was saved is damaged",
}
_TIERS = {"memory": "this node's memory", "peer": "another node's memory", "durable": "the durable tier"}
_COLOURS = ("productive", "hydrate", "lost", "save", "resize", "groups")


def saves(one: Analysis) -> Markup:
    told = one.save_s
    if not told.count:
        return section("saves", "Saves", note="No save was written down.")
    seconds = (one.end_us - one.start_us) / 1e6
    blocked_us = one.wall.by.get(Category.SAVE.value, 0)
    share = percent(one.wall.share(Category.SAVE.value))
    note = f"{count(told.count, 'save')}, of all ranks; the training was blocked for {lasting(blocked_us / 1e6)} in all"
    body = [
        (
            data(f"{told.count:,}", told.count),
            data(lasting(told.p50_s), told.p50_s),
            data(lasting(told.p99_s), told.p99_s),
            data(lasting(told.most_s), told.most_s),
        )
    ]
    head = ("saves", "p50", "p99", "longest")
    return section(
        "saves",
        "Saves",
        _blocked(one, seconds),
        rows(head, body),
        note=f"{note}, {share} of the time.",
    )


def _blocked(one: Analysis, seconds: float) -> Markup | None:
    points = [
        ((each.end_us - one.start_us) / 1e6, each.us / 1e6)
        for each in one.timeline
        if each.category is Category.SAVE and each.us
    ]
    if not points:
        return None
    box = chart.frame(above(max(value for _, value in points)), across=(0.0, seconds), tall=90)
    dots = [
        tag("circle", cx=box.x(x), cy=box.y(y), r=1.8, class_="point", opacity=0.55) for x, y in thinned(points, _DOTS)
    ]
    return chart.drawn(box, "blocked by saves", chart.grid(box, lasting, 3), dots, chart.time_axis(box, seconds))


def restores(one: Analysis) -> Markup:
    total = sum(one.restores.values())
    if not total:
        return section("restores", "Restores", note="No restore was written down.")
    note = f"{count(total, 'restore')} by ranks that came into a world."
    modes = rows(
        ("went on from", "", "ranks"),
        [
            (mode, tag("span", _MODES.get(mode, ""), class_="sub"), data(f"{there:,}", there))
            for mode, there in one.restores.items()
        ],
        right=("ranks",),
    )
    return section("restores", "Restores", modes, _tiers(one), note=note)


def _tiers(one: Analysis) -> Markup | None:
    total = sum(one.restored_bytes.values())
    if not total:
        return None
    tiers = sorted(one.restored_bytes.items(), key=lambda item: (-item[1], item[0]))
    kinds = {tier: _COLOURS[place % len(_COLOURS)] for place, (tier, _) in enumerate(tiers)}
    bar = [tag("i", class_=f"f-{kinds[tier]}", style=f"flex:{there / total:.6f}", title=tier) for tier, there in tiers]
    keys = [
        tag(
            "span",
            tag("i", class_=f"k f-{kinds[tier]}"),
            _TIERS.get(tier, tier),
            tag("b", data(f"{size(there)}, {percent(there / total)}", there)),
        )
        for tier, there in tiers
    ]
    return tag("div", tag("h3", "read from"), tag("div", bar, class_="spent"), tag("p", keys, class_="legend"))
