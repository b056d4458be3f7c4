"""What is to be read from other nodes, cut into pieces, and who may still serve which of them."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from peerstore.errors import PeerStoreError, PeerUnreachableError, ShardDamagedError
from peerstore.peers.spans import Span, Target, cut, join
from peerstore.records import ShardKey

log = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
_PIECE_RANGES = 512


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


class Board:
    """The pieces of one pull, and who may still serve them. Any thread may call."""

    def __init__(self, wishes: Iterable[Wish]) -> None:
        self._pieces = [piece for wish in wishes for piece in _pieces(wish)]
        self._left: dict[str, int] = defaultdict(int)
        """How many pieces that have not come yet each source could serve."""
        self._free: dict[str, list[tuple[int, int, int, Piece]]] = defaultdict(list)
        """For each source a heap of pieces to take next; some have been taken by others since."""
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self.report = Pulled()
        self.crash: BaseException | None = None
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
        """Whether there is still something that ``source`` could serve."""
        with self._changed:
            return self.crash is None and self._left[source] > 0

    def next(self, source: str, *, wait: bool) -> Piece | None:
        """A piece for ``source``: first what fewest others can serve, and what prefers it. May ``wait`` while some of
        its pieces are in other hands and may come back.
        """
        with self._changed:
            while self.crash is None and self._left[source]:
                free = self._free[source]
                while free:
                    *_, piece = heapq.heappop(free)
                    if not (piece.done or piece.busy) and source in piece.sources:
                        piece.busy = True
                        return piece
                if not wait:
                    return None
                self._changed.wait()
            return None

    def done(self, source: str, piece: Piece) -> None:
        with self._changed:
            piece.busy, piece.done = False, True
            self.report.bytes_from[source] += piece.size_bytes
            for other in piece.sources:
                self._left[other] -= 1
            self._changed.notify_all()

    def put_back(self, piece: Piece, *, without: str = "", because: PeerStoreError | None = None) -> None:
        with self._changed:
            piece.busy = False
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
            piece.busy = False
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
