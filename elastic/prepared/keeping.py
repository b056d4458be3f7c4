"""Keeping a batch: room is reserved, bytes are written where nobody looks, and a rename makes them a batch."""

from __future__ import annotations

import os
from typing import NamedTuple

from elastic.prepared.batches import Encoded
from elastic.prepared.errors import CacheFullError
from elastic.prepared.folder import Claim, Folder
from elastic.prepared.room import Entry, make_room
from elastic.prepared.tally import UNKNOWN, Tally, tallied
from peerstore.crashpoints import reach
from peerstore.units import show_size

CRASH_POINTS = (
    "prepared.claimed",
    "prepared.encoded",
    "prepared.reserved",
    "prepared.half",
    "prepared.written",
    "prepared.published",
    "prepared.gave-up",
)
"""Where a test can have a process killed that makes a batch (see :mod:`peerstore.crashpoints`)."""


class _Refusal(NamedTuple):
    """A batch that had no room, and how things were then."""

    entry: Entry
    cursor: int
    used_bytes: int


class Keeping:
    """The writing side of a folder, bounded in bytes."""

    def __init__(self, folder: Folder, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._refusal: _Refusal | None = None
        self.given_up = 0
        """Batches removed to make room, by this process."""

    def count(self) -> None:
        """Sweep what dead processes left unfinished, and say how much there is."""
        with tallied(self._folder.fd) as tally:
            self._count(tally)

    def commit(self, index: int) -> None:
        with tallied(self._folder.fd) as tally:
            tally.committed = index

    def clear(self) -> None:
        with tallied(self._folder.fd) as tally:
            for entry in self._folder.entries():
                self._folder.remove(entry.index)
            self._count(tally)

    def discard(self, index: int, fd: int | None) -> None:
        """Remove a batch that is damaged, as it was opened."""
        with tallied(self._folder.fd) as tally:
            tally.used_bytes = UNKNOWN
            self._folder.remove_damaged(index, fd)

    def keep(self, claim: Claim, encoded: Encoded, reading: int) -> None:
        """Write and publish; :class:`CacheFullError` or ``OSError`` where that cannot be, and nothing is left."""
        self._reserve(claim, encoded.laid.size_bytes, reading)
        reach("prepared.reserved")
        _write(claim.fd, encoded)
        reach("prepared.written")
        self._folder.publish(claim)
        reach("prepared.published")

    def _reserve(self, claim: Claim, size_bytes: int, reading: int) -> None:
        """Room for a batch: its file has its size before anybody else may count."""
        with tallied(self._folder.fd) as tally:
            os.ftruncate(claim.fd, 0)  # what a dead process left in it
            cursor = reading if tally.committed == UNKNOWN else tally.committed
            if tally.used_bytes == UNKNOWN or tally.used_bytes + size_bytes > self._limit_bytes:
                self._make_room(Entry(claim.index, size_bytes), cursor, tally)
            place = os.statvfs(self._folder.fd)
            if size_bytes > place.f_bavail * place.f_frsize:
                raise CacheFullError(
                    f"batch {claim.index} has {show_size(size_bytes)}, and of the file system's "
                    f"{show_size(place.f_blocks * place.f_frsize)} only {show_size(place.f_bavail * place.f_frsize)} "
                    "are free"
                )
            os.ftruncate(claim.fd, size_bytes)
            tally.used_bytes += size_bytes

    def _make_room(self, new: Entry, cursor: int, tally: Tally) -> None:
        if not self._is_refused_again(new, cursor, tally):
            entries, making_bytes = self._count(tally)
            room = make_room(entries, cursor, new, self._limit_bytes - making_bytes)
            sizes = {entry.index: entry.size_bytes for entry in entries}
            for index in room.give_up:
                self._folder.remove(index)
                reach("prepared.gave-up")
                tally.used_bytes -= sizes[index]
            self.given_up += len(room.give_up)
            if room.fits:
                return
        self._refusal = _Refusal(new, cursor, tally.used_bytes)
        raise CacheFullError(
            f"batch {new.index} has {show_size(new.size_bytes)}, for which there is no room in "
            f"{show_size(self._limit_bytes)} beside what training needs sooner, from batch {cursor} on"
        )

    def _is_refused_again(self, new: Entry, cursor: int, tally: Tally) -> bool:
        """Nothing has changed since a nearer and smaller one had no room: no need to look through all files again."""
        last = self._refusal
        return (
            last is not None
            and (last.cursor, last.used_bytes) == (cursor, tally.used_bytes)
            and new.index >= last.entry.index >= cursor
            and new.size_bytes >= last.entry.size_bytes
        )

    def _count(self, tally: Tally) -> tuple[list[Entry], int]:
        self._folder.sweep_making()
        entries = self._folder.entries()
        making_bytes = sum(entry.size_bytes for entry in self._folder.in_the_making())
        tally.used_bytes = sum(entry.size_bytes for entry in entries) + making_bytes
        return entries, making_bytes


def _write(fd: int, encoded: Encoded) -> None:
    laid, half = encoded.laid, len(encoded.laid.head) // 2
    pieces = [(0, memoryview(laid.head)[:half]), (half, memoryview(laid.head)[half:])]
    starts = (len(laid.head) + part.start for part in laid.parts)
    pieces += zip(starts, encoded.views, strict=True)
    for number, (at, view) in enumerate(pieces):
        if number == len(pieces) // 2:
            reach("prepared.half")
        _write_at(fd, view, at)


def _write_at(fd: int, view: memoryview, at: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)
