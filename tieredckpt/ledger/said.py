"""Some of a ledger's events as lines on standard output, for whoever watches a job by what it prints.

They are part of what this package promises: rules for logs are written against them
(``integration/hyperpod/log_rules.yaml``). Each begins at the beginning of a line, with one word; numbers are plain::

    tieredckpt step=120 seconds=0.412 loss=2.3051
    tieredckpt save step=120 state=staged blocked_seconds=0.009
    tieredckpt restore step=120 mode=live seconds=0.211
    tieredckpt first-step epoch=2 seconds=1.902
    tieredckpt broken epoch=2
    tieredckpt ended how=finished
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from tieredckpt.ledger import events as ev

SAY = "TIEREDCKPT_SAY"
"""1: the first rank of every node prints them."""
_STDOUT = 1


def says(environ: Mapping[str, str]) -> bool:
    return environ.get(SAY, "") == "1" and environ.get("LOCAL_RANK", "0") == "0"


def line(event: ev.Event) -> str:
    """One line, without its end; "" for events that are not said."""
    if isinstance(event, ev.Step):
        loss = "" if event.loss is None else f" loss={event.loss:g}"
        return f"tieredckpt step={event.step} seconds={event.seconds:.3f}{loss}"
    if isinstance(event, ev.Save):
        return f"tieredckpt save step={event.step} state={event.state} blocked_seconds={event.seconds:.3f}"
    if isinstance(event, ev.Restored):
        return f"tieredckpt restore step={event.step} mode={event.mode} seconds={event.seconds:.3f}"
    if isinstance(event, ev.Stage) and event.name == ev.FIRST_STEP:
        return f"tieredckpt first-step epoch={event.epoch} seconds={event.seconds:.3f}"
    if isinstance(event, ev.Stage) and event.name == ev.DETECT:
        return f"tieredckpt broken epoch={event.epoch}"
    if isinstance(event, ev.Ended) and event.who == "rank":
        words = " ".join(event.words.split())
        return f"tieredckpt ended how={event.how.replace(' ', '-')}" + (f" {words}" if words else "")
    return ""


def say(event: ev.Event) -> None:
    """One system call, so that lines are whole; where nobody listens nothing happens."""
    words = line(event)
    if words:
        with contextlib.suppress(OSError):
            os.write(_STDOUT, f"{words}\n".encode())
