"""``tieredckpt agent`` and ``tieredckpt demo``."""

from __future__ import annotations

from pathlib import Path

import click

from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.common_options import output_options, pass_output
from tieredckpt.cli.exit_codes import ExitCode


@click.command("agent", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def start_agent_command(options: tuple[str, ...]) -> int:
    """Run this node's agent: memory tier, drain, metrics."""
    from tieredckpt.agent.__main__ import main

    try:
        return main(list(options))
    except SystemExit as done:  # argparse: --help, or a wrong option
        return done.code if isinstance(done.code, int) else ExitCode.USAGE


@click.command("demo", short_help="Train, kill, restore, lose the node, restore: equal bit for bit.")
@click.option("--keep", type=click.Path(path_type=Path), help="Where the bucket's files stay afterwards.")
@output_options
@pass_output
def demo_command(screen: CommandOutput, keep: Path | None) -> int:
    """Train, kill a trainer, restore, lose the node, restore again; the loss goes on bit for bit.

    Needs nothing and leaves nothing running. Exit code 0 when every loss was equal.
    """
    from tieredckpt.demo import main

    return main(as_json=screen.as_json, keep=keep)
