"""The command line. Commands are imported when they run; ``tieredckpt --help`` needs neither torch nor boto3."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from peerstore.errors import PeerStoreError
from tieredckpt.cli.exits import EXIT_HELP, CommandError, Exit
from tieredckpt.cli.groups import Commands, version
from tieredckpt.cli.screen import Screen
from tieredckpt.errors import TieredCheckpointError

_OWN = {
    "agent": "tieredckpt.cli.running:agent",
    "ls": "tieredckpt.cli.listing:ls",
    "status": "tieredckpt.cli.reporting:status",
    "top": "tieredckpt.cli.watching:top",
    "whatif": "tieredckpt.cli.foretelling:whatif",
    "goodput": "tieredckpt.cli.accounting:goodput",
    "simulate": "tieredckpt.cli.simulating:simulate",
    "inspect": "tieredckpt.cli.inspecting:inspect",
    "verify": "tieredckpt.cli.verifying:verify",
    "export": "tieredckpt.cli.exporting:export",
    "gc": "tieredckpt.cli.collecting:gc",
    "quarantine": "tieredckpt.cli.quarantining:quarantine",
    "pin": "tieredckpt.cli.pin:pin",
    "unpin": "tieredckpt.cli.pin:unpin",
    "rm": "tieredckpt.cli.rm:rm",
    "rebuild": "tieredckpt.cli.rebuilding:rebuild",
    "doctor": "tieredckpt.cli.diagnosing:doctor",
    "demo": "tieredckpt.cli.running:demo",
}


@click.group(
    cls=Commands,
    own=_OWN,
    plugins="tieredckpt.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_HELP,
)
@click.version_option(version=version(), prog_name="tieredckpt")
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
    except (TieredCheckpointError, CommandError, PeerStoreError, OSError) as error:
        return screen.failed(error)


__all__ = ["main"]
