"""What a job has in the durable tier: one listing says which steps, one object says all about one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from peerstore.records import Group
from tieredckpt.durable import names
from tieredckpt.durable.names import Entry
from tieredckpt.durable.store import ObjectExistsError, ObjectNotFoundError, ObjectStore
from tieredckpt.errors import (
    CheckpointDamagedError,
    DurableRefusedError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.manifest import (
    Manifest,
    ShardIndex,
    build_manifest,
    decode_manifest,
    decode_shard_file,
    encode_manifest,
)

_FRESH_S = 5.0
"""The ranks of a node ask at the same time; one listing (or one failure to list) serves them all."""
_SHARE, _OLD_S = 0.01, 600.0
"""What the drain knows is listed again so rarely that listing takes this much of the time, or when it is so old."""
_PATIENCE_S = 5.0
"""Somebody waits for a listing: a trainer that starts. So long after the first try that failed it does without, or says
what is wrong."""
_KEPT_MANIFESTS = 4


@dataclass(frozen=True)
class Listing:
    manifests: dict[Group, Entry]
    quarantined: frozenset[Group]
    plain: tuple[int, ...]
    kept: frozenset[Group] = frozenset()
    """Those that somebody wants kept."""


@dataclass
class _Listed:
    """A listing, with what this process did since."""

    at: float
    took_s: float
    listing: Listing
    shared: bool = False
    """Somebody was given it: it has to be copied before it changes."""


class Catalog:
    """One job's manifests in one object store."""

    def __init__(self, store: ObjectStore, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._job = job
        self._clock = clock
        self._lock = threading.Lock()
        self._listing: _Listed | None = None
        self._failure: tuple[float, TieredCheckpointError] | None = None
        self._manifests: dict[Group, Manifest] = {}

    def listing(self, *, fresh: bool = False) -> Listing:
        """All steps there are. Errors of the store pass through: they do not mean that there are none."""
        return self._shared(lambda: 0.0 if fresh else _FRESH_S)

    def remembered(self) -> Listing:
        """All steps as this process knows them: with what it did itself, and perhaps not yet with what others did.

        So that n steps do not cost n listings of n. Nothing may be deleted for what this says alone.
        """
        return self._shared(self._age_s)

    def entry(self, group: Group) -> Entry | None:
        """One of the steps that are remembered."""
        with self._lock:
            return self._at_most(self._age_s()).listing.manifests.get(group)

    def has(self, group: Group, base: int | None) -> bool:
        """Whether a step exists by now, whoever made it: one small read, and none where that is known."""
        if self.entry(group) is not None:
            return True
        try:
            self.store.get_ranges(names.manifest(self._job, group, base), [(0, 1)])
        except ObjectNotFoundError:
            return False
        except CheckpointDamagedError:
            pass  # it is there, whatever is in it
        self._add(Entry(group, quarantine=False, base=base))
        return True

    def _shared(self, age_s: Callable[[], float]) -> Listing:
        with self._lock:
            known = self._at_most(age_s())
            known.shared = True
            return known.listing

    def _age_s(self) -> float:
        """How old what is remembered may be."""
        took_s = self._listing.took_s if self._listing else 0.0
        return min(max(_FRESH_S, took_s / _SHARE), _OLD_S)

    def _at_most(self, age_s: float) -> _Listed:
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
        self._listing = _Listed(now, now - began, listing)
        return self._listing

    def _list(self) -> Listing:
        entries: list[Entry] = []
        for info in self.store.list(names.manifests(self._job), patience_s=_PATIENCE_S):
            entry = names.parse_entry(info.name, self._job)
            if entry is not None:
                entries.append(entry)
        newest = names.newest_epoch(entry.group.epoch for entry in entries)
        entries = [entry for entry in entries if entry.group.epoch <= newest]
        bad = {entry.group for entry in entries if entry.quarantine}
        kept = {entry.group for entry in entries if entry.kept}
        found = {entry.group: entry for entry in entries if not (entry.quarantine or entry.kept)}
        objects = self.store.list(names.plain(self._job), patience_s=_PATIENCE_S)
        plain = {names.parse_plain(info.name, self._job) for info in objects} - {None}
        return Listing(
            found, frozenset(bad), tuple(sorted(step for step in plain if step is not None)), frozenset(kept)
        )

    def manifest(self, group: Group) -> Manifest:
        """One step's manifest; read once."""
        with self._lock:
            kept = self._manifests.get(group)
        if kept is not None:
            return kept
        entry = self.entry(group) or self.listing(fresh=True).manifests.get(group)
        if entry is None:
            raise ObjectNotFoundError(
                f"job {self._job} has no step {group.version} ({names.stem(group)}) in {self.store.url}"
            )
        manifest = decode_manifest(self.store.get(names.manifest(self._job, group, entry.base)))
        if manifest.job != self._job or manifest.group != group:
            raise CheckpointDamagedError(
                f"the manifest of {self._job} step {group.version} describes {manifest.job} step {manifest.step}"
            )
        self._keep(manifest)
        return manifest

    def commit(self, manifest: Manifest, base: int | None) -> None:
        """Make the step exist. Whoever comes second with the same step finds it done."""
        name = names.manifest(self._job, manifest.group, base)
        with contextlib.suppress(ObjectExistsError):
            self.store.put(name, encode_manifest(manifest), create_only=True)
        self._keep(manifest)
        self._add(Entry(manifest.group, quarantine=False, base=base))

    def quarantine(self, group: Group, reason: str) -> None:
        self.store.put(names.quarantine(self._job, group), reason.encode())
        self._change(lambda known: replace(known, quarantined=known.quarantined | {group}))

    def keep(self, group: Group, *, kept: bool, at_ns: int = 0) -> None:
        """Have retention pass over the step, or not any more; said at ``at_ns``, or now and so after all before."""
        yes, no = names.kept(self._job, group), names.released(self._job, group)
        now, before = (yes, no) if kept else (no, yes)
        at_ns = at_ns or max(time.time_ns(), self._said_at(before) + 1)
        self.store.put(now, str(at_ns).encode())
        self.store.delete([before])
        self._change(lambda known: replace(known, kept=known.kept | {group} if kept else known.kept - {group}))

    def said_kept(self, group: Group, *, kept: bool) -> int:
        """When that was said of the step last, whoever said it; 0 where nobody has, or it was taken back."""
        return self._said_at((names.kept if kept else names.released)(self._job, group))

    def _said_at(self, name: str) -> int:
        try:
            said = self.store.get(name)
        except ObjectNotFoundError:
            return 0
        return int(said) if said.isdigit() and len(said) < 20 else 1  # there, and nobody noted when

    def shard_files(self, group: Group, *, at_least: int = 1) -> dict[int, tuple[ShardIndex, bytes, bytes]]:
        """The indexes of the shards of ``group`` that were uploaded, by part: what a manifest is rebuilt from.

        They are only read when there are ``at_least`` so many; else the answer is empty.
        """
        places = [
            (info.name, names.parse_shard(info.name, self._job))
            for info in self.store.list(names.steps(self._job, group))
        ]
        found = [name for name, place in places if place is not None and place[2] == "index"]
        if len(found) < at_least:
            return {}
        files = [decode_shard_file(self.store.get(name)) for name in found]
        return {index.key.part: (index, layout, table) for index, layout, table in files}

    def deleted(self, group: Group) -> None:
        """A step is not there any more."""
        with self._lock:
            self._manifests.pop(group, None)
            known = self._own()
            if known is not None:
                known.manifests.pop(group, None)
            marked = known is not None and (group in known.quarantined or group in known.kept)
        if marked:
            self._change(lambda one: replace(one, quarantined=one.quarantined - {group}, kept=one.kept - {group}))

    def forget(self) -> None:
        with self._lock:
            self._listing = None
            self._manifests.clear()

    def _add(self, entry: Entry) -> None:
        with self._lock:
            known = self._own()
            if known is not None:
                known.manifests[entry.group] = entry

    def _change(self, how: Callable[[Listing], Listing]) -> None:
        """What this process did needs no listing to be known."""
        with self._lock:
            if self._listing is not None:
                self._listing.listing = how(self._listing.listing)

    def _own(self) -> Listing | None:
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


def manifest_from(files: Sequence[tuple[ShardIndex, bytes, bytes]], *, created_ns: int, writer: str) -> Manifest:
    """A step's manifest out of what lies beside its shards."""
    layouts = {index.meta.layout: layout for index, layout, _ in files}
    tables = {index.meta.table: table for index, _, table in files if table}
    return build_manifest([index for index, _, _ in files], layouts, tables, created_ns=created_ns, writer=writer)
