"""Somebody who calls a node's agent, also while nobody needs anything of it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from peerstore.client import Client, Connector, connect
from peerstore.errors import AgentUnreachableError, PeerStoreError
from peerstore.settings import AgentPlace

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_ANSWER_S = 10.0
_FAREWELL_S = 1.0
_START_S = 35.0
"""A start that is under way has ended after this long, whether there is an agent then or not."""


class AgentWatch:
    """Has an agent that died started again, and one that hangs replaced, within seconds.

    What an agent keeps is in memory that outlives it. Until there is another one other nodes cannot read it: nodes that
    a job has left, or that wait outside of its world, have nobody else who would notice. The connection also tells the
    agent that it is needed.
    """

    def __init__(
        self,
        connector: Connector,
        replace: Callable[[], bool],
        *,
        its_turn: Callable[[], bool] = lambda: True,
    ) -> None:
        """``connector`` starts an agent where none answers; ``replace`` ends one that hangs. ``its_turn``: nobody else
        looks after the agent.
        """
        self._client = Client(connector, retry_s=0.0, replace=replace)
        self._its_turn = its_turn
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peerstore-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        missing = False
        while not self._stop.wait(_LOOK_S):
            try:
                if not self._its_turn():
                    continue
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


class Caretaker:
    """Of a node's agent, for one of the processes that use it: the one that has the lock beside its socket looks.

    An agent that was asked to end, or that nobody needed, has taken its socket with it, and is not started again. One
    that died has left it behind.
    """

    def __init__(self, place: AgentPlace, launch: Connector, replace: Callable[[], bool]) -> None:
        self._place = place
        self._launch = launch
        self._replace = replace
        self._ended = False
        self._acting = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(os.fdopen(os.open(place.watch_lock, flags, 0o600), "r+"))
            self._has_lock()  # from now on: who comes later leaves the agent to this process
            self._watch = AgentWatch(self._connect, self._replaced, its_turn=self._has_lock)
            undo.pop_all()

    def _has_lock(self) -> bool:
        """A lock of this process: a child that it forks has no part in it, and may live longer."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError, ValueError):  # somebody else has it, or this has ended
            return False
        return True

    def _connect(self) -> socket.socket:
        try:
            return connect(self._place.socket, named=self._place.named)
        except AgentUnreachableError:
            with self._acting:
                if self._ended or not self._place.socket.exists():
                    raise
                return self._launch()

    def _replaced(self) -> bool:
        with self._acting:
            return not self._ended and self._replace()

    def close(self) -> None:
        """Nothing is started, or ended, from here on; what is under way is waited for."""
        self._ended = True
        self._watch.close()
        if self._acting.acquire(timeout=_START_S):
            self._acting.release()
        self._lock.close()


class Caretakers:
    """Those of this process: one for each agent, while anybody wants it looked after."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here: dict[Path, tuple[Caretaker, int]] = {}
        os.register_at_fork(after_in_child=self._forked)

    def begin(self, place: AgentPlace, launch: Connector, replace: Callable[[], bool]) -> None:
        with self._lock:
            there, wanted = self._here.get(place.directory) or (Caretaker(place, launch, replace), 0)
            self._here[place.directory] = there, wanted + 1

    def end(self, place: AgentPlace) -> None:
        with self._lock:
            there, wanted = self._here.pop(place.directory, (None, 0))
            if there is not None and wanted > 1:
                self._here[place.directory] = there, wanted - 1
        if there is not None and wanted == 1:
            there.close()

    def _forked(self) -> None:
        """What its parent looks after is none of a child's business."""
        self._lock, self._here = threading.Lock(), {}
