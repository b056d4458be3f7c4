"""Who reads which piece from whom: each piece comes once, whatever becomes of its sources."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from peerstore.errors import PeerUnreachableError, ShardDamagedError
from peerstore.peers.board import Board, Wish
from peerstore.peers.spans import Target
from peerstore.records import ShardKey

MIB = 1 << 20
SOURCES = ("n1", "n2", "n3")
LOST = PeerUnreachableError("it is gone")
BAD = ShardDamagedError("it is damaged")


def wish(part, size, sources):
    record = SimpleNamespace(key=ShardKey("job", 1, 1, "a", 0, part), size_bytes=size, chunk_bytes=MIB, checksums=b"")
    return Wish(record, [Target(0, size, memoryview(bytearray(size)))], list(sources))


holders = st.lists(st.sampled_from(SOURCES), unique=True)
actions = st.lists(
    st.tuples(st.sampled_from(["take", "done", "put back", "without", "refuse", "lose"]), st.sampled_from(SOURCES)),
    max_size=60,
)


@given(st.lists(holders, min_size=1, max_size=4), st.integers(1, 9), actions)
def test_every_piece_comes_once_or_is_named_as_missing(held, mebibytes, steps):
    board = Board(wish(part, mebibytes * MIB, sources) for part, sources in enumerate(held))
    pieces = list(board._pieces)
    taken = {source: [] for source in SOURCES}
    lost = set()
    came = Counter()

    def take(source):
        piece = board.next(source, wait=False)
        if piece is not None:
            assert source in piece.sources
            assert not any(piece is other for mine in taken.values() for other in mine)
            taken[source].append(piece)
        return piece

    def done(source):
        piece = taken[source].pop()
        came[id(piece)] += 1
        board.done(source, piece)

    for kind, source in steps:
        if kind == "lose":
            lost.add(source)
            while taken[source]:  # a connection that ends puts back what it had
                board.put_back(taken[source].pop())
            board.lose(source, LOST)
        elif kind == "take" and source not in lost:
            take(source)
        elif taken[source]:
            if kind == "done":
                done(source)
            elif kind == "put back":
                board.put_back(taken[source].pop())
            elif kind == "without":
                board.put_back(taken[source].pop(), without=source, because=LOST)
            elif kind == "refuse":
                board.refuse(source, taken[source].pop(), BAD)
    for source in SOURCES:
        while taken[source]:
            done(source)
    for source in SOURCES:
        while source not in lost and take(source):
            done(source)
        assert not board.wants(source)
        assert board.next(source, wait=True) is None
    board.give_up()

    assert set(came.values()) <= {1}
    missing = [piece for piece in pieces if id(piece) not in came]
    assert all(not piece.sources for piece in missing)
    assert set(board.report.failed) == {piece.wish.record.key for piece in missing}
    assert sum(board.report.bytes_from.values()) == sum(p.size_bytes for p in pieces if id(p) in came)


def test_what_fewest_others_have_is_taken_first_and_then_what_a_source_is_preferred_for():
    board = Board([wish(0, MIB, ["n1", "n2"]), wish(1, MIB, ["n2", "n1"]), wish(2, MIB, ["n2"])])
    assert [board.next("n2", wait=False).wish.record.key.part for _ in range(3)] == [2, 1, 0]
