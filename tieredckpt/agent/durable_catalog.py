"""The steps of a job in the durable tier, and orphaned shards of steps that were never committed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from peerstore.shard_records import VersionId
from tieredckpt.durable.object_store import ObjectExistsError, ObjectInfo, ObjectNotFoundError, ObjectStore
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
"""The ranks of a node ask at the same time; one listing (or one failure to list) serves them all."""
_SHARE, _OLD_S = 0.01, 600.0
"""What the drain knows is listed again so rarely that listing takes this much of the time, or when it is so old."""
_PATIENCE_S = 5.0
"""Somebody waits for a listing: a trainer that starts. So long after the first try that failed it does without, or says
what is wrong."""
_KEPT_MANIFESTS = 4


@dataclass(frozen=True)
class CatalogListing:
    manifests: dict[VersionId, ManifestKey]
    quarantined: frozenset[VersionId]
    plain_steps: tuple[int, ...]
    kept: frozenset[VersionId] = frozenset()
    """Those that somebody wants kept."""


@dataclass
class _CachedListing:
    """A listing, with what this process did since."""

    at: float
    took_s: float
    listing: CatalogListing
    shared: bool = False
    """Somebody was given it: it has to be copied before it changes."""


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
        """All steps there are. Errors of the store pass through: they do not mean that there are none."""
        return self._shared(lambda: 0.0 if fresh else _FRESH_S)

    def cached_listing(self) -> CatalogListing:
        """All steps as this process knows them: with what it did itself, and perhaps not yet with what others did.

        So that n steps do not cost n listings of n. Nothing may be deleted for what this says alone.
        """
        return self._shared(self._age_s)

    def entry(self, group: VersionId) -> ManifestKey | None:
        """One of the steps that are remembered."""
        with self._lock:
            return self._at_most(self._age_s()).listing.manifests.get(group)

    def has(self, group: VersionId, base: int | None) -> bool:
        """Whether a step exists by now, whoever made it: one small read, and none where that is known."""
        if self.entry(group) is not None:
            return True
        try:
            self.store.get_ranges(object_keys.manifest_key(self._job, group, base), [(0, 1)])
        except ObjectNotFoundError:
            return False
        except CheckpointDamagedError:
            pass  # it is there, whatever is in it
        self._add(ManifestKey(group, quarantine=False, base=base))
        return True

    def _shared(self, age_s: Callable[[], float]) -> CatalogListing:
        with self._lock:
            known = self._at_most(age_s())
            known.shared = True
            return known.listing

    def _age_s(self) -> float:
        """How old what is remembered may be."""
        took_s = self._listing.took_s if self._listing else 0.0
        return min(max(_FRESH_S, took_s / _SHARE), _OLD_S)

    def _at_most(self, age_s: float) -> _CachedListing:
        """A listing no older than that; where it is 0, one that begins now. For who has the lock."""
        known = self._listing
        if known and self._clock() - known.at < age_s:
            return known
        if self._failure and self._clock() - self._failure[0] < _FRESH_S:
            raise type(self._failure[1])(str(self._failure[1]))
        began = self._clock()
        try:
            listing = self._list()
        except (TierUnavailableError, DurableRefusedError) as error:
            self._failure = (self._clock(), error)
            raise
        now = self._clock()
        self._listing = _CachedListing(now, now - began, listing)
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
        objects = self.store.list(object_keys.plain_prefix(self._job), patience_s=_PATIENCE_S)
        plain = {object_keys.parse_plain_key(info.name, self._job) for info in objects} - {None}
        return CatalogListing(
            found, frozenset(bad), tuple(sorted(step for step in plain if step is not None)), frozenset(kept)
        )

    def manifest(self, group: VersionId) -> Manifest:
        """One step's manifest; read once."""
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
        self._keep(manifest)
        return manifest

    def commit(self, manifest: Manifest, base: int | None) -> None:
        """Make the step exist. Whoever comes second with the same step finds it done."""
        name = object_keys.manifest_key(self._job, manifest.group, base)
        with contextlib.suppress(ObjectExistsError):
            self.store.put(name, encode_manifest(manifest), create_only=True)
        self._keep(manifest)
        self._add(ManifestKey(manifest.group, quarantine=False, base=base))

    def quarantine(self, group: VersionId, reason: str) -> None:
        self.store.put(object_keys.quarantine_key(self._job, group), reason.encode())
        self._change(lambda known: replace(known, quarantined=known.quarantined | {group}))

    def keep(self, group: VersionId, *, kept: bool, at_ns: int = 0) -> None:
        """Have retention pass over the step, or not any more; said at ``at_ns``, or now and so after all before."""
        yes, no = object_keys.keep_key(self._job, group), object_keys.release_key(self._job, group)
        now, before = (yes, no) if kept else (no, yes)
        at_ns = at_ns or max(time.time_ns(), self._said_at(before) + 1)
        self.store.put(now, str(at_ns).encode())
        self.store.delete([before])
        self._change(lambda known: replace(known, kept=known.kept | {group} if kept else known.kept - {group}))

    def keep_changed_at(self, group: VersionId, *, kept: bool) -> int:
        """When that was said of the step last, whoever said it; 0 where nobody has, or it was taken back."""
        return self._said_at((object_keys.keep_key if kept else object_keys.release_key)(self._job, group))

    def _said_at(self, name: str) -> int:
        try:
            said = self.store.get(name)
        except ObjectNotFoundError:
            return 0
        return int(said) if said.isdigit() and len(said) < 20 else 1  # there, and nobody noted when

    def shard_files(self, group: VersionId, *, at_least: int = 1) -> dict[int, tuple[ShardIndex, bytes, bytes]]:
        """The indexes of the shards of ``group`` that were uploaded, by part: what a manifest is rebuilt from.

        They are only read when there are ``at_least`` so many; else the answer is empty.
        """
        places = [
            (info.name, object_keys.parse_shard_object_key(info.name, self._job))
            for info in self.store.list(object_keys.shards_prefix(self._job, group))
        ]
        found = [name for name, place in places if place is not None and place[2] == "index"]
        if len(found) < at_least:
            return {}
        files = [decode_shard_file(self.store.get(name)) for name in found]
        return {index.key.part: (index, layout, table) for index, layout, table in files}

    def mark_deleted(self, group: VersionId) -> None:
        """A step is not there any more."""
        with self._lock:
            self._manifests.pop(group, None)
            known = self._own()
            if known is not None:
                known.manifests.pop(group, None)
            marked = known is not None and (group in known.quarantined or group in known.kept)
        if marked:
            self._change(lambda one: replace(one, quarantined=one.quarantined - {group}, kept=one.kept - {group}))

    def invalidate(self) -> None:
        with self._lock:
            self._listing = None
            self._manifests.clear()

    def _add(self, entry: ManifestKey) -> None:
        with self._lock:
            known = self._own()
            if known is not None:
                known.manifests[entry.version_id] = entry

    def _change(self, how: Callable[[CatalogListing], CatalogListing]) -> None:
        """What this process did needs no listing to be known."""
        with self._lock:
            if self._listing is not None:
                self._listing.listing = how(self._listing.listing)

    def _own(self) -> CatalogListing | None:
        """The listing, to change its steps in place; a copy where somebody was given it. For who has the lock."""
        known = self._listing
        if known is not None and known.shared:
            known.listing = replace(known.listing, manifests=dict(known.listing.manifests))
            known.shared = False
        return None if known is None else known.listing

    def _keep(self, manifest: Manifest) -> None:
        with self._lock:
            self._manifests[manifest.group] = manifest
            while len(self._manifests) > _KEPT_MANIFESTS:
                self._manifests.pop(next(iter(self._manifests)))


def manifest_from_shard_files(
    files: Sequence[tuple[ShardIndex, bytes, bytes]], *, created_ns: int, writer: str
) -> Manifest:
    """A step's manifest out of what lies beside its shards."""
    layouts = {index.meta.layout: layout for index, layout, _ in files}
    tables = {index.meta.table: table for index, _, table in files if table}
    return build_manifest([index for index, _, _ in files], layouts, tables, created_ns=created_ns, writer=writer)


def has_all_parts(files: Mapping[int, tuple[ShardIndex, bytes, bytes]], parts: int) -> bool:
    """Whether these are all parts; of a step with an open number of them, all that its table names."""
    if parts != UNKNOWN_PART_COUNT:
        return len(files) >= parts
    table = next((table for _, _, table in files.values() if table), b"")
    return bool(table) and not missing_entries(
        decode_table(table), [decode_layout(layout) for _, layout, _ in files.values()]
    )


def delete_step(catalog: DurableCatalog, job: str, group: VersionId) -> None:
    """Remove a step: first what makes it exist, then its shards."""
    entry = catalog.entry(group)
    objects: set[str] = set()
    if entry is not None:
        with suppress(ObjectNotFoundError):  # somebody else deletes it, too
            objects.update(shard.object for shard in catalog.manifest(group).shards if shard.object)
        catalog.store.delete([object_keys.manifest_key(job, group, entry.base)])
    objects.update(info.name for info in catalog.store.list(object_keys.shards_prefix(job, group)))
    catalog.store.delete(sorted(objects))
    catalog.store.delete(
        [object_keys.quarantine_key(job, group), object_keys.keep_key(job, group), object_keys.release_key(job, group)]
    )
    catalog.mark_deleted(group)


@dataclass(frozen=True)
class OrphanedStep:
    """What is left of, or was begun for, a step that does not exist."""

    version_id: VersionId
    objects: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for info in self.objects)

    @property
    def written_s(self) -> float:
        """When the last of it was written."""
        return max(info.modified_s for info in self.objects)


def find_orphaned_steps(catalog: DurableCatalog, job: str, *, spread: bool) -> list[OrphanedStep]:
    """All there are, oldest step first. ``spread``: also look for shards under spread names, among all that is there.

    The shards are looked at first: one that becomes part of a step meanwhile is not taken for an orphan.
    """
    found: dict[VersionId, list[ObjectInfo]] = defaultdict(list)
    for info in catalog.store.list("" if spread else object_keys.shards_prefix(job)):
        place = object_keys.parse_shard_object_key(info.name, job)
        if place is not None:
            found[place[0]].append(info)
    known = catalog.listing(fresh=True).manifests
    left = [OrphanedStep(group, tuple(objects)) for group, objects in found.items() if group not in known]
    return sorted(left, key=lambda one: (one.version_id.version, one.version_id))


def orphaned_parts(catalog: DurableCatalog, job: str, orphan: OrphanedStep) -> tuple[int, int, bool]:
    """How many parts are there completely, of how many (0 where nothing says that), and whether these are all."""
    there = {info.name for info in orphan.objects}
    known = list(_files(catalog, job, orphan))
    files = {
        file[0].key.part: file
        for file in known
        if file[0].object in there
        or not file[0].object.startswith(object_keys.shards_prefix(job))  # spread, and not looked for
    }
    parts = max((index.parts for index, _, _ in known), default=0)
    return len(files), 0 if parts == UNKNOWN_PART_COUNT else parts, bool(files) and has_all_parts(files, parts)


def delete_orphaned_step(catalog: DurableCatalog, job: str, orphan: OrphanedStep) -> None:
    """First what a manifest would be made of, then what that would name."""
    objects = {info.name for info in orphan.objects} | {index.object for index, _, _ in _files(catalog, job, orphan)}
    first = [info.name for info in orphan.objects if _is_index(info, job)]
    catalog.store.delete(first)
    catalog.store.delete(sorted(objects - {*first}))
    catalog.store.delete(
        [object_keys.quarantine_key(job, orphan.version_id), object_keys.keep_key(job, orphan.version_id)]
    )


def _files(catalog: DurableCatalog, job: str, orphan: OrphanedStep) -> Iterator[tuple[ShardIndex, bytes, bytes]]:
    """What its shards say of themselves, each with an object that is really its own."""
    for info in orphan.objects:
        if _is_index(info, job):
            try:
                file = decode_shard_file(catalog.store.get(info.name))
            except (CheckpointDamagedError, ObjectNotFoundError):
                continue
            place = object_keys.parse_shard_object_key(file[0].object, job)
            if place is not None and place[:2] == (orphan.version_id, file[0].key.part):
                yield file


def _is_index(info: ObjectInfo, job: str) -> bool:
    place = object_keys.parse_shard_object_key(info.name, job)
    return place is not None and place[2] == "index"
