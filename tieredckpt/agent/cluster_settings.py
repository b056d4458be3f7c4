"""The cluster's settings while the agent runs: the budget is applied, other changes need a restart."""

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
"""Seconds between two reads of a file, and of a source that all nodes read over the network."""


@dataclass(frozen=True)
class SettingsChange:
    """Difference between the agent's settings and the cluster's current settings."""

    budget: str | None
    """Budget to apply, or ``None``.

    It is ``None`` if the budget is unchanged, if the command line fixes it, or if the memory tier is disabled.
    """
    needs_restart: tuple[str, ...]
    """Changed settings that an agent reads only at its start."""


def settings_change(
    started: Mapping[str, Any], now: Mapping[str, Any], *, budget: str, default: str, fixed: Collection[str]
) -> SettingsChange:
    """Return the changes of the cluster's settings from the agent's start (``started``) to ``now``. Pure.

    ``budget`` is the current budget, ``default`` the budget if the cluster sets none, and ``fixed`` the names of the
    settings on the command line.
    """
    before, after = dict(started.get("agent", {})), dict(now.get("agent", {}))
    new_budget = str(after.pop("budget", default))
    before.pop("budget", None)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} - set(fixed)
    needs_restart = [f"agent.{key}" for key in sorted(changed)]
    if now.get("enabled", True) is False:  # new jobs write to their durable tier directly
        return SettingsChange(None, ("enabled", *needs_restart))
    return SettingsChange(None if "budget" in fixed or new_budget == budget else new_budget, tuple(needs_restart))


class ClusterSettingsWatcher:
    """Thread that follows the settings in ``source`` from ``start`` to ``close``."""

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
        """Why the last read failed, so that earlier settings still apply; "" if it succeeded."""
        self._read, self._started, self._apply = read, started, apply
        self.budget, self._default, self._fixed = budget, default, frozenset(fixed)
        self._every_s = every_s or (FILE_S if source.partition(":")[2].startswith("/") else ASKED_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tieredckpt-cluster", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)  # a read over the network may take longer; the thread is a daemon

    def look(self) -> None:
        """Read the settings once and apply a changed budget; log failures and changes that need a restart."""
        try:
            settings = self._read(self.source)
            change = settings_change(
                self._started, settings, budget=self.budget, default=self._default, fixed=self._fixed
            )
            if change.budget is not None:
                self._apply(change.budget)
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            if str(error) != self.problem:
                log.warning(
                    "%s cannot be read or applied, so the earlier settings remain in effect: %s", self.source, error
                )
            self.problem = str(error)
            return
        self.problem = ""
        if change.budget is not None:
            log.info("%s: the arena's budget is now %s; it was %s", self.source, change.budget, self.budget)
            self.budget = change.budget
        if change.needs_restart and change.needs_restart != self.needs_restart:
            names = ", ".join(change.needs_restart)
            log.warning("%s has changed %s: run `tieredckpt agent restart` to apply it", self.source, names)
        self.needs_restart = change.needs_restart

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.look()
