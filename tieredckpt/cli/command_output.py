"""Command output: results on stdout as text or JSON, everything else on stderr."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.segment import Segment
from rich.table import Table

from peerstore.errors import PeerStoreError
from tieredckpt.cli.exit_codes import CODES_BY_ERROR, CommandError, ErrorCodes, ExitCode, exit_code_for, hint_for
from tieredckpt.errors import TieredCheckpointError

_PIPE_WIDTH = 400

_CONTROL_CHARACTERS = {
    number: f"\\x{number:02x}" for number in (*range(0x20), *range(0x7F, 0xA0)) if chr(number) not in "\n\t"
} | {number: f"\\u{number:04x}" for number in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""Control characters, and characters that change the text direction.
Names and reasons come from untrusted jobs."""

_LINE_BREAKS = _CONTROL_CHARACTERS | {ord("\n"): "\\x0a", ord("\t"): "\\x09", 0x2028: "\\u2028", 0x2029: "\\u2029"}

AdvanceProgress = Callable[[int], None]
"""Callback with the number of bytes processed since the last call."""


class CommandOutput:
    """Output of one command. With ``--json``, standard output has nothing else."""

    reported_errors: ClassVar[tuple[type[Exception], ...]] = (
        TieredCheckpointError,
        CommandError,
        PeerStoreError,
        OSError,
    )
    """Errors that end a command with one message."""
    codes_by_error: ClassVar[ErrorCodes] = CODES_BY_ERROR
    argv: Sequence[str] = ()
    """The command line."""

    def __init__(self, program: str = "tieredckpt") -> None:
        self.program = program
        """Program name, the prefix of its error messages."""
        self.as_json = False
        self.debug = False
        # A pipe has no width, and its reader needs whole values.
        self.out = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)
        for console in (self.out, self.err):
            console.push_render_hook(_EscapeControlCharacters())

    def result(self, value: Mapping[str, Any], show: Callable[[Console], None]) -> None:
        """Print the result of the command: ``value`` as JSON, or the output of ``show``."""
        if self.as_json:
            sys.stdout.write(json.dumps(value, indent=2) + "\n")
            sys.stdout.flush()
        else:
            show(self.out)

    def info(self, text: str) -> None:
        self.err.print(escape(text), style="yellow")

    def report_error(self, error: BaseException) -> ExitCode:
        """Report the error that ended the command, and return the exit code."""
        code, advice = exit_code_for(error, self.codes_by_error), self.advice_for(error)
        if self.debug:
            traceback.print_exception(error)
        text = str(error) or type(error).__name__
        self.err.print(f"[bold red]{self.program}:[/] {escape(text)}")
        if advice:
            self.err.print(f"{'':{len(self.program) + 2}}{escape(advice)}")
        if self.as_json:
            self.print_json_error(type(error).__name__, text, advice, code)
        return code

    def advice_for(self, error: BaseException) -> str:
        """Return advice that the error's message does not contain. Empty: none."""
        return hint_for(error)

    def print_json_error(self, kind: str, message: str, advice: str, code: int) -> None:
        fields = {"kind": kind, "message": message, "advice": advice, "exit": int(code)}
        sys.stdout.write(json.dumps({"error": fields}, indent=2) + "\n")

    @contextlib.contextmanager
    def progress_bar(self, what: str, total_bytes: int) -> Iterator[AdvanceProgress]:
        """Show a progress bar on standard error, if that is a terminal. Yield its callback."""
        if not self.err.is_terminal:
            yield lambda _: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.err, transient=True) as progress:
            task = progress.add_task(escape(what), total=total_bytes)
            yield lambda count: progress.advance(task, count)

    @contextlib.contextmanager
    def spinner(self, what: str) -> Iterator[None]:
        """Show a spinner with ``what`` on standard error, if that is a terminal."""
        if not self.err.is_terminal:
            yield
            return
        with self.err.status(escape(what)):
            yield


class _EscapeControlCharacters(RenderHook):
    """Render hook that escapes control characters in texts. Rich's own control sequences pass."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(one) for one in renderables]


class _Escaped:
    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._shown, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(_CONTROL_CHARACTERS))


def literal(text: str) -> str:
    """Return ``text`` as markup that shows on one line, with its control characters escaped."""
    return escape(text.translate(_LINE_BREAKS))


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """Return a table without lines, its numbers aligned to the right; cells are markup.

    On a narrow terminal the widest columns of text continue on the next line. Numbers are never cut.
    """
    shown = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        number = column in right
        shown.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown


def format_age(seconds: float) -> str:
    """Return a duration in one or two units: ``1 h 30 min``."""
    seconds = max(0, int(seconds))
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d"


def iso_time(ns: int) -> str | None:
    """Return nanoseconds since 1970 as an ISO time for JSON. ``None``: unknown time (0)."""
    if ns <= 0:
        return None
    return dt.datetime.fromtimestamp(ns / 1e9, dt.timezone.utc).isoformat(timespec="milliseconds")


def format_ranges(parts: Sequence[int]) -> str:
    """Return numbers as ranges: ``0-3,7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for part in parts:
        if runs and part == runs[-1][1] + 1:
            runs[-1][1] = part
        else:
            runs.append([part, part])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def print_fields(out: Console, lines: Sequence[tuple[str, str]]) -> None:
    """Print one line per heading and text. Texts are markup and wrap in their column."""
    width = max((len(name) for name, _ in lines), default=0)
    grid = text_table(["", ""], [])
    grid.show_header = False
    grid.columns[0].width = width
    grid.columns[1].no_wrap = False
    for name, text in lines:
        grid.add_row(f"[bold]{name}[/]", text)
    out.print(grid, soft_wrap=False)
