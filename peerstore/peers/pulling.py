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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from peerstore import checksum
from peerstore.errors import (
    PeerStoreError,
    PeerUnreachableError,
    ProtocolError,
    ShardDamagedError,
    ShardNotFoundError,
)
from peerstore.peers.board import Board, Piece, Pulled, Wish
from peerstore.peers.calling import Line, Peer
from peerstore.peers.lending import aligned
from peerstore.peers.messages import Read, Sent, Suspect
from peerstore.peers.spans import Span, cut, digest

log = logging.getLogger(__name__)

_AHEAD = 2
"""Pieces that are asked for on one connection before the first of them has come."""


class Puller:
    """Reads from the agents of one job. ``peer_of`` gives a node's agent."""

    def __init__(self, peer_of: Callable[[str], Peer], *, streams: int = 2) -> None:
        self._peer_of = peer_of
        self._streams = streams

    def pull(self, wishes: Iterable[Wish]) -> Pulled:
        board = Board(wishes)
        threads = [
            threading.Thread(target=self._serve, args=(board, source), name="peerstore-pull", daemon=True)
            for source, count in board.load().items()
            for _ in range(min(self._streams, count))
        ]
        board.begin(len(threads))
        for thread in threads:
            thread.start()
        board.wait()
        board.give_up()
        board.let_go()
        if board.crash is not None:
            raise board.crash
        return board.report

    def _serve(self, board: Board, source: str) -> None:
        """One stream of one source, until there is nothing left that it could serve.

        A connection that breaks says little about the node behind it: as long as a new one gets anywhere, it goes on.
        """
        try:
            self._serve_all(board, source)
        finally:
            board.end()

    def _serve_all(self, board: Board, source: str) -> None:
        fresh = False
        try:
            while True:
                before = board.delivered(source)
                lost = self._serve_once(board, source, fresh=fresh)
                board.left()
                if lost is None or not board.wants(source):
                    return
                if fresh and board.delivered(source) == before:
                    raise lost
                fresh = True
        except PeerStoreError as error:
            board.lose(source, error)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever pulls
            board.fail(error)

    def _serve_once(self, board: Board, source: str, *, fresh: bool) -> PeerUnreachableError | None:
        """Why the connection broke; nothing of what it was bringing is held by that any more."""
        try:
            with self._peer_of(source).line(fresh=fresh) as line:
                board.entered()
                _Stream(board, source, line).run()
        except PeerUnreachableError as error:
            return PeerUnreachableError(str(error))
        return None


class _Stream:
    """One connection to one source. The next piece is asked for before this one has come: the source sends it while
    this one is compared.
    """

    def __init__(self, board: Board, source: str, line: Line) -> None:
        self._board = board
        self._source = source
        self._line = line
        self._asked: deque[Piece] = deque()
        self._doubtful: deque[tuple[Piece, ShardDamagedError]] = deque()
        """Came, and not as they were sealed. The source is asked about them once nothing else is on the way."""

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
            piece = self._board.next(self._source, wait=not self._asked, cut=self._line.close)
            if piece is None:
                return
            self._asked.append(piece)
            record = piece.wish.record
            ranges = tuple((span.start, span.stop) for span in piece.spans)
            self._line.tell("read", Read(record.key, checksum.digest(record.checksums), ranges))

    def _take(self) -> None:
        """The first of the pieces that were asked for: what comes, comes in that order."""
        piece = self._asked[0]
        try:
            self._receive(piece)
        except ShardDamagedError as error:
            self._doubtful.append((piece, error))
        except (PeerUnreachableError, ProtocolError):
            raise
        except PeerStoreError as error:
            self._board.put_back(piece, without=self._source, because=error)
        else:
            self._board.done(self._source, piece)
        self._asked.popleft()

    def _receive(self, piece: Piece) -> None:
        compared: list[_Comparison] = []

        def watch(sent: Sent) -> _Comparison:
            compared.append(_Comparison(piece, sent))
            return compared[0]

        self._line.answer("read", Sent, into=[view for span in piece.spans for view in span.views], watch=watch)
        if compared[0].problem:
            raise ShardDamagedError(compared[0].problem)

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

    def _damaged_there(self, piece: Piece) -> bool:
        """Have the holder look at its copy itself: it may be good and the way to it bad."""
        size = piece.wish.record.chunk_bytes
        chunks = tuple((span.start // size, -(-span.stop // size)) for span in piece.spans[:64])
        try:
            damaged: bool = self._line.ask("suspect", Suspect(piece.wish.record.key, chunks), bool)
        except ShardNotFoundError:  # it has looked, and dropped it
            return True
        return damaged


class _Comparison:
    """Compares a piece while it comes: whole chunks with the seal's checksums, ends of chunks with what their holder
    says of them.
    """

    def __init__(self, piece: Piece, sent: Sent) -> None:
        self._piece = piece
        self._expected = _expected(piece, sent)
        self._next = next(self._expected, None)
        self.problem = ""

    def __call__(self, size_bytes: int) -> None:
        self._piece.arrived_bytes = size_bytes
        while self._next is not None and self._next.end <= size_bytes:
            if not self.problem and digest(self._next.span) != self._next.digest:
                self.problem = self._next.problem
            self._next = next(self._expected, None)


class _Expected(NamedTuple):
    end: int
    """Of the piece's bytes, when the span's last one is there."""
    span: Span
    digest: bytes
    problem: str


def _expected(piece: Piece, sent: Sent) -> Iterator[_Expected]:
    record = piece.wish.record
    size, chunk_bytes = 0, record.chunk_bytes
    digests = iter(range(0, len(sent.digests), 8))
    for span in piece.spans:
        if aligned(span.start, span.stop, size_bytes=record.size_bytes, chunk_bytes=chunk_bytes):
            for chunk in cut(span, chunk_bytes, chunk_bytes):
                number = chunk.start // chunk_bytes
                size += chunk.stop - chunk.start
                problem = f"chunk {number} of {record.key} differs from what was sealed"
                yield _Expected(size, chunk, record.checksums[8 * number : 8 * number + 8], problem)
        else:
            at = next(digests, len(sent.digests))
            size += span.stop - span.start
            problem = f"bytes {span.start} to {span.stop} of {record.key} changed on the way"
            yield _Expected(size, span, sent.digests[at : at + 8], problem)
