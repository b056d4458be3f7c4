"""Ranged reads from many nodes at once: coalesce, split into pieces, assign to the fastest source, verify.

Every source has streams of its own that take the next piece it can serve: a fast one serves more. What a source did not
deliver goes to the others; what was delivered stays. A piece is done when it was compared: whole chunks with the seal's
checksums, the rest with a digest of bytes that their holder has compared.

What lies side by side in the shard is asked for as one, wherever its parts are to be: most of it is whole chunks then,
which their holder sends as they are.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import xxhash

from peerstore import checksums
from peerstore.errors import PeerStoreError, PeerUnreachableError, ProtocolError, ShardDamagedError, ShardNotFoundError
from peerstore.peers.peer_client import PeerClient, PeerConnection
from peerstore.peers.peer_messages import RangeDigests, ReadRanges, VerifyChunks
from peerstore.peers.shard_server import is_chunk_aligned
from peerstore.shard_records import ShardKey

log = logging.getLogger(__name__)


_GAP_BYTES = 64
"""Between two targets, most that is read along with them: what aligns one tensor behind another."""


class ReadTarget(NamedTuple):
    """Bytes ``[start, stop)`` of a shard, and where they are to be."""

    start: int
    stop: int
    view: memoryview


class ReadSpan(NamedTuple):
    """Bytes ``[start, stop)`` of a shard, and the views they fill one behind the other."""

    start: int
    stop: int
    views: tuple[memoryview, ...]


def coalesce_targets(targets: Iterable[ReadTarget]) -> list[ReadSpan]:
    """Targets that lie side by side in the shard as one span; a small gap between two goes to a view of its own."""
    found: list[ReadSpan] = []
    views: list[memoryview] = []
    first = last = 0
    for start, stop, view in sorted(targets, key=lambda target: target[:2]):
        if start == stop:
            continue
        if not views or not 0 <= start - last <= _GAP_BYTES:
            if views:
                found.append(ReadSpan(first, last, tuple(views)))
            first, views = start, []
        elif start > last:
            views.append(memoryview(bytearray(start - last)))
        views.append(view)
        last = stop
    return [*found, ReadSpan(first, last, tuple(views))] if views else found


def split_span(span: ReadSpan, chunk_bytes: int, step_bytes: int) -> Iterable[ReadSpan]:
    """The start up to the first chunk, whole chunks ``step_bytes`` at a time, and the rest."""
    start, stop, views = span
    edge = min(stop, -(-start // chunk_bytes) * chunk_bytes)
    last = max(edge, stop // chunk_bytes * chunk_bytes)
    left = deque(views)
    for first, end in itertools.pairwise(sorted({start, edge, *range(edge, last, step_bytes), last, stop})):
        taken: list[memoryview] = []
        missing = end - first
        while missing:
            view = left.popleft()
            if len(view) > missing:
                left.appendleft(view[missing:])
                view = view[:missing]
            taken.append(view)
            missing -= len(view)
        yield ReadSpan(first, end, tuple(taken))


def span_digest(span: ReadSpan) -> bytes:
    """Of all its bytes, little-endian."""
    if len(span.views) == 1:
        return xxhash.xxh3_64_digest(span.views[0])[::-1]
    state = xxhash.xxh3_64()
    for view in span.views:
        state.update(view)
    return state.digest()[::-1]


_PIECE_BYTES = 4 << 20
_PIECE_RANGES = 512
_LATE_S = 2.0
"""A piece is nobody's fault before it has been on its way for so long."""
_TIMES = 4.0
"""A source that takes so many times as long as another one for a piece is slow."""
_LOOK_S = 0.5
"""What came of a late piece in so long is its source's pace."""
_UNMEASURED_BYTES_PER_S = 4 << 20
"""Expected rate of a source for bytes beyond its measured pieces."""


class ReadableShard(Protocol):
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
class ReadRequest:
    """What is wanted of one shard, and who has it, the preferred source first."""

    shard: ReadableShard
    targets: Sequence[ReadTarget]
    sources: Sequence[str]


@dataclass
class ReadResult:
    """What came, from where, and what did not come."""

    bytes_from: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[ShardKey, PeerStoreError] = field(default_factory=dict)
    """Shards of which something came from nobody, and the last reason."""
    rejected_replicas: list[tuple[str, ShardKey, str]] = field(default_factory=list)
    """Copies that were not what was sealed: who has them, and what was wrong."""


@dataclass
class ReadPiece:
    wish: ReadRequest
    spans: list[ReadSpan]
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


class _Pace(NamedTuple):
    """Time of a source's last piece that was at least half as large as the piece measured before."""

    size_bytes: int = 0
    seconds: float = 0.0

    def expected_s(self, size_bytes: int) -> float:
        """Estimate the seconds of a piece; a small piece's time is mostly latency, so it is not scaled up."""
        if size_bytes < self.size_bytes:
            return self.seconds * size_bytes / self.size_bytes
        return self.seconds + (size_bytes - self.size_bytes) / _UNMEASURED_BYTES_PER_S


class PieceQueue:
    """The pieces of one pull, and who may still serve them. Any thread may call.

    A source that keeps a piece much longer than another one would need for it is slow: the connection is cut, so that
    nothing of it can arrive any more, and the piece is the other one's. What nobody else has still comes from it.
    """

    def __init__(self, wishes: Iterable[ReadRequest], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slow: set[str] = set()
        self._paces: dict[str, _Pace] = {}
        self._serving = 0
        self._streaming: set[int] = set()
        """Threads that are connected, and may have targets in their hands."""
        self._away: dict[int, ReadPiece] = {}
        """Those that somebody was asked for."""
        self._pieces = [piece for wish in wishes for piece in _pieces(wish)]
        self._left: dict[str, int] = defaultdict(int)
        """How many pieces that have not come yet each source could serve."""
        self._free: dict[str, list[tuple[int, int, int, ReadPiece]]] = defaultdict(list)
        """For each source a heap of pieces to take next; some have been taken by others since."""
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self.report = ReadResult()
        self.error: BaseException | None = None
        self._undone = len(self._pieces)
        for piece in self._pieces:
            self._offer(piece)
            for source in piece.sources:
                self._left[source] += 1

    def pieces_per_source(self) -> dict[str, int]:
        """How many pieces each source could serve."""
        return dict(self._left)

    def bytes_from(self, source: str) -> int:
        with self._changed:
            return self.report.bytes_from.get(source, 0)

    def wait_for_work(self, source: str) -> bool:
        """Once there is something that ``source`` may serve; False when there never will be."""
        with self._changed:
            while self.error is None and self._left[source]:
                if self._top(source) is not None:
                    return True
                self._changed.wait()
            return False

    def take(self, source: str, *, wait: bool, cut: Callable[[], object] = lambda: None) -> ReadPiece | None:
        """A piece for ``source``: first what fewest others can serve, and what prefers it. May ``wait`` while some of
        its pieces are in other hands and may come back. ``split_span`` ends the connection that it is to come on.
        """
        with self._changed:
            while self.error is None and self._left[source]:
                piece = self._top(source)
                if piece is not None:
                    heapq.heappop(self._free[source])
                    piece.busy, piece.holder, piece.cut = True, source, cut
                    piece.asked_at, piece.arrived_bytes, piece.looked_at = self._clock(), 0, None
                    self._away[id(piece)] = piece
                    return piece
                if not wait:
                    return None
                self._changed.wait(self._take_from_slow_sources(source))
            return None

    def _top(self, source: str) -> ReadPiece | None:
        """What ``source`` is to take next, and stays where it is."""
        free = self._free[source]
        while free:
            piece = free[0][-1]
            if not (piece.done or piece.busy) and source in piece.sources and not self._passed_over(source, piece):
                return piece
            heapq.heappop(free)  # whatever makes it this source's after all offers it again
        return None

    def _passed_over(self, source: str, piece: ReadPiece) -> bool:
        return source in self._slow and any(other not in self._slow for other in piece.sources)

    def _take_from_slow_sources(self, source: str) -> float | None:
        """``source`` has nothing to do: take from slow ones what it would be done with sooner. When to look again."""
        if source in self._slow:
            return None
        now, again = self._clock(), []
        for piece in list(self._away.values()):
            if piece.holder == source or source not in piece.sources:
                continue
            own_s = self._paces.get(source, _Pace()).expected_s(piece.size_bytes)
            since = now - piece.asked_at
            if since < _LATE_S + _TIMES * own_s:
                again.append(_LATE_S + _TIMES * own_s - since)
            elif self._needs_more(piece, now, _TIMES * own_s):
                self._take_from(piece)
            else:
                again.append(_LOOK_S)
        return min(again, default=None)

    def _needs_more(self, piece: ReadPiece, now: float, limit_s: float) -> bool:
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

    def _take_from(self, piece: ReadPiece) -> None:
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

    def start_streams(self, streams: int) -> None:
        self._serving = streams

    def stream_ended(self) -> None:
        """A stream takes nothing any more."""
        with self._changed:
            self._serving -= 1
            self._streaming.discard(threading.get_ident())
            self._changed.notify_all()

    def stream_connected(self) -> None:
        """This thread is connected."""
        with self._changed:
            self._streaming.add(threading.get_ident())

    def stream_idle(self) -> None:
        """This thread has nothing in its hands any more."""
        with self._changed:
            self._streaming.discard(threading.get_ident())
            self._changed.notify_all()

    def wait(self) -> None:
        """Until everything has come, or no stream is left. Who still tries to connect then is not waited for."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._serving or (self.error is None and not self._undone and not self._streaming)
            )

    def release_targets(self) -> None:
        """Of all targets: whoever still tries to connect keeps none of them open."""
        with self._changed:
            self._pieces = []
            self._free.clear()
            self._away.clear()

    def complete(self, source: str, piece: ReadPiece) -> None:
        with self._changed:
            measured = self._paces.get(source, _Pace())
            if piece.size_bytes >= measured.size_bytes / 2:
                self._paces[source] = _Pace(piece.size_bytes, self._clock() - piece.asked_at)
            piece.done = True
            self._came_back(piece)
            self._undone -= 1
            self.report.bytes_from[source] += piece.size_bytes
            for other in piece.sources:
                self._left[other] -= 1
            self._changed.notify_all()

    def requeue(self, piece: ReadPiece, *, without: str = "", because: PeerStoreError | None = None) -> None:
        with self._changed:
            self._came_back(piece)
            if because is not None:
                self.report.failed[piece.wish.shard.key] = because
            self._remove_source(without, piece)
            self._offer(piece)
            self._changed.notify_all()

    def reject_replica(self, source: str, piece: ReadPiece, error: ShardDamagedError) -> None:
        """This source's copy of the shard is not asked for again."""
        log.error("%s has a damaged copy: %s", source, error)
        with self._changed:
            key = piece.wish.shard.key
            self.report.rejected_replicas.append((source, key, str(error)))
            self.report.failed[key] = error
            self._came_back(piece)
            for other in self._pieces:
                if other.wish.shard.key == key:
                    self._remove_source(source, other)
            self._offer(piece)
            self._changed.notify_all()

    def drop_source(self, source: str, error: PeerStoreError) -> None:
        """This source does not answer any more."""
        log.warning("%s is not read from any more: %s", source, error)
        with self._changed:
            for piece in self._pieces:
                if self._remove_source(source, piece):
                    self.report.failed[piece.wish.shard.key] = error
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def finish(self) -> None:
        """What is left was delivered by nobody; reasons of shards that came in the end are forgotten."""
        left = {piece.wish.shard.key for piece in self._pieces if not piece.done}
        nobody = PeerUnreachableError("no node that is reached has it")
        self.report.failed = {key: self.report.failed.get(key, nobody) for key in left}

    def _came_back(self, piece: ReadPiece) -> None:
        piece.busy = False
        del self._away[id(piece)]

    def _offer(self, piece: ReadPiece) -> None:
        """Whoever can serve it may take it."""
        for place, source in enumerate(piece.sources):
            heapq.heappush(self._free[source], (len(piece.sources), place, next(self._numbers), piece))

    def _remove_source(self, source: str, piece: ReadPiece) -> bool:
        """``source`` does not serve it any more; whether it would have had to."""
        if piece.done or source not in piece.sources:
            return False
        piece.sources.remove(source)
        self._left[source] -= 1
        if not piece.busy:
            self._offer(piece)  # there are fewer to choose from: it is taken earlier
        return True


def _pieces(wish: ReadRequest) -> list[ReadPiece]:
    """Cut into requests of about one size; long ranges are cut at chunks, so that most of them are whole ones."""
    pieces: list[ReadPiece] = []
    spans: list[ReadSpan] = []
    size = 0
    step = max(1, _PIECE_BYTES // wish.shard.chunk_bytes) * wish.shard.chunk_bytes
    for joined in coalesce_targets(wish.targets):
        for span in split_span(joined, wish.shard.chunk_bytes, step):
            spans.append(span)
            size += span.stop - span.start
            if size >= _PIECE_BYTES or len(spans) >= _PIECE_RANGES:
                pieces.append(ReadPiece(wish, spans, size, list(wish.sources)))
                spans, size = [], 0
    if spans:
        pieces.append(ReadPiece(wish, spans, size, list(wish.sources)))
    return pieces


_AHEAD = 2
"""Pieces that are asked for on one connection before the first of them has come."""


class RangeReader:
    """Reads from the agents of one job. ``peer_of`` gives a node's agent."""

    def __init__(self, peer_of: Callable[[str], PeerClient], *, streams: int = 2) -> None:
        self._peer_of = peer_of
        self._streams = streams

    def read(self, wishes: Iterable[ReadRequest]) -> ReadResult:
        board = PieceQueue(wishes)
        threads = [
            threading.Thread(target=self._serve, args=(board, source), name="peerstore-pull", daemon=True)
            for source, count in board.pieces_per_source().items()
            for _ in range(min(self._streams, count))
        ]
        board.start_streams(len(threads))
        for thread in threads:
            thread.start()
        board.wait()
        board.finish()
        board.release_targets()
        if board.error is not None:
            raise board.error
        return board.report

    def _serve(self, board: PieceQueue, source: str) -> None:
        """One stream of one source, until there is nothing left that it could serve.

        A connection that breaks says little about the node behind it: as long as a new one gets anywhere, it goes on.
        """
        try:
            self._serve_all(board, source)
        finally:
            board.stream_ended()

    def _serve_all(self, board: PieceQueue, source: str) -> None:
        fresh = False
        try:
            while True:
                before = board.bytes_from(source)
                lost = self._serve_once(board, source, fresh=fresh)
                board.stream_idle()
                if lost is None or not board.wait_for_work(source):
                    return
                if fresh and board.bytes_from(source) == before:
                    raise lost
                fresh = True
        except PeerStoreError as error:
            board.drop_source(source, error)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever pulls
            board.fail(error)

    def _serve_once(self, board: PieceQueue, source: str, *, fresh: bool) -> PeerUnreachableError | None:
        """Why the connection broke; nothing of what it was bringing is held by that any more."""
        try:
            with self._peer_of(source).connection(fresh=fresh) as line:
                board.stream_connected()
                _Stream(board, source, line).run()
        except PeerUnreachableError as error:
            return PeerUnreachableError(str(error))
        return None


class _Stream:
    """One connection to one source. The next piece is asked for before this one has come: the source sends it while
    this one is compared.
    """

    def __init__(self, board: PieceQueue, source: str, line: PeerConnection) -> None:
        self._board = board
        self._source = source
        self._line = line
        self._asked: deque[ReadPiece] = deque()
        self._doubtful: deque[tuple[ReadPiece, ShardDamagedError]] = deque()
        """Came, and not as they were sealed. The source is asked about them once nothing else is on the way."""

    def run(self) -> None:
        try:
            while True:
                self._ask()
                if self._asked:
                    self._receive_next()
                elif self._doubtful:
                    self._ask_holder_to_verify()
                else:
                    return
        finally:
            for piece in [*self._asked, *(piece for piece, _ in self._doubtful)]:
                self._board.requeue(piece)

    def _ask(self) -> None:
        while len(self._asked) < _AHEAD and not self._doubtful:
            piece = self._board.take(self._source, wait=not self._asked, cut=self._line.close)
            if piece is None:
                return
            self._asked.append(piece)
            record = piece.wish.shard
            ranges = tuple((span.start, span.stop) for span in piece.spans)
            self._line.send("read_ranges", ReadRanges(record.key, checksums.chunk_checksum(record.checksums), ranges))

    def _receive_next(self) -> None:
        """The first of the pieces that were asked for: what comes, comes in that order."""
        piece = self._asked[0]
        try:
            self._receive(piece)
        except ShardDamagedError as error:
            self._doubtful.append((piece, error))
        except (PeerUnreachableError, ProtocolError):
            raise
        except PeerStoreError as error:
            self._board.requeue(piece, without=self._source, because=error)
        else:
            self._board.complete(self._source, piece)
        self._asked.popleft()

    def _receive(self, piece: ReadPiece) -> None:
        compared: list[_Comparison] = []

        def watch(sent: RangeDigests) -> _Comparison:
            compared.append(_Comparison(piece, sent))
            return compared[0]

        self._line.receive_response(
            "read_ranges", RangeDigests, into=[view for span in piece.spans for view in span.views], watch=watch
        )
        if compared[0].problem:
            raise ShardDamagedError(compared[0].problem)

    def _ask_holder_to_verify(self) -> None:
        piece, error = self._doubtful[0]
        try:
            refused = self._source in piece.doubted or self._damaged_there(piece)
        except (PeerUnreachableError, ProtocolError):
            raise
        except PeerStoreError as problem:
            self._board.requeue(piece, without=self._source, because=problem)
        else:
            if refused:
                self._board.reject_replica(self._source, piece, error)
            else:
                log.warning("%s is asked again for what changed on the way: %s", self._source, error)
                piece.doubted.add(self._source)
                self._board.requeue(piece)
        self._doubtful.popleft()

    def _damaged_there(self, piece: ReadPiece) -> bool:
        """Have the holder look at its copy itself: it may be good and the way to it bad."""
        size = piece.wish.shard.chunk_bytes
        chunks = tuple((span.start // size, -(-span.stop // size)) for span in piece.spans[:64])
        try:
            damaged: bool = self._line.call("verify_chunks", VerifyChunks(piece.wish.shard.key, chunks), bool)
        except ShardNotFoundError:  # it has looked, and dropped it
            return True
        return damaged


class _Comparison:
    """Compares a piece while it comes: whole chunks with the seal's checksums, ends of chunks with what their holder
    says of them.
    """

    def __init__(self, piece: ReadPiece, sent: RangeDigests) -> None:
        self._piece = piece
        self._expected = _expected(piece, sent)
        self._next = next(self._expected, None)
        self.problem = ""

    def __call__(self, size_bytes: int) -> None:
        self._piece.arrived_bytes = size_bytes
        while self._next is not None and self._next.end <= size_bytes:
            if not self.problem and span_digest(self._next.span) != self._next.digest:
                self.problem = self._next.problem
            self._next = next(self._expected, None)


class _Expected(NamedTuple):
    end: int
    """Of the piece's bytes, when the span's last one is there."""
    span: ReadSpan
    digest: bytes
    problem: str


def _expected(piece: ReadPiece, sent: RangeDigests) -> Iterator[_Expected]:
    record = piece.wish.shard
    size, chunk_bytes = 0, record.chunk_bytes
    digests = iter(range(0, len(sent.digests), 8))
    for span in piece.spans:
        if is_chunk_aligned(span.start, span.stop, size_bytes=record.size_bytes, chunk_bytes=chunk_bytes):
            for chunk in split_span(span, chunk_bytes, chunk_bytes):
                number = chunk.start // chunk_bytes
                size += chunk.stop - chunk.start
                problem = f"chunk {number} of {record.key} differs from what was sealed"
                yield _Expected(size, chunk, record.checksums[8 * number : 8 * number + 8], problem)
        else:
            at = next(digests, len(sent.digests))
            size += span.stop - span.start
            problem = f"bytes {span.start} to {span.stop} of {record.key} changed on the way"
            yield _Expected(size, span, sent.digests[at : at + 8], problem)
