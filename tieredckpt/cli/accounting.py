"""``tieredckpt goodput``: what became of a job's time."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tieredckpt.cli.accounts import faults_table, summary, tables
from tieredckpt.cli.exits import Exit
from tieredckpt.cli.options import pass_screen, printing, with_exits
from tieredckpt.cli.screen import Screen
from tieredckpt.errors import LedgerNotFoundError, UsageError
from tieredckpt.goodput import Analysis, analyse
from tieredckpt.goodput.exposition import exposition
from tieredckpt.ledger import LEDGER, read_ledger

_REFRESH_S = 2.0
_LOGS = "elastic-logs"


@click.command("goodput", short_help="What a job's time went into, and what faults cost.")
@click.argument("where", metavar="[DIR|JOB]", required=False)
@click.option("--faults", is_flag=True, help="Every recovery and resize, stage by stage.")
@click.option("--prometheus", is_flag=True, help="Print metrics in Prometheus' text format.")
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page of pictures as well, in one file."
)
@click.option("--watch", is_flag=True, help="Again every two seconds, until Ctrl-C.")
@printing
@pass_screen
@with_exits
def goodput(
    screen: Screen, *, where: str | None, faults: bool, prometheus: bool, html: Path | None, watch: bool
) -> Exit:
    """Show how much of a job's time went into steps that count, and what the rest went into.

    Reads the ledger that `elastic run` keeps beside what its ranks print, also while the job runs: DIR is that log
    directory or the ledger itself, JOB one below ./elastic-logs. Without either, $TIEREDCKPT_LEDGER.
    """
    if prometheus and (screen.as_json or faults):
        raise UsageError("--prometheus prints nothing but metrics: leave out --json and --faults")
    if watch and (screen.as_json or prometheus or html is not None):
        raise UsageError("--watch is for people: leave out --json, --prometheus and --html, and call it again instead")
    place = ledger_of(where)
    if watch and screen.out.is_terminal:
        _live(screen.out, place, faults=faults)
        return Exit.OK
    found = look(place)
    if html is not None:
        write_page(html, found)
    if prometheus:
        sys.stdout.write(exposition(found))
        sys.stdout.flush()
    else:
        screen.result(as_json(found), lambda out: out.print(shown(found, faults=faults)))
    for complaint in found.complaints:
        screen.note(f"{place}: {complaint}")
    return Exit.OK


def ledger_of(where: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory that somebody means, or :class:`LedgerNotFoundError`."""
    if where is None:
        if not environ.get(LEDGER):
            raise UsageError(f"say which job, or the directory of its ledger; ${LEDGER} is not set")
        return Path(environ[LEDGER])
    given = Path(where)
    if any(given.glob("*.jsonl")):
        return given
    looked = [*dict.fromkeys((given / "ledger", Path(_LOGS) / where / "ledger"))]
    for path in looked:
        if path.is_dir():
            return path
    if given.is_dir():
        return given
    tried = " and ".join(str(path) for path in looked)
    raise LedgerNotFoundError(f"{where} is no directory with a ledger, nor is there {tried}")


def look(place: Path) -> Analysis:
    read = read_ledger(place)
    return analyse(read.events, complaints=read.complaints)


def write_page(path: Path, found: Analysis) -> None:
    """Whole or not at all; what was there before is replaced."""
    from tieredckpt.goodput.page import page

    if path.is_dir() or not path.parent.is_dir():
        why = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise UsageError(f"--html {path}: {why}; say a file")
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(page(found), encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def as_json(found: Analysis) -> dict[str, Any]:
    """All of it but the single steps."""
    value: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(found, step_views=()))
    del value["step_views"]
    return {**value, "live": found.live, "unstated_us": found.unstated_us}


def shown(found: Analysis, *, faults: bool) -> RenderableType:
    parts: list[RenderableType] = [*summary(found), Text(), *tables(found)]
    if faults:
        parts += [Text(), *faults_table(found)]
    return Group(*parts)


def _live(out: Console, place: Path, *, faults: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts it in the background ignores it
    try:
        with Live(Text(f"reading {place}"), console=out, auto_refresh=False) as live:
            while True:
                found = look(place)
                said = [Text(complaint, style="yellow") for complaint in found.complaints]
                live.update(Group(shown(found, faults=faults), *said), refresh=True)
                if not found.live:
                    return
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:  # the way out
        return
