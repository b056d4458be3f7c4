"""Counters of a store, its damage reports, and the slots that this release cannot read."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection

from peerstore.shard_records import DamageReport, UnrecognizedSlot
from peerstore.sizes_and_durations import show_size
from peerstore.store.arena import Arena
from peerstore.store.slot_metadata import LEASE_METADATA, METADATA_FORMAT, SEAL_METADATA, MetadataStore
from peerstore.store.slots import SLOT_PREFIX

log = logging.getLogger(__name__)

_DAMAGES = 1000
_REASON_CHARS = 500


class StoreIncidents:
    """Counters of a store, and its newest damage reports; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._damages: deque[DamageReport] = deque(maxlen=_DAMAGES)

    def count(self, name: str, by: float = 1) -> None:
        with self._lock:
            self._counters[name] += by

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def record_damage(self, job: str, what: str, reason: str) -> None:
        reason = reason[:_REASON_CHARS]
        log.error("damaged: %s: %s", what, reason)
        self.count("damaged")
        self._damages.append(DamageReport(job, what, reason, time.time_ns()))

    def damage_reports(self) -> tuple[DamageReport, ...]:
        return tuple(self._damages)


class UnrecognizedSlots:
    """Slots that this release cannot read: they stay unchanged, and no writer uses them."""

    def __init__(self, arena: Arena, metadata: MetadataStore) -> None:
        self._arena = arena
        self._metadata = metadata
        self._slots: dict[str, UnrecognizedSlot] = {}

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self._slots.values())

    @property
    def hint(self) -> str:
        """Text for errors of full memory if these slots use part of the budget."""
        if not self.size_bytes:
            return ""
        return (
            f"; {show_size(self.size_bytes)} more is in slots that another version of the agent left: run that "
            "version again, or drop them (tieredckpt gc JOB --unrecognized-slots)"
        )

    def find(self, name: str | None = None, *, job: str | None = None) -> tuple[UnrecognizedSlot, ...]:
        """Return all such slots, or those of one name or job."""
        found = list(self._slots.values())  # at once, because a caller need not hold the table's lock
        return tuple(one for one in found if name in (None, one.name) and job in (None, one.job))

    def mark(self, name: str, size_bytes: int, reason: str) -> None:
        reason = reason[:_REASON_CHARS]
        log.error("%s (%d bytes) is set aside: %s", name, size_bytes, reason)
        written, key, job = None, None, ""
        if name.startswith(SLOT_PREFIX):
            written, key = self._metadata.stated(SEAL_METADATA, name)
            job = key.job if key is not None else name.removeprefix(SLOT_PREFIX).rsplit(".", 2)[0]
        self._slots[name] = UnrecognizedSlot(name, size_bytes, reason, job, key, written, METADATA_FORMAT)

    def drop(self, names: Collection[str] | None) -> int:
        """Drop the slots of these names, or all of them, and return their bytes."""
        gone = [one for one in self._slots.values() if names is None or one.name in names]
        for one in gone:
            if one.name.startswith(SLOT_PREFIX):
                for note in (LEASE_METADATA, SEAL_METADATA):
                    self._metadata.remove(note, one.name)
                self._arena.remove(one.name)
            del self._slots[one.name]
            log.warning("dropped unrecognized %s on request", one.name)
        return sum(one.size_bytes for one in gone)
