"""The queue of pieces for several sources: each piece arrives once, even if sources fail."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from peerstore.errors import PeerUnreachableError, ShardDamagedError
from peerstore.peers.range_reader import PieceQueue, ReadRequest, ReadTarget
from peerstore.shard_records import ShardKey

MIB = 1 << 20
SOURCES = ("n1", "n2", "n3")
LOST = PeerUnreachableError("it is gone")
BAD = ShardDamagedError("it is damaged")


def wish(part, size, sources):
    record = SimpleNamespace(key=ShardKey("job", 1, 1, "a", 0, part), size_bytes=size, chunk_bytes=MIB, checksums=b"")
    return ReadRequest(record, [ReadTarget(0, size, memoryview(bytearray(size)))], list(sources))


holders = st.lists(st.sampled_from(SOURCES), unique=True)
actions = st.lists(
    st.tuples(st.sampled_from(["take", "done", "put back", "without", "refuse", "lose"]), st.sampled_from(SOURCES)),
    max_size=60,
)


@given(st.lists(holders, min_size=1, max_size=4), st.integers(1, 9), actions)
def test_every_piece_is_delivered_once_or_named_as_missing(held, mebibytes, steps):
    board = PieceQueue(wish(part, mebibytes * MIB, sources) for part, sources in enumerate(held))
    pieces = list(board._pieces)
    taken = {source: [] for source in SOURCES}
    lost = set()
    came = Counter()

    def take(source):
        piece = board.take(source, wait=False)
        if piece is not None:
            assert source in piece.sources
            assert not any(piece is other for mine in taken.values() for other in mine)
            taken[source].append(piece)
        return piece

    def done(source):
        piece = taken[source].pop()
        came[id(piece)] += 1
        board.complete(source, piece)

    for kind, source in steps:
        if kind == "lose":
            lost.add(source)
            while taken[source]:  # a closed connection returns its pieces
                board.requeue(taken[source].pop())
            board.drop_source(source, LOST)
        elif kind == "take" and source not in lost:
            take(source)
        elif taken[source]:
            if kind == "done":
                done(source)
            elif kind == "put back":
                board.requeue(taken[source].pop())
            elif kind == "without":
                board.requeue(taken[source].pop(), without=source, because=LOST)
            elif kind == "refuse":
                board.reject_replica(source, taken[source].pop(), BAD)
    for source in SOURCES:
        while taken[source]:
            done(source)
    for source in SOURCES:
        while source not in lost and take(source):
            done(source)
        assert not board.wait_for_work(source)
        assert board.take(source, wait=True) is None
    board.finish()

    assert set(came.values()) <= {1}
    missing = [piece for piece in pieces if id(piece) not in came]
    assert all(not piece.sources for piece in missing)
    assert set(board.report.failed) == {piece.wish.shard.key for piece in missing}
    assert sum(board.report.bytes_from.values()) == sum(p.size_bytes for p in pieces if id(p) in came)


def test_rarest_pieces_are_read_first_then_preferred_sources():
    board = PieceQueue([wish(0, MIB, ["n1", "n2"]), wish(1, MIB, ["n2", "n1"]), wish(2, MIB, ["n2"])])
    assert [board.take("n2", wait=False).wish.shard.key.part for _ in range(3)] == [2, 1, 0]


class Hand:
    """A source's stream: the pieces assigned to it, and a connection that can be cut."""

    def __init__(self, board, source):
        self.board, self.source, self.pieces, self.cuts = board, source, [], 0

    def take(self, *, wait=False):
        piece = self.board.take(self.source, wait=wait, cut=self.cut)
        self.pieces += [piece] if piece else []
        return piece

    def cut(self):
        """Cut the connection: its reader notices on a thread of its own."""
        self.cuts += 1
        threading.Thread(target=self.put_back).start()

    def put_back(self):
        while self.pieces:
            self.board.requeue(self.pieces.pop())

    def done(self):
        self.board.complete(self.source, self.pieces.pop())


def slow_and_quick(sizes, *, clock):
    board = PieceQueue((wish(part, size, ["slow", "quick"]) for part, size in enumerate(sizes)), clock=clock)
    return board, Hand(board, "slow"), Hand(board, "quick")


def test_idle_source_takes_over_pieces_of_a_slow_one():
    now = [0.0]
    board, slow, quick = slow_and_quick([MIB, MIB, MIB], clock=lambda: now[0])
    kept = slow.take()
    quick.take()
    now[0] = 1.0
    quick.done()
    now[0] = 20.0
    kept.arrived_bytes = MIB // 100
    quick.take()  # other pieces are still unread
    quick.done()
    assert slow.cuts == 0
    assert quick.take(wait=True) is kept
    assert slow.cuts == 1
    quick.done()
    assert slow.take(wait=True) is None
    assert board.report.bytes_from == {"quick": 3 * MIB}


def test_source_close_to_its_end_keeps_its_pieces():
    now = [0.0]
    board, slow, quick = slow_and_quick([MIB, MIB], clock=lambda: now[0])
    kept = slow.take()
    quick.take()
    now[0] = 8.0
    quick.done()
    now[0] = 40.0
    kept.arrived_bytes = MIB * 9 // 10
    assert board._take_from_slow_sources("quick") is not None
    assert slow.cuts == 0


def test_source_stalled_close_to_its_end_loses_its_pieces():
    now = [0.0]
    board, slow, quick = slow_and_quick([MIB, MIB], clock=lambda: now[0])
    kept = slow.take()
    quick.take()
    now[0] = 0.01
    quick.done()
    kept.arrived_bytes = MIB - 1000  # nearly all of it, at once
    now[0] = 3.0
    again = board._take_from_slow_sources("quick")
    assert slow.cuts == 0
    now[0] += again
    kept.arrived_bytes += 1
    board._take_from_slow_sources("quick")
    assert slow.cuts == 1


def test_small_last_piece_does_not_hide_a_slow_source():
    """The last piece of a shard may have 5 bytes, and its answer waits for the piece before it."""
    now = [0.0]
    board, slow, quick = slow_and_quick([4 * MIB, 4 * MIB, 5], clock=lambda: now[0])
    stalled = slow.take()
    large, small = quick.take(), quick.take()
    assert (large.size_bytes, small.size_bytes) == (4 * MIB, 5)
    now[0] = 0.1
    board.complete("quick", large)
    now[0] = 0.12
    board.complete("quick", small)
    stalled.arrived_bytes = MIB
    now[0] = 3.0
    board._take_from_slow_sources("quick")
    assert slow.cuts == 1


def test_source_that_served_only_a_small_piece_replaces_a_slow_one():
    now = [0.0]
    board, slow, quick = slow_and_quick([4 * MIB, 5], clock=lambda: now[0])
    stalled = slow.take()
    quick.take()
    now[0] = 0.1
    quick.done()
    stalled.arrived_bytes = MIB
    now[0] = 10.0
    board._take_from_slow_sources("quick")
    assert slow.cuts == 1


def test_slow_source_delivers_pieces_that_only_it_has():
    now = [0.0]
    board, slow, quick = slow_and_quick([MIB, MIB], clock=lambda: now[0])
    kept = slow.take()
    quick.take()
    now[0] = 1.0
    quick.done()
    now[0] = 60.0
    assert quick.take(wait=True) is kept
    assert slow.take() is None  # it is skipped while another source exists
    quick.put_back()
    board.drop_source("quick", LOST)
    assert slow.take(wait=True) is kept
    slow.done()
    assert not board.wait_for_work("slow")
