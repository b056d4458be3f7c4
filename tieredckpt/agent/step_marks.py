"""Marks of steps on this node: quarantined by a user or a reader, or damaged."""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from peerstore.message_codec import from_msgpack
from peerstore.shard_records import ShardKey, ShardRecord, VersionId
from peerstore.store.slot_metadata import BlobStore
from peerstore.store.store_listener import StoreListener
from tieredckpt.agent.agent_api import DAMAGED_BLOB_PREFIX, QUARANTINE_BLOB_PREFIX
from tieredckpt.format import object_keys
from tieredckpt.step_inventory import StepStatus

log = logging.getLogger(__name__)


class _DamageNote(msgspec.Struct, frozen=True):
    key: ShardKey
    parts: int
    reason: str


class StepMarks(StoreListener):
    """Quarantine and damage of the jobs' steps, stored with the jobs' shards."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    def quarantine(self, job: str, group: VersionId, reason: str) -> None:
        """Mark the step on this node.

        The drain marks it in the durable tier after its next upload, because the process that found the damage may only
        read that tier.
        """
        log.error("job %s step %d (%s) is quarantined: %s", job, group.version, object_keys.group_stem(group), reason)
        self._blobs.put(job, QUARANTINE_BLOB_PREFIX + object_keys.group_stem(group), reason.encode())

    def lift_quarantine(self, job: str, group: VersionId) -> None:
        self._blobs.remove(job, QUARANTINE_BLOB_PREFIX + object_keys.group_stem(group))

    def quarantine_reasons(self, job: str) -> dict[VersionId, str]:
        """Return the quarantined steps, with the reasons."""
        reasons = {}
        for name in self._names(job, QUARANTINE_BLOB_PREFIX):
            group = object_keys.parse_group_stem(name.removeprefix(QUARANTINE_BLOB_PREFIX))
            reason = (self._blobs.find(job, name) or b"").decode(errors="replace") if group else ""
            if group and reason:
                reasons[group] = reason
        return reasons

    def on_shard_damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        """Record the damage, so that the step is listed as damaged and not as one that never existed."""
        name = f"{DAMAGED_BLOB_PREFIX}{object_keys.group_stem(key.version_id)}.{key.part}"
        self._blobs.put(key.job, name, msgspec.msgpack.encode(_DamageNote(key, record.parts, reason)))

    def forget_damage(self, job: str, groups: Collection[VersionId]) -> None:
        """Delete the notes of damage of these steps."""
        stems = tuple(DAMAGED_BLOB_PREFIX + object_keys.group_stem(group) for group in groups)
        for name in self._names(job, DAMAGED_BLOB_PREFIX):
            if name.startswith(stems):
                self._blobs.remove(job, name)

    def add_damaged(self, job: str, views: dict[VersionId, StepStatus]) -> None:
        """Add damaged parts to ``views``; delete notes of parts that exist again or precede a complete step."""
        newest_complete = max((group for group, view in views.items() if view.candidate.is_complete), default=None)
        for name in self._names(job, DAMAGED_BLOB_PREFIX):
            blob = self._blobs.find(job, name)
            if blob is None:
                continue
            note = from_msgpack(blob, _DamageNote)
            group, part = note.key.version_id, note.key.part
            view = views.get(group) or StepStatus(group, note.parts, {})
            if part in view.found or (newest_complete is not None and newest_complete > group):
                self._blobs.remove(job, name)
            else:
                views[group] = msgspec.structs.replace(view, damaged={**view.damaged, part: note.reason})

    def _names(self, job: str, prefix: str) -> list[str]:
        return [name for name in self._blobs.list_names(job) if name.startswith(prefix)]
