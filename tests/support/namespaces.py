"""Network namespaces by name: create, enter and remove, including leftovers of killed test runs.

A name begins with its owner's pid (``hosts-test-PID-...``). ``ip netns exec NAME bash`` opens a shell inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from peerstore.daemon_process import process_start_time
from tests.support.leaks import process_prefix

PROGRAMS = ("ip", "tc", "iptables", "iptables-restore", "nsenter")
PLACES = (Path("/run/netns"), Path("/dev/shm"))
"""Directories of namespaces and of hosts' files in memory."""
_NAME = re.compile(r"hosts-test-(\d+)-")
_CLONE_NEWNET = 0x40000000
_PATIENCE_S = 200.0
T = TypeVar("T")


def new_prefix() -> str:
    return f"{process_prefix('hosts')}{os.urandom(2).hex()}"


@functools.cache
def missing_reason() -> str:
    """Return why hosts cannot run here, or an empty string."""
    if os.getuid() != 0:
        return "only root can make network namespaces"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)}"
    name = f"{new_prefix()}-probe"
    try:
        create(name)
        run_ip_batch(name, ["link add eth0 type veth peer name eth1", "link add br0 type bridge"])
        limit_rate(name, "eth0", "rate 1gbit burst 4mb latency 50ms")
        in_it = [*nsenter_command(name), "iptables-restore"]
        run_tool(*in_it, text="*filter\n-A INPUT -p tcp -j REJECT --reject-with tcp-reset\nCOMMIT\n")
        run_tool(*in_it, text="*filter\n-A INPUT -m statistic --mode random --probability 0.5 -j DROP\nCOMMIT\n")
        run_tool(*in_it, text="*nat\n-A OUTPUT -p tcp -m mark ! --mark 1 -j REDIRECT --to-ports 1\nCOMMIT\n")
    except RuntimeError as error:
        return f"network namespaces do not work here: {error}"
    finally:
        remove(name)
    return ""


def namespace_path(name: str) -> Path:
    return Path("/run/netns") / name


def create(name: str) -> None:
    run_tool("ip", "netns", "add", name)


def remove(name: str) -> None:
    """Kill the processes inside and delete the namespace, if it exists."""
    deadline = time.monotonic() + _PATIENCE_S
    while pids := processes_in(name):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} in {name} did not end")
        for pid in pids:
            _kill(pid, name)
    if namespace_path(name).exists():
        done = subprocess.run(["ip", "netns", "del", name], capture_output=True, text=True)
        if namespace_path(name).exists():  # else another test run deleted it
            raise RuntimeError(f"{name} cannot be removed: {done.stderr.strip()}")


def remove_leftovers() -> None:
    """Remove namespaces, their processes and files in memory that dead test runs left."""
    for place in PLACES:
        for path in place.glob("hosts-test-*"):
            found = _NAME.match(path.name)
            if found and process_start_time(int(found[1])) < 0:
                if place == PLACES[0]:
                    remove(path.name)
                else:
                    shutil.rmtree(path, ignore_errors=True)


def processes_in(name: str) -> list[int]:
    """Return the pids of all other processes in this namespace."""
    wanted = _identity(namespace_path(name))
    if wanted is None:
        return []
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _identity(Path(f"/proc/{pid}/ns/net")) == wanted]


def nsenter_command(name: str) -> list[str]:
    """Return the command prefix that runs a command inside, without an additional process."""
    return ["nsenter", f"--net={namespace_path(name)}", "--"]


def enter(name: str) -> None:
    """Move only this thread inside. Sockets created there stay inside for all threads."""
    with namespace_path(name).open("rb") as file:
        _move_to(file.fileno(), name)


@contextlib.contextmanager
def inside_namespace(name: str) -> Iterator[None]:
    """Run the block with this thread inside; threads that it starts stay inside."""
    with Path("/proc/thread-self/ns/net").open("rb") as home:
        enter(name)
        try:
            yield
        finally:
            _move_to(home.fileno(), "where it was")


def run_inside(name: str, function: Callable[[], T]) -> T:
    """Call ``function`` inside, on a temporary thread, and return its result."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            enter(name)
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=f"inside-{name}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def run_tool(*words: str, text: str | None = None) -> str:
    """Run a system tool and return its output. Raise if it fails."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=200)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def run_ip_batch(name: str, lines: Sequence[str]) -> None:
    """Run several ``ip`` commands inside ``name``."""
    run_tool("ip", "-n", name, "-batch", "-", text="\n".join(lines) + "\n")


def limit_rate(name: str, device: str, bucket: str) -> None:
    """Limit outgoing traffic of ``device`` with a token bucket."""
    run_tool("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *bucket.split())


def _move_to(fd: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {name}: {os.strerror(ctypes.get_errno())}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:  # gone, or a zombie, which has no namespace
        return None
    return found.st_dev, found.st_ino


def _kill(pid: int, name: str) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The pid may belong to another process by now. From here on the pidfd pins it.
        if _identity(Path(f"/proc/{pid}/ns/net")) == _identity(namespace_path(name)):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [], _PATIENCE_S)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)
