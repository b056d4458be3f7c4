"""Object keys of manifests, shards, indexes and markers below a durable URL.

::

    JOB/manifests/000000000120.000003.0.1f2e3d.from-100.manifest      a step is there when this is
    JOB/manifests/000000000120.000003.0.1f2e3d.quarantine             do not load it
    JOB/manifests/000000000120.000003.0.1f2e3d.kept                   retention does not delete it
    JOB/manifests/000000000120.000003.0.1f2e3d.released               nor does it pass over it any more; since when
    JOB/steps/000000000120/000003.0.1f2e3d/000007.safetensors
    JOB/steps/000000000120/000003.0.1f2e3d/000007.index
    JOB/files/data.step-120@2fstate.json                     a file beside the steps; file.* says when it was written
    JOB/step-120/.metadata                                   a plain DCP checkpoint (TIEREDCKPT_ENABLED=0)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from peerstore.shard_records import MAX_EPOCH_LEAD, MAX_NUMBER, ShardKey, VersionId

_STEM = r"([0-9]{12,19})\.([0-9]{6,19})\.([0-9]{1,19})\.([A-Za-z0-9-]{1,64})"
_ENTRY = re.compile(_STEM + r"\.(?:(?:from-([0-9]{1,19})|(fresh)|unknown)\.manifest|(quarantine)|(kept))")
_SHARD = re.compile(r"([0-9]{12,19})/([0-9]{6,19})\.([0-9]{1,19})\.([A-Za-z0-9-]{1,64})/([0-9]{6,19})\.(.+)")


class ManifestKey(NamedTuple):
    """What an object below ``manifest_prefix`` says by its name alone."""

    version_id: VersionId
    quarantine: bool
    base: int | None
    """The step the incarnation began from, -1 for nothing, None when it did not say."""
    keep: bool = False


def group_stem(group: VersionId) -> str:
    return f"{group.version:012d}.{group.epoch:06d}.{group.attempt}.{group.incarnation}"


def parse_group_stem(text: str) -> VersionId | None:
    match = re.fullmatch(_STEM, text)
    return _group(match) if match else None


def _group(match: re.Match[str]) -> VersionId | None:
    """The attempt that a name speaks of; ``None`` where one of its numbers is larger than anybody counts."""
    group = VersionId(int(match[2]), int(match[1]), int(match[3]), match[4])
    return group if max(group.epoch, group.version, group.attempt) < MAX_NUMBER else None


def manifest_prefix(job: str) -> str:
    return f"{job}/manifests/"


def manifest_key(job: str, group: VersionId, base: int | None) -> str:
    origin = "unknown" if base is None else "fresh" if base < 0 else f"from-{base}"
    return f"{manifest_prefix(job)}{group_stem(group)}.{origin}.manifest"


def quarantine_key(job: str, group: VersionId) -> str:
    return f"{manifest_prefix(job)}{group_stem(group)}.quarantine"


def keep_key(job: str, group: VersionId) -> str:
    return f"{manifest_prefix(job)}{group_stem(group)}.kept"


def release_key(job: str, group: VersionId) -> str:
    return f"{manifest_prefix(job)}{group_stem(group)}.released"


def parse_manifest_key(name: str, job: str) -> ManifestKey | None:
    """What a name below ``manifest_prefix`` stands for; ``None`` for a stranger's object."""
    match = _ENTRY.fullmatch(name.removeprefix(manifest_prefix(job)))
    if match is None:
        return None
    group = _group(match)
    base = int(match[5]) if match[5] else -1 if match[6] else None
    if group is None or (base is not None and base >= MAX_NUMBER):
        return None
    return ManifestKey(group, bool(match[7]), base, bool(match[8]))


def side_file_key(job: str, name: str) -> str:
    """Where a file is that lies beside the steps, or what describes it."""
    return f"{job}/files/{name}"


def newest_epoch(epochs: Iterable[int]) -> int:
    """The newest incarnation there can have been, by the names that are there.

    They count one by one. What stands alone far above all others was put there by somebody else: taken for an
    incarnation it would be the last one, because nothing can be saved after the largest number there is.
    """
    newest = 0
    for epoch in sorted(epochs):
        if epoch > newest + MAX_EPOCH_LEAD:
            break
        newest = epoch
    return newest


def shards_prefix(job: str, group: VersionId | None = None) -> str:
    """Where a job's (or one attempt's) shards are, when they are not spread."""
    if group is None:
        return f"{job}/steps/"
    return f"{job}/steps/{group.version:012d}/{group.epoch:06d}.{group.attempt}.{group.incarnation}/"


def shard_object_key(key: ShardKey, *, spread: bool, compressed: bool) -> str:
    """A shard's object; spread names start with a hash, so that a store can split its load between them."""
    place = f"{shards_prefix(key.job, key.version_id)}{key.part:06d}.safetensors" + (".zst" if compressed else "")
    return f"{xxhash.xxh3_64_hexdigest(place.encode())[:4]}/{place}" if spread else place


def shard_index_key(key: ShardKey) -> str:
    """A shard's own index, never spread: finding all of a step's takes one listing."""
    return f"{shards_prefix(key.job, key.version_id)}{key.part:06d}.index"


def plain_prefix(job: str, step: int | None = None) -> str:
    """Where plain DCP checkpoints of a job are: a folder per step."""
    return f"{job}/step-" + ("" if step is None else str(step))


def parse_plain_key(name: str, job: str) -> int | None:
    """The step whose plain checkpoint is complete when an object of this name exists."""
    match = re.fullmatch(r"([0-9]{1,18})/\.metadata", name.removeprefix(plain_prefix(job)))
    return int(match[1]) if match else None


def parse_shard_object_key(name: str, job: str) -> tuple[VersionId, int, str] | None:
    """Group, part and kind ("index", "safetensors", ...) of an object below ``shards_prefix``; ``None`` for a
    stranger's.
    """
    head, found, rest = name.partition(shards_prefix(job))
    if not found or not re.fullmatch(r"([0-9a-f]{4}/)?", head):
        return None
    match = _SHARD.fullmatch(rest)
    if match is None:
        return None
    group, part = _group(match), int(match[5])
    return None if group is None or part >= MAX_NUMBER else (group, part, match[6])
