"""Execution of a fault exactly once: the claim file, the log line, the effect on a rank or node.

Whoever makes the file carries the fault out, at once: not even a rank that is started anew does it again. ``elastic
run`` begins without any. Each machine has its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from elastic.fault_injection.fault_spec import FaultInjection, InjectionKind, InjectionPhase, RankLocation
from peerstore.server.agent_launcher import signal_agent
from peerstore.settings import AgentPaths
from tieredckpt.event_log import event_log_from_environ, event_types

_FOLDER = "injected"
_BEGAN = ".began"


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault that was carried out, as it was about to be."""

    injection: FaultInjection
    injected_at: float
    """Wall-clock seconds."""
    pid: int
    node: str
    phase: InjectionPhase | None = None
    """``None``: a supervisor did it, at no particular one."""
    step: int = -1
    rank: int = -1
    local_rank: int = -1
    epoch: int = -1


class InjectionRecord:
    """Of the job whose run directory this is."""

    def __init__(self, run: Path) -> None:
        self.folder = run / _FOLDER

    def claim(self, told: InjectedFault) -> bool:
        """Whether this process is to carry it out: true for one of all, once."""
        return self._make(told.injection.name, msgspec.json.encode(told))

    def is_done(self, name: str) -> bool:
        return (self.folder / name).exists()

    def job_started_at(self) -> float:
        """When the first process of the job looked, by the wall clock."""
        self._make(_BEGAN, b"")
        return (self.folder / _BEGAN).stat().st_mtime

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self, name: str, data: bytes) -> bool:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        return True


def injected_here(
    injection: FaultInjection,
    place: RankLocation,
    *,
    phase: InjectionPhase | None = None,
    step: int = -1,
    epoch: int = -1,
) -> InjectedFault:
    """What is about to happen here and now."""
    return InjectedFault(
        injection=injection,
        injected_at=time.time(),
        pid=os.getpid(),
        node=place.node,
        phase=phase,
        step=step,
        rank=place.rank,
        local_rank=place.local_rank,
        epoch=epoch,
    )


def log_injection(what: InjectedFault) -> None:
    """Just before it happens; where no event log is kept, nothing."""
    event_log_from_environ().write(
        event_types.FaultInjected(
            at=what.injected_at,
            kind=what.injection.kind.value,
            epoch=what.epoch,
            node=what.node,
            local_rank=what.local_rank,
            rank=what.rank,
            step=what.step,
            words=f"{what.injection.name}: {what.injection}",
        )
    )


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


def raise_exception() -> None:
    raise InjectedFaultError("an exception was injected")


def segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # whoever handles it may say what happened, and go on
    ctypes.string_at(0)


def hold_gil() -> None:
    """``PyDLL`` calls without giving up the lock, and no signal that could be handled ends the wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        ctypes.PyDLL(None).pause()


def hang() -> None:
    while True:
        threading.Event().wait(3600)


def exhaust_memory(limit_bytes: int = OOM_BYTES) -> None:
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


def kill_node(supervisor: int, environ: Mapping[str, str] = os.environ) -> None:
    """The node is gone, without a word: what it kept in memory, its supervisor, and with it its ranks.

    An agent that other jobs use as well is left alone: it is this job's own where the environment names its directory.
    """
    directory = environ.get("TIEREDCKPT_AGENT_DIRECTORY")
    if directory:
        _end_agent(Path(directory))
        shutil.rmtree(directory, ignore_errors=True)
    os.kill(supervisor, signal.SIGKILL)


def kill_agent(environ: Mapping[str, str] = os.environ) -> None:
    """The node's agent is gone; what it kept stays in the machine's memory for the next one."""
    directory = environ.get("TIEREDCKPT_AGENT_DIRECTORY")
    if not directory:
        raise InjectedFaultError("this node's agent is not this job's own: $TIEREDCKPT_AGENT_DIRECTORY is not set")
    _end_agent(Path(directory))


def _end_agent(directory: Path) -> None:
    signal_agent(AgentPaths(directory), signal.SIGKILL)


def parent_supervisor() -> int:
    """The process that started this one, where that is a supervisor."""
    parent = os.getppid()
    if b"elastic.launcher" not in Path(f"/proc/{parent}/cmdline").read_bytes():
        raise InjectedFaultError(f"process {parent}, which started this one, is no supervisor of a node")
    return parent


RANK_ACTIONS: Mapping[InjectionKind, Callable[[], None]] = {
    InjectionKind.SIGKILL: sigkill,
    InjectionKind.SIGSTOP: sigstop,
    InjectionKind.EXCEPTION: raise_exception,
    InjectionKind.SEGFAULT: segfault,
    InjectionKind.HOLD_GIL: hold_gil,
    InjectionKind.HANG: hang,
    InjectionKind.OOM: exhaust_memory,
    InjectionKind.NODE: lambda: kill_node(parent_supervisor()),
    InjectionKind.AGENT: kill_agent,
}
