"""The command line. Commands are imported when they run; ``tieredckpt --help`` needs neither torch nor boto3."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from peerstore.errors import PeerStoreError
from tieredckpt.cli.exits import EXIT_HELP, Exit
from tieredckpt.cli.screen import Screen
from tieredckpt.errors import TieredCheckpointError

_COMMANDS = {
    "agent": "tieredckpt.cli.running",
    "ls": "tieredckpt.cli.listing",
    "status": "tieredckpt.cli.reporting",
    "top": "tieredckpt.cli.watching",
    "whatif": "tieredckpt.cli.foretelling",
    "goodput": "tieredckpt.cli.accounting",
    "simulate": "tieredckpt.cli.simulating",
    "inspect": "tieredckpt.cli.inspecting",
    "verify": "tieredckpt.cli.verifying",
    "export": "tieredckpt.cli.exporting",
    "gc": "tieredckpt.cli.collecting",
    "quarantine": "tieredckpt.cli.quarantining",
    "rebuild": "tieredckpt.cli.rebuilding",
    "doctor": "tieredckpt.cli.diagnosing",
    "demo": "tieredckpt.cli.running",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        found: click.Command = getattr(import_module(module), cmd_name)
        return found


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("tieredckpt")
    except metadata.PackageNotFoundError:
        return "0+unknown"


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_HELP,
)
@click.version_option(version=_version(), prog_name="tieredckpt")
def commands() -> None:
    """PyTorch checkpoints in node memory first, in an object store a little later.

    A job is written JOB or tiered://JOB, a step JOB/step-120. Settings come from $TIEREDCKPT_CONFIG and
    $TIEREDCKPT_<SECTION>_<KEY>, as for training.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code (``docs/cli.md``). Errors are one message; ``--debug`` shows where from."""
    screen = Screen()
    try:
        result = commands.main(
            args=None if argv is None else list(argv), prog_name="tieredckpt", standalone_mode=False, obj=screen
        )
        sys.stdout.flush()
        return int(result or 0)
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except click.ClickException as wrong:
        wrong.show()
        return int(wrong.exit_code)
    except (click.Abort, KeyboardInterrupt):
        screen.err.print("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except (TieredCheckpointError, PeerStoreError, OSError) as error:
        return screen.failed(error)


__all__ = ["main"]
