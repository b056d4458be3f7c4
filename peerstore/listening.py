"""Who wants to know what happens to shards."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection

from peerstore.owners import Owner
from peerstore.records import Group, ShardKey, ShardRecord

log = logging.getLogger(__name__)

_REMEMBERED = 1000


class SealListener:
    """Told what happens to shards. Calls come from the thread that caused them and must return quickly."""

    def sealed(self, record: ShardRecord) -> None:
        """A shard was sealed (or adopted from a killed agent's arena)."""

    def copied(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        """A copy of a shard that another node wrote is here (or was adopted); ``holders`` were to have it."""

    def damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        """A sealed shard was found to be damaged and was dropped: after a restart, or when it was looked at again."""

    def dropped(self, job: str) -> None:
        """The job's last process left long ago, and everything that was kept for it is gone."""

    def departed(self, owner: Owner, job: str) -> None:
        """The last connection that a process had for the job is closed."""

    def parity(self, record: ShardRecord) -> None:
        """A parity came or went: it is no shard, and none of the above is said of it."""

    def decided(self, job: str, group: Group, *, torn: bool) -> None:
        """A version is whole, as is known from elsewhere, or torn: some writer has left its part out."""

    def withdrawn(self, job: str, groups: Collection[Group]) -> None:
        """Their owner drops these versions, here or on another node."""

    def not_durable(self, job: str, group: Group, why: str) -> None:
        """Another node's part of a version will not be where a listener there was to bring it; the version stays."""

    def give_way(self, job: str, last: bool) -> bool:
        """A writer of ``job`` finds no slot: let go of something that is held and can be spared; False: nothing is.

        ``last``: else the writer is refused now. Until then it waits.
        """
        return False


class Listeners(SealListener):
    """All of them, each on its own: what one cannot do (there is no room for its note, say) keeps nobody else from
    hearing. Never called with the store's lock held.
    """

    def __init__(self) -> None:
        self.errors = 0
        self._lock = threading.Lock()
        self._all: tuple[SealListener, ...] = ()
        self._damaged: deque[tuple[ShardRecord, str]] = deque(maxlen=_REMEMBERED)

    def add(self, listener: SealListener) -> list[tuple[ShardRecord, str]]:
        """From now on, tell ``listener``. The answer is the damage that was found before it came."""
        with self._lock:
            self._all = (*self._all, listener)
            return list(self._damaged)

    def tell(self, what: str, tell: Callable[[SealListener], None], *, only: SealListener | None = None) -> None:
        for listener in self._all if only is None else (only,):
            try:
                tell(listener)
            except Exception:  # whatever it is, the shard is where it is
                with self._lock:
                    self.errors += 1
                log.exception("%s did not take in that %s", type(listener).__name__, what)

    def sealed(self, record: ShardRecord) -> None:
        if record.key.kind:
            self.parity(record)
            return
        self.tell(f"{record.key} is sealed", lambda one: one.sealed(record))

    def copied(self, record: ShardRecord, holders: tuple[str, ...]) -> None:
        self.tell(f"{record.key} is here", lambda one: one.copied(record, holders))

    def parity(self, record: ShardRecord) -> None:
        self.tell(f"{record.key} came or went", lambda one: one.parity(record))

    def damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        if key.kind:
            self.parity(record)
            return
        with self._lock:
            self._damaged.append((record, reason))
        self.tell(f"{key} is damaged", lambda one: one.damaged(key, record, reason))

    def departed(self, owner: Owner, job: str) -> None:
        self.tell(f"process {owner.pid} left job {job}", lambda one: one.departed(owner, job))

    def dropped(self, job: str) -> None:
        self.tell(f"job {job} is forgotten", lambda one: one.dropped(job))

    def decided(self, job: str, group: Group, *, torn: bool) -> None:
        what = "torn" if torn else "whole"
        self.tell(f"version {group.version} of job {job} is {what}", lambda one: one.decided(job, group, torn=torn))

    def withdrawn(self, job: str, groups: Collection[Group]) -> None:
        self.tell(f"{len(groups)} versions of job {job} are dropped", lambda one: one.withdrawn(job, groups))

    def not_durable(self, job: str, group: Group, why: str) -> None:
        self.tell(f"version {group.version} is not durable: {why}", lambda one: one.not_durable(job, group, why))

    def give_way(self, job: str, last: bool) -> bool:
        return any(listener.give_way(job, last) for listener in self._all)
