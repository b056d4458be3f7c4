"""What is to be read from other nodes, cut into pieces, and who may still serve which of them."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from peerstore.errors import PeerStoreError, PeerUnreachableError, ShardDamagedError
from peerstore.peers.spans import Span, Target, cut, join
from peerstore.records import ShardKey

log = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
_PIECE_RANGES = 512
_LATE_S = 2.0
"""A piece is nobody's fault before it has been on its way for so long."""
_TIMES = 4.0
"""A source that takes so many times as long as another one for a piece is slow."""
_LOOK_S = 0.5
"""What came of a late piece in so long is its source's pace."""
_UNMEASURED_BYTES_PER_S = 4 << 20
"""What a source that has sent nothing yet is expected to do."""


class Sealed(Protocol):
    """What a reader has to know of a shard."""

    @property
    def key(self) -> ShardKey: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def checksums(self) -> bytes: ...


@dataclass(frozen=True)
class Wish:
    """What is wanted of one shard, and who has it, the preferred source first."""

    record: Sealed
    targets: Sequence[Target]
    sources: Sequence[str]


@dataclass
class Pulled:
    """What came, from where, and what did not come."""

    bytes_from: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[ShardKey, PeerStoreError] = field(default_factory=dict)
    """Shards of which something came from nobody, and the last reason."""
    refused: list[tuple[str, ShardKey, str]] = field(default_factory=list)
    """Copies that were not what was sealed: who has them, and what was wrong."""


@dataclass
class Piece:
    wish: Wish
    spans: list[Span]
    size_bytes: int
    sources: list[str]
    busy: bool = False
    done: bool = False
    doubted: set[str] = field(default_factory=set)
    """Sources whose answer was not what they hold: they are asked once more."""
    holder: str = ""
    """Who was asked for it last."""
    asked_at: float = 0.0
    arrived_bytes: int = 0
    looked_at: float | None = None
    """When it was late and seemed to come in time, and what had arrived then."""
    looked_bytes: int = 0
    cut: Callable[[], object] = lambda: None
    """Ends the connection that it is to come on."""


class Board:
    """The pieces of one pull, and who may still serve them. Any thread may call.

    A source that keeps a piece much longer than another one would need for it is slow: the connection is cut, so that
    nothing of it can arrive any more, and the piece is the other one's. What nobody else has still comes from it.
    """

    def __init__(self, wishes: Iterable[Wish], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slow: set[str] = set()
        self._byte_s: dict[str, float] = {}
        """How long the last piece of each source took, by byte."""
        self._serving = 0
        self._streaming: set[int] = set()
        """Threads that are connected, and may have targets in their hands."""
        self._away: dict[int, Piece] = {}
        """Those that somebody was asked for."""
        self._pieces = [piece for wish in wishes for piece in _pieces(wish)]
        self._left: dict[str, int] = defaultdict(int)
        """How many pieces that have not come yet each source could serve."""
        self._free: dict[str, list[tuple[int, int, int, Piece]]] = defaultdict(list)
        """For each source a heap of pieces to take next; some have been taken by others since."""
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self.report = Pulled()
        self.crash: BaseException | None = None
        self._undone = len(self._pieces)
        for piece in self._pieces:
            self._offer(piece)
            for source in piece.sources:
                self._left[source] += 1

    def load(self) -> dict[str, int]:
        """How many pieces each source could serve."""
        return dict(self._left)

    def delivered(self, source: str) -> int:
        with self._changed:
            return self.report.bytes_from.get(source, 0)

    def wants(self, source: str) -> bool:
        """Once there is something that ``source`` may serve; False when there never will be."""
        with self._changed:
            while self.crash is None and self._left[source]:
                if self._top(source) is not None:
                    return True
                self._changed.wait()
            return False

    def next(self, source: str, *, wait: bool, cut: Callable[[], object] = lambda: None) -> Piece | None:
        """A piece for ``source``: first what fewest others can serve, and what prefers it. May ``wait`` while some of
        its pieces are in other hands and may come back. ``cut`` ends the connection that it is to come on.
        """
        with self._changed:
            while self.crash is None and self._left[source]:
                piece = self._top(source)
                if piece is not None:
                    heapq.heappop(self._free[source])
                    piece.busy, piece.holder, piece.cut = True, source, cut
                    piece.asked_at, piece.arrived_bytes, piece.looked_at = self._clock(), 0, None
                    self._away[id(piece)] = piece
                    return piece
                if not wait:
                    return None
                self._changed.wait(self._look_after(source))
            return None

    def _top(self, source: str) -> Piece | None:
        """What ``source`` is to take next, and stays where it is."""
        free = self._free[source]
        while free:
            piece = free[0][-1]
            if not (piece.done or piece.busy) and source in piece.sources and not self._passed_over(source, piece):
                return piece
            heapq.heappop(free)  # whatever makes it this source's after all offers it again
        return None

    def _passed_over(self, source: str, piece: Piece) -> bool:
        return source in self._slow and any(other not in self._slow for other in piece.sources)

    def _look_after(self, source: str) -> float | None:
        """``source`` has nothing to do: take from slow ones what it would be done with sooner. When to look again."""
        if source in self._slow:
            return None
        now, again = self._clock(), []
        for piece in list(self._away.values()):
            if piece.holder == source or source not in piece.sources:
                continue
            own_s = piece.size_bytes * self._byte_s.get(source, 1 / _UNMEASURED_BYTES_PER_S)
            since = now - piece.asked_at
            if since < _LATE_S + _TIMES * own_s:
                again.append(_LATE_S + _TIMES * own_s - since)
            elif self._needs_more(piece, now, _TIMES * own_s):
                self._take_from(piece)
            else:
                again.append(_LOOK_S)
        return min(again, default=None)

    def _needs_more(self, piece: Piece, now: float, limit_s: float) -> bool:
        """Whether what is left of a late piece will take longer, at the pace since it was asked for or of late."""
        left = piece.size_bytes - piece.arrived_bytes
        if left * (now - piece.asked_at) > piece.arrived_bytes * limit_s:
            return True
        if piece.looked_at is not None:
            passed_s = now - piece.looked_at
            if passed_s < _LOOK_S:
                return False
            if left * passed_s > (piece.arrived_bytes - piece.looked_bytes) * limit_s:
                return True
        piece.looked_at, piece.looked_bytes = now, piece.arrived_bytes
        return False

    def _take_from(self, piece: Piece) -> None:
        log.warning(
            "%s is slow: %d of %d bytes in %.1f s; others are asked",
            *(piece.holder, piece.arrived_bytes, piece.size_bytes, self._clock() - piece.asked_at),
        )
        self._slow.add(piece.holder)
        piece.asked_at = self._clock()  # it is free once its connection has ended
        for other in self._pieces:  # some may have only slow sources now
            if not (other.done or other.busy):
                self._offer(other)
        piece.cut()

    def begin(self, streams: int) -> None:
        self._serving = streams

    def end(self) -> None:
        """A stream takes nothing any more."""
        with self._changed:
            self._serving -= 1
            self._streaming.discard(threading.get_ident())
            self._changed.notify_all()

    def entered(self) -> None:
        """This thread is connected."""
        with self._changed:
            self._streaming.add(threading.get_ident())

    def left(self) -> None:
        """This thread has nothing in its hands any more."""
        with self._changed:
            self._streaming.discard(threading.get_ident())
            self._changed.notify_all()

    def wait(self) -> None:
        """Until everything has come, or no stream is left. Who still tries to connect then is not waited for."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._serving or (self.crash is None and not self._undone and not self._streaming)
            )

    def let_go(self) -> None:
        """Of all targets: whoever still tries to connect keeps none of them open."""
        with self._changed:
            self._pieces = []
            self._free.clear()
            self._away.clear()

    def done(self, source: str, piece: Piece) -> None:
        with self._changed:
            took = self._clock() - piece.asked_at
            self._byte_s[source] = took / max(1, piece.size_bytes)
            piece.done = True
            self._came_back(piece)
            self._undone -= 1
            self.report.bytes_from[source] += piece.size_bytes
            for other in piece.sources:
                self._left[other] -= 1
            self._changed.notify_all()

    def put_back(self, piece: Piece, *, without: str = "", because: PeerStoreError | None = None) -> None:
        with self._changed:
            self._came_back(piece)
            if because is not None:
                self.report.failed[piece.wish.record.key] = because
            self._strike(without, piece)
            self._offer(piece)
            self._changed.notify_all()

    def refuse(self, source: str, piece: Piece, error: ShardDamagedError) -> None:
        """This source's copy of the shard is not asked for again."""
        log.error("%s has a damaged copy: %s", source, error)
        with self._changed:
            key = piece.wish.record.key
            self.report.refused.append((source, key, str(error)))
            self.report.failed[key] = error
            self._came_back(piece)
            for other in self._pieces:
                if other.wish.record.key == key:
                    self._strike(source, other)
            self._offer(piece)
            self._changed.notify_all()

    def lose(self, source: str, error: PeerStoreError) -> None:
        """This source does not answer any more."""
        log.warning("%s is not read from any more: %s", source, error)
        with self._changed:
            for piece in self._pieces:
                if self._strike(source, piece):
                    self.report.failed[piece.wish.record.key] = error
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.crash = self.crash or error
            self._changed.notify_all()

    def give_up(self) -> None:
        """What is left was delivered by nobody; reasons of shards that came in the end are forgotten."""
        left = {piece.wish.record.key for piece in self._pieces if not piece.done}
        nobody = PeerUnreachableError("no node that is reached has it")
        self.report.failed = {key: self.report.failed.get(key, nobody) for key in left}

    def _came_back(self, piece: Piece) -> None:
        piece.busy = False
        del self._away[id(piece)]

    def _offer(self, piece: Piece) -> None:
        """Whoever can serve it may take it."""
        for place, source in enumerate(piece.sources):
            heapq.heappush(self._free[source], (len(piece.sources), place, next(self._numbers), piece))

    def _strike(self, source: str, piece: Piece) -> bool:
        """``source`` does not serve it any more; whether it would have had to."""
        if piece.done or source not in piece.sources:
            return False
        piece.sources.remove(source)
        self._left[source] -= 1
        if not piece.busy:
            self._offer(piece)  # there are fewer to choose from: it is taken earlier
        return True


def _pieces(wish: Wish) -> list[Piece]:
    """Cut into requests of about one size; long ranges are cut at chunks, so that most of them are whole ones."""
    pieces: list[Piece] = []
    spans: list[Span] = []
    size = 0
    step = max(1, _PIECE_BYTES // wish.record.chunk_bytes) * wish.record.chunk_bytes
    for joined in join(wish.targets):
        for span in cut(joined, wish.record.chunk_bytes, step):
            spans.append(span)
            size += span.stop - span.start
            if size >= _PIECE_BYTES or len(spans) >= _PIECE_RANGES:
                pieces.append(Piece(wish, spans, size, list(wish.sources)))
                spans, size = [], 0
    if spans:
        pieces.append(Piece(wish, spans, size, list(wish.sources)))
    return pieces
