"""Giving shards up: because their owner said so, or because they cannot be trusted any more."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from peerstore.jobs import Jobs
from peerstore.records import Group, ShardKey, ShardRecord, SlotState
from peerstore.shelf import Shelf, Slot, Standing

log = logging.getLogger(__name__)


class Keeping:
    """``forget`` and ``report`` of the store. The shelf's lock is taken here."""

    def __init__(self, shelf: Shelf, jobs: Jobs) -> None:
        self._shelf = shelf
        self._jobs = jobs

    def forget(self, job: str, groups: Sequence[Group] | None) -> int:
        with self._shelf.lock:
            found = [
                (slot, slot.record)
                for slot in self._shelf.slots.values()
                if slot.record is not None and slot.record.key.job == job and slot.standing is not Standing.GIVEN_UP
                if groups is None or slot.record.key.group in groups
            ]
            for slot, _ in found:
                self._shelf.give_up(slot)
            self._jobs.forgot(job, groups)
            if groups is None:
                self._drop_job(job)
            return sum(not record.key.kind for _, record in found)

    def expire(self, job: str, reason: str) -> None:
        """Drop all of a job whose owner has not said so; what it had, and why it went, stays noted."""
        with self._shelf.lock:
            log.warning("job %s: its shards are given back: %s", job, reason)
            self._jobs.bury(job, reason)
            self.forget(job, None)

    def drop_unused(self) -> None:
        """Slots that nobody is going to fill. What is known of their jobs stays."""
        with self._shelf.lock:
            held = {slot.job for slot in self._shelf.slots.values() if slot.record is not None}
            for slot in list(self._shelf.slots.values()):
                if slot.state is SlotState.FREE and slot.job not in held and not self._jobs.active(slot.job):
                    self._shelf.drop(slot)

    def _drop_job(self, job: str) -> None:
        for slot in list(self._shelf.slots.values()):
            if slot.job == job and slot.state is SlotState.FREE:
                self._shelf.drop(slot)
        for blob in self._shelf.notes.blobs(job):
            self._shelf.notes.remove_blob(job, blob)
        self._jobs.drop(job)

    def damaged(self, key: ShardKey, reason: str) -> ShardRecord | None:
        """Drop the shard and what was said of its version; the record, when it was here."""
        with self._shelf.lock:
            slot = self._shelf.slot_of(key)
            if slot is None or slot.record is None:
                return None
            record = slot.record
            self._shelf.note_damage(key.job, str(key), reason)
            self._drop(slot)
            if not key.kind:
                self._jobs.lost_part(key.job, key.group, key.part)
            return record

    def _drop(self, slot: Slot) -> None:
        # Readers may still look at these bytes: only a slot nobody looks at is used again.
        if slot.users:
            self._shelf.drop(slot)
        else:
            self._shelf.clear(slot)
