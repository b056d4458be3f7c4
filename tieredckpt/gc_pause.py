"""Pauses garbage collection during a save or a load. No torch.

A full collection in a process with a model in it takes longer than saving a step does, and the thousands of small
tuples of a plan would set one off.
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
    """Keep the cyclic collector off while the block runs, whoever else asks for the same at the same time."""
    global _depth, _was_enabled  # noqa: PLW0603 - the collector is one for the whole process
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
