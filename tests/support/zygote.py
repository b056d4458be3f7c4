"""Processes for tests to kill, forked within milliseconds from one that has imported torch.

That one is a fork of the test process made by :mod:`tests.support.workers`, or else its own interpreter.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import crashes

_TIMEOUT_S = 200.0
_OURS = ("TIEREDCKPT_", "AWS_")
"""Prefixes of environment variables that tests set for their processes."""


class ProcessResult(NamedTuple):
    """Result of a process: its status (negative for a signal), return value and lines."""

    status: int
    result: Any
    lines: list[str]


def warm() -> None:
    """Import the slowest modules."""
    import torch
    import torch._dynamo  # every optimizer imports it
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import tieredckpt.checkpointer.checkpointer  # noqa: F401 - warm

    torch.set_num_threads(1)


def _zygote(pipe: Connection) -> None:
    warm()
    _serve(pipe)


def _serve(pipe: Connection) -> None:
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(_fork(*task))


def _fork(function: Callable[..., Any], args: Sequence[Any], environ: dict[str, str], folder: str, world: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        for name in [name for name in os.environ if name.startswith(_OURS)]:
            del os.environ[name]  # drop variables that an earlier test set
        os.environ.update(environ)
        crashes.arm_crash_points()
        with (Path(folder) / "result").open("wb") as file:
            file.write(pickle.dumps(_run(function, args, folder, world)))
        status = 0
    except BaseException:
        (Path(folder) / "error").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _run(function: Callable[..., Any], args: Sequence[Any], folder: str, world: Any) -> Any:
    import torch.distributed as dist

    from tieredckpt.session.session import close_sessions

    lines = (Path(folder) / "lines").open("a", buffering=1)
    if world is not None:
        rank, size, store = world
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        return function(lambda text: lines.write(f"{text}\n"), *args)
    finally:
        close_sessions()
        if dist.is_initialized():
            dist.destroy_process_group()


def has_ended(pid: int, within_s: float) -> bool:
    """Return whether a process, which may be any process's child, ends within this time."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        return bool(poll.poll(within_s * 1000))
    finally:
        os.close(end)


class RunningProcess:
    """A forked process and its output."""

    def __init__(self, pid: int, folder: tempfile.TemporaryDirectory[str]) -> None:
        self.pid = pid
        self._folder = folder

    def lines(self) -> list[str]:
        path = Path(self._folder.name) / "lines"
        return path.read_text().splitlines() if path.exists() else []

    def wait_line(self, text: str, timeout_s: float = 200.0) -> None:
        """Wait until the process has reported the line ``text``."""
        deadline = time.monotonic() + timeout_s
        while text not in self.lines():
            assert time.monotonic() < deadline, f"{text!r} was not reported: {self.lines()} {self._read('error')}"
            assert self._status() is None or text in self.lines(), f"ended without {text!r}: {self._read('error')}"
            has_ended(self.pid, 0.01)

    def wait_lines(self, count: int, timeout_s: float = 200.0) -> None:
        """Wait until the process has reported ``count`` lines or has ended."""
        deadline = time.monotonic() + timeout_s
        while len(self.lines()) < count and self._status() is None:
            assert time.monotonic() < deadline, f"{count} lines were not reported: {self.lines()}"
            has_ended(self.pid, 0.002)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def kill_if_alive(self) -> None:
        if self._status() is None:
            self.kill()

    @property
    def has_ended(self) -> bool:
        return self._status() is not None

    def wait(self, timeout_s: float = _TIMEOUT_S, *, may_fail: bool = False) -> ProcessResult:
        """Wait until the process has ended; raise its error unless it ``may_fail``."""
        if not has_ended(self.pid, timeout_s):
            os.kill(self.pid, signal.SIGKILL)
            has_ended(self.pid, timeout_s)
            lines = self.lines()
            self._folder.cleanup()  # else a later test fails because of the folder
            raise AssertionError(f"process {self.pid} did not end: {lines[-5:]}")
        while (status := self._status()) is None:  # its zombie appears a moment later
            time.sleep(0.001)
        lines, error = self.lines(), self._read("error")
        result = Path(self._folder.name) / "result"
        value = pickle.loads(result.read_bytes()) if result.exists() and result.stat().st_size else None
        self._folder.cleanup()
        if status > 0 and not may_fail:
            raise AssertionError(error)
        return ProcessResult(status, value, lines)

    def _read(self, name: str) -> str:
        path = Path(self._folder.name) / name
        return path.read_text() if path.exists() else ""

    def _status(self) -> int | None:
        """Return the exit status, or ``None`` while it runs.

        It is the zygote's child, so the status is read from its zombie.
        """
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            raise AssertionError(f"process {self.pid} was reaped by another process") from None
        if fields[0] != "Z":
            return None
        code = int(fields[-1])  # in the format of waitpid
        return -os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)


class _Forked:
    """Subset of ``multiprocessing.Process`` for the process that :func:`prepare` forked."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def join(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.005)

    def is_alive(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self._pid, os.WNOHANG) == (0, 0)
        return False

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


_prepared: list[tuple[Any, Connection]] = []
"""Zygote of this worker, until a test needs it."""


def prepare(*closed: Any) -> None:
    """Fork this worker's zygote before the worker has threads or files of tests; it closes ``closed``."""
    warm()
    here, there = mp.Pipe()
    pid = os.fork()
    if pid:
        there.close()
        _prepared.append((_Forked(pid), here))
        return
    try:
        here.close()
        for one in closed:
            one.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.resetwarnings()  # warnings that fail tests must not fail their processes
        for quiet in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", quiet)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        _serve(there)
    finally:
        os._exit(0)


class Zygote:
    """Template process that forks test functions, each called with ``say(text)`` and its arguments."""

    def __init__(self) -> None:
        if _prepared:
            self._process, self._pipe = _prepared.pop()
            return
        context = mp.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_zygote, args=(there,))
        self._process.start()
        there.close()

    def start(
        self, function: Callable[..., Any], *args: Any, environ: dict[str, str] | None = None, world: Any = None
    ) -> RunningProcess:
        folder = tempfile.TemporaryDirectory()
        inherited = {k: v for k, v in os.environ.items() if k.startswith(_OURS)} | (environ or {})
        self._pipe.send((function, args, inherited, folder.name, world))
        return RunningProcess(self._pipe.recv(), folder)

    def run(self, function: Callable[..., Any], *args: Any, environ: dict[str, str] | None = None) -> ProcessResult:
        return self.start(function, *args, environ=environ).wait()

    def start_world(
        self, size: int, function: Callable[..., Any], *args: Any, environ: dict[int, dict[str, str]] | None = None
    ) -> list[RunningProcess]:
        """Start ``size`` gloo ranks; ``environ`` is by rank."""
        store = str(Path(tempfile.gettempdir()) / f"store-{uuid.uuid4().hex}")
        return [
            self.start(function, *args, environ=(environ or {}).get(rank), world=(rank, size, store))
            for rank in range(size)
        ]

    def run_world(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``size`` gloo ranks and return their results. If one fails, kill the others."""
        return [one.result for one in self.run_ranks(size, function, *args)]

    def run_ranks(
        self, size: int, function: Callable[..., Any], *args: Any, environ: dict[int, dict[str, str]] | None = None
    ) -> list[ProcessResult]:
        """Run ``size`` gloo ranks and return how they ended. If one fails, kill the others."""
        running = self.start_world(size, function, *args, environ=environ)
        try:
            return [one.wait() for one in running]
        finally:
            for one in running:
                one.kill_if_alive()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(200)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    one = Zygote()
    yield one
    one.close()
