"""Ranges of shards from whichever nodes have them, several at a time, straight to where they are to be.

Every source has streams of its own that take the next piece it can serve: a fast one serves more. What a source did not
deliver goes to the others; what was delivered stays. A piece is done when it was compared: whole chunks with the seal's
checksums, the rest with a digest of bytes that their holder has compared.

What lies side by side in the shard is asked for as one, wherever its parts are to be: most of it is whole chunks then,
which their holder sends as they are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from peerstore import checksum
from peerstore.errors import (
    PeerStoreError,
    PeerUnreachableError,
    ProtocolError,
    ShardDamagedError,
    ShardNotFoundError,
)
from peerstore.peers.calling import Line, Peer
from peerstore.peers.lending import aligned
from peerstore.peers.messages import Read, Sent, Suspect
from peerstore.peers.spans import Span, Target, cut, digest, join
from peerstore.records import ShardKey

log = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20
_PIECE_RANGES = 512
_AHEAD = 2
"""Pieces that are asked for on one connection before the first of them has come."""


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
    seconds_from: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    failed: dict[ShardKey, PeerStoreError] = field(default_factory=dict)
    """Shards of which something came from nobody, and the last reason."""
    refused: list[tuple[str, ShardKey, str]] = field(default_factory=list)
    """Copies that were not what was sealed: who has them, and what was wrong."""


@dataclass
class _Piece:
    wish: Wish
    spans: list[Span]
    size_bytes: int
    sources: list[str]
    busy: bool = False
    done: bool = False
    doubted: set[str] = field(default_factory=set)
    """Sources whose answer was not what they hold: they are asked once more."""


class Puller:
    """Reads from the agents of one job. ``peer_of`` gives a node's agent."""

    def __init__(self, peer_of: Callable[[str], Peer], *, streams: int = 2) -> None:
        self._peer_of = peer_of
        self._streams = streams

    def pull(self, wishes: Iterable[Wish]) -> Pulled:
        board = _Board([piece for wish in wishes for piece in _pieces(wish)])
        threads = [
            threading.Thread(target=self._serve, args=(board, source), name="peerstore-pull", daemon=True)
            for source, count in board.load().items()
            for _ in range(min(self._streams, count))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        board.give_up()
        if board.crash is not None:
            raise board.crash
        return board.report

    def _serve(self, board: _Board, source: str) -> None:
        """One stream of one source, until there is nothing left that it could serve.

        A connection that breaks says little about the node behind it: as long as a new one gets anywhere, it goes on.
        """
        fresh = False
        try:
            while True:
                before = board.delivered(source)
                try:
                    with self._peer_of(source).line(fresh=fresh) as line:
                        _Stream(board, source, line).run()
                    return
                except PeerUnreachableError:
                    if not board.wants(source):
                        return
                    if fresh and board.delivered(source) == before:
                        raise
                    fresh = True
        except PeerStoreError as error:
            board.lose(source, error)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever pulls
            board.fail(error)


class _Stream:
    """One connection to one source. The next piece is asked for before this one has come: the source sends it while
    this one is compared.
    """

    def __init__(self, board: _Board, source: str, line: Line) -> None:
        self._board = board
        self._source = source
        self._line = line
        self._asked: deque[_Piece] = deque()
        self._doubtful: deque[tuple[_Piece, ShardDamagedError]] = deque()
        """Came, and not as they were sealed. The source is asked about them once nothing else is on the way."""
        self._free_since = 0.0

    def run(self) -> None:
        try:
            while True:
                self._ask()
                if self._asked:
                    self._take()
                elif self._doubtful:
                    self._judge()
                else:
                    return
        finally:
            for piece in [*self._asked, *(piece for piece, _ in self._doubtful)]:
                self._board.put_back(piece)

    def _ask(self) -> None:
        while len(self._asked) < _AHEAD and not self._doubtful:
            piece = self._board.next(self._source, wait=not self._asked)
            if piece is None:
                return
            self._asked.append(piece)
            record = piece.wish.record
            ranges = tuple((span.start, span.stop) for span in piece.spans)
            if len(self._asked) == 1:
                self._free_since = time.monotonic()
            self._line.tell("read", Read(record.key, checksum.digest(record.checksums), ranges))

    def _take(self) -> None:
        """The first of the pieces that were asked for: what comes, comes in that order."""
        piece = self._asked[0]
        try:
            sent: Sent = self._line.answer("read", Sent, into=[view for span in piece.spans for view in span.views])
            _compare(piece, sent)
        except ShardDamagedError as error:
            self._doubtful.append((piece, error))
        except (PeerUnreachableError, ProtocolError):
            raise
        except PeerStoreError as error:
            self._board.put_back(piece, without=self._source, because=error)
        else:
            now = time.monotonic()
            self._board.done(self._source, piece, now - self._free_since)
            self._free_since = now
        self._asked.popleft()

    def _judge(self) -> None:
        piece, error = self._doubtful[0]
        try:
            refused = self._source in piece.doubted or self._damaged_there(piece)
        except (PeerUnreachableError, ProtocolError):
            raise
        except PeerStoreError as problem:
            self._board.put_back(piece, without=self._source, because=problem)
        else:
            if refused:
                self._board.refuse(self._source, piece, error)
            else:
                log.warning("%s is asked again for what changed on the way: %s", self._source, error)
                piece.doubted.add(self._source)
                self._board.put_back(piece)
        self._doubtful.popleft()

    def _damaged_there(self, piece: _Piece) -> bool:
        """Have the holder look at its copy itself: it may be good and the way to it bad."""
        size = piece.wish.record.chunk_bytes
        chunks = tuple((span.start // size, -(-span.stop // size)) for span in piece.spans[:64])
        try:
            damaged: bool = self._line.ask("suspect", Suspect(piece.wish.record.key, chunks), bool)
        except ShardNotFoundError:  # it has looked, and dropped it
            return True
        return damaged


def _compare(piece: _Piece, sent: Sent) -> None:
    """What came, with the seal's checksums; ends of chunks with what their holder says of them."""
    record = piece.wish.record
    digests = iter(range(0, len(sent.digests), 8))
    for span in piece.spans:
        if aligned(span.start, span.stop, size_bytes=record.size_bytes, chunk_bytes=record.chunk_bytes):
            for chunk in cut(span, record.chunk_bytes, record.chunk_bytes):
                number = chunk.start // record.chunk_bytes
                if digest(chunk) != record.checksums[8 * number : 8 * number + 8]:
                    raise ShardDamagedError(f"chunk {number} of {record.key} differs from what was sealed")
            continue
        at = next(digests, len(sent.digests))
        if digest(span) != sent.digests[at : at + 8]:
            raise ShardDamagedError(f"bytes {span.start} to {span.stop} of {record.key} changed on the way")


class _Board:
    """The pieces of one pull, and who may still serve them. Any thread may call."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self._pieces = pieces
        self._changed = threading.Condition()
        self.report = Pulled()
        self.crash: BaseException | None = None

    def load(self) -> dict[str, int]:
        """How many pieces each source could serve."""
        counts: dict[str, int] = defaultdict(int)
        for piece in self._pieces:
            for source in piece.sources:
                counts[source] += 1
        return counts

    def delivered(self, source: str) -> int:
        with self._changed:
            return self.report.bytes_from.get(source, 0)

    def wants(self, source: str) -> bool:
        """Whether there is still something that ``source`` could serve."""
        with self._changed:
            return self.crash is None and any(source in piece.sources for piece in self._pieces)

    def next(self, source: str, *, wait: bool) -> _Piece | None:
        """A piece for ``source``: first what fewest others can serve, and what prefers it. May ``wait`` while some of
        its pieces are in other hands and may come back.
        """
        with self._changed:
            while True:
                if self.crash is not None:
                    return None
                mine = [piece for piece in self._pieces if source in piece.sources and not piece.done]
                free = [piece for piece in mine if not piece.busy]
                if free:
                    piece = min(free, key=lambda piece: (len(piece.sources), piece.sources.index(source)))
                    piece.busy = True
                    return piece
                if not mine or not wait:
                    return None
                self._changed.wait(1.0)

    def done(self, source: str, piece: _Piece, seconds: float) -> None:
        with self._changed:
            piece.busy, piece.done = False, True
            self.report.bytes_from[source] += piece.size_bytes
            self.report.seconds_from[source] += seconds
            self._pieces = [other for other in self._pieces if other is not piece]
            self._changed.notify_all()

    def put_back(self, piece: _Piece, *, without: str = "", because: PeerStoreError | None = None) -> None:
        with self._changed:
            piece.busy = False
            if without in piece.sources:
                piece.sources.remove(without)
            if because is not None:
                self.report.failed[piece.wish.record.key] = because
            self._changed.notify_all()

    def refuse(self, source: str, piece: _Piece, error: ShardDamagedError) -> None:
        """This source's copy of the shard is not asked for again."""
        log.error("%s has a damaged copy: %s", source, error)
        with self._changed:
            key = piece.wish.record.key
            self.report.refused.append((source, key, str(error)))
            self.report.failed[key] = error
            piece.busy = False
            for other in self._pieces:
                if other.wish.record.key == key and source in other.sources:
                    other.sources.remove(source)
            self._changed.notify_all()

    def lose(self, source: str, error: PeerStoreError) -> None:
        """This source does not answer any more."""
        log.warning("%s is not read from any more: %s", source, error)
        with self._changed:
            for piece in self._pieces:
                if source in piece.sources:
                    piece.sources.remove(source)
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


def _pieces(wish: Wish) -> list[_Piece]:
    """Cut into requests of about one size; long ranges are cut at chunks, so that most of them are whole ones."""
    pieces: list[_Piece] = []
    spans: list[Span] = []
    size = 0
    step = max(1, _PIECE_BYTES // wish.record.chunk_bytes) * wish.record.chunk_bytes
    for joined in join(wish.targets):
        for span in cut(joined, wish.record.chunk_bytes, step):
            spans.append(span)
            size += span.stop - span.start
            if size >= _PIECE_BYTES or len(spans) >= _PIECE_RANGES:
                pieces.append(_Piece(wish, spans, size, list(wish.sources)))
                spans, size = [], 0
    if spans:
        pieces.append(_Piece(wish, spans, size, list(wish.sources)))
    return pieces
