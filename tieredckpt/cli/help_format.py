"""Layout of ``--help`` and of errors about commands, for all commands and plug-ins."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

from peerstore.suggestions import did_you_mean

_DEFAULT = re.compile(r"(\.?)\s*\[default: ([^\];]*?)(?:\.0)?(?:; ([^\]]*))?\]")


class HelpFormatter(click.HelpFormatter):
    """Formatter that writes ``(default 8)`` instead of click's ``[default: 8]``."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(first, _DEFAULT.sub(_default, text).strip()) for first, text in rows], col_max, col_spacing)


class SuggestingGroup(click.Group):
    """Group that suggests the closest command for an unknown one.

    Click 8.4 does so for static groups only.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{did_you_mean(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class HelpContext(click.Context):
    formatter_class = HelpFormatter


def with_help_format(command: click.Command) -> click.Command:
    """Make ``command`` and its subcommands use :class:`HelpFormatter`, and return it."""
    command.context_class = HelpContext
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            with_help_format(subcommand)
    return command


def _default(found: re.Match[str]) -> str:
    end, value, bounds = found.groups()
    return f" (default {value}){end}" + (f"  [{bounds}]" if bounds else "")
