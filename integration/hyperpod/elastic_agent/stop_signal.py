"""SIGUSR1 from the elastic agent, received by the rank and blocked for its child processes.

The agent sends it to the process group, and every process without a handler dies: spawned data loaders, compilers,
other children of the script. A *blocked* signal has no effect, and children inherit the mask, through ``fork`` and
``exec``. So the main thread blocks it, and another thread receives it at once, even while the main thread is inside a
collective. The script's own handlers still run in the main thread, which a second, harmless signal wakes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

SignalCallback = Callable[[], None]

_WAKE_SIGNAL = signal.SIGRTMAX - 1
"""Signal to a thread of this process, never to a group, so no child receives it."""


class GroupSignalListener:
    """Listener for one signal of this process, from :meth:`listen` until :meth:`close`."""

    def __init__(self, number: int = signal.SIGUSR1) -> None:
        self.number = number
        self.received = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[SignalCallback] = []
        self._earlier_handler: Any = signal.SIG_DFL
        self._blocked_before = False
        self._pipe = (-1, -1)
        """The interpreter writes the number of every signal into it, independent of the receiving thread."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()

    def listen(self) -> GroupSignalListener:
        """Start listening. Do nothing outside the main thread.

        Processes started earlier are not protected.
        """
        if self._thread is not None or threading.current_thread() is not threading.main_thread():
            return self
        self._earlier_handler = signal.getsignal(self.number)
        signal.signal(
            self.number, self._handler
        )  # for older threads, in which the signal is not blocked: its default action kills the process
        if signal.getsignal(_WAKE_SIGNAL) is signal.SIG_DFL:
            signal.signal(_WAKE_SIGNAL, _ignore)
        read_end, write_end = self._pipe = os.pipe()
        os.set_blocking(write_end, False)
        earlier = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        if earlier != -1:  # another event loop uses the pipe: the main thread's handler then forwards the signal
            signal.set_wakeup_fd(earlier)
        self._blocked_before = self.number in signal.pthread_sigmask(signal.SIG_BLOCK, {self.number})
        self._thread = threading.Thread(
            target=self._receive_signals, args=(read_end,), name="hyperpod-signal", daemon=True
        )
        self._thread.start()
        _listening.add(self)
        return self

    def add_callback(self, call: SignalCallback) -> None:
        """Call ``call`` in the receiving thread once the signal arrives, or now if it already has."""
        with self._lock:
            self._calls.append(call)
            late = self.received.is_set()
        if late:
            _run_callback(call)

    def remove_callback(self, call: SignalCallback) -> None:
        with self._lock:
            if call in self._calls:
                self._calls.remove(call)

    def close(self) -> None:
        """Restore the earlier handler and mask. Children started meanwhile still ignore the signal."""
        thread = self._thread
        if thread is None or threading.current_thread() is not threading.main_thread():
            return
        self._closed, self._thread = True, None
        _listening.discard(self)
        self._remove_wakeup_pipe()
        os.write(self._pipe[1], b"\0")
        thread.join()
        for end in self._pipe:
            os.close(end)
        if signal.getsignal(self.number) == self._handler:
            signal.signal(self.number, self._earlier_handler if self._earlier_handler is not None else signal.SIG_DFL)
        if signal.getsignal(_WAKE_SIGNAL) is _ignore:
            signal.signal(_WAKE_SIGNAL, signal.SIG_DFL)
        if not self._blocked_before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.number})

    def _remove_wakeup_pipe(self) -> None:
        """Remove the wakeup pipe unless another library has replaced it."""
        earlier = signal.set_wakeup_fd(-1)
        if earlier not in (-1, self._pipe[1]):
            signal.set_wakeup_fd(earlier)

    def _receive_signals(self, read_end: int) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.number})
        while not self._closed:
            if self.number in os.read(read_end, 64):
                self._hear()
                main = threading.main_thread().ident
                if main is not None:
                    signal.pthread_kill(main, _WAKE_SIGNAL)

    def _handler(self, number: int, frame: FrameType | None) -> None:
        """Forward the signal to the thread. It takes no lock, because it may interrupt any code."""
        if os.getpid() == self._pid and not self._closed:
            with contextlib.suppress(BlockingIOError):  # the pipe is full of signals already
                os.write(self._pipe[1], bytes([number]))
        if callable(self._earlier_handler):
            self._earlier_handler(number, frame)

    def _hear(self) -> None:
        """Run the callbacks once: the agent sends no second request to the same process."""
        with self._lock:
            if self.received.is_set():
                return
            self.received.set()
            calls = tuple(self._calls)
        log.info("%s: the agent asks this rank to stop, so that the world can change", signal.strsignal(self.number))
        for call in calls:
            _run_callback(call)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal only interrupts a wait of the main thread."""


def _run_callback(call: SignalCallback) -> None:
    try:
        call()
    except Exception as error:  # top of a thread: the other callbacks must still run
        log.error("%s failed when the agent's signal came", call, exc_info=error)


_listening: set[GroupSignalListener] = set()
"""Active listeners. In a forked process they belong to the parent."""


def _forked() -> None:
    while _listening:
        with contextlib.suppress(ValueError):  # a thread of a subinterpreter has forked
            _listening.pop()._remove_wakeup_pipe()


os.register_at_fork(after_in_child=_forked)
_listeners: list[GroupSignalListener] = []


def agent_stop_signal() -> GroupSignalListener:
    """Return the listener of this process; the first call starts it, until the process exits."""
    if not _listeners or _listeners[0]._pid != os.getpid():
        _listeners[:] = [GroupSignalListener()]
    return _listeners[0].listen()
