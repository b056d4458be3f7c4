"""A thread that owns the process groups of a broken world until their own threads have ended.

The destructor of ``ProcessGroupNCCL`` joins the group's watchdog. After an error that watchdog sleeps, and Python is
free to run the destructor wherever the last reference goes: on the thread that trains. So a reaper holds one more
reference, joins the watchdogs itself, and only then drops it. A destructor that runs after that returns at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import torch.distributed as dist

log = logging.getLogger(__name__)

_USUAL_S = 0.25
"""Seconds within which the threads of an aborted group end, unless a watchdog sleeps."""


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of ``group``, each of them once."""
    found: list[Any] = []  # torch's types do not declare abort and shutdown
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # torch makes some of them on first use
            backend = group._get_backend(device)
            if backend not in found:
                found.append(backend)
    return found


def reap(groups: list[dist.ProcessGroup]) -> threading.Thread:
    """Move aborted ``groups`` out of the list to a new thread, which shuts them down and drops them.

    Wait as long as that takes in the usual case, so that the next world finds no threads of this one.
    """
    owned = list(groups)
    groups.clear()
    reaper = threading.Thread(target=_shut_down, args=(owned,), name="elastic-reaper", daemon=True)
    reaper.start()
    del owned
    reaper.join(_USUAL_S)
    if reaper.is_alive():
        log.info("threads of the broken world's groups still run; a reaper waits for them")
    return reaper


def _shut_down(owned: list[dist.ProcessGroup]) -> None:
    while owned:
        backends = backends_of(owned.pop())
        while backends:
            try:
                backends.pop().shutdown()
            except RuntimeError as error:
                log.warning("a group of a broken world did not shut down: %s", error)
