"""Exit codes, the errors they stand for, and the hint printed with each. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from peerstore import errors as store_errors
from tieredckpt import errors


class ExitCode(enum.IntEnum):
    """Exit codes of all programs. Absent, damaged and unknown have different codes."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    DAMAGED = 4
    UNAVAILABLE = 5
    REFUSED = 6
    STOPPED = 7
    """The job was stopped and can be resumed (``elastic run``)."""
    JOB_FAILED = 8
    """The job failed (``elastic run``)."""
    INTERRUPTED = 130


class CommandError(Exception):
    """Error with its own exit code and advice, for commands of plug-ins."""

    def __init__(self, message: str, *, code: ExitCode = ExitCode.FAILED, advice: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.advice = advice

    def __reduce__(self) -> tuple[object, ...]:
        return _command_error, (type(self), str(self), self.code, self.advice)


def _command_error(kind: type[CommandError], message: str, code: ExitCode, advice: str) -> CommandError:
    return kind(message, code=code, advice=advice)


EXIT_CODES_HELP = """\b
Exit codes:
  0  done, and nothing is wrong
  1  failed; the message says why
  2  the command line or the configuration is wrong
  3  there is no such job, step or file
  4  bytes differ from the saved ones
  5  a tier is unavailable, and its contents are unknown
  6  the object store refused (credentials, permission, no such bucket), or another agent (secret)"""

ErrorCodes = Mapping[type[Exception], ExitCode]
CODES_BY_ERROR: ErrorCodes = {
    errors.UsageError: ExitCode.USAGE,
    store_errors.RequestError: ExitCode.USAGE,
    errors.CheckpointNotFoundError: ExitCode.NOT_FOUND,
    store_errors.ShardNotFoundError: ExitCode.NOT_FOUND,
    errors.CheckpointDamagedError: ExitCode.DAMAGED,
    errors.CheckpointLostError: ExitCode.DAMAGED,
    store_errors.ShardDamagedError: ExitCode.DAMAGED,
    errors.TierUnavailableError: ExitCode.UNAVAILABLE,
    store_errors.UnavailableError: ExitCode.UNAVAILABLE,
    errors.DurableRefusedError: ExitCode.REFUSED,
    store_errors.PeerRefusedError: ExitCode.REFUSED,
}
"""Exit code of an error class and its subclasses. Programs of other packages add their errors."""

_HINTS = {
    ExitCode.NOT_FOUND: "`tieredckpt ls` lists the jobs and steps",
    ExitCode.DAMAGED: "`tieredckpt verify` names the damaged copies; `tieredckpt ls` shows the complete steps",
    ExitCode.UNAVAILABLE: "`tieredckpt doctor` shows which part does not answer; nothing is known to be lost",
    ExitCode.REFUSED: "`tieredckpt doctor` shows which credentials are used and what the store allows",
}


def exit_code_for(error: BaseException, codes: ErrorCodes = CODES_BY_ERROR) -> ExitCode:
    """Return the exit code of the error's nearest base class in ``codes``."""
    if isinstance(error, CommandError):
        return error.code
    return next((codes[kind] for kind in type(error).__mro__ if kind in codes), ExitCode.FAILED)


def hint_for(error: BaseException) -> str:
    """Return advice that the error's message does not contain. Empty: none."""
    if isinstance(error, CommandError):
        return error.advice
    if isinstance(error, store_errors.AgentUnreachableError):
        return "start one with `tieredckpt agent --dir DIR`, or name the store to look into with --durable URL"
    if isinstance(error, errors.EventLogNotFoundError):
        return "`elastic run` keeps one in LOG-DIR/event-log; under other launchers set $TIEREDCKPT_EVENT_LOG"
    return _HINTS.get(exit_code_for(error), "")


def worst_exit_code(codes: list[ExitCode]) -> ExitCode:
    """Return the exit code of several findings. Damage outranks unknown, and unknown outranks success."""
    for code in (ExitCode.DAMAGED, ExitCode.REFUSED, ExitCode.UNAVAILABLE, ExitCode.NOT_FOUND, ExitCode.FAILED):
        if code in codes:
            return code
    return ExitCode.OK
