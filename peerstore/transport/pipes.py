"""Bytes from one node of a memory network to another, and what can happen to them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from peerstore.errors import PeerUnreachableError
from peerstore.transport.clock import Clock
from peerstore.transport.seam import FileSlice

_PIECE_BYTES = 64 << 10


@dataclass
class Way:
    """The way from one node to another, for all channels that use it."""

    open: bool = True
    """Whether new channels come about; bytes of old ones wait while it is not."""
    flowing: bool = True
    delay_s: float = 0.0
    drop_after: int | None = None
    """After so many bytes more, the channel whose turn it is breaks."""
    payloads: int = 0
    """How many payloads were sent this way."""
    flips: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Payload number to (byte, bit) that arrives the other way round."""


class Pipe:
    """One direction of a channel. Every method is called with the network's lock held, which all conditions share."""

    def __init__(self, way: Way, back: Way, clock: Clock, lock: threading.RLock, capacity_bytes: int) -> None:
        self._way = way
        self._back = back
        self._clock = clock
        self._capacity = capacity_bytes
        self._pieces: deque[tuple[float, memoryview]] = deque()
        self._held = 0
        self._flips: dict[int, int] = {}
        self._sent = 0
        self._changed = threading.Condition(lock)
        self._ended = False
        """The writer has closed."""
        self._deaf = False
        """The reader has closed."""
        self._broken = ""
        self.on_drop: Callable[[], None] = self.wake

    def wake(self) -> None:
        self._clock.notify(self._changed)

    def end(self) -> None:
        self._ended = True
        self.wake()

    def ignore(self) -> None:
        self._deaf = True
        self.wake()

    def tear(self, why: str) -> None:
        self._broken = self._broken or why
        self.wake()

    def flip_at(self, ahead: int, bit: int) -> None:
        """The byte ``ahead`` bytes from here arrives with ``bit`` turned."""
        self._flips[self._sent + ahead] = self._flips.get(self._sent + ahead, 0) ^ 1 << bit

    def put(self, views: list[memoryview], within_s: float) -> int:
        self._wait(lambda: self._held < self._capacity or self._unheard() or bool(self._broken), within_s)
        if why := self._broken or self._unheard():
            raise PeerUnreachableError(why)
        ready_at = self._clock.now() + self._way.delay_s
        total = 0
        for view in views:
            with view[: self._capacity - self._held] as fitting:
                for start in range(0, fitting.nbytes, _PIECE_BYTES):
                    total += self._put(bytearray(fitting[start : start + _PIECE_BYTES]), ready_at)
        self.wake()
        if self._way.drop_after == 0:
            self._way.drop_after = None
            self.on_drop()
        return total

    def take(self, views: list[memoryview], within_s: float | None) -> int:
        self._wait(lambda: self._ready() or self._at_end() or bool(self._broken), within_s)
        if self._deaf:
            return 0
        if self._broken and not self._ready():
            raise PeerUnreachableError(self._broken)
        total = 0
        for view in views:
            filled = self._pour(view)
            total += filled
            if filled < view.nbytes:
                break
        self._held -= total
        self.wake()
        return total

    def _pour(self, view: memoryview) -> int:
        filled = 0
        while filled < view.nbytes and self._ready():
            ready_at, piece = self._pieces.popleft()
            count = min(piece.nbytes, view.nbytes - filled)
            view[filled : filled + count] = piece[:count]
            filled += count
            if count < piece.nbytes:
                self._pieces.appendleft((ready_at, piece[count:]))
        return filled

    def _put(self, piece: bytearray, ready_at: float) -> int:
        left = self._way.drop_after
        if left is not None:
            del piece[left:]
            self._way.drop_after = left - len(piece)
        for at in [at for at in self._flips if self._sent <= at < self._sent + len(piece)]:
            piece[at - self._sent] ^= self._flips.pop(at)
        self._sent += len(piece)
        self._held += len(piece)
        if piece:
            self._pieces.append((ready_at, memoryview(piece)))
        return len(piece)

    def _ready(self) -> bool:
        return bool(self._pieces) and self._way.flowing and self._pieces[0][0] <= self._clock.now()

    def _at_end(self) -> bool:
        return self._deaf or (self._ended and not self._pieces and self._way.flowing)

    def _unheard(self) -> str:
        """Why there is no point in sending. That the reader has closed is known when word of it comes through."""
        if self._ended:
            return "closed on this side"
        return "the peer has closed the connection" if self._deaf and self._back.flowing else ""

    def _wait(self, done: Callable[[], object], within_s: float | None) -> None:
        deadline = None if within_s is None else self._clock.now() + within_s
        while not done():
            now = self._clock.now()
            if deadline is not None and now >= deadline:
                raise PeerUnreachableError(f"silent for {within_s:.3g} s")
            next_at = self._pieces[0][0] if self._pieces else now
            times = [at for at in (deadline, next_at if next_at > now else None) if at is not None]
            self._clock.wait(self._changed, min(times, default=None))


class PipeStream:
    """A :class:`~peerstore.transport.framing.Stream` over two pipes."""

    def __init__(self, out: Pipe, into: Pipe, clock: Clock, lock: threading.RLock) -> None:
        self._out = out
        self._into = into
        self._clock = clock
        self._lock = lock

    def now(self) -> float:
        return self._clock.now()

    def send(self, views: list[memoryview], *, more: bool, within_s: float) -> int:
        with self._lock:
            return self._out.put(views, within_s)

    def send_file(self, piece: FileSlice, *, within_s: float) -> int:
        data = os.pread(piece.fd, min(piece.size, _PIECE_BYTES), piece.start)
        return self.send([memoryview(data)], more=False, within_s=within_s) if data else 0

    def receive(self, views: list[memoryview], *, within_s: float | None) -> int:
        with self._lock:
            return self._into.take(views, within_s)

    def flip_at(self, ahead: int, bit: int) -> None:
        with self._lock:
            self._out.flip_at(ahead, bit)

    def shut(self) -> None:
        with self._lock:
            self._out.end()
            self._into.ignore()

    def close(self) -> None:
        """Nothing but memory is held."""
