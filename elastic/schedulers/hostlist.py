"""Slurm's short way to write many host names: ``n[1-3,07],gpu-[01-04]x``. Pure."""

from __future__ import annotations

import itertools
import math
import re
from typing import TypeAlias

from elastic.control.messages import MAX_NODES
from elastic.errors import PolicyError

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)


_Numbers: TypeAlias = tuple[range, int]
"""And how many digits they have at least."""
_Piece: TypeAlias = "tuple[_Numbers, ...] | str"


def host_names(text: str, *, most: int = MAX_NODES) -> tuple[str, ...]:
    """Every name in ``text``, in its order; :class:`PolicyError` where it is no such list or has more than ``most``.

    Names are counted before any is made.
    """
    items = [_pieces(item, text) for item in _items(text)]
    count = sum(math.prod(_count(piece) for piece in pieces) for pieces in items)
    if count > most:
        raise PolicyError(f"host list {_short(text)} has {count} names: a job has {most} nodes at the most")
    return tuple("".join(parts) for pieces in items for parts in itertools.product(*map(_words, pieces)))


def _items(text: str) -> list[str]:
    """What stands between commas that are in no brackets."""
    found, at = [], 0
    while True:
        item = _ITEM.match(text, at)
        if item is None or (item.end() < len(text) and text[item.end()] != ","):
            raise _wrong(text)
        found.append(item[0])
        if item.end() == len(text):
            return found
        at = item.end() + 1


def _pieces(item: str, text: str) -> list[_Piece]:
    return [plain or tuple(_range(one, text) for one in ranges.split(",")) for ranges, plain in _PIECE.findall(item)]


def _range(one: str, text: str) -> _Numbers:
    found = _RANGE.fullmatch(one)
    if found is None:
        raise _wrong(text)
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise PolicyError(f"host list {_short(text)}: {one} counts backwards")
    return range(first, last + 1), len(found[1])


def _count(piece: _Piece) -> int:
    return 1 if isinstance(piece, str) else sum(numbers.stop - numbers.start for numbers, _ in piece)


def _words(piece: _Piece) -> list[str]:
    if isinstance(piece, str):
        return [piece]
    return [f"{number:0{width}d}" for numbers, width in piece for number in numbers]


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def _wrong(text: str) -> PolicyError:
    return PolicyError(f"{_short(text)} is no host list: expected names as in n[1-3,07],gpu-[01-04]x")
