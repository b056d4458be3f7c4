"""The node agent of the memory tier: started with a node, so that the first save finds it warm."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from elastic.control.memory_release import release
from elastic.control.processes import importable
from peerstore.client import Client, connect
from peerstore.errors import PeerStoreError
from peerstore.launch import connect_or_launch, replace_hung, signal_agent
from peerstore.settings import AgentPlace
from tieredckpt.agent.messages import CutOff
from tieredckpt.agent_node import agent_command, caretakers
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.settings import load_settings

log = logging.getLogger(__name__)


class NodeAgent:
    """An agent that answers already is used. One that was started here outlives the supervisor that is killed.

    While this is open, a connection tells the agent that it is needed: a node that waits outside the world has nobody
    else who does, and an agent that nobody needs leaves after a while. It is looked after here, and by no rank: this
    begins before them, and they end with it.
    """

    def __init__(self, environ: Mapping[str, str], job: Path | None = None) -> None:
        """An agent in ``job``, the job's own directory, is for nobody else: it ends with it, whoever started it."""
        self._environ, self._job = environ, job
        self._began_ns = time.time_ns()
        self._mine: AgentPlace | None = None
        self._place: AgentPlace | None = None
        """Of the agent that is looked after."""

    def start(self) -> None:
        """Training goes on without: the first rank tries again, and says what is wrong."""
        try:
            settings = load_settings(self._environ)
            if not (settings.enabled and settings.agent.embedded):
                return
            place = settings.agent_place
            launch = partial(connect_or_launch, place, agent_command(settings), environ=importable(self._environ))
            try:
                connect(place.socket, named=place.named).close()
            except PeerStoreError:
                self._mine = place
            if self._job is not None and self._job in place.directory.parents:
                self._mine = place
                self._began_ns = 0  # all it has is of this job, also what was sealed under an earlier supervisor
            launch().close()
            caretakers.begin(place, launch, partial(replace_hung, place))
            self._place = place
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.warning("the node agent was not started: %s", error)

    def cut_off(self, seconds: float) -> None:
        """Have it reach no other node's agent for so long. One that other jobs use as well is left alone."""
        place = self._place
        if place is None or not self._environ.get("TIEREDCKPT_AGENT_DIRECTORY"):
            return
        try:
            with contextlib.closing(Client(partial(connect, place.socket, named=place.named), retry_s=0.0)) as client:
                client.call("cut_off", CutOff(seconds), type(None))
        except PeerStoreError as error:
            log.warning("the node agent was not cut off: %s", error)

    def end(self) -> None:
        """The job has succeeded: what the durable tier has of it need not be in memory, and nobody needs the agent."""
        needed = self._place is not None and not self._released()
        self.close()
        if self._mine is not None and not needed:
            signal_agent(self._mine, signal.SIGTERM)
            self._mine = None

    def _released(self) -> bool:
        try:
            return release(self._environ, self._began_ns)
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.warning("what is in memory of this job stays there: %s", error)
            return True

    def close(self) -> None:
        """Whoever else needs the agent says so."""
        place, self._place = self._place, None
        if place is not None:
            caretakers.end(place)

    @property
    def stays(self) -> Path | None:
        """Where an agent that was started here keeps what it has."""
        return None if self._mine is None else self._mine.directory
