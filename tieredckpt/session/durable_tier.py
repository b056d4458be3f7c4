"""DurableTier: one job's durable tier in this process, and warnings if the job has none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tieredckpt.agent.agent_api import NodeAgentAPI
from tieredckpt.durable.object_store import ObjectStore
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import TierUnavailableError
from tieredckpt.settings import DurableSettings, Settings, is_local_rank_zero

log = logging.getLogger(__name__)


class DurableTier:
    """Settings at the agent, checks, reads and warnings of one job's durable tier. Any thread may call it."""

    def __init__(self, job: str, node: NodeAgentAPI, settings: Callable[[], Settings]) -> None:
        self._job = job
        self._agent = node
        self._settings = settings
        self._store: ObjectStore | None = None
        self._checked_url = ""
        """URL of the last save, which was checked."""
        self._used: DurableSettings | None = None
        """Settings that the agent has recorded, because all ranks began a save with them."""
        self.warns_memory_only = True
        """Whether to warn about steps without a durable tier. Steps that are only sent need no warning."""
        self._has_warned_memory_only = False
        """Whether this process has warned that no durable tier stores the steps. It warns again when it ends."""
        self._lock = threading.Lock()

    def configure(self) -> None:
        """Send the settings to the agent. Only a save changes the durable tier that the agent records."""
        durable = self._settings().durable
        used = bool(durable.url) and durable == self._used
        self._agent.configure(self._job, durable, check="none" if used else "open")

    def record_used(self) -> None:
        """Make the agent record the settings, because all ranks begin a save with them."""
        durable = self._settings().durable
        if durable.url and durable != self._used:
            self._agent.configure(self._job, durable)
            self._used = durable

    def check(self, newest_step: int | None) -> None:
        """Raise before the first save if nothing can become durable; one process of a node checks.

        :class:`DurableRefusedError` if the store takes no object, and :class:`TierUnavailableError` if it does not
        answer. A run that has a ``newest_step`` continues with a warning while the store is away.
        """
        durable = self._settings().durable
        if durable.url == self._checked_url:
            return
        try:
            if durable.url:
                self._agent.configure(self._job, durable, check="write" if is_local_rank_zero() else "open")
        except TierUnavailableError as error:
            if durable.on_unreachable == "raise" and (newest_step is None or newest_step < 0):
                raise
            log.warning("%s continues in memory: %s", self._job, error)
        self._checked_url = durable.url

    def open(self) -> ObjectStore:
        """Return the store, opened by this process for reads."""
        with self._lock:
            if self._store is None:
                durable = self._settings().durable
                if not durable.url:
                    durable = self._agent.list_steps(self._job).durable or durable
                self._store = open_store(durable.url, durable)
            return self._store

    def close(self) -> None:
        """Close the store. The next read opens it with the settings of that time."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def wants(self, step: int) -> bool:
        """Return whether the policy requests an upload of ``step``."""
        durable = self._settings().durable
        return bool(durable.url) and step % durable.every == 0

    def wait_for_drain(self, step: int, timeout_s: float) -> None:
        """Wait until the uploads before ``step`` have succeeded or failed, or the timeout has passed.

        Other ranks of this node may have saved ``step`` already. Its upload needs this rank's part.
        """
        view = self._agent.wait_durable(self._job, None, timeout_s, before=step)
        if view is not None and view.state in ("waiting", "running"):
            log.warning(
                "step %d of %s is still not durable after %.0f s", view.version_id.version, self._job, timeout_s
            )

    def warn_memory_only(self) -> None:
        """Warn once if no durable tier stores the steps: where they are, and for how long. For one rank."""
        settings = self._settings()
        if self._has_warned_memory_only or settings.durable.url or not self.warns_memory_only:
            return
        self._has_warned_memory_only = True
        log.warning(
            "%s has no durable tier: its steps are in memory only. They are lost with their nodes, and are deleted %s "
            "after the job's last process. To retain them, set Checkpointer(durable='s3://bucket/prefix') or "
            "durable.url",
            self._job,
            f"{settings.agent.job_ttl_s / 3600:.3g} hours",
        )

    def warn_remaining(self, sealed_step: int) -> None:
        """Warn at the end of the process how long its last sealed step remains in memory."""
        settings = self._settings()
        if not self._has_warned_memory_only or sealed_step < 0 or settings.durable.url:
            return
        until = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(time.time() + settings.agent.job_ttl_s))
        log.warning(
            "%s: step %d is in memory only, and forgotten at %s unless the job runs again. `tieredckpt export %s DEST` "
            "writes it to a file",
            *(self._job, sealed_step, until, self._job),
        )
