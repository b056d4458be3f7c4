"""What is given up when a batch needs room, decided purely.

::

    index   ... 4   5   6   7  |cursor|  8   9   10   11 ...
            <- given up first, all at once   farthest ahead next ->
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Entry:
    """A batch in the cache."""

    index: int
    size_bytes: int


class Room(NamedTuple):
    """What has to go; or that it is not worth it."""

    fits: bool
    give_up: tuple[int, ...] = ()


def make_room(entries: Sequence[Entry], cursor: int, new: Entry, limit_bytes: int) -> Room:
    """How ``new`` gets room among ``entries``.

    The nearer ahead of the cursor, the more a batch is worth; all that lies behind is worth less than anything ahead,
    and goes together, so that this is not asked again for every batch. Nothing is given up for a batch that is worth
    less, or that would not fit all the same.
    """
    excess = sum(entry.size_bytes for entry in entries) + new.size_bytes - limit_bytes
    if excess <= 0:
        return Room(fits=True)
    worth_less = [entry for entry in entries if _cost(entry.index, cursor) > _cost(new.index, cursor)]
    worth_less.sort(key=lambda entry: _cost(entry.index, cursor), reverse=True)
    given: list[int] = []
    for entry in worth_less:
        if excess <= 0 and entry.index >= cursor:
            break
        given.append(entry.index)
        excess -= entry.size_bytes
    return Room(fits=True, give_up=tuple(given)) if excess <= 0 else Room(fits=False)


def _cost(index: int, cursor: int) -> tuple[bool, int]:
    """The lower, the longer it is kept."""
    return (index < cursor, abs(index - cursor))
