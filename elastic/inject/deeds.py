"""What each kind does to this process or this node. Nothing here imports torch; most of it does not return."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic.inject.plan import Kind
from peerstore.launch import signal_agent
from peerstore.settings import AgentPlace

OOM_BYTES = 256 << 20
"""How much an injected lack of memory may allocate; a machine has to have that much to spare."""
_OOM_STEP = 8 << 20
_PAGE = mmap.PAGESIZE


class InjectedFaultError(RuntimeError):
    """Raised where an exception was asked for."""


def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sigstop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exception() -> None:
    raise InjectedFaultError("an exception was injected")


def segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # whoever handles it may say what happened, and go on
    ctypes.string_at(0)


def gil() -> None:
    """``PyDLL`` calls without giving up the lock, and no signal that could be handled ends the wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        ctypes.PyDLL(None).pause()


def hang() -> None:
    while True:
        threading.Event().wait(3600)


def oom(limit_bytes: int = OOM_BYTES) -> None:
    """Memory that is touched, until the kernel or the limit set here says no; then the end that the kernel brings.

    The kernel is told to take this process first, and the limit keeps it from taking much from others.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + limit_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    held: list[mmap.mmap] = []
    with contextlib.suppress(OSError, MemoryError, ValueError):
        while len(held) * _OOM_STEP < limit_bytes:
            block = mmap.mmap(-1, _OOM_STEP)
            for at in range(0, _OOM_STEP, _PAGE):
                block[at] = 1
            held.append(block)
    sigkill()


def lose_node(supervisor: int, environ: Mapping[str, str] = os.environ) -> None:
    """The node is gone, without a word: what it kept in memory, its supervisor, and with it its ranks.

    An agent that other jobs use as well is left alone: it is this job's own where the environment names its directory.
    """
    directory = environ.get("TIEREDCKPT_AGENT_DIRECTORY")
    if directory:
        _end_agent(Path(directory))
        shutil.rmtree(directory, ignore_errors=True)
    os.kill(supervisor, signal.SIGKILL)


def lose_agent(environ: Mapping[str, str] = os.environ) -> None:
    """The node's agent is gone; what it kept stays in the machine's memory for the next one."""
    directory = environ.get("TIEREDCKPT_AGENT_DIRECTORY")
    if not directory:
        raise InjectedFaultError("this node's agent is not this job's own: $TIEREDCKPT_AGENT_DIRECTORY is not set")
    _end_agent(Path(directory))


def _end_agent(directory: Path) -> None:
    signal_agent(AgentPlace(directory), signal.SIGKILL)


def supervisor_of_this_rank() -> int:
    """The process that started this one, where that is a supervisor."""
    parent = os.getppid()
    if b"elastic.control" not in Path(f"/proc/{parent}/cmdline").read_bytes():
        raise InjectedFaultError(f"process {parent}, which started this one, is no supervisor of a node")
    return parent


IN_PROCESS: Mapping[Kind, Callable[[], None]] = {
    Kind.SIGKILL: sigkill,
    Kind.SIGSTOP: sigstop,
    Kind.EXCEPTION: exception,
    Kind.SEGFAULT: segfault,
    Kind.GIL: gil,
    Kind.HANG: hang,
    Kind.OOM: oom,
    Kind.NODE: lambda: lose_node(supervisor_of_this_rank()),
    Kind.AGENT: lose_agent,
}
