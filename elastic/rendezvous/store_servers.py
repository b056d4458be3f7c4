"""Placement of store servers and keys on nodes (pure), and the process that keeps a server running. No torch.

All ranks compute the same from the same list of addresses, and nobody is asked. Nothing ever moves: every world begins
with no keys, and its members stay the same until it ends. So this need not be a ring: a key's holders are drawn evenly
among all, and what a dead member held falls to all others in equal parts.

The job's ``TCPStore`` must live in no rank, and this package knows no torch; a coordinator must not stop with what the
supervisor does.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from elastic.control.child_processes import ChildProcess, python_module_command, with_import_path

ROOTLESS = "rootless"
"""Where a store's address is asked for: one on every node."""

KEY_COPIES = 2
MAX_STORE_NODES = 1024
"""So many nodes of a world keep its keys at the most: a rank may have to know, and to call, each of them."""

T = TypeVar("T")


@lru_cache(maxsize=1 << 16)
def key_holders(key: str, members: int, copies: int = KEY_COPIES) -> tuple[int, ...]:
    """The members that hold ``key``, by their place in the world's list; the first one decides."""
    if members < 1 or copies < 1:
        raise ValueError(f"members={members}, copies={copies}: a key is held by at least one of at least one")
    number = _digest(key)
    drawn: list[int] = []
    for _ in range(min(copies, members)):
        number, place = divmod(number, members - len(drawn))
        drawn.append(_among_the_others(place, drawn))
    return tuple(drawn)


def store_nodes(epoch: int, nodes: Sequence[T], most: int = MAX_STORE_NODES) -> tuple[T, ...]:
    """The nodes that keep the keys of a world: all, or so many of a large one, others in every epoch."""
    if len(nodes) <= most:
        return tuple(nodes)
    drawn = sorted(range(len(nodes)), key=lambda place: _digest(f"{epoch}/{place}"))[:most]
    return tuple(nodes[place] for place in sorted(drawn))


def _among_the_others(place: int, drawn: Sequence[int]) -> int:
    """The ``place``-th of those that were not drawn."""
    for taken in sorted(drawn):
        place += place >= taken
    return place


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest(), "big")


STORE_MODULE = "elastic.rendezvous.store_process"
_AGAIN_S = 1.0
_CANDIDATE_AGAIN_S = 2.0
_RELEASE_S = 10.0
_PREFIX = b"store "
_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""The thread that serves all ranks asks for the name of each that connects: where no name server answers, they all wait
for a second, and not for the ten that are usual."""


class StoreProcess:
    """Keeps one while it is wanted; ``on_address`` is called with where it is, and "" when it is no more."""

    def __init__(
        self, host: str, on_address: Callable[[str], None], *, spawn: Callable[..., Any] = ChildProcess
    ) -> None:
        self._host, self._told, self._spawn = host, on_address, spawn
        self._running: Any = None
        self._ended_at: float | None = None

    def ensure(self, *, wanted: bool) -> None:
        """To be called now and then, by a thread that lasts."""
        if self._running is not None and not self._running.is_running:
            self._running = None
            self._ended_at = time.monotonic()
            self._told("")
        if not wanted:
            self.close()
        elif self._running is None and (self._ended_at is None or time.monotonic() - self._ended_at > _AGAIN_S):
            self._running = self._spawn(
                python_module_command(STORE_MODULE, self._host),
                environ=_NAMES | with_import_path(os.environ),
                on_line=self._printed,
                on_exit=lambda _: None,
                name="store",
            )

    def close(self) -> None:
        if self._running is not None:
            self._running.signal(signal.SIGKILL)
            self._running.join()
            self._running = None
            self._told("")

    def _printed(self, line: bytes) -> None:
        if line.startswith(_PREFIX):
            self._told(line[len(_PREFIX) :].decode().strip())
        else:
            sys.stderr.buffer.write(b"[store] " + line)


class CoordinatorKeeper:
    """Starts a candidate where nobody leads the job. It ends by itself when another one does."""

    def __init__(self, command: Callable[[int], Sequence[str]], *, spawn: Callable[..., Any] = ChildProcess) -> None:
        """``command``: of the latest term in which a coordinator was obeyed here."""
        self._command, self._spawn = command, spawn
        self._running: Any = None
        self._again_at = float("-inf")

    def keep(self, *, wanted: bool, term: int, now: float) -> None:
        """To be called now and then, by a thread that lasts."""
        if self._running is not None and not self._running.is_running:
            self._running = None
            self._again_at = now + _CANDIDATE_AGAIN_S
        if wanted and self._running is None and now >= self._again_at:
            self._running = self._spawn(
                self._command(term),
                environ=with_import_path(os.environ),
                on_line=None,
                on_exit=lambda _: None,
                name="coordinator",
            )

    def dismiss(self) -> None:
        """Another one leads."""
        if self._running is not None:
            self._running.signal(signal.SIGTERM)

    def close(self, *, within_s: float) -> None:
        """It may have others to tell of a job's end, and so long for it; then it gives up its lead, and ends."""
        if self._running is None:
            return
        if not self._running.join(within_s):
            self._running.signal(signal.SIGTERM)
        if not self._running.join(_RELEASE_S):
            self._running.signal(signal.SIGKILL)
            self._running.join()
        self._running = None
