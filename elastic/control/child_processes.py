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
"""Signal on which a rank writes the stacks of all its threads and ends, also while native code holds the GIL."""
LEAVE_STATUS = 1
"""Exit status of a rank that did not leave a broken world in time. Its log has the stacks of its threads."""
_LINE_BYTES = 64 << 10
_LAST_WORDS_S = 5.0
_LEASH = Path(parent_death.__file__)
_BY_HAND = (
    "import sys; sys.path.remove(''); import runpy; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def python_module_command(name: str, *args: str) -> list[str]:
    """``python -m NAME`` that imports nothing from the folder it is run in: others may write there."""
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", name, *args]
    return [sys.executable, "-c", _BY_HAND, name, *args]


def with_import_path(environ: Mapping[str, str]) -> dict[str, str]:
    """With these packages where this process found them. An empty entry would be the folder it is run in."""
    root = str(Path(__file__).resolve().parents[2])
    known = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**environ, "PYTHONPATH": os.pathsep.join([root, *known])}


def die_with_parent(command: Sequence[str]) -> list[str]:
    """``command``, ended by the kernel when this process (the thread that starts it) ends."""
    return [sys.executable, "-I", "-S", str(_LEASH), str(os.getpid()), *command]


class ChildProcess:
    """A process in a session of its own. Made and kept by a thread that lasts: the process ends with it.

    ``on_exit`` is called once, from another thread, when the process and all it has printed are through. Without a
    ``on_line`` it prints where this process does.
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
        self._ended = on_exit
        self._reaping = threading.Lock()
        self._pump = threading.Thread(target=self._read, args=(on_line,), name=f"elastic-log-{name}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"elastic-wait-{name}", daemon=True)
        self._pump.start()
        self._waiter.start()

    @property
    def is_running(self) -> bool:
        return self._waiter.is_alive()

    def signal(self, number: int) -> None:
        """To the process and all that it has started."""
        self._send(os.killpg, number)

    def end_with_stacks(self) -> None:
        """Have the process write the stacks of its threads and end. A stopped one does not: kill it as well."""
        self._send(os.kill, STACKS_SIGNAL)

    def _send(self, send: Callable[[int, int], None], number: int) -> None:
        with self._reaping:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(self.pid, number)

    def join(self, timeout_s: float | None = None) -> bool:
        self._waiter.join(timeout_s)
        return not self._waiter.is_alive()

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # what it left behind in its session ends with it
            status = self._process.wait()
        self._pump.join(_LAST_WORDS_S)
        self._ended(status)

    def _read(self, on_line: Callable[[bytes], None] | None) -> None:
        stream = self._process.stdout
        if stream is None or on_line is None:
            return
        with stream:
            while line := stream.readline(_LINE_BYTES):
                on_line(line)


class ProcessLog:
    """What a process prints: to a file of its own, and with a prefix to the terminal."""

    def __init__(self, path: Path, prefix: str, terminal: IO[bytes] | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._prefix = prefix.encode()
        self._terminal = terminal

    def write_line(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk ends no training
            self._file.write(line)
        if self._terminal is not None:
            with contextlib.suppress(OSError, ValueError):
                self._terminal.write(self._prefix + line.rstrip(b"\n") + b"\n")
                self._terminal.flush()

    def close(self) -> None:
        self._file.close()


def describe_exit(status: int) -> str:
    """A process's end in words."""
    if status >= 0:
        return f"it ended with status {status}"
    if status == -STACKS_SIGNAL:
        return "it was killed after it had written the stacks of its threads"
    try:
        return f"it was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"it was killed by signal {-status}"


_BLOCK = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_LIBRARIES = tuple(
    {str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)


def stack_location(text: str) -> str:
    """Return "FILE:LINE in FUNCTION" of the main thread in the last dump of ``faulthandler`` in ``text``, or "".

    It is the innermost frame outside of libraries, if there is one.
    """
    frames: list[re.Match[str]] = []
    for line in text.splitlines():
        found = _FRAME.match(line)
        if _BLOCK.match(line):  # the main thread is the last one of a dump
            frames = []
        elif found is not None:
            frames.append(found)
    own = [frame for frame in frames if not frame[1].startswith((*_LIBRARIES, "<"))] or frames
    return f"{Path(own[0][1]).name}:{own[0][2]} in {own[0][3]}" if own else ""


def last_line(text: str) -> str:
    """Return the last line that is not blank, or "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
