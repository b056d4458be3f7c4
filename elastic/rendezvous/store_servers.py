"""Placement of store keys on nodes (pure), and processes of store servers and coordinators. No torch.

All ranks compute the same placement from the same list of addresses, without communication. Keys never move: every
world begins without keys, and its members are the same until it ends. So a consistent-hash ring is not needed. The
holders of a key are drawn evenly from all members, and the load of a lost member spreads evenly over the others.

The job's ``TCPStore`` runs in its own process, because it must not end with a rank and the supervisor does not import
torch. The coordinator has its own process too, so that the supervisor's work does not stop it.
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
"""Stands for a store's address: every node runs a store server."""

KEY_COPIES = 2
"""Holders of each key."""
MAX_STORE_NODES = 1024
"""Most nodes of a world that hold its keys: a rank may have to connect to each of them."""

T = TypeVar("T")


@lru_cache(maxsize=1 << 16)
def key_holders(key: str, members: int, copies: int = KEY_COPIES) -> tuple[int, ...]:
    """Return the members that hold ``key``, as indexes in the world's list. The first one decides."""
    if members < 1 or copies < 1:
        raise ValueError(f"members={members}, copies={copies}: a key is held by at least one of at least one")
    number = _digest(key)
    drawn: list[int] = []
    for _ in range(min(copies, members)):
        number, index = divmod(number, members - len(drawn))
        drawn.append(_nth_undrawn(index, drawn))
    return tuple(drawn)


def store_nodes(epoch: int, nodes: Sequence[T], most: int = MAX_STORE_NODES) -> tuple[T, ...]:
    """Return the nodes that hold the keys of a world: all, or ``most`` that differ in every epoch."""
    if len(nodes) <= most:
        return tuple(nodes)
    drawn = sorted(range(len(nodes)), key=lambda index: _digest(f"{epoch}/{index}"))[:most]
    return tuple(nodes[index] for index in sorted(drawn))


def _nth_undrawn(index: int, drawn: Sequence[int]) -> int:
    """Return the ``index``-th number that was not drawn."""
    for taken in sorted(drawn):
        index += index >= taken
    return index


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest(), "big")


STORE_MODULE = "elastic.rendezvous.store_process"
_RESTART_DELAY_S = 1.0
_CANDIDATE_DELAY_S = 2.0
_RELEASE_S = 10.0
_PREFIX = b"store "
_RESOLVER_ENVIRON = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""Resolver limits of the server process: 1 s without a responding name server, instead of 10 s.

The server's only thread looks up the name of each client, and all ranks wait meanwhile.
"""


class StoreProcess:
    """A store server process. ``on_address`` is called with its address, and with "" after it ended."""

    def __init__(
        self, host: str, on_address: Callable[[str], None], *, spawn: Callable[..., Any] = ChildProcess
    ) -> None:
        self._host, self._on_address, self._spawn = host, on_address, spawn
        self._running: Any = None
        self._ended_at: float | None = None

    def ensure(self, *, wanted: bool) -> None:
        """Start, restart or stop the server as ``wanted`` requires.

        Call it periodically from one long-lived thread: the process ends with the thread that started it.
        """
        if self._running is not None and not self._running.is_running:
            self._running = None
            self._ended_at = time.monotonic()
            self._on_address("")
        if not wanted:
            self.close()
        elif self._running is None and (self._ended_at is None or time.monotonic() - self._ended_at > _RESTART_DELAY_S):
            self._running = self._spawn(
                python_module_command(STORE_MODULE, self._host),
                environ=_RESOLVER_ENVIRON | with_import_path(os.environ),
                on_line=self._read_line,
                on_exit=lambda _: None,
                name="store",
            )

    def close(self) -> None:
        if self._running is not None:
            self._running.signal(signal.SIGKILL)
            self._running.join()
            self._running = None
            self._on_address("")

    def _read_line(self, line: bytes) -> None:
        if line.startswith(_PREFIX):
            self._on_address(line[len(_PREFIX) :].decode().strip())
        else:
            sys.stderr.buffer.write(b"[store] " + line)


class CoordinatorKeeper:
    """A candidate coordinator process while no coordinator leads the job.

    The process exits on its own if another coordinator leads.
    """

    def __init__(self, command: Callable[[int], Sequence[str]], *, spawn: Callable[..., Any] = ChildProcess) -> None:
        """``command`` takes the latest term of a coordinator that this node followed."""
        self._command, self._spawn = command, spawn
        self._running: Any = None
        self._retry_at = float("-inf")

    def keep(self, *, wanted: bool, term: int, now: float) -> None:
        """Start the candidate if it is ``wanted`` and does not run; ``now`` is in monotonic seconds.

        Call it periodically from one long-lived thread: the process ends with the thread that started it.
        """
        if self._running is not None and not self._running.is_running:
            self._running = None
            self._retry_at = now + _CANDIDATE_DELAY_S
        if wanted and self._running is None and now >= self._retry_at:
            self._running = self._spawn(
                self._command(term),
                environ=with_import_path(os.environ),
                on_line=None,
                on_exit=lambda _: None,
                name="coordinator",
            )

    def dismiss(self) -> None:
        """Send SIGTERM to the candidate, because another coordinator leads."""
        if self._running is not None:
            self._running.signal(signal.SIGTERM)

    def close(self, *, within_s: float) -> None:
        """Wait ``within_s`` seconds for the process to report the job's end to other nodes, then end it.

        After SIGTERM it has 10 s to release its lead, then it is killed.
        """
        if self._running is None:
            return
        if not self._running.join(within_s):
            self._running.signal(signal.SIGTERM)
        if not self._running.join(_RELEASE_S):
            self._running.signal(signal.SIGKILL)
            self._running.join()
        self._running = None
