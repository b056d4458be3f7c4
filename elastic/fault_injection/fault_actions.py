"""Execution of a fault exactly once: the claim file, the log line, the effect on a rank or node.

The process that creates a fault's claim file executes the fault at once. A restarted rank does not repeat it. ``elastic
run`` starts without claim files. Each machine has its own.
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
from peerstore.client.agent_launcher import signal_agent
from peerstore.settings import AgentPaths
from tieredckpt.event_log import event_log_from_environ, event_types

_FOLDER = "injected"
_STARTED = ".began"


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault with the time and place of its execution, recorded just before it."""

    injection: FaultInjection
    injected_at: float
    """Wall-clock seconds."""
    pid: int
    node: str
    phase: InjectionPhase | None = None
    """Phase of the rank; ``None`` if a supervisor executed the fault."""
    step: int = -1
    rank: int = -1
    local_rank: int = -1
    epoch: int = -1


class InjectionRecord:
    """Claim files of the injected faults of a job, in its run directory."""

    def __init__(self, run: Path) -> None:
        self.folder = run / _FOLDER

    def claim(self, fault: InjectedFault) -> bool:
        """Claim a fault. Return true in only one process, once: that process must execute it."""
        return self._create_once(fault.injection.name, msgspec.json.encode(fault))

    def is_done(self, name: str) -> bool:
        return (self.folder / name).exists()

    def job_started_at(self) -> float:
        """Return the wall-clock time in seconds of the first call on this machine for the job."""
        self._create_once(_STARTED, b"")
        return (self.folder / _STARTED).stat().st_mtime

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _create_once(self, name: str, data: bytes) -> bool:
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
    """Return the record of a fault that this process is about to execute."""
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


def log_injection(fault: InjectedFault) -> None:
    """Write the fault to the event log, if the job has one. Call it just before the execution."""
    event_log_from_environ().write(
        event_types.FaultInjected(
            at=fault.injected_at,
            kind=fault.injection.kind.value,
            epoch=fault.epoch,
            node=fault.node,
            local_rank=fault.local_rank,
            rank=fault.rank,
            step=fault.step,
            words=f"{fault.injection.name}: {fault.injection}",
        )
    )


OOM_BYTES = 256 << 20
"""Bytes that an injected lack of memory may allocate. The machine must have them free."""
_OOM_STEP = 8 << 20
_PAGE = mmap.PAGESIZE


class InjectedFaultError(RuntimeError):
    """The error that the ``exception`` fault raises."""


def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sigstop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_exception() -> None:
    raise InjectedFaultError("an exception was injected")


def segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # a handler could report the fault and continue
    ctypes.string_at(0)


def hold_gil() -> None:
    """Block forever with the interpreter's lock: ``PyDLL`` does not release it, and signals are blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        ctypes.PyDLL(None).pause()


def hang() -> None:
    while True:
        threading.Event().wait(3600)


def exhaust_memory(limit_bytes: int = OOM_BYTES) -> None:
    """Allocate memory up to ``limit_bytes`` or a refusal, then kill this process like the kernel.

    The out-of-memory score makes the kernel choose this process first. The limit protects other processes.
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
    """Kill the node without a report: its memory tier, its supervisor and thereby its ranks.

    The agent is killed only if the environment names its directory: otherwise other jobs may use it.
    """
    directory = environ.get("TIEREDCKPT_AGENT_DIRECTORY")
    if directory:
        _end_agent(Path(directory))
        shutil.rmtree(directory, ignore_errors=True)
    os.kill(supervisor, signal.SIGKILL)


def kill_agent(environ: Mapping[str, str] = os.environ) -> None:
    """Kill the node's agent. Its shards remain in the machine's memory for the next agent."""
    directory = environ.get("TIEREDCKPT_AGENT_DIRECTORY")
    if not directory:
        raise InjectedFaultError("this node's agent is not this job's own: $TIEREDCKPT_AGENT_DIRECTORY is not set")
    _end_agent(Path(directory))


def _end_agent(directory: Path) -> None:
    signal_agent(AgentPaths(directory), signal.SIGKILL)


def parent_supervisor() -> int:
    """Return the parent process; raise :class:`InjectedFaultError` unless it is a supervisor."""
    parent = os.getppid()
    if b"elastic.launcher" not in Path(f"/proc/{parent}/cmdline").read_bytes():
        raise InjectedFaultError(f"process {parent}, which started this one, is not the supervisor of a node")
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
