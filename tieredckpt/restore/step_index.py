"""Index of one stored step: which shard holds which piece, and each rank's read plan. Pure but for its agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peerstore.shard_records import VersionId
from tieredckpt.agent.agent_api import ItemLocation, NodeAgentAPI, PeerSource, StepDescription
from tieredckpt.errors import CheckpointDamagedError, MismatchError, PeersLostError, TierUnavailableError
from tieredckpt.format.manifest import Manifest, ShardIndex
from tieredckpt.format.shard_layout import Layout, TensorEntry, check_nested_paths
from tieredckpt.format.slice_boxes import Box, Tiling
from tieredckpt.resolve_step import Tier

_ASKED_AT_ONCE = 5_000
"""Pieces in one question: half a megabyte, or a few with long names."""
_LOST_AGAIN = 4


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


class StepIndex:
    """Everything there is to know about one step before any of its tensors is read."""

    def __init__(self, described: StepDescription) -> None:
        self.manifest: Manifest = described.manifest
        self.tiers_by_part: Mapping[int, tuple[Tier, ...]] = described.found
        self.sources: Mapping[int, tuple[PeerSource, ...]] = described.sources
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
    def group(self) -> VersionId:
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
        check_nested_paths(merged)
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
        tiling = Tiling(box)
        for place in places:
            for common in tiling.add(place.entry.box):
                yield TensorPiece(place.part, place.entry, common, place.item)
            if not tiling.missing:
                return
        if tiling.missing:
            raise CheckpointDamagedError(f"step {self.group.version} lacks {tiling.missing[0]} of {fqn}")

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
        return _range_of(piece, self.layouts[piece.part].header_bytes + piece.entry.start)

    def item_range(self, part: int, number: int) -> ByteRange:
        shard, layout = self.shards[part], self.layouts[part]
        start = layout.header_bytes + layout.item_starts(shard.meta.item_sizes)[number]
        return ByteRange(start, start + shard.meta.item_sizes[number])

    def tier(self, part: int) -> Tier:
        """Where a shard is read from."""
        return self.tiers_by_part[part][0]

    def _distance(self, part: int) -> int:
        return list(Tier).index(self.tiers_by_part[part][0])


class RankReadPlan:
    """What one rank reads of a step: it asks its node for its own pieces, and knows of nothing else where it is.

    ``names`` is about the whole state: what a load is planned against. ``unreadable`` parts are in this node's memory,
    which cannot read them for now.
    """

    def __init__(self, node: NodeAgentAPI, job: str, group: VersionId, unreadable: Collection[int] = ()) -> None:
        self._node = node
        self._unreadable = frozenset(unreadable)
        self._job = job
        self.version_id = group
        self.names = node.step_names(job, group)
        self.shards: dict[int, ShardIndex] = {}
        self.found: dict[int, tuple[Tier, ...]] = {}
        self.sources: dict[int, tuple[PeerSource, ...]] = {}
        self.pieces: dict[tuple[str, Box], tuple[TensorPiece, ...]] = {}
        self._headers: dict[int, int] = {}
        self._objects: dict[str, ItemLocation] = {}
        self._items: dict[tuple[int, int], ItemLocation] = {}
        self.whole_parts: frozenset[int] = frozenset()
        """Shards in this node's memory of whose chunks this rank reads about half or more."""

    def plan(self, rank: int, needs: Sequence[tuple[str, Box]], objects: Sequence[str]) -> dict[int, list[ByteRange]]:
        """Find out where all of this is; the bytes of each shard that will be read."""
        for _ in range(_LOST_AGAIN):
            self._find(rank, needs, objects)
            if self._describe():
                self.whole_parts = self._mostly_whole()
                return self._ranges(needs, objects)
        raise PeersLostError(
            f"step {self.version_id.version} of {self._job}: the nodes that hold it go away one by one"
        )

    def _find(self, rank: int, needs: Sequence[tuple[str, Box]], objects: Sequence[str]) -> None:
        self.pieces.clear()
        self._objects.clear()
        self._items.clear()
        done, asked = 0, 0
        while done < len(needs) or not asked:
            some = needs[done : done + _ASKED_AT_ONCE]
            last = done + len(some) == len(needs)
            wanted = [(fqn, box.offsets, box.sizes) for fqn, box in some]
            said = self._node.step_pieces(self._job, self.version_id, rank, wanted, objects if last else ())
            found: list[list[TensorPiece]] = [[] for _ in range(said.answered)]
            for one in said.pieces:
                fqn, _, _ = wanted[one.need]
                stored = Box(one.offsets, one.sizes)
                entry = TensorEntry(fqn, one.dtype, one.shape, stored, one.itemsize, start=one.start)
                box = stored if one.box is None else Box(*one.box)
                found[one.need].append(TensorPiece(one.part, entry, box, one.item))
            for need, pieces in zip(some, found, strict=False):
                self.pieces[need] = tuple(pieces)
            done, asked = done + said.answered, asked + 1
            items = said.items
            if last and said.answered == len(some):
                items, values = items[: len(items) - len(objects)], items[len(items) - len(objects) :]
                self._objects.update(zip(objects, values, strict=True))
            self._items.update(((item.part, item.number), item) for item in items)

    def _describe(self) -> bool:
        """Learn what the shards are that pieces are in; False when some of them are gone, so that others have to do."""
        used = {piece.part for pieces in self.pieces.values() for piece in pieces}
        left = sorted(used | {item.part for item in self._objects.values()})
        gone = False
        while left:
            said = self._node.step_parts(self._job, self.version_id, left)
            for one in said.parts:
                part = one.index.key.part
                self.shards[part], self._headers[part] = one.index, one.header_bytes
                self.found[part], self.sources[part] = self._readable(part, one.found), one.sources
            done = {one.index.key.part for one in said.parts} | {*said.lost}
            gone |= bool(said.lost)
            left = [part for part in left if part not in done] if done else []
        return not gone

    def _readable(self, part: int, found: tuple[Tier, ...]) -> tuple[Tier, ...]:
        if part not in self._unreadable:
            return found
        rest = tuple(tier for tier in found if tier is not Tier.MEMORY)
        if not rest:
            raise TierUnavailableError(
                f"part {part} of {self._job} step {self.version_id.version} is in the memory tier alone, which cannot "
                "read "
                "it for now (out of descriptors or memory, or an I/O error: the agent's log says which). It is kept: "
                "load again"
            )
        return rest

    def _ranges(self, needs: Sequence[tuple[str, Box]], objects: Sequence[str]) -> dict[int, list[ByteRange]]:
        ranges: dict[int, list[ByteRange]] = {}
        for need in needs:
            for piece in self.pieces[need]:
                ranges.setdefault(piece.part, []).append(self.tensor_range(piece))
        for fqn in objects:
            part, span = self.object(fqn)
            ranges.setdefault(part, []).append(span)
        return ranges

    def archive_ranges(self, objects: Sequence[str]) -> dict[int, list[ByteRange]]:
        """The bytes of each shard that are read as archives: objects, and tensors that are kept as such."""
        ranges: dict[int, list[ByteRange]] = {}
        for pieces in self.pieces.values():
            for piece in pieces:
                if piece.item >= 0:
                    ranges.setdefault(piece.part, []).append(self.archive_range(piece))
        for fqn in objects:
            part, span = self.object(fqn)
            ranges.setdefault(part, []).append(span)
        return ranges

    def _mostly_whole(self) -> frozenset[int]:
        ranges: defaultdict[int, list[ByteRange]] = defaultdict(list)
        wanted: defaultdict[int, int] = defaultdict(int)
        for pieces in self.pieces.values():
            for piece in pieces:
                if piece.item < 0 and self.tier(piece.part) is Tier.MEMORY:
                    span = self.tensor_range(piece)
                    ranges[piece.part].append(span)
                    alone = piece.box == piece.entry.box
                    wanted[piece.part] += span.stop - span.start if alone else piece.box.volume * piece.entry.itemsize
        found = set()
        for part, some in ranges.items():
            size = self.shards[part].chunk_bytes
            touched = sum(stop - first for first, stop in chunk_ranges(some, size)) * size
            if touched <= 2 * wanted[part] + 4 * size:
                found.add(part)
        return frozenset(found)

    def tier(self, part: int) -> Tier:
        """Where a shard is read from."""
        return self.found[part][0]

    def start(self, piece: TensorPiece) -> int:
        """Where the shard's piece of the tensor begins."""
        return self._headers[piece.part] + piece.entry.start

    def tensor_range(self, piece: TensorPiece) -> ByteRange:
        """The smallest run of bytes of its shard with all of ``piece`` in it."""
        return self.archive_range(piece) if piece.item >= 0 else _range_of(piece, self.start(piece))

    def archive_range(self, piece: TensorPiece) -> ByteRange:
        return self._range(self._items[piece.part, piece.item])

    def object(self, fqn: str) -> tuple[int, ByteRange]:
        """The part this rank gets an object from, and where in it."""
        item = self._objects[fqn]
        return item.part, self._range(item)

    def _range(self, item: ItemLocation) -> ByteRange:
        header = self._headers[item.part]
        return ByteRange(header + item.start, header + item.stop)


def _range_of(piece: TensorPiece, base: int) -> ByteRange:
    entry, box = piece.entry, piece.box
    if box == entry.box:
        return ByteRange(base, base + entry.size_bytes)
    first = last = 0
    for offset, size, start, full in zip(box.offsets, box.sizes, entry.box.offsets, entry.box.sizes, strict=True):
        first = first * full + (offset - start)
        last = last * full + (offset - start + size - 1)
    return ByteRange(base + first * entry.itemsize, base + (last + 1) * entry.itemsize)


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
