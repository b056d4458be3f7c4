"""Who looks at whom, so that in a large job nobody has to ask everybody. Pure.

The nodes are cut into about ``sqrt(n)`` districts of about ``sqrt(n)`` nodes. In its own district a node looks at
everybody itself; of every other one it asks a member to do that for it, its lookout there::

    district 0   a  b  c  d        b asks f for e f g h, and k for i j k l; f looks at e g h, once for all
    district 1   e  f  g  h        who ask at one time. So every node sends, and gets, about 2 * sqrt(n) messages.
    district 2   i  j  k  l

Whoever has the same nodes cuts in the same way. A node that comes or goes changes its own district alone; each time
the job has become four times as large, every district is cut in two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from peerstore.cluster.domains import point

SPLIT_FROM = 64
"""With fewer nodes everybody is asked directly: that is one message a node, and no way round."""
LOOKOUTS = 3
"""How many members of a district are asked before its nodes are looked at directly."""
_POINT_BITS = 64


class Districts:
    """The nodes of a job, cut into districts."""

    def __init__(self, nodes: Collection[str], *, split_from: int = SPLIT_FROM) -> None:
        self._bits = len(nodes).bit_length() // 2 if len(nodes) >= split_from else 0
        cut: dict[int, list[tuple[int, str]]] = {}
        for node in nodes:
            cut.setdefault(self._number(point(node)), []).append((point(node), node))
        self._members = {number: tuple(node for _, node in sorted(cut[number])) for number in sorted(cut)}

    def of(self, node: str) -> tuple[str, ...]:
        """All members of the district in which ``node`` is, or would be."""
        return self._members.get(self._number(point(node)), ())

    def beyond(self, node: str) -> list[tuple[str, ...]]:
        """The members of every other district, in the order in which ``node`` asks them to be its lookout.

        Each node begins with another member, so that as many ask the one as the other.
        """
        mine, begin = self._number(point(node)), point(node) & 0xFFFFFFFF
        return [_turned(members, begin) for number, members in self._members.items() if number != mine]

    def _number(self, place: int) -> int:
        return place >> (_POINT_BITS - self._bits)


class Errand:
    """One district that somebody else is to look at: whom to ask next."""

    def __init__(self, members: Sequence[str], *, gone: Callable[[str], bool]) -> None:
        self.members = tuple(members)
        self._gone = gone
        self._next = self._lookouts()

    def next(self) -> str | None:
        """The next lookout; ``None`` when nobody else is asked."""
        return next(self._next, None)

    def give_up(self) -> None:
        """Nobody there is any use as a lookout."""
        self._next = iter(())

    def _lookouts(self) -> Iterator[str]:
        asked = 0
        for node in self.members:
            if asked == LOOKOUTS:
                return
            if not self._gone(node):
                asked += 1
                yield node


def _turned(members: tuple[str, ...], begin: int) -> tuple[str, ...]:
    first = begin % len(members)
    return members[first:] + members[:first]
