"""The layout of ``--help``: one notation for defaults, in every command and plug-in."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

_DEFAULT = re.compile(r"(\.?)\s*\[default: ([^\];]*?)(?:\.0)?(?:; ([^\]]*))?\]")


class HelpFormatter(click.HelpFormatter):
    """Writes ``(default 8)`` where click writes ``[default: 8]``."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(first, _DEFAULT.sub(_default, text).strip()) for first, text in rows], col_max, col_spacing)


class HelpContext(click.Context):
    formatter_class = HelpFormatter


def with_help_format(command: click.Command) -> click.Command:
    """Have ``command`` and its subcommands use :class:`HelpFormatter`."""
    command.context_class = HelpContext
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            with_help_format(subcommand)
    return command


def _default(found: re.Match[str]) -> str:
    end, value, bounds = found.groups()
    return f" (default {value}){end}" + (f"  [{bounds}]" if bounds else "")
