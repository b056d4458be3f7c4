"""Execution of a command of any command-line program: exit code, and errors as text or JSON."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence

import click

from peerstore.optional_packages import missing_package_error
from tieredckpt.cli.command_output import CommandOutput
from tieredckpt.cli.exit_codes import ExitCode


def run_program(command: click.Command, screen: CommandOutput, argv: Sequence[str] | None = None) -> int:
    """Run ``command`` with ``argv``, or with this process's arguments, and return its exit code.

    Errors of ``screen.reported_errors`` are printed as one message; ``--debug`` adds the traceback. Others are raised.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    screen.argv = words
    if f"_{screen.program}_COMPLETE".replace("-", "_").upper() in os.environ:  # the shell completes a command line
        command.main(args=words, prog_name=screen.program)
    try:
        result = _invoke(command, screen, words)
        sys.stdout.flush()
        return int(result or 0)
    except click.ClickException as wrong:
        wrong.show()
        if screen.as_json or "--json" in words:  # click may have failed before it parsed --json
            screen.print_json_error(type(wrong).__name__, wrong.format_message(), "", wrong.exit_code)
        return int(wrong.exit_code)
    except (click.Abort, KeyboardInterrupt):
        screen.err.print("interrupted")
        return ExitCode.INTERRUPTED
    except screen.reported_errors as error:
        if isinstance(error, BrokenPipeError) and _is_stdout_closed():  # the reader has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.OK
        return screen.report_error(error)
    except ModuleNotFoundError as error:  # an agent's image has no torch
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        return screen.report_error(missing_package_error("this command", "torch"))


def _invoke(command: click.Command, screen: CommandOutput, words: list[str]) -> int | None:
    """Run the command without click's handling of broken pipes, which also covers any network connection."""
    try:
        with command.make_context(screen.program, list(words), obj=screen) as context:
            result: int | None = command.invoke(context)
            return result
    except click.exceptions.Exit as done:
        return int(done.exit_code)


def _is_stdout_closed() -> bool:
    """Return whether standard output is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return False
