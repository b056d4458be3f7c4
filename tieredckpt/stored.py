"""A stored step, indexed for reading: which shard has which piece of which tensor, and where it can be had. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from peerstore.records import Group
from tieredckpt.boxes import Box, intersection, subtract
from tieredckpt.errors import CheckpointDamagedError, MismatchError, TierUnavailableError
from tieredckpt.layout import ItemEntry, Layout, TensorEntry
from tieredckpt.manifest import Manifest, ShardIndex
from tieredckpt.node import Described, Source
from tieredckpt.resolve import Tier


class TensorPiece(NamedTuple):
    """Part of a tensor, out of one shard."""

    part: int
    entry: TensorEntry
    box: Box
    """In the tensor's global coordinates."""
    item: int = -1
    """For a tensor kept as an archive: the number of the item it is in."""


class ByteRange(NamedTuple):
    """Bytes ``[start, stop)`` of a shard."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Place:
    part: int
    entry: TensorEntry
    item: int


class StoredStep:
    """Everything there is to know about one step before any of its tensors is read."""

    def __init__(self, described: Described) -> None:
        self.manifest: Manifest = described.manifest
        self.found: Mapping[int, tuple[Tier, ...]] = described.found
        self.sources: Mapping[int, tuple[Source, ...]] = described.sources
        self.shards: dict[int, ShardIndex] = {shard.key.part: shard for shard in self.manifest.shards}
        self.layouts: dict[int, Layout] = {}
        self.tensors: dict[str, list[_Place]] = {}
        self.objects: dict[str, dict[int, int]] = {}
        """Name to part to item number: several ranks may have written one name."""
        decoded: dict[str, Layout] = {}
        for part, shard in self.shards.items():
            digest = shard.meta.layout
            layout = decoded.get(digest) or decoded.setdefault(digest, self.manifest.layout_of(shard))
            self._check(shard, layout)
            self.layouts[part] = layout
            for entry in layout.tensors:
                self.tensors.setdefault(entry.fqn, []).append(_Place(part, entry, -1))
            for number, item in enumerate(layout.items):
                if item.tensor is not None:
                    self.tensors.setdefault(item.fqn, []).append(_Place(part, item.tensor, number))
                else:
                    self.objects.setdefault(item.fqn, {})[part] = number

    @property
    def group(self) -> Group:
        return self.manifest.group

    @staticmethod
    def _check(shard: ShardIndex, layout: Layout) -> None:
        if len(shard.meta.item_sizes) != len(layout.items) or min(shard.meta.item_sizes, default=0) < 0:
            raise CheckpointDamagedError(
                f"{shard.key}: {len(shard.meta.item_sizes)} sizes for {len(layout.items)} items"
            )
        if layout.size_bytes(shard.meta.item_sizes) != shard.size_bytes:
            raise CheckpointDamagedError(
                f"{shard.key} has {shard.size_bytes} bytes, its layout makes {layout.size_bytes(shard.meta.item_sizes)}"
            )

    @property
    def paths(self) -> dict[str, tuple[str | int, ...]] | None:
        """Where every name was in the nested state dict, as the planner had it."""
        known = [layout.paths for layout in self.layouts.values() if layout.paths is not None]
        if not known:
            return None
        merged: dict[str, tuple[str | int, ...]] = {}
        for paths in known:
            merged.update(paths)
        return merged

    def chunks(self, fqn: str) -> list[TensorEntry]:
        """The distinct pieces of a tensor, in order of their offsets."""
        unique = {place.entry.box: place.entry for place in self.tensors[fqn]}
        return [unique[box] for box in sorted(unique)]

    def pieces(self, fqn: str, box: Box) -> Iterator[TensorPiece]:
        """``box`` out of as near and as few shards as there are; raises when some of it is nowhere."""
        places = self.tensors.get(fqn)
        if places is None:
            raise MismatchError(f"step {self.group.version} has no tensor {fqn}")
        if len(places) == 1 and places[0].entry.box == box:
            yield TensorPiece(places[0].part, places[0].entry, box, places[0].item)
            return
        if len(places) > 1:
            places = sorted(places, key=lambda place: (self._distance(place.part), place.part))
        if len(places[0].entry.shape) != len(box.offsets):
            raise MismatchError(f"{fqn} has shape {places[0].entry.shape}, a piece at {box.offsets} was asked for")
        shapes = {place.entry.shape for place in places}
        if len(shapes) > 1:
            raise CheckpointDamagedError(f"step {self.group.version} has {fqn} in several shapes: {sorted(shapes)}")
        missing = [box]
        for place in places:
            rest = []
            for hole in missing:
                common = intersection(hole, place.entry.box)
                if common is None:
                    rest.append(hole)
                else:
                    yield TensorPiece(place.part, place.entry, common, place.item)
                    rest.extend(subtract(hole, common))
            missing = rest
            if not missing:
                return
        if any(hole.volume for hole in missing):
            raise CheckpointDamagedError(f"step {self.group.version} lacks {missing[0]} of {fqn}")

    def object_part(self, fqn: str, rank: int) -> int:
        """Whose value of an object this rank gets: its own where every rank saved one, else the first one's."""
        parts = self.objects.get(fqn)
        if parts is None:
            raise MismatchError(f"step {self.group.version} has no object {fqn}")
        return (
            rank
            if rank in parts and self.manifest.parts == len(parts)
            else min(parts, key=lambda p: (self._distance(p), p))
        )

    def tensor_range(self, piece: TensorPiece) -> ByteRange:
        """The smallest run of bytes of its shard with all of ``piece`` in it."""
        if piece.item >= 0:
            return self.item_range(piece.part, piece.item)
        entry, box = piece.entry, piece.box
        base = self.layouts[piece.part].header_bytes + entry.start
        if box == entry.box:
            return ByteRange(base, base + entry.size_bytes)
        first = last = 0
        for offset, size, start, full in zip(box.offsets, box.sizes, entry.box.offsets, entry.box.sizes, strict=True):
            first = first * full + (offset - start)
            last = last * full + (offset - start + size - 1)
        return ByteRange(base + first * entry.itemsize, base + (last + 1) * entry.itemsize)

    def item_range(self, part: int, number: int) -> ByteRange:
        shard, layout = self.shards[part], self.layouts[part]
        start = layout.header_bytes + layout.item_starts(shard.meta.item_sizes)[number]
        return ByteRange(start, start + shard.meta.item_sizes[number])

    def item_entry(self, part: int, number: int) -> ItemEntry:
        return self.layouts[part].items[number]

    def tier(self, part: int) -> Tier:
        """Where a shard is read from."""
        return self.found[part][0]

    def _distance(self, part: int) -> int:
        return list(Tier).index(self.found[part][0])


def without(described: Described, tier: Tier, parts: Collection[int]) -> Described:
    """The same step without ``tier``'s copies of ``parts``, which are there and cannot be read for now."""
    if not parts:
        return described
    found = {
        part: tuple(where for where in tiers if where is not tier or part not in parts)
        for part, tiers in described.found.items()
    }
    alone = sorted(part for part, tiers in found.items() if not tiers)
    if alone:
        manifest = described.manifest
        raise TierUnavailableError(
            f"parts {alone} of {manifest.job} step {manifest.step} are in the {tier.value} tier alone, which cannot "
            "read them for now (out of descriptors or memory, or an I/O error: the agent's log says which). They are "
            "kept: load again"
        )
    return msgspec.structs.replace(described, found=found)


def chunk_ranges(ranges: Sequence[ByteRange], chunk_bytes: int) -> list[tuple[int, int]]:
    """The chunks ``[first, stop)`` that together hold every range, joined where they touch."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if stop <= start:
            continue
        first, end = start // chunk_bytes, -(-stop // chunk_bytes)
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((first, end))
    return found
