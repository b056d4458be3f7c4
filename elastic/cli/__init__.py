"""The ``elastic`` command. Subcommands are imported when they run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from elastic.cli.common import ELASTIC_EXIT_HELP, ElasticScreen
from tieredckpt.cli import LazyCommandGroup, distribution_version
from tieredckpt.cli.run_program import run_program

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
    "map": "elastic.cli.map:map_command",
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
    """Train while machines join, leave and fail.

    `elastic run train.py` starts a job whose ranks keep their processes when the number of nodes changes. `join` to
    `inject` control a running job. `plan` shows how a batch is split, and `reshard` changes a checkpoint's sharding.
    `map` applies a function to lines of JSON.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``elastic``, and return its exit code."""
    return run_program(elastic_commands, ElasticScreen("elastic"), argv)


__all__ = ["main"]
