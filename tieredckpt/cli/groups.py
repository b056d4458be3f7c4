"""A program's commands: its own, and those that other packages add as plug-ins.

A plug-in is an entry point of a group such as ``tieredckpt.commands``, found when a command is asked for that the
program does not have itself. One that cannot be loaded is still listed, and fails by itself: the others do not need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any

import click

from tieredckpt.errors import PluginError


class Commands(click.Group):
    """Each command by where it is (``module:name``), imported when it is asked for.

    The program's own come first, in the order given, and none of them is replaced by a plug-in of the same name.
    """

    def __init__(self, *args: Any, own: Mapping[str, str], plugins: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.own = own
        self.plugins = plugins
        """The entry points' group; "": there are none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.own, *sorted(set(metadata.entry_points(group=self.plugins).names) - self.own.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.own:
            module, _, name = self.own[cmd_name].partition(":")
            found: click.Command = getattr(import_module(module), name)
            return found
        added = metadata.entry_points(group=self.plugins, name=cmd_name)
        return _command_of(cmd_name, list(added)) if added else None


def _command_of(name: str, points: list[metadata.EntryPoint]) -> click.Command:
    places = sorted({point.value for point in points})
    if len(places) > 1:
        text = f"`{name}` is added by several packages ({', '.join(places)}): uninstall all but one"
        return _broken(name, PluginError(text))
    try:
        found = points[0].load()
    except Exception as cause:  # noqa: BLE001 - of somebody else's module: only this command needs it
        return _broken(name, PluginError(f"{_whose(name, points[0])} cannot be loaded: {cause!r}"), cause)
    if not isinstance(found, click.Command):
        return _broken(name, PluginError(f"{_whose(name, points[0])} is no command: {found!r:.200}"))
    return found


def _whose(name: str, point: metadata.EntryPoint) -> str:
    owner = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package"
    return f"`{name}`, which {owner} adds ({point.value}),"


def _broken(name: str, error: PluginError, cause: Exception | None = None) -> click.Command:
    """A command that takes anything and says why it is not there."""

    def fail() -> None:
        context = click.get_current_context()
        screen = context.obj
        for option, switch in (("--json", "as_json"), ("--debug", "debug")):
            if screen is not None and option in context.args:
                setattr(screen, switch, True)
        raise error from cause

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    short = "(cannot be loaded)"
    return click.Command(name, callback=fail, context_settings=settings, add_help_option=False, short_help=short)


def version() -> str:
    """Of the distribution that has all these programs."""
    try:
        return metadata.version("tieredckpt")
    except metadata.PackageNotFoundError:
        return "0+unknown"
