"""The steps of a job in the durable tier, and orphaned shards of steps that were never committed."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from peerstore.shard_records import VersionId
from tieredckpt.durable.object_store import ObjectExistsError, ObjectInfo, ObjectNotFoundError, ObjectStore
from tieredckpt.durable.plain_objects import PlainSteps, list_plain_steps
from tieredckpt.errors import (
    CheckpointDamagedError,
    DurableRefusedError,
    FormatVersionError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import (
    UNKNOWN_PART_COUNT,
    Manifest,
    ShardIndex,
    build_manifest,
    decode_manifest,
    decode_shard_file,
    decode_table,
    encode_manifest,
    missing_entries,
)
from tieredckpt.format.object_keys import ManifestKey
from tieredckpt.format.shard_layout import decode_layout

_FRESH_S = 5.0
"""Seconds for which one listing, or one failure to list, is reused.

The ranks of a node request listings at the same time.
"""
_MAX_TIME_SHARE, _MAX_AGE_S = 0.01, 600.0
"""Largest share of time for the drain's listings, and largest age of a listing in seconds."""
_PATIENCE_S = 5.0
"""Seconds to retry a failed listing. A starting trainer waits for it."""
_KEPT_MANIFESTS = 4


@dataclass(frozen=True)
class CatalogListing:
    manifests: dict[VersionId, ManifestKey]
    quarantined: frozenset[VersionId]
    plain: PlainSteps
    kept: frozenset[VersionId] = frozenset()
    """Versions that a user marked to be retained."""


@dataclass
class _CachedListing:
    """A listing, updated with this process's later changes."""

    began: float
    ended: float
    listing: CatalogListing
    shared: bool = False
    """Whether a caller holds the listing, so that it must be copied before a change."""


class DurableCatalog:
    """One job's manifests in one object store."""

    def __init__(self, store: ObjectStore, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._job = job
        self._clock = clock
        self._lock = threading.Lock()
        self._listing: _CachedListing | None = None
        self._failure: tuple[float, TieredCheckpointError] | None = None
        self._manifests: dict[VersionId, Manifest] = {}

    def listing(self, *, fresh: bool = False) -> CatalogListing:
        """Return all steps. With ``fresh``, the listing began after this call.

        Calls at the same time share one. Errors of the store propagate: they do not mean that no step exists.
        """
        return self._shared_listing(lambda: 0.0 if fresh else _FRESH_S)

    def cached_listing(self) -> CatalogListing:
        """Return all steps as this process knows them, possibly without recent changes of other processes.

        The cache saves a listing for every new step. Do not delete anything because of this listing alone.
        """
        return self._shared_listing(self._age_s)

    def entry(self, group: VersionId) -> ManifestKey | None:
        """Return a step's entry in the cached listing, or ``None``."""
        with self._lock:
            return self._listing_at_most(self._age_s()).listing.manifests.get(group)

    def has(self, group: VersionId, base: int | None) -> bool:
        """Return whether a step exists. This costs one small read unless the cached listing has it."""
        if self.entry(group) is not None:
            return True
        try:
            self.store.get_ranges(object_keys.manifest_key(self._job, group, base), [(0, 1)])
        except ObjectNotFoundError:
            return False
        except CheckpointDamagedError:
            pass  # the object exists, even if it is damaged
        self._add_entry(ManifestKey(group, quarantine=False, base=base))
        return True

    def _shared_listing(self, age_s: Callable[[], float]) -> CatalogListing:
        called = self._clock()
        with self._lock:
            known = self._listing_at_most(age_s(), called)
            known.shared = True
            return known.listing

    def _age_s(self) -> float:
        """Return the largest age of the cached listing, in seconds."""
        took_s = self._listing.ended - self._listing.began if self._listing else 0.0
        return min(max(_FRESH_S, took_s / _MAX_TIME_SHARE), _MAX_AGE_S)

    def _listing_at_most(self, age_s: float, called: float = math.inf) -> _CachedListing:
        """Return a listing of at most this age in seconds, or begun after ``called``. Lock held.

        A failure of the last ``_FRESH_S`` seconds is raised again.
        """
        known = self._listing
        if known and (known.began > called or self._clock() - known.ended < age_s):
            return known
        if self._failure and self._clock() - self._failure[0] < _FRESH_S:
            raise type(self._failure[1])(str(self._failure[1]))
        began = self._clock()
        try:
            listing = self._list()
        except (TierUnavailableError, DurableRefusedError) as error:
            self._failure = (self._clock(), error)
            raise
        self._listing = _CachedListing(began, self._clock(), listing)
        return self._listing

    def _list(self) -> CatalogListing:
        entries: list[ManifestKey] = []
        for info in self.store.list(object_keys.manifest_prefix(self._job), patience_s=_PATIENCE_S):
            entry = object_keys.parse_manifest_key(info.name, self._job)
            if entry is not None:
                entries.append(entry)
        newest = object_keys.newest_epoch(entry.version_id.epoch for entry in entries)
        entries = [entry for entry in entries if entry.version_id.epoch <= newest]
        bad = {entry.version_id for entry in entries if entry.quarantine}
        kept = {entry.version_id for entry in entries if entry.keep}
        found = {entry.version_id: entry for entry in entries if not (entry.quarantine or entry.keep)}
        plain = list_plain_steps(self.store, self._job, patience_s=_PATIENCE_S)
        return CatalogListing(found, frozenset(bad), plain, frozenset(kept))

    def manifest(self, group: VersionId) -> Manifest:
        """Return a step's manifest, from the cache if possible."""
        with self._lock:
            kept = self._manifests.get(group)
        if kept is not None:
            return kept
        entry = self.entry(group) or self.listing(fresh=True).manifests.get(group)
        if entry is None:
            raise ObjectNotFoundError(
                f"job {self._job} has no step {group.version} ({object_keys.group_stem(group)}) in {self.store.url}"
            )
        data = self.store.get(object_keys.manifest_key(self._job, group, entry.base))
        try:
            manifest = decode_manifest(data)
        except FormatVersionError as error:
            raise FormatVersionError(f"step {group.version} of {self._job} in {self.store.url}: {error}") from error
        if manifest.job != self._job or manifest.group != group:
            raise CheckpointDamagedError(
                f"the manifest of {self._job} step {group.version} describes {manifest.job} step {manifest.step}"
            )
        self._cache_manifest(manifest)
        return manifest

    def commit(self, manifest: Manifest, base: int | None) -> None:
        """Create the step's manifest, unless another node already did."""
        name = object_keys.manifest_key(self._job, manifest.group, base)
        with contextlib.suppress(ObjectExistsError):
            self.store.put(name, encode_manifest(manifest), create_only=True)
        self._cache_manifest(manifest)
        self._add_entry(ManifestKey(manifest.group, quarantine=False, base=base))

    def quarantine(self, group: VersionId, reason: str) -> None:
        self.store.put(object_keys.quarantine_key(self._job, group), reason.encode())
        self._update_listing(lambda known: replace(known, quarantined=known.quarantined | {group}))

    def keep(self, group: VersionId, *, kept: bool, at_ns: int = 0) -> None:
        """Mark the step to be retained, or release it.

        A mark without ``at_ns`` is newer than all earlier marks.
        """
        keep_key, release_key = object_keys.keep_key(self._job, group), object_keys.release_key(self._job, group)
        added, removed = (keep_key, release_key) if kept else (release_key, keep_key)
        at_ns = at_ns or max(time.time_ns(), self._marked_at(removed) + 1)
        self.store.put(added, str(at_ns).encode())
        self.store.delete([removed])
        self._update_listing(lambda known: replace(known, kept=known.kept | {group} if kept else known.kept - {group}))

    def keep_changed_at(self, group: VersionId, *, kept: bool) -> int:
        """Return the time of the step's mark of this kind in Unix nanoseconds, or 0 without one."""
        return self._marked_at((object_keys.keep_key if kept else object_keys.release_key)(self._job, group))

    def _marked_at(self, name: str) -> int:
        try:
            data = self.store.get(name)
        except ObjectNotFoundError:
            return 0
        return int(data) if data.isdigit() and len(data) < 20 else 1  # a mark without a valid time

    def shard_files(self, group: VersionId, *, at_least: int = 1) -> dict[int, tuple[ShardIndex, bytes, bytes]]:
        """Return index, layout and table of each uploaded shard of ``group``, by part.

        With fewer than ``at_least`` of them, return nothing and read none.
        """
        parsed = [
            (info.name, object_keys.parse_shard_object_key(info.name, self._job))
            for info in self.store.list(object_keys.shards_prefix(self._job, group))
        ]
        found = [name for name, parsed_key in parsed if parsed_key is not None and parsed_key[2] == "index"]
        if len(found) < at_least:
            return {}
        files = [decode_shard_file(self.store.get(name)) for name in found]
        return {index.key.part: (index, layout, table) for index, layout, table in files}

    def mark_deleted(self, group: VersionId) -> None:
        """Remove a deleted step from the cache."""
        with self._lock:
            self._manifests.pop(group, None)
            known = self._mutable_listing()
            if known is not None:
                known.manifests.pop(group, None)
            marked = known is not None and (group in known.quarantined or group in known.kept)
        if marked:
            self._update_listing(
                lambda one: replace(one, quarantined=one.quarantined - {group}, kept=one.kept - {group})
            )

    def invalidate(self) -> None:
        with self._lock:
            self._listing = None
            self._manifests.clear()

    def _add_entry(self, entry: ManifestKey) -> None:
        with self._lock:
            known = self._mutable_listing()
            if known is not None:
                known.manifests[entry.version_id] = entry

    def _update_listing(self, how: Callable[[CatalogListing], CatalogListing]) -> None:
        """Apply a change of this process to the cached listing."""
        with self._lock:
            if self._listing is not None:
                self._listing.listing = how(self._listing.listing)

    def _mutable_listing(self) -> CatalogListing | None:
        """Return the cached listing for changes in place, copied first if a caller holds it. Lock held."""
        known = self._listing
        if known is not None and known.shared:
            known.listing = replace(known.listing, manifests=dict(known.listing.manifests))
            known.shared = False
        return None if known is None else known.listing

    def _cache_manifest(self, manifest: Manifest) -> None:
        with self._lock:
            self._manifests[manifest.group] = manifest
            while len(self._manifests) > _KEPT_MANIFESTS:
                self._manifests.pop(next(iter(self._manifests)))


def manifest_from_shard_files(
    files: Sequence[tuple[ShardIndex, bytes, bytes]], *, created_ns: int, writer: str
) -> Manifest:
    """Return a step's manifest, built from the index files of its shards."""
    layouts = {index.meta.layout: layout for index, layout, _ in files}
    tables = {index.meta.table: table for index, _, table in files if table}
    return build_manifest([index for index, _, _ in files], layouts, tables, created_ns=created_ns, writer=writer)


def has_all_parts(files: Mapping[int, tuple[ShardIndex, bytes, bytes]], parts: int) -> bool:
    """Return whether these are all parts.

    If their number is unknown, they must hold all entries of the state table.
    """
    if parts != UNKNOWN_PART_COUNT:
        return len(files) >= parts
    table = next((table for _, _, table in files.values() if table), b"")
    return bool(table) and not missing_entries(
        decode_table(table), [decode_layout(layout) for _, layout, _ in files.values()]
    )


def delete_step(catalog: DurableCatalog, job: str, group: VersionId) -> None:
    """Delete a step: first its manifest, then its indexes, marks and shards."""
    entry = catalog.entry(group)
    objects: set[str] = set()
    if entry is not None:
        with suppress(ObjectNotFoundError):  # another process deletes it too
            objects.update(shard.object for shard in catalog.manifest(group).shards if shard.object)
        catalog.store.delete([object_keys.manifest_key(job, group, entry.base)])
    objects.update(info.name for info in catalog.store.list(object_keys.shards_prefix(job, group)))
    _delete_without_manifest(catalog, job, group, objects)
    catalog.mark_deleted(group)


def _delete_without_manifest(catalog: DurableCatalog, job: str, group: VersionId, objects: set[str]) -> None:
    """Delete the objects of a step without a manifest. After an interruption, ``gc`` finds the rest.

    A manifest could be built from indexes, so these are deleted before a quarantine mark. Shards come last.
    """
    indexes = {name for name in objects if _is_index(name, job)}
    catalog.store.delete(sorted(indexes))
    catalog.store.delete(_marks(job, group))
    catalog.store.delete(sorted(objects - indexes))


@dataclass(frozen=True)
class OrphanedStep:
    """Objects of a step without a manifest: deleted in part, or never committed."""

    version_id: VersionId
    objects: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for info in self.objects)

    @property
    def written_s(self) -> float:
        """Unix time at which the newest object was written."""
        return max(info.modified_s for info in self.objects)


def find_orphaned_steps(catalog: DurableCatalog, job: str, *, spread: bool) -> list[OrphanedStep]:
    """Return all orphaned steps, oldest first.

    With ``spread``, search the whole store for shards under spread names.

    Shards are listed before manifests, so that a step committed meanwhile is not taken for an orphan.
    """
    found: dict[VersionId, list[ObjectInfo]] = defaultdict(list)
    for info in catalog.store.list("" if spread else object_keys.shards_prefix(job)):
        parsed = object_keys.parse_shard_object_key(info.name, job)
        if parsed is not None:
            found[parsed[0]].append(info)
    known = catalog.listing(fresh=True).manifests
    orphans = [OrphanedStep(group, tuple(objects)) for group, objects in found.items() if group not in known]
    return sorted(orphans, key=lambda one: (one.version_id.version, one.version_id))


def orphaned_parts(catalog: DurableCatalog, job: str, orphan: OrphanedStep) -> tuple[int, int, bool]:
    """Return the number of complete parts, the total, and whether all are complete.

    The total is 0 if unknown.
    """
    names = {info.name for info in orphan.objects}
    known = list(_index_files(catalog, job, orphan))
    files = {
        file[0].key.part: file
        for file in known
        if file[0].object in names
        or not file[0].object.startswith(object_keys.shards_prefix(job))  # under a spread name, not searched for
    }
    parts = max((index.parts for index, _, _ in known), default=0)
    return len(files), 0 if parts == UNKNOWN_PART_COUNT else parts, bool(files) and has_all_parts(files, parts)


def delete_orphaned_step(catalog: DurableCatalog, job: str, orphan: OrphanedStep) -> None:
    """Delete an orphaned step: its indexes, marks and shards."""
    objects = {info.name for info in orphan.objects} | {
        index.object for index, _, _ in _index_files(catalog, job, orphan)
    }
    _delete_without_manifest(catalog, job, orphan.version_id, objects)


def _marks(job: str, group: VersionId) -> list[str]:
    """Return the keys of all marks that a step can have."""
    return [
        object_keys.quarantine_key(job, group),
        object_keys.keep_key(job, group),
        object_keys.release_key(job, group),
    ]


def _index_files(catalog: DurableCatalog, job: str, orphan: OrphanedStep) -> Iterator[tuple[ShardIndex, bytes, bytes]]:
    """Yield the decoded shard indexes of the orphan.

    Damaged indexes and indexes that name another shard's object are skipped.
    """
    for info in orphan.objects:
        if _is_index(info.name, job):
            try:
                file = decode_shard_file(catalog.store.get(info.name))
            except (CheckpointDamagedError, ObjectNotFoundError):
                continue
            parsed = object_keys.parse_shard_object_key(file[0].object, job)
            if parsed is not None and parsed[:2] == (orphan.version_id, file[0].key.part):
                yield file


def _is_index(name: str, job: str) -> bool:
    place = object_keys.parse_shard_object_key(name, job)
    return place is not None and place[2] == "index"
