"""Up to which step a job is protected, and since when not: one answer for metrics, status and the log. Pure."""

from __future__ import annotations

import time
from collections.abc import Collection

from tieredckpt.node import Protected

PATIENCE_S = 30.0
"""Copies take a moment: until then what is newer is on its way, and nothing to warn of."""


def protected(step: int, newer: Collection[float], left_out: tuple[int, float], *, now: float) -> Protected:
    """``step`` is the newest that has all the copies it was to have, or is durable; -1 for none.

    ``newer`` has the times of what was sealed after it and has not; ``left_out`` how many saves were skipped or failed
    since it had them, and when the first one was.
    """
    missed, first = left_out
    since = min([*newer, *([first] if missed else [])], default=None)
    if since is None or (not missed and now - since < PATIENCE_S):
        return Protected(step, None, missed)
    return Protected(step, since, missed)


def in_words(found: Protected) -> str:
    upto = f"protected up to step {found.step}" if found.step >= 0 else "no step is protected yet"
    if found.unprotected_since is None:
        return upto
    since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(found.unprotected_since))
    missed = f" ({found.left_out} saves skipped or failed)" if found.left_out else ""
    return f"{upto}, unprotected since {since}{missed}"
