"""The command line. Commands are imported when they run; only ``reshard`` needs torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from elastic.cli.exits import EXIT_HELP, Exit
from elastic.cli.screen import ElasticScreen
from elastic.errors import ElasticError
from peerstore.errors import PeerStoreError
from tieredckpt.cli.exits import CommandError
from tieredckpt.cli.groups import Commands, version
from tieredckpt.errors import TieredCheckpointError

_OWN = {
    "run": "elastic.cli.running:run",
    "join": "elastic.cli.running:join",
    "coordinator": "elastic.cli.running:coordinator",
    "status": "elastic.cli.asking:status",
    "resize": "elastic.cli.asking:resize",
    "leave": "elastic.cli.asking:leave",
    "stop": "elastic.cli.asking:stop",
    "inject": "elastic.cli.injecting:inject",
    "plan": "elastic.batch.command:plan",
    "reshard": "elastic.reshard.command:reshard",
    "demo": "elastic.cli.showing:demo",
}


@click.group(
    cls=Commands,
    own=_OWN,
    plugins="elastic.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_HELP,
)
@click.version_option(version=version(), prog_name="elastic")
def commands() -> None:
    """Training that goes on when machines come, go and break.

    `elastic run train.py` starts ranks that keep their processes when the number of nodes changes; `join` to
    `inject` are about a job that runs. `plan` shows who computes what of a batch, `reshard` cuts a checkpoint anew.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors are one message; ``--debug`` shows where from."""
    screen = ElasticScreen("elastic")
    screen.words = sys.argv[1:] if argv is None else list(argv)
    try:
        result = commands.main(
            args=None if argv is None else list(argv), prog_name="elastic", standalone_mode=False, obj=screen
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
    except (TieredCheckpointError, CommandError) as error:  # of commands that end as tieredckpt's do
        return int(screen.failed(error))
    except (ElasticError, PeerStoreError, OSError) as error:
        return screen.ended_by(error)


__all__ = ["main"]
