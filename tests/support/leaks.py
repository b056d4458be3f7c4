"""What a test leaves behind: threads, child processes, agents and arenas."""

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
"""Made by a library at first use and meant to stay: the loop that fsspec has, and who resolves names for it."""
_LASTING_CHILDREN = (b"multiprocessing",)
"""Rank pools are kept warm between tests and grow in any of them; their own fixtures end them."""


def process_prefix(kind: str) -> str:
    """The beginning of names on shared memory that belong to this test process: others may be running beside it."""
    return f"{kind}-test-{os.getpid()}-"


class Footprint(NamedTuple):
    """What exists right now."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    places: frozenset[str]
    """Sockets that are listened on, directories on shared memory, and network namespaces."""

    def difference(self, *others: Footprint) -> list[str]:
        """What is here and in none of the others, in words."""
        threads = self.threads.difference(*(other.threads for other in others))
        children = self.children.difference(*(other.children for other in others))
        places = self.places.difference(*(other.places for other in others))
        found = [
            f"thread {one.name}" for one in threads if one.is_alive() and not one.name.startswith(_LASTING_THREADS)
        ]
        for pid in children:
            command = _command(pid)
            if not any(word in command for word in _LASTING_CHILDREN):
                found.append(f"process {pid} ({command.decode(errors='replace') or 'ended, and nobody waited for it'})")
        return found + sorted(places)


NOTHING = Footprint(frozenset(), frozenset(), frozenset())


def current_footprint() -> Footprint:
    return Footprint(frozenset(threading.enumerate()), frozenset(_children()), frozenset(_places()))


def union(one: Footprint, other: Footprint) -> Footprint:
    return Footprint(one.threads | other.threads, one.children | other.children, one.places | other.places)


def added(before: Footprint, after: Footprint) -> Footprint:
    return Footprint(after.threads - before.threads, after.children - before.children, after.places - before.places)


def wait_for_cleanup(before: Footprint, lasting: Footprint) -> tuple[Footprint, list[str]]:
    """What there is, and what of it is left although it was given some time to go."""
    deadline = time.monotonic() + _PATIENCE_S
    while left := (there := current_footprint()).difference(before, lasting):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return there, left


_others: set[int] = set()
"""Processes that are not ours: whoever is somebody else's child never becomes one of ours."""


def _children() -> Iterator[int]:
    """By everybody's parent: the kernel's own list of children leaves some out while others come and go."""
    me, here = str(os.getpid()), {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - names do
    _others.intersection_update(here)  # a number may be given again
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
