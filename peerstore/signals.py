"""Signals as something a thread hears: the handler writes one byte to a pipe and does nothing else.

Python runs a handler between any two steps of the main thread, also inside another handler. One that takes a lock
(``Event.set``, ``Condition.notify``) waits for itself when the step it interrupted has that lock.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

_END = b"\0"


def heed(calls: Mapping[int, Callable[[], None]]) -> Callable[[], None]:
    """Have these signals call their functions, in a thread, from now on; the answer gives the signals back.

    Only the main thread can. A process that ends with its work may leave them as they are: the interpreter's own end
    ignores them, so that none that comes late changes the exit status.
    """
    heard, written = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(written, False)

    def handler(number: int, frame: FrameType | None) -> None:
        del frame
        with contextlib.suppress(BlockingIOError):  # as many are waiting already
            os.write(written, bytes([number]))

    before: dict[int, Any] = {number: signal.signal(number, handler) for number in calls}
    thread = threading.Thread(target=_listen, args=(heard, calls), name="peerstore-signals", daemon=True)
    thread.start()

    def ignore() -> None:
        for number in calls:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)

    def undo() -> None:
        atexit.unregister(ignore)
        for number, earlier in before.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)
        os.set_blocking(written, True)
        os.write(written, _END)
        thread.join()
        os.close(written)
        os.close(heard)

    return undo


def _listen(heard: int, calls: Mapping[int, Callable[[], None]]) -> None:
    while (said := os.read(heard, 1)) not in (_END, b""):
        try:
            calls[said[0]]()
        except Exception:  # the next signal is heard all the same
            log.exception("%s could not be acted upon", signal.Signals(said[0]).name)
