"""Exit codes, output and options that all ``elastic`` commands share."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeVar

import click

from elastic import errors
from peerstore.errors import PeerStoreError
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.exit_codes import CODES_BY_ERROR, ExitCode, exit_code_for

ELASTIC_EXIT_HELP = """\b
Exit codes:
  0  done; `run`: all ranks have finished, or this node was removed
  1  failed; the message says why; `map`: some inputs failed
  2  the command line, the policy or a setting is wrong, or SCRIPT never called elastic.run
  3  no such job runs on this machine
  4  `map`: a file of the job is damaged; the message names it
  5  the coordinator did not answer: the state of the job is unknown
  6  the coordinator refused (another secret, the same node twice, too few nodes)
  7  the job was stopped; the same command resumes it
  8  the job failed; the message says why, and how to resume it"""

_UNAVAILABLE_ADVICE = "`elastic status` shows which jobs run here; the ranks of one continue without its coordinator"


class ElasticScreen(CommandOutput):
    """Output of a command that may end with an error of ``elastic``."""

    reported_errors = (*CommandOutput.reported_errors, errors.ElasticError)
    codes_by_error = MappingProxyType(
        {
            **CODES_BY_ERROR,
            errors.PolicyError: ExitCode.USAGE,
            errors.ControlPlaneRefusedError: ExitCode.REFUSED,
            errors.JobNotFoundError: ExitCode.NOT_FOUND,
            errors.ControlPlaneUnavailableError: ExitCode.UNAVAILABLE,
            errors.JobFailedError: ExitCode.JOB_FAILED,
            errors.ChunkDamagedError: ExitCode.DAMAGED,
            PeerStoreError: ExitCode.UNAVAILABLE,
        }
    )

    def advice_for(self, error: BaseException) -> str:
        if not isinstance(error, (errors.ElasticError, PeerStoreError)):
            return super().advice_for(error)
        code = exit_code_for(error, self.codes_by_error)
        return _UNAVAILABLE_ADVICE if code is ExitCode.UNAVAILABLE else ""


F = TypeVar("F", bound=Callable[..., Any])

pass_elastic_screen = click.make_pass_decorator(ElasticScreen)


def job_options(command: F) -> F:
    """Add the options that name a job, on this machine or another one, and ``--json`` and ``--debug``."""
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
