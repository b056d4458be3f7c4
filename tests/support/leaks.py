"""Leaks of a test: threads, child processes, agents and arenas."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PATIENCE_S = 60.0
_LASTING_THREADS = ("fsspecIO", "asyncio_")
"""Threads that libraries keep for the process lifetime: fsspec's loop and its name resolver."""
_LASTING_CHILDREN = (b"multiprocessing",)
"""Command lines of rank pools, which tests share and grow; their fixtures end them."""


def process_prefix(kind: str) -> str:
    """Return the prefix of shared-memory names of this test process, as others may run in parallel."""
    return f"{kind}-test-{os.getpid()}-"


class Footprint(NamedTuple):
    """Current threads, child processes and places of this process."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    places: frozenset[str]
    """Listening sockets, directories on shared memory, and network namespaces."""

    def difference(self, *others: Footprint) -> list[str]:
        """Describe the items of this footprint that no other has."""
        threads = self.threads.difference(*(other.threads for other in others))
        children = self.children.difference(*(other.children for other in others))
        places = self.places.difference(*(other.places for other in others))
        found = [
            f"thread {one.name}" for one in threads if one.is_alive() and not one.name.startswith(_LASTING_THREADS)
        ]
        for pid in children:
            command = _command(pid)
            if not any(word in command for word in _LASTING_CHILDREN):
                found.append(f"process {pid} ({command.decode(errors='replace') or 'a zombie'})")
        return found + sorted(places)


NOTHING = Footprint(frozenset(), frozenset(), frozenset())


def current_footprint() -> Footprint:
    return Footprint(frozenset(threading.enumerate()), frozenset(_children()), frozenset(_places()))


def union(one: Footprint, other: Footprint) -> Footprint:
    return Footprint(one.threads | other.threads, one.children | other.children, one.places | other.places)


def added(before: Footprint, after: Footprint) -> Footprint:
    return Footprint(after.threads - before.threads, after.children - before.children, after.places - before.places)


def wait_for_cleanup(before: Footprint, lasting: Footprint) -> tuple[Footprint, list[str]]:
    """Wait until all leaks are gone; return the footprint and the leaks left at the timeout."""
    deadline = time.monotonic() + _PATIENCE_S
    while left := (there := current_footprint()).difference(before, lasting):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return there, left


_others: set[int] = set()
"""Pids of processes that are not our children and never become ours."""


def _children() -> Iterator[int]:
    """Yield our children by the parent of every process.

    The kernel's list of children may omit some while others start and end.
    """
    me, here = str(os.getpid()), {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - names do
    _others.intersection_update(here)  # pids are reused
    for pid in here - _others:
        with contextlib.suppress(OSError):  # it ended meanwhile
            with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - this is done twice a test
                stat = file.read()
            if stat.rpartition(b")")[2].split()[1].decode() == me:
                yield pid
            else:
                _others.add(pid)


def _places() -> Iterator[str]:
    own = f"-test-{os.getpid()}-"
    yield from (f"socket {line.rpartition(' ')[2]}" for line in _unix_sockets() if own in line)
    for kind, folder in (("directory ", "/dev/shm/"), ("namespace ", "/run/netns/")):
        with contextlib.suppress(FileNotFoundError):
            yield from (f"{kind}{folder}{name}" for name in os.listdir(folder) if own in name)  # noqa: PTH208


def _unix_sockets() -> list[str]:
    listening = " 00010000 "
    return [line for line in Path("/proc/net/unix").read_text(errors="replace").splitlines() if listening in line]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    except OSError:
        return b""
