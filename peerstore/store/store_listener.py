"""Listeners of a store's events."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection

from peerstore.daemon_process import ProcessIdentity
from peerstore.shard_records import ShardKey, ShardRecord, VersionId

log = logging.getLogger(__name__)
_MAX_DAMAGES = 1000


class StoreListener:
    """Receiver of the store's events. Calls come from the thread that caused them and must return quickly."""

    def on_shard_sealed(self, record: ShardRecord) -> None:
        """A shard was sealed, or recovered from a killed agent's arena."""

    def on_replica_stored(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """A replica of another node's shard was stored or recovered; ``holders`` are its chosen nodes."""

    def on_shard_damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        """A damaged shard was dropped, at recovery or at a later check."""

    def on_job_expired(self, job: str) -> None:
        """The job expired, and its shards were dropped."""

    def on_client_left(self, owner: ProcessIdentity, job: str) -> None:
        """A client's last connection for the job closed."""

    def on_parity_changed(self, record: ShardRecord) -> None:
        """A parity was stored or dropped. The other methods are not called for parities."""

    def on_version_decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        """A version is committed, as another source reports, or aborted (``torn``)."""

    def on_versions_deleted(self, job: str, groups: Collection[VersionId]) -> None:
        """The owner deleted these versions, on this or another node."""

    def on_not_durable(self, job: str, group: VersionId, why: str) -> None:
        """Another node failed to upload its part of a version; the version stays in memory."""

    def free_a_slot(self, job: str, last: bool) -> bool:
        """Release a held shard for a writer of ``job`` that finds no slot; return whether one was released.

        With ``last`` the writer is refused if nothing is released; before that it waits.
        """
        return False


class StoreListeners(StoreListener):
    """All listeners. An exception of one listener does not affect the others.

    Methods are never called with the store's lock held.
    """

    def __init__(self) -> None:
        self.errors = 0
        self._lock = threading.Lock()
        self._all: tuple[StoreListener, ...] = ()
        self._damaged: deque[tuple[ShardRecord, str]] = deque(maxlen=_MAX_DAMAGES)

    def add(self, listener: StoreListener) -> list[tuple[ShardRecord, str]]:
        """Add a listener and return the damage that was found before."""
        with self._lock:
            self._all = (*self._all, listener)
            return list(self._damaged)

    def notify(self, what: str, tell: Callable[[StoreListener], None], *, only: StoreListener | None = None) -> None:
        for listener in self._all if only is None else (only,):
            try:
                tell(listener)
            except Exception:  # the event has happened, so a listener's failure is only logged
                with self._lock:
                    self.errors += 1
                log.exception("%s failed to handle an event: %s", type(listener).__name__, what)

    def on_shard_sealed(self, record: ShardRecord) -> None:
        if record.key.kind:
            self.on_parity_changed(record)
            return
        self.notify(f"{record.key} is sealed", lambda one: one.on_shard_sealed(record))

    def on_stored(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """Report a shard of this node, which has no ``holders``, a replica or a parity."""
        if holders:
            self.on_replica_stored(record, holders)
        else:
            self.on_shard_sealed(record)

    def on_replica_stored(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        self.notify(f"{record.key} is stored", lambda one: one.on_replica_stored(record, holders))

    def on_parity_changed(self, record: ShardRecord) -> None:
        self.notify(f"{record.key} was stored or dropped", lambda one: one.on_parity_changed(record))

    def on_shard_damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        if key.kind:
            self.on_parity_changed(record)
            return
        with self._lock:
            self._damaged.append((record, reason))
        self.notify(f"{key} is damaged", lambda one: one.on_shard_damaged(key, record, reason))

    def on_client_left(self, owner: ProcessIdentity, job: str) -> None:
        self.notify(f"process {owner.pid} left job {job}", lambda one: one.on_client_left(owner, job))

    def on_job_expired(self, job: str) -> None:
        self.notify(f"job {job} expired", lambda one: one.on_job_expired(job))

    def on_version_decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        what = "aborted" if torn else "committed"
        self.notify(
            f"version {group.version} of job {job} is {what}", lambda one: one.on_version_decided(job, group, torn=torn)
        )

    def on_versions_deleted(self, job: str, groups: Collection[VersionId]) -> None:
        self.notify(
            f"{len(groups)} versions of job {job} are deleted", lambda one: one.on_versions_deleted(job, groups)
        )

    def on_not_durable(self, job: str, group: VersionId, why: str) -> None:
        self.notify(f"version {group.version} is not durable: {why}", lambda one: one.on_not_durable(job, group, why))

    def free_a_slot(self, job: str, last: bool) -> bool:
        return any(listener.free_a_slot(job, last) for listener in self._all)
