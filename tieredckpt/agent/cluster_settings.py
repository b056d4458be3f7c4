"""Follows the cluster's settings while the agent runs: applies the budget, reports what needs a restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from peerstore.errors import PeerStoreError
from tieredckpt.errors import TieredCheckpointError

log = logging.getLogger(__name__)

FILE_S, ASKED_S = 10.0, 300.0
"""How often a file is read again, and something that all nodes ask over the network."""


@dataclass(frozen=True)
class SettingsChange:
    """From what the agent was started with, or went on with, to what the cluster says now."""

    budget: str | None
    """The one to go on with; ``None``: it is the same, or the command line says it."""
    needs_restart: tuple[str, ...]
    """Settings that an agent has from its start on."""


def settings_change(
    started: Mapping[str, Any], now: Mapping[str, Any], *, budget: str, default: str, fixed: Collection[str]
) -> SettingsChange:
    """``started`` and ``now`` are what the cluster said then and says now, ``budget`` what holds, ``default`` what an
    agent has where nobody says anything, and ``fixed`` what the command line says. Pure.
    """
    before, after = dict(started.get("agent", {})), dict(now.get("agent", {}))
    wanted = str(after.pop("budget", default))
    before.pop("budget", None)
    differ = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} - set(fixed)
    needs = [f"agent.{key}" for key in sorted(differ)]
    if now.get("enabled", True) is False:  # jobs that begin from here on write to their durable tier
        return SettingsChange(None, ("enabled", *needs))
    return SettingsChange(None if "budget" in fixed or wanted == budget else wanted, tuple(needs))


class ClusterSettingsWatcher:
    """Follows ``source`` in a thread of its own, from ``start`` to ``close``."""

    def __init__(
        self,
        source: str,
        read: Callable[[str], Mapping[str, Any]],
        started: Mapping[str, Any],
        apply: Callable[[str], None],
        *,
        budget: str,
        default: str,
        fixed: Collection[str],
        every_s: float | None = None,
    ) -> None:
        self.source = source
        self.needs_restart: tuple[str, ...] = ()
        self.problem = ""
        """Why it could not be read last time; what was said before holds."""
        self._read, self._started, self._apply = read, started, apply
        self.budget, self._default, self._fixed = budget, default, frozenset(fixed)
        self._every_s = every_s or (FILE_S if source.partition(":")[2].startswith("/") else ASKED_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tieredckpt-cluster", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)  # one that asks over the network ends by itself

    def look(self) -> None:
        """Once."""
        try:
            said = self._read(self.source)
            found = settings_change(self._started, said, budget=self.budget, default=self._default, fixed=self._fixed)
            if found.budget is not None:
                self._apply(found.budget)
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            if str(error) != self.problem:
                log.warning("%s is not followed for now, what it said before holds: %s", self.source, error)
            self.problem = str(error)
            return
        self.problem = ""
        if found.budget is not None:
            log.info("%s: the arena's budget is %s from here on, it was %s", self.source, found.budget, self.budget)
            self.budget = found.budget
        if found.needs_restart and found.needs_restart != self.needs_restart:
            what = ", ".join(found.needs_restart)
            log.warning("%s has changed %s: run `tieredckpt agent restart` to apply it", self.source, what)
        self.needs_restart = found.needs_restart

    def _work(self) -> None:
        while not self._stop.wait(self._every_s):
            self.look()
