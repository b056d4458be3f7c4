"""The life of a node agent's process: take the directory, serve, notice when nobody needs it, leave in order."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from peerstore.arena import TmpfsArena
from peerstore.descriptors import raise_limit
from peerstore.notes import FORGOTTEN
from peerstore.operations import Operation
from peerstore.server import StoreServer, sole_agent
from peerstore.settings import AgentPlace, StoreSettings
from peerstore.signals import heed
from peerstore.store import NodeStore

log = logging.getLogger(__name__)

_TICK_S = 1.0


@dataclass(frozen=True)
class Extras:
    """What a larger agent adds to the plain store."""

    operations: Mapping[str, Operation]
    errors: tuple[type[Exception], ...] = ()
    busy: Callable[[], bool] = lambda: False
    """Whether there is work that should not be left behind (an upload)."""


Extend = Callable[[NodeStore], contextlib.AbstractContextManager[Extras]]


@contextlib.contextmanager
def _plain(_: NodeStore) -> Iterator[Extras]:
    yield Extras({})


def detach() -> None:
    """Go on in a child of init, so that whoever started this process is neither waited for nor waits."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        os._exit(0)


def serve(
    place: AgentPlace,
    settings: StoreSettings,
    *,
    version: str,
    linger_s: float | None = None,
    extend: Extend = _plain,
) -> None:
    """Run the agent of ``place`` until SIGTERM or SIGINT, or until nobody has needed it for ``linger_s``."""
    stop = threading.Event()
    heed({signal.SIGTERM: stop.set, signal.SIGINT: stop.set})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    most = raise_limit()
    with sole_agent(place), contextlib.ExitStack() as cleanup:
        arena = TmpfsArena(place.directory)
        store = NodeStore(arena, settings)
        cleanup.callback(store.close)
        extras = cleanup.enter_context(extend(store))
        server = StoreServer(store, place.socket, version=version, more=extras.operations, errors=extras.errors)
        cleanup.callback(server.close)
        server.start()
        log.info("agent %s serves %s (process %d, at most %d open files)", version, place.directory, os.getpid(), most)
        cleanup.callback(store.shut)  # first of all: nobody waits for a slot any more

        def needed() -> bool:
            return linger_s is None or bool(server.connections) or extras.busy() or store.idle_s() <= linger_s

        while not stop.wait(_TICK_S) and needed():
            pass
        log.info("agent leaves")
        if not stop.is_set():
            server.close()
            if not needed():  # nor did anybody come while the door was being closed
                log.info("nobody has needed this agent for %.0f s, its memory is given back", linger_s)
                arena.purge(keep=FORGOTTEN)
        else:
            store.drop_unused()
