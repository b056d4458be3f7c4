"""Child processes that die with their parent: start, output, exit status in words."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from elastic.control import parent_death

STACKS_SIGNAL = signal.SIGRTMIN + 12
"""Signal on which a rank writes all stacks and exits, even if native code holds the GIL."""
LEAVE_STATUS = 1
"""Exit status of a rank that did not leave a broken world in time. Its log contains its stacks."""
_LINE_BYTES = 64 << 10
_OUTPUT_S = 5.0
"""Seconds to wait for the rest of the output after the exit of a process."""
_WRAPPER = Path(parent_death.__file__)
_BY_HAND = (
    "import sys; sys.path.remove(''); import runpy; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def python_module_command(name: str, *args: str) -> list[str]:
    """Return the command ``python -m NAME ARGS`` without the current directory on the import path.

    Other users may be able to write to that directory.
    """
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", name, *args]
    return [sys.executable, "-c", _BY_HAND, name, *args]


def with_import_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the folder of these packages first on ``PYTHONPATH``.

    Empty entries are dropped, as Python reads them as the current directory.
    """
    root = str(Path(__file__).resolve().parents[2])
    known = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**environ, "PYTHONPATH": os.pathsep.join([root, *known])}


def die_with_parent(command: Sequence[str]) -> list[str]:
    """Return ``command`` in a wrapper that makes the kernel kill it when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", str(_WRAPPER), str(os.getpid()), *command]


class ChildProcess:
    """A child process in its own session.

    The kernel kills the child when the thread that created this object ends. ``on_exit`` receives the exit status once,
    from another thread, after the child has exited and its output was read. ``on_line`` receives each line of output;
    without it the child inherits stdout and stderr.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        on_line: Callable[[bytes], None] | None,
        on_exit: Callable[[int], None],
        name: str = "rank",
    ) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - the user's own command
            die_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=None if on_line is None else subprocess.PIPE,
            stderr=None if on_line is None else subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._on_exit = on_exit
        self._reap_lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, args=(on_line,), name=f"elastic-log-{name}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"elastic-wait-{name}", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def is_running(self) -> bool:
        return self._waiter.is_alive()

    def signal(self, number: int) -> None:
        """Send a signal to the process group of the child."""
        self._send(os.killpg, number)

    def end_with_stacks(self) -> None:
        """Make the process write the stacks of its threads and exit. A stopped process must also be killed."""
        self._send(os.kill, STACKS_SIGNAL)

    def _send(self, send: Callable[[int, int], None], number: int) -> None:
        with self._reap_lock:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(self.pid, number)

    def join(self, timeout_s: float | None = None) -> bool:
        self._waiter.join(timeout_s)
        return not self._waiter.is_alive()

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._reap_lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # its own children end with it
            status = self._process.wait()
        self._reader.join(_OUTPUT_S)
        self._on_exit(status)

    def _read(self, on_line: Callable[[bytes], None] | None) -> None:
        stream = self._process.stdout
        if stream is None or on_line is None:
            return
        with stream:
            while line := stream.readline(_LINE_BYTES):
                on_line(line)


class ProcessLog:
    """Log file of one process. Each line is also written to the terminal, with a prefix."""

    def __init__(self, path: Path, prefix: str, terminal: IO[bytes] | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._prefix = prefix.encode()
        self._terminal = terminal

    def write_line(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the training
            self._file.write(line)
        if self._terminal is not None:
            with contextlib.suppress(OSError, ValueError):
                self._terminal.write(self._prefix + line.rstrip(b"\n") + b"\n")
                self._terminal.flush()

    def close(self) -> None:
        self._file.close()


def describe_exit(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"it ended with status {status}"
    if status == -STACKS_SIGNAL:
        return "it was killed after it had written the stacks of its threads"
    try:
        return f"it was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"it was killed by signal {-status}"


_THREAD_LINE = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_FRAME_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_LIBRARIES = tuple(
    {str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)


def stack_location(text: str) -> str:
    """Return "FILE:LINE in FUNCTION" of the main thread in the last dump of ``text``, or "".

    ``text`` is output of ``faulthandler``. Frames outside of libraries are preferred, then the innermost one.
    """
    frames: list[re.Match[str]] = []
    for line in text.splitlines():
        found = _FRAME_LINE.match(line)
        if _THREAD_LINE.match(line):  # the main thread is the last one of a dump
            frames = []
        elif found is not None:
            frames.append(found)
    own = [frame for frame in frames if not frame[1].startswith((*_LIBRARIES, "<"))] or frames
    return f"{Path(own[0][1]).name}:{own[0][2]} in {own[0][3]}" if own else ""


def last_line(text: str) -> str:
    """Return the last line that is not blank, or ""."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
