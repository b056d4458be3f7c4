"""SIGUSR1 from the elastic agent, received by the rank and blocked for its child processes.

Whoever is in that group and has no handler dies of it: data loading processes that were spawned, compilers, whatever
the script has started. A signal that is *blocked* does them nothing, and what is blocked is inherited, by forked
processes and through ``exec``. So the main thread blocks it, and another one takes it, which hears it at once, also
while the one that trains is inside a collective. Handlers that the script has set, before or after, are called in the
main thread as ever; a second signal, which does nothing, wakes it for that.
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

_WAKING = signal.SIGRTMAX - 1
"""Sent to a thread of this process, never to a group: no child gets it."""


class GroupSignalListener:
    """One signal of this process, from :meth:`listen` until :meth:`close`."""

    def __init__(self, number: int = signal.SIGUSR1) -> None:
        self.number = number
        self.received = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[SignalCallback] = []
        self._before: Any = signal.SIG_DFL
        self._blocked_before = False
        self._pipe = (-1, -1)
        """The interpreter writes the number of every signal there, whichever thread the kernel has chosen for it."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()

    def listen(self) -> GroupSignalListener:
        """Only the main thread can: elsewhere nothing is changed. Processes started before are not protected."""
        if self._thread is not None or threading.current_thread() is not threading.main_thread():
            return self
        self._before = signal.getsignal(self.number)
        signal.signal(self.number, self._handler)  # for threads that were there before: by default it ends the process
        if signal.getsignal(_WAKING) is signal.SIG_DFL:
            signal.signal(_WAKING, _awake)
        reading, writing = self._pipe = os.pipe()
        os.set_blocking(writing, False)
        earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if earlier != -1:  # somebody's loop wants to be woken: then it is heard when the main thread gets on
            signal.set_wakeup_fd(earlier)
        self._blocked_before = self.number in signal.pthread_sigmask(signal.SIG_BLOCK, {self.number})
        self._thread = threading.Thread(target=self._take, args=(reading,), name="hyperpod-signal", daemon=True)
        self._thread.start()
        _listening.add(self)
        return self

    def add_callback(self, call: SignalCallback) -> None:
        """Have ``call`` called once it is received, by whichever thread hears it; at once where it was already."""
        with self._lock:
            self._calls.append(call)
            late = self.received.is_set()
        if late:
            _called(call)

    def remove_callback(self, call: SignalCallback) -> None:
        with self._lock:
            if call in self._calls:
                self._calls.remove(call)

    def close(self) -> None:
        """Give it back to whoever had it. What was started meanwhile keeps ignoring it."""
        thread = self._thread
        if thread is None or threading.current_thread() is not threading.main_thread():
            return
        self._closed, self._thread = True, None
        _listening.discard(self)
        self._quiet()
        os.write(self._pipe[1], b"\0")
        thread.join()
        for end in self._pipe:
            os.close(end)
        if signal.getsignal(self.number) == self._handler:
            signal.signal(self.number, self._before if self._before is not None else signal.SIG_DFL)
        if signal.getsignal(_WAKING) is _awake:
            signal.signal(_WAKING, signal.SIG_DFL)
        if not self._blocked_before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.number})

    def _quiet(self) -> None:
        """Signals are not written down any more, unless they are for somebody else by now."""
        earlier = signal.set_wakeup_fd(-1)
        if earlier not in (-1, self._pipe[1]):
            signal.set_wakeup_fd(earlier)

    def _take(self, reading: int) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.number})
        while not self._closed:
            if self.number in os.read(reading, 64):
                self._hear()
                main = threading.main_thread().ident
                if main is not None:
                    signal.pthread_kill(main, _WAKING)

    def _handler(self, number: int, frame: FrameType | None) -> None:
        """It may have interrupted anybody, so it takes no lock: the thread hears of it."""
        if os.getpid() == self._pid and not self._closed:
            with contextlib.suppress(BlockingIOError):  # as many are waiting already
                os.write(self._pipe[1], bytes([number]))
        if callable(self._before):
            self._before(number, frame)

    def _hear(self) -> None:
        """Once: the agent asks no second time of the same process."""
        with self._lock:
            if self.received.is_set():
                return
            self.received.set()
            calls = tuple(self._calls)
        log.info("%s: the agent asks this rank to stop, so that the world can change", signal.strsignal(self.number))
        for call in calls:
            _called(call)


def _awake(number: int, frame: FrameType | None) -> None:
    """What interrupts a wait of the main thread; what is to be done was noted before."""


def _called(call: SignalCallback) -> None:
    try:
        call()
    except Exception as error:  # a thread's top: whoever is asked next is asked all the same
        log.error("%s failed when the agent's signal came", call, exc_info=error)


_listening: set[GroupSignalListener] = set()
"""In a forked process they are its parent's."""


def _forked() -> None:
    while _listening:
        with contextlib.suppress(ValueError):  # a thread of a subinterpreter has forked
            _listening.pop()._quiet()


os.register_at_fork(after_in_child=_forked)
_ours: list[GroupSignalListener] = []


def agent_stop_signal() -> GroupSignalListener:
    """This process's, listened to from the first call on, until the process ends."""
    if not _ours or _ours[0]._pid != os.getpid():
        _ours[:] = [GroupSignalListener()]
    return _ours[0].listen()
