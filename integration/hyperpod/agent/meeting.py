"""Where the ranks of one start meet: a store at the address that the operator gave, kept by the first of them."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from elastic.control.plane import Assignment, Want
from elastic.errors import ControlLostError, DeadlineError, StaleEpochError
from elastic.workers.groups import address_of
from elastic.workers.launched import connected, served
from elastic.workers.store_plane import StorePlane, let_go

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_REACH_S = 2.0
_TAKEN_S = 5.0
"""So long a store that somebody else keeps may not answer yet."""
_FAREWELL_S = 10.0


class Servers:
    """The store that this process keeps, from one start to the next where the address is the same."""

    def __init__(self) -> None:
        self._address = ""
        self._server: dist.TCPStore | None = None

    def serve(self, address: str) -> None:
        if address == self._address:
            return
        self.close()
        host, port = address_of(address)
        try:
            self._server = served(host, port)
        except RuntimeError as error:
            # A process that was the first rank before keeps one there. Every start has its own names in it.
            log.info("the store at %s is kept by somebody else: %s", address, error)
            return
        self._address = address

    @property
    def is_kept(self) -> bool:
        return self._server is not None

    def close(self) -> None:
        self._address, self._server = "", None


class Meeting:
    """The ranks of one start. ``is_over`` says whether this process knows by now that it was for nothing."""

    def __init__(self, place: Assignment, count: int, servers: Servers, is_over: Callable[[], bool]) -> None:
        self._place = place
        self._address = address_of(place.store)
        self._prefix = f"hyperpod/{count}"
        self._servers = servers
        self._is_over = is_over

    def plane(self, until: float | None) -> StorePlane:
        """What the ranks say to each other. Who cannot be reached yet is waited for.

        Where the first rank cannot keep a store, and nobody does, there never will be one: another start is needed,
        which has another address.
        """
        first = self._place.rank == 0
        if first:
            self._servers.serve(self._place.store)
        taken_until = time.monotonic() + _TAKEN_S
        while not self._answers():
            if self._is_over():
                raise StaleEpochError("the start was taken back")
            if until is not None and time.monotonic() > until:
                raise DeadlineError(f"no store answers at {self._place.store}, where the first rank is to keep one")
            if first and not self._servers.is_kept and time.monotonic() > taken_until:
                raise ControlLostError(f"{self._place.store} is taken, and no store answers there")
            time.sleep(_LOOK_S)
        try:
            return StorePlane(self._connect, self._place, last=False)
        except RuntimeError as error:
            raise ControlLostError(f"the store at {self._place.store} does not answer: {error}") from error

    def gather(self, what: str, epoch: int, plane: StorePlane, until: float | None) -> None:
        """Until all ranks of the epoch have come to this: who went on before the others would take them along."""
        try:
            with self._named(epoch) as store:
                store.add(what, 1)
                while int(store.add(what, 0)) < self._place.world_size:
                    notice = plane.notice()
                    if notice is not None and notice.want is Want.RESTART:
                        raise StaleEpochError(f"epoch {epoch} is over: {notice.reason}")
                    if until is not None and time.monotonic() > until:
                        raise DeadlineError(f"not all others {what} within the time given")
                    time.sleep(_LOOK_S)
        except RuntimeError as error:
            raise ControlLostError(f"the store that the ranks met at does not answer: {error}") from error

    def farewell(self, epoch: int) -> None:
        """All ranks have ended well. Who keeps the store stays until they have all heard it."""
        try:
            with self._named(epoch) as store:
                store.add("left", 1)
                until = time.monotonic() + _FAREWELL_S
                while self._servers.is_kept and time.monotonic() < until:
                    if int(store.add("left", 0)) >= self._place.world_size:
                        return
                    time.sleep(_LOOK_S)
        except RuntimeError as error:
            log.info("nobody is there to take leave of: %s", error)

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._address, timeout=_REACH_S).close()
        except OSError:
            return False
        return True

    def _connect(self) -> torch.distributed.Store:
        return dist.PrefixStore(self._prefix, connected(*self._address))

    @contextlib.contextmanager
    def _named(self, epoch: int) -> Iterator[torch.distributed.Store]:
        store = self._connect()
        try:
            yield dist.PrefixStore(f"elastic/end/{epoch}", store)
        finally:
            let_go(store)
