"""Names that enter from outside, and what they are called inside."""

from __future__ import annotations

import re
from typing import Annotated, NewType

import msgspec

from peerstore.errors import InvalidNameError

JobName = NewType("JobName", str)
Epoch = NewType("Epoch", int)
Version = NewType("Version", int)
Part = NewType("Part", int)

MAX_NUMBER = 1 << 62
Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
"""Whatever is counted and comes from outside: what is larger fits no message, and nothing can follow it."""
Counted = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_NUMBER)]
"""The same, with -1 before the first one."""
AHEAD = 1 << 32
"""So far beyond what is known here an incarnation can be that somebody else tells of; one a second for a century. A
number that is nearly the largest would be the last one, and nobody could save any more."""

_JOB = re.compile(r"[A-Za-z0-9._-]{1,128}")
_BLOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,239}")
_INCARNATION = re.compile(r"[A-Za-z0-9-]{1,64}")


def job_name(text: str) -> JobName:
    """``text`` as a job name, or :class:`InvalidNameError` that says what is allowed."""
    if not isinstance(text, str) or not _JOB.fullmatch(text) or set(text) == {"."}:
        raise InvalidNameError(
            f"job name {text!r} is not allowed: use 1 to 128 letters, digits, '.', '_' or '-', and not only dots"
        )
    return JobName(text)


def incarnation_name(text: str) -> str:
    """``text`` as the name of one incarnation of a job."""
    if not isinstance(text, str) or not _INCARNATION.fullmatch(text):
        raise InvalidNameError(f"incarnation {text!r} is not allowed: use 1 to 64 letters, digits or '-'")
    return text


def blob_name(text: str) -> str:
    """``text`` as the name of something small that is kept beside a job's shards."""
    if not isinstance(text, str) or not _BLOB.fullmatch(text):
        raise InvalidNameError(
            f"blob name {text!r} is not allowed: use up to 240 letters, digits, '.', '_', '@' or '-'"
        )
    return text
