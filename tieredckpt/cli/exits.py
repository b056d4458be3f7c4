"""Exit codes, and what somebody who reads an error can do next. Pure; ``docs/cli.md`` lists them."""

from __future__ import annotations

import enum

from peerstore import errors as store_errors
from tieredckpt import errors


class Exit(enum.IntEnum):
    """Absent, damaged and unknown are different answers, so they are different codes."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    DAMAGED = 4
    UNAVAILABLE = 5
    REFUSED = 6
    INTERRUPTED = 130


class CommandError(Exception):
    """Of a command that a plug-in adds, which knows itself what it ends with and what to do next."""

    def __init__(self, message: str, *, code: Exit = Exit.FAILED, advice: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.advice = advice

    def __reduce__(self) -> tuple[object, ...]:
        return _command_error, (type(self), str(self), self.code, self.advice)


def _command_error(kind: type[CommandError], message: str, code: Exit, advice: str) -> CommandError:
    return kind(message, code=code, advice=advice)


EXIT_HELP = """\b
Exit codes:
  0  done, and everything that was asked about is well
  1  failed; the message says why
  2  the command line or the configuration is wrong
  3  there is no such job, step or file
  4  bytes are not what was saved
  5  a tier could not be asked: what it holds is unknown
  6  the object store refused (credentials, permission, no such bucket)"""

_ORDER: tuple[tuple[type[Exception], Exit], ...] = (
    (errors.UsageError, Exit.USAGE),
    (store_errors.RequestError, Exit.USAGE),
    (errors.CheckpointNotFoundError, Exit.NOT_FOUND),
    (store_errors.ShardNotFoundError, Exit.NOT_FOUND),
    (errors.CheckpointDamagedError, Exit.DAMAGED),
    (errors.CheckpointLostError, Exit.DAMAGED),
    (store_errors.ShardDamagedError, Exit.DAMAGED),
    (errors.TierUnavailableError, Exit.UNAVAILABLE),
    (store_errors.UnavailableError, Exit.UNAVAILABLE),
    (errors.DurableRefusedError, Exit.REFUSED),
)

_ADVICE = {
    Exit.NOT_FOUND: "`tieredckpt ls` shows which jobs and steps there are",
    Exit.DAMAGED: "`tieredckpt verify` names what is damaged; `tieredckpt ls` shows which other steps are whole",
    Exit.UNAVAILABLE: "`tieredckpt doctor` shows which part does not answer; nothing is known to be lost",
    Exit.REFUSED: "`tieredckpt doctor` shows which credentials are used and what the store allows",
}


def exit_for(error: BaseException) -> Exit:
    """The code an error ends the command with."""
    if isinstance(error, CommandError):
        return error.code
    return next((code for kind, code in _ORDER if isinstance(error, kind)), Exit.FAILED)


def advice_for(error: BaseException) -> str:
    """What to do next, where the message itself cannot know; "" otherwise."""
    if isinstance(error, CommandError):
        return error.advice
    if isinstance(error, store_errors.AgentUnreachableError):
        return "start one with `tieredckpt agent --dir DIR`, or name the store to look into with --durable URL"
    if isinstance(error, errors.LedgerNotFoundError):
        return "`elastic run` keeps one in LOG-DIR/ledger; under other launchers set $TIEREDCKPT_LEDGER"
    return _ADVICE.get(exit_for(error), "")


def worst(codes: list[Exit]) -> Exit:
    """One code for several findings: damage is said before what is unknown, what is unknown before success."""
    for code in (Exit.DAMAGED, Exit.REFUSED, Exit.UNAVAILABLE, Exit.NOT_FOUND, Exit.FAILED):
        if code in codes:
            return code
    return Exit.OK
