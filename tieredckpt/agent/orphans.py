"""Shards in the durable tier of steps that are not there: their manifest was never written, or is gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from peerstore.records import Group
from tieredckpt.agent.catalog import Catalog
from tieredckpt.agent.drain import are_all
from tieredckpt.durable import names
from tieredckpt.durable.store import ObjectInfo, ObjectNotFoundError
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.manifest import OPEN_ENDED, ShardIndex, decode_shard_file


@dataclass(frozen=True)
class Orphan:
    """What is left of, or was begun for, a step that does not exist."""

    group: Group
    objects: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for info in self.objects)

    @property
    def written_s(self) -> float:
        """When the last of it was written."""
        return max(info.modified_s for info in self.objects)


def orphans(catalog: Catalog, job: str, *, spread: bool) -> list[Orphan]:
    """All there are, oldest step first. ``spread``: also look for shards under spread names, among all that is there.

    The shards are looked at first: one that becomes part of a step meanwhile is not taken for an orphan.
    """
    found: dict[Group, list[ObjectInfo]] = defaultdict(list)
    for info in catalog.store.list("" if spread else names.steps(job)):
        place = names.parse_shard(info.name, job)
        if place is not None:
            found[place[0]].append(info)
    known = catalog.listing(fresh=True).manifests
    left = [Orphan(group, tuple(objects)) for group, objects in found.items() if group not in known]
    return sorted(left, key=lambda one: (one.group.version, one.group))


def parts_of(catalog: Catalog, job: str, orphan: Orphan) -> tuple[int, int, bool]:
    """How many parts are there completely, of how many (0 where nothing says that), and whether these are all."""
    there = {info.name for info in orphan.objects}
    known = list(_files(catalog, job, orphan))
    files = {
        file[0].key.part: file
        for file in known
        if file[0].object in there or not file[0].object.startswith(names.steps(job))  # spread, and not looked for
    }
    parts = max((index.parts for index, _, _ in known), default=0)
    return len(files), 0 if parts == OPEN_ENDED else parts, bool(files) and are_all(files, parts)


def delete_orphan(catalog: Catalog, job: str, orphan: Orphan) -> None:
    """First what a manifest would be made of, then what that would name."""
    objects = {info.name for info in orphan.objects} | {index.object for index, _, _ in _files(catalog, job, orphan)}
    first = [info.name for info in orphan.objects if _is_index(info, job)]
    catalog.store.delete(first)
    catalog.store.delete(sorted(objects - {*first}))
    catalog.store.delete([names.quarantine(job, orphan.group), names.kept(job, orphan.group)])


def _files(catalog: Catalog, job: str, orphan: Orphan) -> Iterator[tuple[ShardIndex, bytes, bytes]]:
    """What its shards say of themselves, each with an object that is really its own."""
    for info in orphan.objects:
        if _is_index(info, job):
            try:
                file = decode_shard_file(catalog.store.get(info.name))
            except (CheckpointDamagedError, ObjectNotFoundError):
                continue
            place = names.parse_shard(file[0].object, job)
            if place is not None and place[:2] == (orphan.group, file[0].key.part):
                yield file


def _is_index(info: ObjectInfo, job: str) -> bool:
    place = names.parse_shard(info.name, job)
    return place is not None and place[2] == "index"
