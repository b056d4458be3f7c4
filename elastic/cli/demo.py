"""``elastic demo``."""

from __future__ import annotations

from pathlib import Path

import click

from elastic.cli.common import ElasticScreen, pass_elastic_screen
from tieredckpt.cli.common_options import output_options


@click.command("demo", short_help="Kill a rank, lose a node, shrink and grow: equal bit for bit.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the demo's files in this folder.")
@output_options
@pass_elastic_screen
def elastic_demo_command(screen: ElasticScreen, /, keep: Path | None) -> int:
    """Train on two nodes, kill a rank, lose a node, get another one, shrink, grow, and drain to a bucket.

    Then repeat the steps in one process without faults, and compare all losses and the final state bit for bit. Needs
    no other program and leaves no process running. Exit code 0 if all bits are equal.
    """
    from elastic.demo import main

    return main(as_json=screen.as_json, keep=keep)
