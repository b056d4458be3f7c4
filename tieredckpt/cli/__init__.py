"""The ``tieredckpt`` command. Subcommands and plug-ins of other packages are imported when they run.

A plug-in is an entry point of a group such as ``tieredckpt.commands``. It is searched only for commands that the
program does not have. A plug-in that cannot be loaded is still listed, and only its own command fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

import click

from peerstore.errors import MissingPackageError
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.exit_codes import EXIT_CODES_HELP
from tieredckpt.cli.help_format import HelpContext, SuggestingGroup, with_help_format
from tieredckpt.cli.run_program import run_program
from tieredckpt.errors import PluginError

__all__ = ["main"]

_COMMANDS = {
    "agent": "tieredckpt.cli.agent:agent_group",
    "ls": "tieredckpt.cli.ls:ls_command",
    "status": "tieredckpt.cli.status:status_command",
    "top": "tieredckpt.cli.top:top_command",
    "whatif": "tieredckpt.cli.whatif:whatif_command",
    "goodput": "tieredckpt.cli.goodput:goodput_command",
    "monitoring": "tieredckpt.cli.monitoring:monitoring_group",
    "simulate": "tieredckpt.cli.simulate:simulate_command",
    "inspect": "tieredckpt.cli.inspect:inspect_command",
    "verify": "tieredckpt.cli.verify:verify_command",
    "export": "tieredckpt.cli.export:export_command",
    "gc": "tieredckpt.cli.gc:gc_command",
    "quarantine": "tieredckpt.cli.quarantine:quarantine_command",
    "pin": "tieredckpt.cli.pin:pin_command",
    "unpin": "tieredckpt.cli.pin:unpin_command",
    "rm": "tieredckpt.cli.rm:rm_command",
    "rebuild": "tieredckpt.cli.rebuild:rebuild_command",
    "doctor": "tieredckpt.cli.doctor:doctor_command",
    "demo": "tieredckpt.cli.agent:demo_command",
}


class LazyCommandGroup(SuggestingGroup):
    """Group that imports a command, named as ``module:name``, on its first use.

    Built-in commands come first, in their order. A plug-in of the same name does not replace them.
    """

    def __init__(self, *args: Any, own: Mapping[str, str], plugins: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.context_class = HelpContext
        self.builtin_commands = own
        self.plugin_group = plugins
        """Group of the plug-ins' entry points. Empty: no plug-ins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [
            *self.builtin_commands,
            *sorted(set(metadata.entry_points(group=self.plugin_group).names) - self.builtin_commands.keys()),
        ]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.builtin_commands:
            module, _, name = self.builtin_commands[cmd_name].partition(":")
            return with_help_format(getattr(import_module(module), name))
        added = metadata.entry_points(group=self.plugin_group, name=cmd_name)
        return with_help_format(_load_plugin(cmd_name, list(added))) if added else None


def distribution_version() -> str:
    """Return the version of the installed distribution, ``0+unknown`` without one."""
    try:
        return metadata.version("tieredckpt")
    except metadata.PackageNotFoundError:
        return "0+unknown"


@click.group(
    cls=LazyCommandGroup,
    own=_COMMANDS,
    plugins="tieredckpt.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES_HELP,
)
@click.version_option(version=distribution_version(), prog_name="tieredckpt")
def tieredckpt_cli() -> None:
    """PyTorch checkpoints in node memory first, in an object store a little later.

    A job is written JOB or tiered://JOB, a step JOB/step-120. Settings come from $TIEREDCKPT_CONFIG and
    $TIEREDCKPT_<SECTION>_<KEY>, as for training.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``tieredckpt`` and return its exit code."""
    return run_program(tieredckpt_cli, CommandOutput(), argv)


def _load_plugin(name: str, points: list[metadata.EntryPoint]) -> click.Command:
    places = sorted({point.value for point in points})
    if len(places) > 1:
        text = f"`{name}` is added by several packages ({', '.join(places)}): uninstall all but one"
        return _failing_command(name, PluginError(text))
    try:
        found = points[0].load()
    except Exception as cause:  # noqa: BLE001 - from another package's module, which only this command needs
        text = f"{_describe_plugin(name, points[0])} cannot be loaded: {cause!r}"
        return _failing_command(name, cause if isinstance(cause, MissingPackageError) else PluginError(text), cause)
    if not isinstance(found, click.Command):
        return _failing_command(name, PluginError(f"{_describe_plugin(name, points[0])} is no command: {found!r:.200}"))
    return found


def _describe_plugin(name: str, point: metadata.EntryPoint) -> str:
    owner = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package"
    return f"`{name}`, which {owner} adds ({point.value}),"


def _failing_command(
    name: str, error: PluginError | MissingPackageError, cause: Exception | None = None
) -> click.Command:
    """Return a command that accepts any arguments and raises ``error``."""

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
