"""Pause of the garbage collector during a save or a load. No torch.

A full collection in a process with a model takes longer than a save. The thousands of small tuples of a plan would
trigger one.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_depth = 0
_was_enabled = False


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic collector while the block runs.

    Nested and concurrent uses are counted, in any thread.
    """
    global _depth, _was_enabled  # noqa: PLW0603 - the collector is global to the process
    with _lock:
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()
