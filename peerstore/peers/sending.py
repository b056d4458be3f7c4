"""One shard on its way to another node: offered, sent where it is missing, acknowledged when all of it was compared."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peerstore.bandwidth import Bandwidth
from peerstore.crashpoints import reach
from peerstore.errors import PeerStoreError, ShardDamagedError
from peerstore.peers.calling import Line, Peer
from peerstore.peers.messages import Abort, Chunk, Commit, Flush, Offer, PutBlob, Wanted
from peerstore.records import Base, ShardRecord
from peerstore.transport.seam import FileSlice

_COMMIT_S = 120.0
_FLUSH_CHUNKS = 64
"""Chunks between two looks at what arrived damaged."""


@dataclass(frozen=True)
class Pushed:
    """What one push took."""

    sent_bytes: int
    skipped_bytes: int
    """Bytes the other node had already."""
    seconds: float


@dataclass
class _Work:
    """Chunks that are still to be sent, handed out to the streams one run at a time."""

    runs: list[tuple[int, int]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    bad: list[int] = field(default_factory=list)
    failure: BaseException | None = None

    def next(self) -> tuple[int, int] | None:
        with self.lock:
            if not self.runs or self.failure is not None:
                return None
            first, stop = self.runs.pop()
            if stop - first > _FLUSH_CHUNKS:
                self.runs.append((first + _FLUSH_CHUNKS, stop))
                stop = first + _FLUSH_CHUNKS
            return first, stop


class Push:
    """Sends one shard to one node; ``run`` returns when the copy counts, or raises why it does not."""

    def __init__(
        self,
        peer: Peer,
        record: ShardRecord,
        fd: int,
        *,
        pace: Bandwidth,
        streams: int = 2,
        blob: Callable[[str], bytes] = lambda _name: b"",
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._peer = peer
        self._record = record
        self._fd = fd
        self._pace = pace
        self._streams = streams
        self._blob = blob
        self._stopped = stopped

    def run(
        self, *, holders: tuple[str, ...], whole: bool, blobs: tuple[str, ...] = (), base: Base | None = None
    ) -> Pushed:
        began = time.monotonic()
        offer = Offer(self._record, holders, whole, blobs, base)
        wanted: Wanted = self._peer.call("offer", offer, Wanted, timeout_s=_COMMIT_S)
        for name in wanted.blobs:
            self._peer.call("put_blob", PutBlob(name), type(None), payload=[memoryview(self._blob(name))])
        if not wanted.transfer:
            return Pushed(0, self._record.size_bytes, time.monotonic() - began)
        reach("peer.offered")
        sent = self._bytes_of(wanted.missing)
        try:
            self._send(wanted.transfer, list(wanted.missing))
            self._peer.call("commit", Commit(wanted.transfer), type(None), timeout_s=_COMMIT_S)
        except BaseException:
            with contextlib.suppress(PeerStoreError):
                self._peer.call("abort", Abort(wanted.transfer), type(None), timeout_s=5.0)
            raise
        return Pushed(sent, self._record.size_bytes - sent, time.monotonic() - began)

    def _bytes_of(self, runs: Sequence[tuple[int, int]]) -> int:
        size, total = self._record.chunk_bytes, self._record.size_bytes
        return sum(min(stop * size, total) - first * size for first, stop in runs)

    def _send(self, transfer: str, runs: list[tuple[int, int]]) -> None:
        bad = self._send_all(transfer, runs)
        # The way may be bad and the bytes good: what arrived damaged is sent once more.
        if bad and self._send_all(transfer, [(number, number + 1) for number in bad]):
            raise ShardDamagedError(f"{self._record.key}: {len(bad)} chunks arrived damaged twice, first: {bad[0]}")

    def _send_all(self, transfer: str, runs: list[tuple[int, int]]) -> list[int]:
        work = _Work(sorted(runs, reverse=True))
        many = min(self._streams, sum(-(-(stop - first) // _FLUSH_CHUNKS) for first, stop in runs))
        helpers = [
            threading.Thread(target=self._stream, args=(transfer, work), name="peerstore-push", daemon=True)
            for _ in range(many - 1)
        ]
        for thread in helpers:
            thread.start()
        self._stream(transfer, work)
        for thread in helpers:
            thread.join()
        if work.failure is not None:
            raise work.failure
        return work.bad

    def _stream(self, transfer: str, work: _Work) -> None:
        """Runs of chunks over one connection, until there are no more."""
        try:
            with self._peer.line() as line:
                while (run := work.next()) is not None:
                    for number in range(*run):
                        self._send_chunk(line, transfer, number)
                    bad = line.ask("flush", Flush(transfer), tuple[int, ...])
                    with work.lock:
                        work.bad += bad
        except BaseException as error:  # noqa: BLE001 - raised again by whoever started the streams
            with work.lock:
                work.failure = work.failure or error

    def _send_chunk(self, line: Line, transfer: str, number: int) -> None:
        if self._stopped():
            raise PeerStoreError("this agent is stopping")
        start = number * self._record.chunk_bytes
        size = min(self._record.chunk_bytes, self._record.size_bytes - start)
        self._pace.take(size)
        reach("peer.sending")
        line.tell("chunk", Chunk(transfer, number), [FileSlice(self._fd, start, size)])
