"""An analysis as people read it. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from tieredckpt.agent.protection import in_words
from tieredckpt.cli.screen import count, show_age, table
from tieredckpt.goodput import Analysis, Category, Recovery
from tieredckpt.ledger.events import STAGES
from tieredckpt.node import Protected


def summary(found: Analysis) -> Iterator[RenderableType]:
    """The few lines that say the most."""
    name, total_s = escape(found.job or "job"), found.wall.total / 1e6
    how = "goes on, or was killed" if found.live else found.runs[-1].how
    began = dt.datetime.fromtimestamp(found.start_us / 1e6, dt.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    sizes = f"{count(found.worlds, 'world')}, at most {count(found.ranks, 'rank')}"
    runs = f", {count(len(found.runs), 'run')}" if len(found.runs) > 1 else ""
    yield Text.from_markup(f"[bold]{name}[/] {how}; {show_s(total_s)} since {began}{runs}, {sizes}")
    yield Text(
        f"goodput {percent(found.goodput)} of the capacity, ETTR {percent(found.ettr)} of the time: "
        f"{count(found.steps_counted, 'step')} that count, {found.steps_lost} lost"
    )
    each = f"{show_s(found.step_s.p50_s)} a step (p50), {show_s(found.step_s.p99_s)} (p99)"
    saves = f"a save blocks {show_s(found.save_s.p50_s)} (p50), {show_s(found.save_s.p99_s)} (p99)"
    yield Text("; ".join([*([each] if found.step_s.count else []), *([saves] if found.save_s.count else [])]))
    rate = [
        f"{number / total_s:,.0f} {what}/s"
        for number, what in ((found.tokens, "tokens"), (found.samples, "samples"))
        if number is not None and total_s
    ]
    if rate:
        yield Text(f"{' and '.join(rate)}, counting steps that count and all of the time")
    if found.mtbf_s is not None:
        mean = "none was recovered from" if found.mttr_s is None else f"MTTR {show_s(found.mttr_s)}"
        yield Text(f"{count(found.faults, 'fault')}: {mean}, MTBF {show_s(found.mtbf_s)}")
    if found.protected_step is not None:
        yield _protection(found, found.protected_step)


def _protection(found: Analysis, step: int) -> Text:
    """The words that status and log use, and for how long it was otherwise."""
    since_us = found.unprotected_since_us
    left_out = found.unprotected[-1].left_out if since_us is not None else 0
    now = Protected(step, None if since_us is None else since_us / 1e6, left_out)
    times = len(found.unprotected)
    before = ""
    if times:
        total_s = sum(one.end_us - one.start_us for one in found.unprotected) / 1e6
        before = f"; it was unprotected {'once' if times == 1 else f'{times} times'}, for {show_s(total_s)}"
    return Text(f"{in_words(now)}{before}", style="" if since_us is None else "bold yellow")


def tables(found: Analysis) -> Iterator[RenderableType]:
    """What the time went into, and how long ranks took for each stage."""
    rows = []
    for name in [*(one.value for one in Category), "missing"]:
        wall_us, ranks_us = found.wall.by.get(name, 0), found.capacity.by.get(name, 0)
        if wall_us or ranks_us:
            wall = (show_s(wall_us / 1e6), percent(found.wall.share(name))) if name != "missing" else ("-", "-")
            rows.append([name, *wall, show_s(ranks_us / 1e6), percent(found.capacity.share(name))])
    numbers = ("TIME", "SHARE", "RANK TIME", "OF CAPACITY")
    yield table(("SPENT ON", *numbers), rows, right=numbers)
    stages = [
        [one.category.value, one.name, str(one.count), *map(show_s, (one.p50_s, one.p99_s, one.most_s))]
        for one in found.stages
    ]
    if stages:
        columns = ("RANKS", "P50", "P99", "MOST")
        yield Text()
        yield table(("WAY", "STAGE", *columns), stages, right=columns)


def faults_table(found: Analysis) -> Iterator[RenderableType]:
    """A line for each way from one world to the next, and below it what it came of."""
    ways = [one for one in found.recoveries if one.category is not Category.STARTUP or one.faults]
    if not ways:
        yield Text("no fault and no resize")
        return
    names = sorted({name for one in ways for name in one.stages}, key=_place)
    rows = [_row(found, one, names) for one in ways]
    numbers = ("AT", "RANKS", *(name.upper() for name in names), "TOTAL", "LOST STEPS", "LOST")
    yield table(("WAY", "HOW", *numbers), rows, right=numbers)
    for number, one in enumerate(ways, start=1):
        for fault in one.faults:
            who = f"rank {fault.local_rank} of {fault.node}" if fault.local_rank >= 0 else fault.node
            injected = f" (injected: {fault.injected})" if fault.injected else ""
            seen_s = (fault.noticed_us - fault.at_us) / 1e6
            yield Text(
                f"{number}. {fault.kind or 'fault'} {who}{injected}: {fault.reason}, noticed after {show_s(seen_s)}"
            )
        if not one.faults and one.reason:
            yield Text(f"{number}. {one.reason}")


def _row(found: Analysis, one: Recovery, names: list[str]) -> list[str]:
    ranks = f"{one.ranks} → {one.next_ranks}" if one.resumed else f"{one.ranks} → -"
    return [
        one.category.value,
        one.how or "-",
        f"+{show_s((one.start_us - found.start_us) / 1e6)}",
        ranks,
        *(show_s(one.stages[name]) if name in one.stages else "-" for name in names),
        show_s(one.seconds),
        str(one.steps_lost),
        show_s(one.lost_s),
    ]


def _place(name: str) -> tuple[int, str]:
    return (STAGES.index(name) if name in STAGES else len(STAGES), name)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def show_s(seconds: float) -> str:
    """``0.0123`` as ``12.3 ms``, ``5400`` as ``1 h 30 min``."""
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    if seconds < 1000:
        return f"{seconds:.0f} s"
    return show_age(seconds)
