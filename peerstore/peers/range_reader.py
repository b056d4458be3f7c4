"""Ranged reads from many nodes at once: coalesce, split, assign to the fastest source, verify.

Every source has its own streams, which take the next piece that it can serve, so a fast source serves more. Pieces that
a source did not deliver go to other sources; delivered pieces stay. A piece is done when it is verified. Complete
chunks are verified against the seal's checksums, other ranges against a digest of bytes that the holder has verified.

Adjacent targets in the shard are requested as one span, wherever their bytes are stored. A span consists mostly of
complete chunks, which the holder sends without a check.
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
from peerstore.shard_records import ShardKey, is_chunk_aligned

log = logging.getLogger(__name__)


_GAP_BYTES = 64
"""Largest gap between two targets that is read along with them: padding between aligned tensors."""


class ReadTarget(NamedTuple):
    """Bytes ``[start, stop)`` of a shard, and the memory for them."""

    start: int
    stop: int
    view: memoryview


class ReadSpan(NamedTuple):
    """Bytes ``[start, stop)`` of a shard, and the views that they fill in order."""

    start: int
    stop: int
    views: tuple[memoryview, ...]


def coalesce_targets(targets: Iterable[ReadTarget]) -> list[ReadSpan]:
    """Return adjacent targets as one span; a small gap between two targets is read into a scratch view."""
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
    """Yield the start up to the first chunk, whole chunks ``step_bytes`` at a time, and the rest."""
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
    """Return the xxh3-64 of the span's bytes, little-endian."""
    if len(span.views) == 1:
        return xxhash.xxh3_64_digest(span.views[0])[::-1]
    state = xxhash.xxh3_64()
    for view in span.views:
        state.update(view)
    return state.digest()[::-1]


_PIECE_BYTES = 4 << 20
_PIECE_RANGES = 512
_LATE_S = 2.0
"""Seconds in flight before which a piece never counts as late."""
_SLOW_FACTOR = 4.0
"""A source is slow if a piece takes this many times as long as another source would need."""
_PROGRESS_S = 0.5
"""Seconds between two checks of a late piece's progress."""
_UNMEASURED_BYTES_PER_S = 4 << 20
"""Expected rate of a source for bytes beyond its measured pieces."""


class ReadableShard(Protocol):
    """The fields of a shard that a reader needs."""

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
    """Targets within one shard, and its holders, the preferred source first."""

    shard: ReadableShard
    targets: Sequence[ReadTarget]
    sources: Sequence[str]


@dataclass
class ReadResult:
    """Bytes read from each source, and the failures."""

    bytes_from: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[ShardKey, PeerStoreError] = field(default_factory=dict)
    """Shards with targets that no source delivered, and the last error."""
    rejected_replicas: list[tuple[str, ShardKey, str]] = field(default_factory=list)
    """Damaged copies: the node, the shard and the problem."""


@dataclass
class ReadPiece:
    """One request to a source: spans of one shard, and the state of their delivery."""

    wish: ReadRequest
    spans: list[ReadSpan]
    size_bytes: int
    sources: list[str]
    busy: bool = False
    done: bool = False
    doubted: set[str] = field(default_factory=set)
    """Sources whose response did not match although their copy is intact: they get one more attempt."""
    holder: str = ""
    """The source of the last request."""
    asked_at: float = 0.0
    arrived_bytes: int = 0
    looked_at: float | None = None
    """Time of the last progress check of a late piece that seemed to arrive in time."""
    looked_bytes: int = 0
    """Bytes that had arrived at the last progress check."""
    cut: Callable[[], object] = lambda: None
    """Closes the connection that the piece is expected on."""


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
    """The pieces of one read, and the sources that can still serve them. Thread-safe.

    A source that takes much longer for a piece than another one would need is slow. Its connection is closed, so that
    none of its bytes can arrive later, and the other source gets the piece. Pieces without another source still come
    from it.
    """

    def __init__(self, wishes: Iterable[ReadRequest], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slow: set[str] = set()
        self._paces: dict[str, _Pace] = {}
        self._serving = 0
        self._streaming: set[int] = set()
        """Ids of connected threads, which may hold views of targets."""
        self._in_flight: dict[int, ReadPiece] = {}
        """Pieces that were requested from a source."""
        self._pieces = [piece for wish in wishes for piece in _pieces(wish)]
        self._left: dict[str, int] = defaultdict(int)
        """Number of undelivered pieces that each source could serve."""
        self._free: dict[str, list[tuple[int, int, int, ReadPiece]]] = defaultdict(list)
        """Heap of the next pieces for each source; some of them are taken already."""
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
        """Return the number of undelivered pieces that each source could serve."""
        return dict(self._left)

    def bytes_from(self, source: str) -> int:
        with self._changed:
            return self.report.bytes_from.get(source, 0)

    def wait_for_work(self, source: str) -> bool:
        """Wait for a piece that ``source`` can serve; return ``False`` if there will be none."""
        with self._changed:
            while self.error is None and self._left[source]:
                if self._next_piece(source) is not None:
                    return True
                self._changed.wait()
            return False

    def take(self, source: str, *, wait: bool, cut: Callable[[], object] = lambda: None) -> ReadPiece | None:
        """Return a piece for ``source``: pieces with the fewest sources first, then those that prefer it.

        With ``wait``, wait while other sources hold pieces that may be returned. ``cut`` closes the connection that the
        piece is expected on.
        """
        with self._changed:
            while self.error is None and self._left[source]:
                piece = self._next_piece(source)
                if piece is not None:
                    heapq.heappop(self._free[source])
                    piece.busy, piece.holder, piece.cut = True, source, cut
                    piece.asked_at, piece.arrived_bytes, piece.looked_at = self._clock(), 0, None
                    self._in_flight[id(piece)] = piece
                    return piece
                if not wait:
                    return None
                self._changed.wait(self._take_from_slow_sources(source))
            return None

    def _next_piece(self, source: str) -> ReadPiece | None:
        """Return the next piece for ``source`` without removing it, or ``None``."""
        free = self._free[source]
        while free:
            piece = free[0][-1]
            if not (piece.done or piece.busy) and source in piece.sources and not self._yields_to_others(source, piece):
                return piece
            heapq.heappop(free)  # if the source can serve it later, it is offered again
        return None

    def _yields_to_others(self, source: str, piece: ReadPiece) -> bool:
        return source in self._slow and any(other not in self._slow for other in piece.sources)

    def _take_from_slow_sources(self, source: str) -> float | None:
        """Take pieces from slow sources that the idle ``source`` would deliver sooner.

        Return the seconds until the next check, or ``None`` if no piece can become late.
        """
        if source in self._slow:
            return None
        now, again = self._clock(), []
        for piece in list(self._in_flight.values()):
            if piece.holder == source or source not in piece.sources:
                continue
            own_s = self._paces.get(source, _Pace()).expected_s(piece.size_bytes)
            since = now - piece.asked_at
            if since < _LATE_S + _SLOW_FACTOR * own_s:
                again.append(_LATE_S + _SLOW_FACTOR * own_s - since)
            elif self._will_be_late(piece, now, _SLOW_FACTOR * own_s):
                self._cut_off(piece)
            else:
                again.append(_PROGRESS_S)
        return min(again, default=None)

    def _will_be_late(self, piece: ReadPiece, now: float, limit_s: float) -> bool:
        """Return whether the rest of a late piece will exceed the limit, at its overall or its recent rate."""
        left = piece.size_bytes - piece.arrived_bytes
        if left * (now - piece.asked_at) > piece.arrived_bytes * limit_s:
            return True
        if piece.looked_at is not None:
            passed_s = now - piece.looked_at
            if passed_s < _PROGRESS_S:
                return False
            if left * passed_s > (piece.arrived_bytes - piece.looked_bytes) * limit_s:
                return True
        piece.looked_at, piece.looked_bytes = now, piece.arrived_bytes
        return False

    def _cut_off(self, piece: ReadPiece) -> None:
        log.warning(
            "%s is slow: %d of %d bytes in %.1f s; trying other nodes",
            *(piece.holder, piece.arrived_bytes, piece.size_bytes, self._clock() - piece.asked_at),
        )
        self._slow.add(piece.holder)
        piece.asked_at = self._clock()  # the piece is free after its connection has ended
        for other in self._pieces:  # the free pieces may have only slow sources now
            if not (other.done or other.busy):
                self._offer(other)
        piece.cut()

    def start_streams(self, streams: int) -> None:
        self._serving = streams

    def stream_ended(self) -> None:
        """Record that the calling stream takes no more pieces."""
        with self._changed:
            self._serving -= 1
            self._streaming.discard(threading.get_ident())
            self._changed.notify_all()

    def stream_connected(self) -> None:
        """Record that the calling thread is connected."""
        with self._changed:
            self._streaming.add(threading.get_ident())

    def stream_idle(self) -> None:
        """Record that the calling thread no longer holds views of targets."""
        with self._changed:
            self._streaming.discard(threading.get_ident())
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all pieces are delivered or no stream remains, not for threads that still connect."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._serving or (self.error is None and not self._undone and not self._streaming)
            )

    def release_targets(self) -> None:
        """Drop all views of targets, which threads that still connect would hold."""
        with self._changed:
            self._pieces = []
            self._free.clear()
            self._in_flight.clear()

    def complete(self, source: str, piece: ReadPiece) -> None:
        with self._changed:
            measured = self._paces.get(source, _Pace())
            if piece.size_bytes >= measured.size_bytes / 2:
                self._paces[source] = _Pace(piece.size_bytes, self._clock() - piece.asked_at)
            piece.done = True
            self._return_piece(piece)
            self._undone -= 1
            self.report.bytes_from[source] += piece.size_bytes
            for other in piece.sources:
                self._left[other] -= 1
            self._changed.notify_all()

    def requeue(self, piece: ReadPiece, *, without: str = "", because: PeerStoreError | None = None) -> None:
        with self._changed:
            self._return_piece(piece)
            if because is not None:
                self.report.failed[piece.wish.shard.key] = because
            self._remove_source(without, piece)
            self._offer(piece)
            self._changed.notify_all()

    def reject_replica(self, source: str, piece: ReadPiece, error: ShardDamagedError) -> None:
        """Record that this source's copy of the shard is damaged, and do not read it again."""
        log.error("%s has a damaged copy: %s", source, error)
        with self._changed:
            key = piece.wish.shard.key
            self.report.rejected_replicas.append((source, key, str(error)))
            self.report.failed[key] = error
            self._return_piece(piece)
            for other in self._pieces:
                if other.wish.shard.key == key:
                    self._remove_source(source, other)
            self._offer(piece)
            self._changed.notify_all()

    def drop_source(self, source: str, error: PeerStoreError) -> None:
        """Stop reading from this source."""
        log.warning("stopped reading from %s: %s", source, error)
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
        """Record an error for every shard with undelivered pieces, and drop the errors of complete shards."""
        left = {piece.wish.shard.key for piece in self._pieces if not piece.done}
        no_source = PeerUnreachableError("no node that is reached has it")
        self.report.failed = {key: self.report.failed.get(key, no_source) for key in left}

    def _return_piece(self, piece: ReadPiece) -> None:
        piece.busy = False
        del self._in_flight[id(piece)]

    def _offer(self, piece: ReadPiece) -> None:
        """Add the piece to the heaps of all its sources."""
        for place, source in enumerate(piece.sources):
            heapq.heappush(self._free[source], (len(piece.sources), place, next(self._numbers), piece))

    def _remove_source(self, source: str, piece: ReadPiece) -> bool:
        """Remove ``source`` from the piece; return ``False`` if the piece is done or has no such source."""
        if piece.done or source not in piece.sources:
            return False
        piece.sources.remove(source)
        self._left[source] -= 1
        if not piece.busy:
            self._offer(piece)  # fewer sources remain, so its rank changes
        return True


def _pieces(wish: ReadRequest) -> list[ReadPiece]:
    """Split the targets at chunk borders into requests of about one size."""
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


_PIPELINE_DEPTH = 2
"""Number of pieces in flight on one connection."""


class RangeReader:
    """Reader of shards from the agents of one job. ``peer_of`` returns a node's client."""

    def __init__(self, peer_of: Callable[[str], PeerClient], *, streams: int = 2) -> None:
        self._peer_of = peer_of
        self._streams = streams

    def read(self, wishes: Iterable[ReadRequest]) -> ReadResult:
        queue = PieceQueue(wishes)
        threads = [
            threading.Thread(target=self._serve, args=(queue, source), name="peerstore-pull", daemon=True)
            for source, count in queue.pieces_per_source().items()
            for _ in range(min(self._streams, count))
        ]
        queue.start_streams(len(threads))
        for thread in threads:
            thread.start()
        queue.wait()
        queue.finish()
        queue.release_targets()
        if queue.error is not None:
            raise queue.error
        return queue.report

    def _serve(self, queue: PieceQueue, source: str) -> None:
        """Serve one stream of a source until no piece remains for it.

        A broken connection says little about the node. The stream reconnects after it, until a new connection delivers
        nothing.
        """
        try:
            self._serve_all(queue, source)
        finally:
            queue.stream_ended()

    def _serve_all(self, queue: PieceQueue, source: str) -> None:
        fresh = False
        try:
            while True:
                before = queue.bytes_from(source)
                lost = self._serve_once(queue, source, fresh=fresh)
                queue.stream_idle()
                if lost is None or not queue.wait_for_work(source):
                    return
                if fresh and queue.bytes_from(source) == before:
                    raise lost
                fresh = True
        except PeerStoreError as error:
            queue.drop_source(source, error)
        except BaseException as error:  # noqa: BLE001 - raised again by the reading thread
            queue.fail(error)

    def _serve_once(self, queue: PieceQueue, source: str, *, fresh: bool) -> PeerUnreachableError | None:
        """Serve pieces on one connection; return the error that broke it.

        The returned error references no target.
        """
        try:
            with self._peer_of(source).connection(fresh=fresh) as line:
                queue.stream_connected()
                _Stream(queue, source, line).run()
        except PeerUnreachableError as error:
            return PeerUnreachableError(str(error))
        return None


class _Stream:
    """One connection to one source.

    The next piece is requested before the previous one has arrived, so that the source sends it during the
    verification.
    """

    def __init__(self, queue: PieceQueue, source: str, line: PeerConnection) -> None:
        self._queue = queue
        self._source = source
        self._line = line
        self._asked: deque[ReadPiece] = deque()
        self._doubtful: deque[tuple[ReadPiece, ShardDamagedError]] = deque()
        """Pieces that did not match the seal. The source verifies them after all other pieces have arrived."""

    def run(self) -> None:
        try:
            while True:
                self._request_pieces()
                if self._asked:
                    self._receive_next()
                elif self._doubtful:
                    self._ask_holder_to_verify()
                else:
                    return
        finally:
            for piece in [*self._asked, *(piece for piece, _ in self._doubtful)]:
                self._queue.requeue(piece)

    def _request_pieces(self) -> None:
        while len(self._asked) < _PIPELINE_DEPTH and not self._doubtful:
            piece = self._queue.take(self._source, wait=not self._asked, cut=self._line.close)
            if piece is None:
                return
            self._asked.append(piece)
            record = piece.wish.shard
            ranges = tuple((span.start, span.stop) for span in piece.spans)
            self._line.send("read_ranges", ReadRanges(record.key, checksums.chunk_checksum(record.checksums), ranges))

    def _receive_next(self) -> None:
        """Receive the oldest requested piece: responses arrive in the order of the requests."""
        piece = self._asked[0]
        try:
            self._receive(piece)
        except ShardDamagedError as error:
            self._doubtful.append((piece, error))
        except (PeerUnreachableError, ProtocolError):
            raise
        except PeerStoreError as error:
            self._queue.requeue(piece, without=self._source, because=error)
        else:
            self._queue.complete(self._source, piece)
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
            refused = self._source in piece.doubted or self._is_damaged_at_source(piece)
        except (PeerUnreachableError, ProtocolError):
            raise
        except PeerStoreError as problem:
            self._queue.requeue(piece, without=self._source, because=problem)
        else:
            if refused:
                self._queue.reject_replica(self._source, piece, error)
            else:
                log.warning("requesting bytes from %s again because they changed in transit: %s", self._source, error)
                piece.doubted.add(self._source)
                self._queue.requeue(piece)
        self._doubtful.popleft()

    def _is_damaged_at_source(self, piece: ReadPiece) -> bool:
        """Request that the holder verify its copy; return whether it is damaged there."""
        size = piece.wish.shard.chunk_bytes
        chunks = tuple((span.start // size, -(-span.stop // size)) for span in piece.spans[:64])
        try:
            damaged: bool = self._line.call("verify_chunks", VerifyChunks(piece.wish.shard.key, chunks), bool)
        except ShardNotFoundError:  # the holder verified its copy and dropped it
            return True
        return damaged


class _Comparison:
    """Verification of a piece while it arrives.

    Whole chunks are compared with the seal's checksums, other bytes with the holder's digests.
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
    """Offset in the piece's bytes at which the span is complete."""
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
                problem = f"chunk {number} of {record.key} does not match its checksum"
                yield _Expected(size, chunk, record.checksums[8 * number : 8 * number + 8], problem)
        else:
            at = next(digests, len(sent.digests))
            size += span.stop - span.start
            problem = f"bytes {span.start} to {span.stop} of {record.key} changed on the way"
            yield _Expected(size, span, sent.digests[at : at + 8], problem)
