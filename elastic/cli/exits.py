"""Exit codes of ``elastic``, and what somebody who reads an error can do next. Pure."""

from __future__ import annotations

import enum

from elastic import errors
from peerstore.errors import PeerRefusedError, PeerStoreError, RequestError


class Exit(enum.IntEnum):
    """A job that stopped to be resumed and one that gave up are different answers."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 5
    REFUSED = 6
    STOPPED = 7
    GAVE_UP = 8
    INTERRUPTED = 130


EXIT_HELP = """\b
Exit codes:
  0  done; `run`: all ranks have finished, or this node was given back
  1  failed; the message says why
  2  the command line or the policy is wrong
  5  the coordinator could not be asked: how the job is, is unknown
  6  the coordinator says no (another secret, the same node twice, too few nodes)
  7  the job was stopped; started again, it resumes
  8  the job gave up; the message says after what"""

_ORDER: tuple[tuple[type[Exception], Exit], ...] = (
    (errors.PolicyError, Exit.USAGE),
    (errors.RefusedError, Exit.REFUSED),
    (PeerRefusedError, Exit.REFUSED),
    (RequestError, Exit.USAGE),
    (errors.ControlLostError, Exit.UNAVAILABLE),
    (errors.GaveUpError, Exit.GAVE_UP),
    (PeerStoreError, Exit.UNAVAILABLE),
)

_ADVICE = {
    Exit.UNAVAILABLE: "`elastic status` shows which jobs run here; the ranks of one go on without its coordinator",
}


def exit_for(error: BaseException) -> Exit:
    """The code an error ends the command with."""
    return next((code for kind, code in _ORDER if isinstance(error, kind)), Exit.FAILED)


def advice_for(error: BaseException) -> str:
    """What to do next, where the message itself cannot know; "" otherwise."""
    return _ADVICE.get(exit_for(error), "")
