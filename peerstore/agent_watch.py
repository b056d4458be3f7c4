"""Somebody who calls a node's agent, also while nobody needs anything of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from peerstore.client import Client, Connector
from peerstore.errors import PeerStoreError

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_ANSWER_S = 10.0
_FAREWELL_S = 1.0


class AgentWatch:
    """Has an agent that died started again, and one that hangs replaced, within seconds.

    What an agent keeps is in memory that outlives it. Until there is another one other nodes cannot read it: nodes that
    a job has left, or that wait outside of its world, have nobody else who would notice. The connection also tells the
    agent that it is needed.
    """

    def __init__(self, connector: Connector, replace: Callable[[], bool]) -> None:
        """``connector`` starts an agent where none answers; ``replace`` ends one that hangs."""
        self._client = Client(connector, retry_s=0.0, replace=replace)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peerstore-watch", daemon=True)
        self._thread.start()

    def call(self, op: str, body: object, result: Any) -> Any:
        """Ask the agent that is watched."""
        return self._client.call(op, body, result)

    def _run(self) -> None:
        missing = False
        while not self._stop.wait(_LOOK_S):
            try:
                self._client.answers(timeout_s=_ANSWER_S)
                missing = False
            except (PeerStoreError, OSError) as error:
                level = logging.DEBUG if missing or self._stop.is_set() else logging.WARNING
                log.log(level, "the agent of this node does not answer: %s", error)
                missing = True

    def close(self) -> None:
        """Nothing is started from here on; a look, or a start, that is under way ends by itself."""
        self._stop.set()
        self._client.close()
        self._thread.join(_FAREWELL_S)
