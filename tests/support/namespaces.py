"""Network namespaces by name: made, entered, and removed, also those that a killed test run has left behind.

A name begins with the process that made it (``hosts-test-PID-...``); ``ip netns exec NAME bash`` looks into one.
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
"""Where names of this kind are found: namespaces, and what hosts keep in memory."""
_NAME = re.compile(r"hosts-test-(\d+)-")
_CLONE_NEWNET = 0x40000000
_PATIENCE_S = 200.0
T = TypeVar("T")


def new_prefix() -> str:
    return f"{process_prefix('hosts')}{os.urandom(2).hex()}"


@functools.cache
def missing_reason() -> str:
    """Why there can be no hosts here, or ""."""
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
    """End the processes inside and let go of the namespace; one that is not there is no error."""
    deadline = time.monotonic() + _PATIENCE_S
    while pids := processes_in(name):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} in {name} did not end")
        for pid in pids:
            _kill(pid, name)
    if namespace_path(name).exists():
        done = subprocess.run(["ip", "netns", "del", name], capture_output=True, text=True)
        if namespace_path(name).exists():  # unless another test run was faster
            raise RuntimeError(f"{name} cannot be removed: {done.stderr.strip()}")


def remove_leftovers() -> None:
    """What processes that are dead now have left: namespaces with all that runs in them, and files in memory."""
    for place in PLACES:
        for path in place.glob("hosts-test-*"):
            found = _NAME.match(path.name)
            if found and process_start_time(int(found[1])) < 0:
                if place == PLACES[0]:
                    remove(path.name)
                else:
                    shutil.rmtree(path, ignore_errors=True)


def processes_in(name: str) -> list[int]:
    """Everybody else who lives there."""
    wanted = _identity(namespace_path(name))
    if wanted is None:
        return []
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _identity(Path(f"/proc/{pid}/ns/net")) == wanted]


def nsenter_command(name: str) -> list[str]:
    """What a command line begins with to run inside; the process stays the one that was started."""
    return ["nsenter", f"--net={namespace_path(name)}", "--"]


def enter(name: str) -> None:
    """Move this thread, and only this one; sockets it makes stay inside whoever uses them later."""
    with namespace_path(name).open("rb") as file:
        _move_to(file.fileno(), name)


@contextlib.contextmanager
def inside_namespace(name: str) -> Iterator[None]:
    """While the block runs this thread is inside, and threads that it starts stay there."""
    with Path("/proc/thread-self/ns/net").open("rb") as home:
        enter(name)
        try:
            yield
        finally:
            _move_to(home.fileno(), "where it was")


def run_inside(name: str, function: Callable[[], T]) -> T:
    """``function`` called inside, on a thread that ends with it."""
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
    """A system tool's output; what it complains about is raised."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=200)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def run_ip_batch(name: str, lines: Sequence[str]) -> None:
    """Several commands of ``ip`` inside ``name`` at once."""
    run_tool("ip", "-n", name, "-batch", "-", text="\n".join(lines) + "\n")


def limit_rate(name: str, device: str, bucket: str) -> None:
    """Let what leaves through ``device`` pass a token bucket."""
    run_tool("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *bucket.split())


def _move_to(fd: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {name}: {os.strerror(ctypes.get_errno())}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:  # gone, or a zombie, which has none
        return None
    return found.st_dev, found.st_ino


def _kill(pid: int, name: str) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The number may have gone to somebody else since it was read; from here on it cannot.
        if _identity(Path(f"/proc/{pid}/ns/net")) == _identity(namespace_path(name)):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [], _PATIENCE_S)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)
