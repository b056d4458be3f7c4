"""The ``elastic`` command. Subcommands are imported when they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from elastic.cli.common import ELASTIC_EXIT_HELP, ElasticExit, ElasticScreen
from elastic.errors import ElasticError
from peerstore.errors import PeerStoreError
from tieredckpt.cli import LazyCommandGroup, distribution_version
from tieredckpt.cli.exit_codes import CommandError
from tieredckpt.cli.optional_packages import missing_extra
from tieredckpt.errors import TieredCheckpointError

_OWN = {
    "run": "elastic.cli.run:run_command",
    "join": "elastic.cli.run:join_command",
    "coordinator": "elastic.cli.run:coordinator_command",
    "status": "elastic.cli.job_control:job_status_command",
    "resize": "elastic.cli.job_control:resize_command",
    "drain": "elastic.cli.job_control:drain_command",
    "stop": "elastic.cli.job_control:stop_command",
    "inject": "elastic.cli.job_control:inject_command",
    "plan": "elastic.cli.plan:batch_plan_command",
    "reshard": "elastic.cli.reshard:reshard_command",
    "demo": "elastic.cli.demo:elastic_demo_command",
}


@click.group(
    cls=LazyCommandGroup,
    own=_OWN,
    plugins="elastic.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=ELASTIC_EXIT_HELP,
)
@click.version_option(version=distribution_version(), prog_name="elastic")
def elastic_commands() -> None:
    """Training that goes on when machines come, go and break.

    `elastic run train.py` starts ranks that keep their processes when the number of nodes changes; `join` to
    `inject` are about a job that runs. `plan` shows who computes what of a batch, `reshard` cuts a checkpoint anew.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Errors are one message; ``--debug`` shows where from."""
    screen = ElasticScreen("elastic")
    screen.argv = sys.argv[1:] if argv is None else list(argv)
    try:
        result = elastic_commands.main(
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
        return ElasticExit.INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ElasticExit.OK
    except (TieredCheckpointError, CommandError) as error:  # of commands that end as tieredckpt's do
        return int(screen.report_error(error))
    except (ElasticError, PeerStoreError, OSError) as error:
        return screen.report_elastic_error(error)
    except ModuleNotFoundError as error:
        needed = missing_extra(error)
        if needed is None:
            raise
        return int(screen.report_error(needed))


__all__ = ["main"]
