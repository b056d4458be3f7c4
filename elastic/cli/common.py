"""Exit codes, output and options that all ``elastic`` commands share."""

from __future__ import annotations

import enum
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from rich.markup import escape

from elastic import errors
from peerstore.errors import PeerRefusedError, PeerStoreError, RequestError
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.errors import SettingsError


class ElasticExit(enum.IntEnum):
    """A job that stopped to be resumed and one that failed are different answers."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 5
    REFUSED = 6
    STOPPED = 7
    JOB_FAILED = 8
    INTERRUPTED = 130


ELASTIC_EXIT_HELP = """\b
Exit codes:
  0  done; `run`: all ranks have finished, or this node was removed
  1  failed; the message says why
  2  the command line, the policy or a setting is wrong, or SCRIPT never called elastic.run
  3  no such job runs on this machine
  5  the coordinator did not answer: the state of the job is unknown
  6  the coordinator refused (another secret, the same node twice, too few nodes)
  7  the job was stopped; the same command resumes it
  8  the job failed; the message says why and what resumes it"""

_ORDER: tuple[tuple[type[Exception], ElasticExit], ...] = (
    (errors.PolicyError, ElasticExit.USAGE),
    (SettingsError, ElasticExit.USAGE),
    (errors.ControlPlaneRefusedError, ElasticExit.REFUSED),
    (PeerRefusedError, ElasticExit.REFUSED),
    (RequestError, ElasticExit.USAGE),
    (errors.JobNotFoundError, ElasticExit.NOT_FOUND),
    (errors.ControlPlaneUnavailableError, ElasticExit.UNAVAILABLE),
    (errors.JobFailedError, ElasticExit.JOB_FAILED),
    (PeerStoreError, ElasticExit.UNAVAILABLE),
)

_ADVICE = {
    ElasticExit.UNAVAILABLE: "`elastic status` shows which jobs run here; the ranks of one go on without its "
    "coordinator",
}


def elastic_exit_for(error: BaseException) -> ElasticExit:
    """The code an error ends the command with."""
    return next((code for kind, code in _ORDER if isinstance(error, kind)), ElasticExit.FAILED)


def elastic_advice_for(error: BaseException) -> str:
    """What to do next, where the message itself cannot know; "" otherwise."""
    return _ADVICE.get(elastic_exit_for(error), "")


class ElasticScreen(CommandOutput):
    argv: Sequence[str] = ()
    """Of the command line."""

    def report_elastic_error(self, error: BaseException) -> ElasticExit:
        """Report what ended the command; its exit code."""
        code, advice = elastic_exit_for(error), elastic_advice_for(error)
        if self.debug:
            traceback.print_exception(error)
        text = str(error) or type(error).__name__
        self.err.print(f"[bold red]elastic:[/] {escape(text)}")
        if advice:
            self.err.print(f"         {escape(advice)}")
        if self.as_json:
            said = {"kind": type(error).__name__, "message": text, "advice": advice, "exit": int(code)}
            sys.stdout.write(json.dumps({"error": said}, indent=2) + "\n")
        return code


F = TypeVar("F", bound=Callable[..., Any])

pass_elastic_screen = click.make_pass_decorator(ElasticScreen)


def job_options(command: F) -> F:
    """Options that name a job, also one of other machines, and ``--json`` and ``--debug``."""
    from tieredckpt.cli.common_options import output_options

    address = click.option(
        "--coordinator", default="", metavar="HOST:PORT", help="Coordinator of a job on other machines; needs --secret."
    )
    secret = click.option(
        "--secret", default="", metavar="file:PATH", help="File with the secret of that job. [$ELASTIC_SECRET]"
    )
    job = click.option(
        "--job", default=None, metavar="NAME", help="Name of the job. [default: the only one on this machine]"
    )
    return job(address(secret(output_options(command))))
