"""Where the ranks of one start meet: a store at the address that the operator gave, kept by the first of them."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

import torch.distributed as dist

from elastic.control.movement import HangLimits, Pace
from elastic.control.plane import Assignment
from elastic.errors import ControlLostError, DeadlineError, StaleEpochError
from elastic.workers.groups import address_of
from elastic.workers.launched import connected, served
from elastic.workers.store_plane import StorePlane, pauses_s

log = logging.getLogger(__name__)

_REACH_S = 2.0
_TAKEN_S = 5.0
"""So long a store that somebody else keeps may not answer yet."""


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


def meet(
    place: Assignment,
    count: int,
    servers: Servers,
    *,
    is_over: Callable[[], bool],
    until: float | None,
    limits: HangLimits,
    pace: Pace,
) -> StorePlane:
    """What the ranks of one start say to each other. Who cannot be reached yet is waited for.

    ``is_over`` says whether this process knows by now that it was for nothing. Where the first rank cannot keep a
    store, and nobody does, there never will be one: another start is needed, which has another address.
    """
    first, address = place.rank == 0, address_of(place.store)
    if first:
        servers.serve(place.store)
    taken_until = time.monotonic() + _TAKEN_S
    for pause_s in pauses_s():
        if _answers(address):
            break
        if is_over():
            raise StaleEpochError("the start was taken back")
        if until is not None and time.monotonic() > until:
            raise DeadlineError(f"no store answers at {place.store}, where the first rank is to keep one")
        if first and not servers.is_kept and time.monotonic() > taken_until:
            raise ControlLostError(f"{place.store} is taken, and no store answers there")
        time.sleep(pause_s)
    try:
        return StorePlane(
            lambda: connected(*address),
            place,
            last=False,
            prefix=f"hyperpod/{count}/",
            limits=limits,
            pace=pace,
            leave_s=None,  # the agent ends who does not come to the barrier
        )
    except RuntimeError as error:
        raise ControlLostError(f"the store at {place.store} does not answer: {error}") from error


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_REACH_S).close()
    except OSError:
        return False
    return True
