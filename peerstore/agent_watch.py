"""Somebody who calls a node's agent, also while nobody needs anything of it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from peerstore.client import Client, Connector
from peerstore.errors import PeerStoreError

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_ANSWER_S = 10.0


class AgentWatch:
    """Has an agent that died started again, and one that hangs replaced, within seconds.

    What an agent keeps is in memory that outlives it. Until there is another one other nodes cannot read it: nodes that
    a job has left, or that wait outside of its world, have nobody else who would notice.
    """

    def __init__(self, connector: Connector, replace: Callable[[], bool]) -> None:
        """``connector`` starts an agent where none answers; ``replace`` ends one that hangs."""
        self._connector, self._replace = connector, replace
        self._client: Client | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peerstore-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        missing = False
        while not self._stop.wait(_LOOK_S):
            try:
                self._look()
                missing = False
            except (PeerStoreError, OSError) as error:
                log.log(
                    logging.DEBUG if missing else logging.WARNING, "the agent of this node does not answer: %s", error
                )
                missing = True
        with contextlib.suppress(PeerStoreError, OSError):
            if self._client is not None:
                self._client.close()

    def _look(self) -> None:
        if self._client is None:
            self._client = Client(self._connector, retry_s=0.0, replace=self._replace)
        self._client.answers(timeout_s=_ANSWER_S)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
