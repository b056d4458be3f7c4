"""Object keys of manifests, shards, indexes and markers below a durable URL.

::

    JOB/manifests/000000000120.000003.0.1f2e3d.from-100.manifest      the step exists if this does
    JOB/manifests/000000000120.000003.0.1f2e3d.quarantine             do not load it
    JOB/manifests/000000000120.000003.0.1f2e3d.kept                   retention does not delete it
    JOB/manifests/000000000120.000003.0.1f2e3d.released               retention may delete it again; since when
    JOB/steps/000000000120/000003.0.1f2e3d/000007.safetensors
    JOB/steps/000000000120/000003.0.1f2e3d/000007.index
    JOB/files/data.step-120@2fstate.json                     a file beside the steps; file.* has its time of writing
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
    """Parsed name of an object below ``manifest_prefix``."""

    version_id: VersionId
    quarantine: bool
    base: int | None
    """Step that the incarnation was restored from; -1 if it started without one; ``None`` if unknown."""
    keep: bool = False


def group_stem(group: VersionId) -> str:
    return f"{group.version:012d}.{group.epoch:06d}.{group.attempt}.{group.incarnation}"


def parse_group_stem(text: str) -> VersionId | None:
    match = re.fullmatch(_STEM, text)
    return _group(match) if match else None


def _group(match: re.Match[str]) -> VersionId | None:
    """Return the version in a name, or ``None`` if one of its numbers is too large."""
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
    """Parse a name below ``manifest_prefix``; return ``None`` for a foreign object."""
    match = _ENTRY.fullmatch(name.removeprefix(manifest_prefix(job)))
    if match is None:
        return None
    group = _group(match)
    base = int(match[5]) if match[5] else -1 if match[6] else None
    if group is None or (base is not None and base >= MAX_NUMBER):
        return None
    return ManifestKey(group, bool(match[7]), base, bool(match[8]))


def side_file_key(job: str, name: str) -> str:
    """Return the key of a file that is stored with the steps, or of its description."""
    return f"{job}/files/{name}"


def newest_epoch(epochs: Iterable[int]) -> int:
    """Return the newest epoch that an incarnation of the job can have had.

    Epochs increase one by one, so an epoch far above all others is foreign. If it counted, no later incarnation could
    save anything newer than the largest number.
    """
    newest = 0
    for epoch in sorted(epochs):
        if epoch > newest + MAX_EPOCH_LEAD:
            break
        newest = epoch
    return newest


def shards_prefix(job: str, group: VersionId | None = None) -> str:
    """Return the prefix of a job's shards, or of one version's, without spread names."""
    if group is None:
        return f"{job}/steps/"
    return f"{job}/steps/{group.version:012d}/{group.epoch:06d}.{group.attempt}.{group.incarnation}/"


def shard_object_key(key: ShardKey, *, spread: bool, compressed: bool) -> str:
    """Return the key of a shard's object.

    Spread keys start with a hash, so that a store can distribute its load.
    """
    name = f"{shards_prefix(key.job, key.version_id)}{key.part:06d}.safetensors" + (".zst" if compressed else "")
    return f"{xxhash.xxh3_64_hexdigest(name.encode())[:4]}/{name}" if spread else name


def shard_index_key(key: ShardKey) -> str:
    """Return the key of a shard's index.

    It is never spread, so that one listing finds all indexes of a step.
    """
    return f"{shards_prefix(key.job, key.version_id)}{key.part:06d}.index"


def plain_prefix(job: str, step: int | None = None) -> str:
    """Return the prefix of a job's plain DCP checkpoints, or of the one of ``step``."""
    return f"{job}/step-" + ("" if step is None else str(step))


def parse_plain_key(name: str, job: str) -> tuple[int, str] | None:
    """Return step and file name of an object in a plain checkpoint's folder, or ``None``."""
    match = re.fullmatch(r"([0-9]{1,18})/([^/]+)", name.removeprefix(plain_prefix(job)))
    return (int(match[1]), match[2]) if match else None


def parse_shard_object_key(name: str, job: str) -> tuple[VersionId, int, str] | None:
    """Return version, part and kind ("index", "safetensors", ...) of an object below ``shards_prefix``.

    Return ``None`` for a foreign object.
    """
    head, found, rest = name.partition(shards_prefix(job))
    if not found or not re.fullmatch(r"([0-9a-f]{4}/)?", head):
        return None
    match = _SHARD.fullmatch(rest)
    if match is None:
        return None
    group, part = _group(match), int(match[5])
    return None if group is None or part >= MAX_NUMBER else (group, part, match[6])
