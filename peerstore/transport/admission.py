"""Who may keep a connection before showing who it is: one rule for every TCP listener.

A connection is a stranger's until its peer has proven something: a secret, or a token. Strangers share a small budget,
whatever they do, and have a short time. Where it is used up, the oldest of the address that has most of it gives
way, so that nobody is kept out by those who only hold connections open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from peerstore import descriptors

log = logging.getLogger(__name__)

STRANGERS = 64
OF_ONE = 8
"""Of one address. More than that are let in for a moment, as when many nodes behind one address start together."""
WITHIN_S = 20.0
"""A whole greeting, or a whole request: TLS and the proof after it each have half of it."""
_SHARE = 8
"""Strangers have at most this part of the files that the process may open."""
_GRACE_S = 1.0
"""Nobody gives way who came less than this ago: whoever is honest needs a few milliseconds."""
_SAY_EVERY_S = 60.0


class Stranger:
    """One connection that has proven nothing yet."""

    def __init__(self, admission: Admission, sock: socket.socket, host: str, now: float) -> None:
        self.host = host
        self.since = now
        self._admission = admission
        # Its own descriptor: who serves the connection may close his, and the number would be somebody else's then.
        self._sock = socket.socket(fileno=os.dup(sock.fileno()))

    def proven(self) -> None:
        """It has shown who it is: it has no deadline any more, and takes nobody's place. Doing it again is fine."""
        self._admission._leaves(self)

    leave = proven

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Admission:
    """The strangers of one listener. ``enter`` and ``sweep`` are for the thread that accepts, the rest for any."""

    def __init__(
        self,
        name: str,
        *,
        strangers: int = STRANGERS,
        of_one: int = OF_ONE,
        within_s: float = WITHIN_S,
        limit: Callable[[], int] = descriptors.limit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._most = max(2, min(strangers, limit() // _SHARE))
        self._of_one = of_one
        self._within_s = within_s
        self._clock = clock
        self._fewer = threading.Condition()
        self._strangers: dict[Stranger, None] = {}
        """In the order in which they came."""
        self._closed = False
        self._turned_away: Counter[str] = Counter()
        self._said_at = float("-inf")

    def enter(self, sock: socket.socket, host: str) -> Stranger | None:
        """A place for this connection, waiting for one if there is none; ``None`` when the listener is being closed."""
        with self._fewer:
            while not self._closed:
                left_s = self._make_room(host)
                if left_s <= 0:
                    try:
                        found = Stranger(self, sock, host, self._clock())
                    except OSError as error:  # no descriptor is left
                        self._say(host, str(error))
                        return None
                    self._strangers[found] = None
                    return found
                self._fewer.wait(left_s)
            return None

    def sweep(self) -> float | None:
        """End those whose time is over; when to come again, in seconds (``None``: when somebody new is there)."""
        with self._fewer:
            now = self._clock()
            for one in [one for one in self._strangers if now - one.since >= self._within_s]:
                self._give_way(one, f"nothing was proven within {self._within_s:g} s")
            return next((max(0.01, one.since + self._within_s - now) for one in self._strangers), None)

    def close(self) -> None:
        """End all strangers."""
        with self._fewer:
            self._closed = True
            for one in list(self._strangers):
                self._drop(one)

    def turned_away(self, why: str, host: str = "") -> None:
        """Of a connection that the listener did not take, for another reason than those here."""
        with self._fewer:
            self._say(host, why)

    def __len__(self) -> int:
        with self._fewer:
            return len(self._strangers)

    # -- with the lock ------------------------------------------------------------------------------------------------

    def _make_room(self, host: str) -> float:
        """0 when there is room for one more of this address, else for how long there will be none."""
        now, counted = self._clock(), Counter(one.host for one in self._strangers)
        if counted[host] >= self._of_one:
            mine = next(one for one in self._strangers if one.host == host)
            if now - mine.since >= _GRACE_S:
                self._give_way(mine, "its address has too many connections that prove nothing")
        if len(self._strangers) < self._most:
            return 0.0
        crowd, count = counted.most_common(1)[0]
        oldest = next(one for one in self._strangers if one.host == crowd)
        crowds = crowd != host and count > self._of_one
        if crowds or now - oldest.since >= _GRACE_S:
            self._give_way(oldest, "too many connections prove nothing")
            return 0.0
        return oldest.since + _GRACE_S - now

    def _give_way(self, one: Stranger, why: str) -> None:
        self._drop(one)
        self._say(one.host, why)

    def _drop(self, one: Stranger) -> None:
        del self._strangers[one]
        one._end()
        self._fewer.notify_all()

    def _leaves(self, one: Stranger) -> None:
        with self._fewer:
            if one in self._strangers:
                del self._strangers[one]
                one._sock.close()
                self._fewer.notify_all()

    def _say(self, host: str, why: str) -> None:
        """One line a minute: a log must not grow by what strangers do."""
        self._turned_away[host] += 1
        now = self._clock()
        if now - self._said_at < _SAY_EVERY_S:
            return
        most, of_most = self._turned_away.most_common(1)[0]
        log.warning(
            "%s: %d connections were turned away or ended, %d of them from %s; the last one: %s",
            self._name,
            self._turned_away.total(),
            of_most,
            most or "nobody knows where",
            why,
        )
        self._said_at = now
        self._turned_away.clear()
