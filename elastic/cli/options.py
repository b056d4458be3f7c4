"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from elastic.cli.screen import ElasticScreen

F = TypeVar("F", bound=Callable[..., Any])

pass_screen = click.make_pass_decorator(ElasticScreen)


def asking(command: F) -> F:
    """Which job, when it is not one of this machine; ``--json`` and ``--debug``."""
    from tieredckpt.cli.options import printing

    address = click.option(
        "--coordinator", default="", metavar="HOST:PORT", help="The coordinator of a job elsewhere; needs --secret."
    )
    secret = click.option(
        "--secret", default="", metavar="file:PATH", help="What the nodes of that job know. [$ELASTIC_SECRET]"
    )
    job = click.option("--job", default=None, metavar="NAME", help="Which job. [default: the only one here]")
    return job(address(secret(printing(command))))
