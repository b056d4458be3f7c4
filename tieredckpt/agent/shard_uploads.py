"""Upload of this node's shards to the durable tier, with notes that survive this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError
from peerstore.failpoints import failpoint
from peerstore.shard_records import ShardKey
from peerstore.store.node_store import NodeStore
from tieredckpt.agent.durable_catalog import DurableCatalog
from tieredckpt.agent.durable_tiers import DurableTiers
from tieredckpt.agent.node_step_reader import NodeStepReader
from tieredckpt.durable.object_store import ObjectNotFoundError
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import ShardIndex, compressed_shard, decode_shard_file, encode_shard_file

log = logging.getLogger(__name__)
_DRAINED_BLOB_PREFIX, _JOURNAL_BLOB_PREFIX = "drained.", "upload."
"""Prefixes of the notes, which are blobs of the job."""
HOLD = "drain"
"""Name under which shards hold their slots until they are uploaded."""

ShardFile = tuple[ShardIndex, bytes, bytes]
"""Index, layout and table of an uploaded shard."""


class ShardUploads:
    """Uploads shards, and remembers which are complete."""

    def __init__(self, store: NodeStore, durable: DurableTiers, steps: NodeStepReader) -> None:
        self._store, self._durable, self._steps = store, durable, steps

    def hold(self, key: ShardKey) -> None:
        """Hold the slot of a shard until :meth:`release_hold`."""
        try:
            self._store.reader.hold(key, HOLD)
        except (ShardNotFoundError, ShardDamagedError):
            log.warning("%s was evicted or damaged before its upload", key)

    def release_hold(self, key: ShardKey) -> None:
        self._store.reader.release_hold(key, HOLD)

    def is_uploaded(self, key: ShardKey, catalog: DurableCatalog) -> bool:
        """Return whether the store still has a shard that was recorded as uploaded.

        If not, delete the record.
        """
        try:
            file = self.uploaded_file(key)
            if file is None:
                return False
            for name in (file[0].object, object_keys.shard_index_key(key)):
                catalog.store.get_ranges(name, [(0, 1)])
        except (ObjectNotFoundError, CheckpointDamagedError):
            log.warning("%s is missing or damaged in %s and is uploaded again", key, catalog.store.url)
            self.forget(key)
            return False
        return True

    def uploaded_file(self, key: ShardKey) -> ShardFile | None:
        """Return the index, layout and table of a shard that was recorded as uploaded."""
        note = _read_note(self._store, key.job, _note_name(key))
        return None if note is None else decode_shard_file(note)

    def forget(self, key: ShardKey) -> None:
        """Delete the record of a shard's upload, if possible: a record without its step does no harm."""
        try:
            self._store.blobs.remove(key.job, _note_name(key))
        except (PeerStoreError, OSError) as error:
            log.warning("the record of the upload of %s cannot be deleted: %s", key, error)

    def upload(
        self, key: ShardKey, catalog: DurableCatalog, *, progress: Callable[[int], None], cancel: threading.Event
    ) -> None:
        """Upload a shard and its index, and record that.

        Raise :class:`CheckpointDamagedError` if the shard was evicted or changed after its seal.
        """
        try:
            record = self._store.reader.hold(key, HOLD)
            bad = self._store.verify(key)
        except ShardNotFoundError as error:
            raise CheckpointDamagedError(f"{key} was evicted from this node's memory before it was durable") from error
        if bad:
            raise CheckpointDamagedError(f"{key} changed in memory after it was sealed, so it is not uploaded")
        settings = self._durable.settings(key.job)
        index, layout, table = self._steps.describe_shard(record)
        journal = BlobJournal(self._store, key.job)
        failpoint("drain.began")
        source = Path(self._store.reader.shard_path(key))
        with compressed_shard(source, index, wanted=settings.compress == "zstd") as (path, frames):
            name = object_keys.shard_object_key(key, spread=settings.hashed_keys, compressed=frames is not None)
            size = index.size_bytes if frames is None else sum(frames)
            identity = xxhash.xxh3_128_hexdigest(index.checksums) + ("" if frames is None else ".zst")
            catalog.store.upload(name, path, size, journal=journal, identity=identity, progress=progress, cancel=cancel)
        index = msgspec.structs.replace(
            index, object=name, encoding="raw" if frames is None else "zstd", frames=tuple(frames or ())
        )
        failpoint("drain.uploaded")
        file = encode_shard_file(index, layout, table)
        catalog.store.put(object_keys.shard_index_key(key), file)
        failpoint("drain.indexed")
        self._store.blobs.put(key.job, _note_name(key), file)
        journal.flush()
        failpoint("drain.noted")


class BlobJournal:
    """Journal of started uploads, stored as blobs of the job for the next agent.

    A complete upload remains in the journal until :meth:`flush`, which is called after the shard was recorded. If the
    agent is killed in between, the entry identifies the finished object.
    """

    def __init__(self, store: NodeStore, job: str) -> None:
        self._store = store
        self._job = job
        self._removed: set[str] = set()

    def get(self, name: str) -> bytes | None:
        return None if name in self._removed else _read_note(self._store, self._job, _journal_name(name))

    def put(self, name: str, data: bytes) -> None:
        self._store.blobs.put(self._job, _journal_name(name), data)
        self._removed.discard(name)

    def remove(self, name: str) -> None:
        self._removed.add(name)

    def flush(self) -> None:
        for name in self._removed:
            self._store.blobs.remove(self._job, _journal_name(name))
        self._removed.clear()


def journaled_uploads(blob_names: list[str]) -> list[str]:
    """Return the names of the objects whose upload has started, by the names of a job's blobs."""
    return [
        name.removeprefix(_JOURNAL_BLOB_PREFIX).replace("@", "/")
        for name in blob_names
        if name.startswith(_JOURNAL_BLOB_PREFIX)
    ]


def _read_note(store: NodeStore, job: str, name: str) -> bytes | None:
    try:
        return store.blobs.find(job, name)
    except ShardDamagedError:
        return None


def _note_name(key: ShardKey) -> str:
    return f"{_DRAINED_BLOB_PREFIX}{object_keys.group_stem(key.version_id)}.{key.part}"


def _journal_name(name: str) -> str:
    return _JOURNAL_BLOB_PREFIX + name.replace("/", "@")
