"""One member's part of the store: its server, and this process's connections to it."""

from __future__ import annotations

import contextlib
import enum
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from elastic.rootless.guarding import Call, Guard
from peerstore.errors import PeerStoreError
from peerstore.transport.addresses import resolve, split_address

log = logging.getLogger(__name__)

_TRY = timedelta(seconds=10)
"""A client that is made asks the name service for the server's name, and gives up when that took longer than this."""

_UNSENT, _TRIES = "Broken pipe", 5
"""What torch says of a request that it could not send: its connection had been cut before."""

T = TypeVar("T")
Address = tuple[str, int]
"""Of a server, as a connection to it has it: a number, no name."""
Cut = Callable[[Collection[Address]], int]
"""Ends this process's connections to these addresses; returns how many."""


def addresses_of(host: str, port: int, *, within_s: float) -> frozenset[Address]:
    """Where a name leads. To be asked on the way in: when a world is aborted there may be nobody who answers.

    :class:`~peerstore.errors.PeerUnreachableError` where nobody says.
    """
    return frozenset((str(found[4][0]), port) for found in resolve(host, port, within_s=within_s))


@dataclass(frozen=True)
class Patience:
    """How long a member is waited for."""

    look_s: float = 20.0
    """A wait is at one holder of its key; so long, then at the next one, and round again."""
    answer_s: float = 20.0
    """What needs no waiting takes no longer, on any network and under any load that a job survives."""
    connect_s: float = 30.0
    again_s: float = 10.0
    """One that did not answer is left alone so long where there is another one to ask."""


class State(enum.Enum):
    ANSWERS = "answers"
    MUTE = "does not answer"
    """It may be slow, stopped, or cut off: whether it did what it was asked for is unknown."""
    GONE = "is gone"
    """Its address refuses connections. It never comes back under this one."""


class NoAnswerError(Exception):
    """The member could not be asked, or its answer did not come."""


class Holder:
    """Any thread may call; calls that wait do not stand in the way of others, each has a connection of its own."""

    def __init__(self, address: str, *, cut: Cut, guard: Guard, patience: Patience) -> None:
        self.address = address
        self.host, self.port = split_address(address)
        self.state = State.ANSWERS
        self._cut, self._guard, self._patience = cut, guard, patience
        self._free: list[dist.TCPStore] = []
        self._lock = threading.Lock()
        self._closed = False
        self._mute_until = 0.0
        self._addresses: frozenset[Address] = frozenset()
        """Where it was found, once somebody was to connect."""

    @property
    def connected(self) -> bool:
        return bool(self._addresses)

    @property
    def is_resting(self) -> bool:
        """It did not answer a moment ago."""
        return self.state is State.MUTE and time.monotonic() < self._mute_until

    def call(self, work: Callable[[dist.TCPStore], T], *, within_s: float = 0.0, again: bool = True) -> T:
        """What ``work`` returns or raises; :class:`NoAnswerError` where it cannot be known.

        ``within_s`` is how long the server may wait before it answers; ``again`` is whether it may be asked twice,
        where a connection breaks that had lain idle.
        """
        limit_s = within_s + self._patience.answer_s
        for _ in range(_TRIES):
            client, is_fresh = self._client()
            until = time.monotonic() + limit_s
            try:
                with self._guard.over(limit_s, self.cut) as call:
                    result = work(client)
            except dist.DistNetworkError as error:
                self._lost(str(error), late=time.monotonic() >= until)
                if self.state is State.ANSWERS and _UNSENT in str(error):  # whoever cut it ended something else
                    continue
                if self.state is State.ANSWERS and again and not is_fresh:
                    again = False
                    continue
                raise NoAnswerError(f"the connection to {self.address} broke") from error
            except dist.DistStoreError:  # the wait was in vain, and that was the answer
                self._keep(client, call)
                raise
            self._keep(client, call)
            return result
        raise NoAnswerError(f"each connection to {self.address} was cut as soon as it was made")

    def cut(self) -> int:
        """Whoever waits for an answer gets an error."""
        return self._cut(self._addresses) if self._addresses else 0

    def end(self) -> int:
        """The same, and nobody asks again."""
        self.close()
        return self.cut()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._free.clear()

    def _client(self) -> tuple[dist.TCPStore, bool]:
        """A connection that nobody uses, and whether it is a new one."""
        with self._lock:
            if self._free:
                return self._free.pop(), False
        until = time.monotonic() + self._patience.connect_s
        while not self._closed and self.state is not State.GONE:
            self._knock()
            try:
                with self._guard.over(self._patience.connect_s, self.cut) as call:
                    client = self._connected()
                why = "it took too long to connect"
                if not call.was_ended:
                    self.state = State.ANSWERS
                    if not self._closed:  # else it was not there yet when all others were cut
                        return client, True
            except dist.DistError as error:
                why = str(error)
            if not self._closed and time.monotonic() > until:
                self._is_mute(why)
                break
        raise NoAnswerError(f"the store on {self.address} {self.state.value}")

    def _connected(self) -> dist.TCPStore:
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=_TRY)

    def _keep(self, client: dist.TCPStore, call: Call | None = None) -> None:
        """For the next one who asks, unless all connections were cut while ``call`` was through."""
        with self._lock:
            if call is not None and call.was_ended:
                self._free.clear()
            elif not self._closed:
                self._free.append(client)

    def _lost(self, why: str, *, late: bool) -> None:
        """A connection broke. Whether the server is there is seen by a new one; the idle ones are no better."""
        with self._lock:
            self._free.clear()
        if late:
            self._is_mute(why)
        elif not self._closed:
            with contextlib.suppress(NoAnswerError):
                self._keep(self._client()[0])

    def _knock(self) -> None:
        """A ``TCPStore`` that is made tries for long to reach a server that is gone; this sees it at once."""
        try:
            addresses = addresses_of(self.host, self.port, within_s=self._patience.connect_s)
            socket.create_connection((self.host, self.port), self._patience.connect_s).close()
            self._addresses = addresses
        except ConnectionRefusedError as error:
            if self.state is not State.GONE:
                log.warning("the store on %s is gone: what it held is asked of the next holder", self.address)
            self.state = State.GONE
            raise NoAnswerError(f"{self.address} {self.state.value}") from error
        except (OSError, PeerStoreError) as error:
            self._is_mute(str(error))
            raise NoAnswerError(f"{self.address} {self.state.value}") from error

    def _is_mute(self, why: str) -> None:
        log.warning("the store on %s does not answer: %s", self.address, why.splitlines()[0] if why else "no reason")
        self.state = State.MUTE
        self._mute_until = time.monotonic() + self._patience.again_s
