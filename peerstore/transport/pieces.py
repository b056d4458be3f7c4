"""A payload in pieces, each of which lies in a buffer of its sender until it was read."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from peerstore.errors import ShardDamagedError
from peerstore.transport.registered import Read
from peerstore.transport.seam import FileSlice
from peerstore.transport.views import Cursor


class Offer(msgspec.Struct, frozen=True, array_like=True):
    payload_bytes: int
    introduction: bytes


class Piece(msgspec.Struct, frozen=True, array_like=True):
    address: int
    size: int
    ticket: int


def in_steps(piece: Piece, most_bytes: int) -> Iterator[tuple[int, int, int | None]]:
    """A piece in as many reads as it takes; the sender is told after the last."""
    for start in range(0, piece.size, most_bytes):
        last = start + most_bytes >= piece.size
        yield piece.address + start, min(most_bytes, piece.size - start), piece.ticket if last else None


def deliver(read: Read, cursor: Cursor) -> None:
    done = 0
    while done < read.size:
        for view in cursor.window(read.size - done):
            view[:] = read.buffer.view[done : done + view.nbytes]
            done += view.nbytes
            cursor.advance(view.nbytes)


def size_of(part: memoryview | FileSlice) -> int:
    return part.size if isinstance(part, FileSlice) else part.nbytes


def copy_into(room: memoryview, part: memoryview | FileSlice, start: int) -> int:
    """As much of ``part``, from ``start`` on, as there is room for."""
    size = min(size_of(part) - start, room.nbytes)
    with room[:size] as target:
        if isinstance(part, FileSlice):
            count = os.preadv(part.fd, [target], part.start + start)
            if count == 0:
                raise ShardDamagedError(f"a file ended at byte {part.start + start}, within what was to be sent")
            return count
        with part.cast("B") as flat, flat[start : start + size] as source:
            target[:] = source
    return size
