"""Memory that network adapters read by themselves: buffers registered once with NIXL, and who has which of them.

A sender fills a buffer and says where it is; the receiver reads it from there into a buffer of its own, and NIXL tells
the sender when that is done. A buffer whose reader went away without a word is not filled again while that reader might
still be reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import math
import mmap
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peerstore.errors import PeerUnreachableError, RequestError

_POLL_US = 500
"""How long NIXL's own thread sleeps when there is nothing to do; without, it takes a core."""
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_MODULES = ("nixl_cu12._bindings", "nixl_cu13._bindings")
"""Imported by name: the package above them asks torch which of them it is to be."""
_TICKET = struct.Struct(">Q")


@dataclass(eq=False)
class Buffer:
    address: int
    view: memoryview
    free_at: float = math.inf
    """When nobody can be reading it any more, although nobody said so."""


class Registered:
    """One NIXL agent and its buffers. Every method may be called from any thread."""

    def __init__(
        self, backend: str, options: Mapping[str, str], *, buffer_bytes: int, buffers: int, timeout_s: float
    ) -> None:
        self._nixl = bindings()
        self.buffer_bytes = buffer_bytes
        self._timeout_s = timeout_s
        self._agent = self._make(backend, options)
        self._memory = mmap.mmap(-1, buffer_bytes * buffers)
        start = _address(self._memory)
        self._places = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(start, buffer_bytes * buffers, 0, "")])
        self._agent.registerMem(self._places, [])
        self.introduction: bytes = self._agent.getLocalMD()
        """What others have to be told before they can read here."""
        self._lock = threading.Lock()
        whole = memoryview(self._memory)
        starts = range(0, buffer_bytes * buffers, buffer_bytes)
        self._free = [Buffer(start + at, whole[at : at + buffer_bytes]) for at in starts]
        self._lent: dict[int, Buffer] = {}
        self._unfinished: list[tuple[int, Buffer]] = []
        """Reads that were given up but go on, and where they write."""
        self._tickets = itertools.count(1)
        self._known: dict[bytes, str] = {}

    def _make(self, backend: str, options: Mapping[str, str]) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _POLL_US
        agent = self._nixl.nixlAgent(uuid.uuid4().hex, config)
        try:
            agent.createBackend(backend, dict(options))
        except Exception as error:  # NIXL has a class for each of its numbers
            known = ", ".join(agent.getAvailPlugins())
            raise RequestError(f"NIXL cannot use {backend!r} here ({error}); it comes with {known}") from error
        return agent

    def close(self) -> None:
        """Nobody uses it any more."""
        with self._lock:
            self._agent.deregisterMem(self._places, [])
            del self._agent  # its threads end with it

    # -- for who sends --------------------------------------------------------------------------------------------

    def take(self, check: Callable[[], None]) -> Buffer:
        """A buffer nobody reads. ``check`` raises when waiting for one makes no sense any more."""
        for _ in patiently(self._timeout_s, check, "no buffer came free"):
            with self._lock:
                self._collect()
                if self._free:
                    return self._free.pop()
        raise PeerUnreachableError("no buffer came free")

    def lend(self, buffer: Buffer) -> int:
        """Somebody will read it; under this ticket is said later that it was done."""
        with self._lock:
            ticket = next(self._tickets)
            buffer.free_at = math.inf
            self._lent[ticket] = buffer
        return ticket

    def still_lent(self, tickets: Iterable[int]) -> list[int]:
        with self._lock:
            self._collect()
            return [ticket for ticket in tickets if ticket in self._lent]

    def put_back(self, buffer: Buffer) -> None:
        with self._lock:
            self._free.append(buffer)

    def leave_behind(self, tickets: Iterable[int]) -> None:
        """Perhaps nobody will ever say that these were read."""
        with self._lock:
            for buffer in [self._lent[ticket] for ticket in tickets if ticket in self._lent]:
                buffer.free_at = time.monotonic() + 2 * self._timeout_s

    def _collect(self) -> None:
        """Take back what is free again."""
        said = [ticket for tickets in self._agent.getNotifs({}).values() for ticket in tickets]
        read = [_TICKET.unpack(ticket)[0] for ticket in said if len(ticket) == _TICKET.size]
        now = time.monotonic()
        late = [ticket for ticket, buffer in self._lent.items() if buffer.free_at <= now]
        self._free += [self._lent.pop(ticket) for ticket in {*read, *late} if ticket in self._lent]
        ended = [write for write in self._unfinished if self._ended(write[0])]
        self._unfinished = [write for write in self._unfinished if write not in ended]
        self._free += [buffer for _, buffer in ended]

    # -- for who receives -----------------------------------------------------------------------------------------

    def meet(self, introduction: bytes) -> str:
        """Who introduced itself so; from now on its buffers can be read."""
        with self._lock:
            if introduction not in self._known:
                try:
                    name = self._agent.loadRemoteMD(introduction)
                except Exception as error:
                    raise PeerUnreachableError(f"NIXL does not know how to reach it: {error}") from error
                self._known[introduction] = name.decode()
            return self._known[introduction]

    def read(self, source: str, address: int, size: int, ticket: int | None, check: Callable[[], None]) -> Read:
        """Begin to read ``size`` bytes at ``address`` of ``source``, which is told by ``ticket`` when it is done."""
        buffer = self.take(check)
        nixl, agent = self._nixl, self._agent
        said = b"" if ticket is None else _TICKET.pack(ticket)
        try:
            here = nixl.nixlXferDList(nixl.DRAM_SEG, [(buffer.address, size, 0)])
            there = nixl.nixlXferDList(nixl.DRAM_SEG, [(address, size, 0)])
            handle = agent.createXferReq(nixl.NIXL_READ, here, there, source, said, [])
        except Exception as error:
            self.put_back(buffer)
            raise self._lost(source, error) from error
        read = Read(self, source, handle, buffer, size)
        try:
            agent.postXferReq(handle)
        except Exception as error:
            read.release()
            raise self._lost(source, error) from error
        return read

    def refuse(self, source: str, ticket: int) -> None:
        """What the ticket stands for will not be read."""
        with contextlib.suppress(Exception):  # then it is left behind over there
            self._agent.genNotif(source, _TICKET.pack(ticket), [])

    def done(self, read: Read) -> bool:
        try:
            return bool(self._agent.getXferStatus(read.handle) == self._nixl.NIXL_SUCCESS)
        except Exception as error:
            raise self._lost(read.source, error) from error

    def release(self, read: Read) -> None:
        with self._lock:
            self._unfinished.append((read.handle, read.buffer))
            self._collect()

    def _ended(self, handle: int) -> bool:
        """Whether a read writes nothing any more; one that goes on is told to stop."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception:  # noqa: BLE001 - it could not be stopped, and will be asked again
            return False
        return True

    def _lost(self, source: str, error: Exception) -> PeerUnreachableError:
        """The next channel introduces it again."""
        with self._lock, contextlib.suppress(Exception):
            self._known = {said: name for said, name in self._known.items() if name != source}
            self._agent.invalidateRemoteMD(source)
        return PeerUnreachableError(f"NIXL could not read from it: {error}")


@dataclass(eq=False)
class Read:
    """Bytes on their way into a buffer."""

    memory: Registered
    source: str
    handle: int
    buffer: Buffer
    size: int

    def wait(self, within_s: float, check: Callable[[], None]) -> None:
        for _ in patiently(within_s, check, f"silent for {within_s:.3g} s"):
            if self.memory.done(self):
                return

    def release(self) -> None:
        """The buffer is somebody else's once nothing is written into it any more."""
        self.memory.release(self)


def patiently(within_s: float, check: Callable[[], None], otherwise: str) -> Iterator[None]:
    """Again and again, at first often, until it is too late."""
    deadline = time.monotonic() + within_s
    pause_s = _FIRST_PAUSE_S
    while True:
        check()
        yield
        if time.monotonic() > deadline:
            raise PeerUnreachableError(otherwise)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def bindings() -> Any:
    """NIXL, where it is installed."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise RequestError("the nixl transport is not installed here: pip install 'tieredckpt[nixl]'")


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
