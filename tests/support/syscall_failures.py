"""Find every system call that the code of some packages makes, and fail them one at a time.

Covers calls into ``os``, ``fcntl``, ``resource``, ``mmap``, ``socket``, threads, files (``open``) and the C library.
"""

from __future__ import annotations

import _pyio
import _socket
import builtins
import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import os
import resource
import socket
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

CODES = (errno.EMFILE, errno.EIO, errno.ENOSPC, errno.ENOMEM, errno.EINTR)
_IN_A_PUSH = {errno.EIO, errno.ENOSPC}
MOSTLY_NIGHTLY = [
    pytest.param(code, marks=() if code in _IN_A_PUSH else pytest.mark.nightly, id=errno.errorcode[code])
    for code in CODES
]
"""All codes as parameters of a test; two of them run on every push."""
_ROOT = Path(__file__).parents[2]
_NO_SYSTEM_CALL = frozenset(
    "fspath getpid getppid getuid geteuid getgid getegid cpu_count strerror umask urandom _exit kill "  # noqa: SIM905 - short words
    "device_encoding sysconf get_terminal_size isatty get_inheritable set_inheritable WIFSIGNALED WEXITSTATUS "
    "WTERMSIG times fileno detach gettimeout settimeout setblocking getblocking getsockname getpeername".split()
)
"""Functions without a system call, or whose system call does not fail for lack of resources."""
_CLOSES = frozenset({"close"})
"""Functions that take effect even if they report an error."""
_DEPTH = 8


class Call(NamedTuple):
    """One call: its name, its stack, and its number among the calls from there."""

    what: str
    stack: tuple[str, ...]
    """Innermost lines of the packages, innermost first."""
    turn: int

    def __str__(self) -> str:
        return f"{self.what} #{self.turn} in {' < '.join(self.stack[:4])}"


class CallRecorder:
    """Records calls of ``packages`` in ``made`` and fails ``failing`` with ``code``; see ``failed``."""

    def __init__(self, *packages: str, failing: Call | None = None, code: int = 0) -> None:
        self._packages = tuple(f"{_ROOT / name}{os.sep}" for name in packages)
        self._failing = failing
        self._code = code
        self._lock = threading.Lock()
        self._turns: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._others = str(_ROOT / "tests") + os.sep
        self.made: list[Call] = []
        self.failed = False

    @property
    def reply_was_lost(self) -> bool:
        """Whether a response was sent that the client could not receive."""
        failing = self._failing
        return failing is not None and failing.what.startswith("socket.recv") and "client.py" in str(failing.stack)

    @contextlib.contextmanager
    def recording(self) -> Iterator[CallRecorder]:
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self._replacements():
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield self

    def _replacements(self) -> Iterator[tuple[object, str, object]]:
        for module in (os, fcntl, resource):
            for name, found in list(vars(module).items()):
                if isinstance(found, types.BuiltinFunctionType) and name not in _NO_SYSTEM_CALL:
                    yield module, name, self._wrapped(name, found)
        for name, found in list(vars(_socket.socket).items()):
            if isinstance(found, types.MethodDescriptorType) and name not in {*_NO_SYSTEM_CALL, *_CLOSES}:
                yield socket.socket, name, self._wrapped(f"socket.{name}", found)
        yield socket.socket, "__init__", self._socket_init()
        yield mmap, "mmap", self._wrapped("mmap", mmap.mmap)
        yield threading, "_start_new_thread", self._wrapped("thread", threading._start_new_thread, _no_thread)  # type: ignore[attr-defined]
        for module in (io, builtins):
            yield module, "open", _pyio.open  # the same, but built on ``os``
        for library in self._libraries():
            for name, found in list(vars(library).items()):
                if isinstance(found, ctypes._CFuncPtr):  # type: ignore[attr-defined]
                    yield library, name, self._wrapped(name, found, _return_error)

    def _libraries(self) -> list[ctypes.CDLL]:
        ours = [one for one in sys.modules.values() if str(getattr(one, "__file__", "")).startswith(self._packages)]
        return [found for one in ours for found in vars(one).values() if isinstance(found, ctypes.CDLL)]

    def _wrapped(
        self, name: str, real: Callable[..., Any], fail: Callable[[int], Any] | None = None
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fails = self._is_failing_call(name)
            if fails and name in _CLOSES:
                real(*args, **kwargs)
            if fails:
                return (fail or _raised)(self._code)
            return real(*args, **kwargs)

        return call

    def _socket_init(self) -> Callable[..., None]:
        real = socket.socket.__init__
        asked = self._wrapped("socket", real)

        def init(*args: Any, fileno: int | None = None, **kwargs: Any) -> None:
            if fileno is None:
                asked(*args, **kwargs)
            else:  # wraps an existing socket
                real(*args, fileno=fileno, **kwargs)

        return init

    def _is_failing_call(self, name: str) -> bool:
        """Record this call and return whether it must fail."""
        stack = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and len(stack) < _DEPTH:
            file = frame.f_code.co_filename
            if file.startswith(self._packages):
                stack.append(f"{file.rpartition(os.sep)[2]}:{frame.f_lineno}")
            elif file.startswith(self._others) and file != __file__:
                break
            frame = frame.f_back
        if not stack:
            return False
        place = name, tuple(stack)
        with self._lock:
            self._turns[place] += 1
            made = Call(*place, self._turns[place])
            self.made.append(made)
            fails = made == self._failing and not self.failed
            self.failed |= fails
        return fails


def _raised(code: int) -> None:
    raise OSError(code, os.strerror(code))


def _no_thread(code: int) -> None:
    raise RuntimeError("can't start new thread")


def _return_error(code: int) -> int:
    ctypes.set_errno(code)
    return -1
