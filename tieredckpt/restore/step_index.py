"""Index of one stored step: the shard of each piece, and each rank's read plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peerstore.shard_records import VersionId
from tieredckpt.agent.agent_api import ItemLocation, NodeAgentAPI, PeerSource, StepDescription
from tieredckpt.agent.step_locator import cover_box
from tieredckpt.errors import CheckpointDamagedError, MismatchError, PeersLostError, TierUnavailableError
from tieredckpt.format.manifest import Manifest, ShardIndex
from tieredckpt.format.shard_layout import Layout, TensorEntry, check_nested_paths
from tieredckpt.format.slice_boxes import Box
from tieredckpt.resolve_step import Tier

_PIECES_PER_REQUEST = 5_000
"""Maximum pieces in one request: about half a megabyte."""
_MAX_PLANS = 4
"""Maximum plans of one load, each after a loss of shards."""


class TensorPiece(NamedTuple):
    """Part of a tensor in one shard."""

    part: int
    entry: TensorEntry
    box: Box
    """Position in the tensor's global coordinates."""
    item: int = -1
    """Number of the item that contains an archived tensor; -1 for other tensors."""


class ByteRange(NamedTuple):
    """Bytes ``[start, stop)`` of a shard."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Location:
    part: int
    entry: TensorEntry
    item: int


class StepIndex:
    """Shards, tensors and objects of one step, before any tensor is read."""

    def __init__(self, described: StepDescription) -> None:
        self.manifest: Manifest = described.manifest
        self.found: Mapping[int, tuple[Tier, ...]] = described.found
        self.sources: Mapping[int, tuple[PeerSource, ...]] = described.sources
        self.shards: dict[int, ShardIndex] = {shard.key.part: shard for shard in self.manifest.shards}
        self.layouts: dict[int, Layout] = {}
        self.tensors: dict[str, list[_Location]] = {}
        self.objects: dict[str, dict[int, int]] = {}
        """Item numbers by name and part, because several ranks may have written one name."""
        decoded: dict[str, Layout] = {}
        for part, shard in self.shards.items():
            digest = shard.meta.layout
            layout = decoded.get(digest) or decoded.setdefault(digest, self.manifest.layout_of(shard))
            self._check(shard, layout)
            self.layouts[part] = layout
            for entry in layout.tensors:
                self.tensors.setdefault(entry.fqn, []).append(_Location(part, entry, -1))
            for number, item in enumerate(layout.items):
                if item.tensor is not None:
                    self.tensors.setdefault(item.fqn, []).append(_Location(part, item.tensor, number))
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
        """Paths of all names in the nested state dict of the planner; ``None`` if unknown."""
        known = [layout.paths for layout in self.layouts.values() if layout.paths is not None]
        if not known:
            return None
        merged: dict[str, tuple[str | int, ...]] = {}
        for paths in known:
            merged.update(paths)
        check_nested_paths(merged)
        return merged

    def chunks(self, fqn: str) -> list[TensorEntry]:
        """Return the distinct pieces of a tensor, in order of their offsets."""
        unique = {location.entry.box: location.entry for location in self.tensors[fqn]}
        return [unique[box] for box in sorted(unique)]

    def pieces(self, fqn: str, box: Box) -> list[TensorPiece]:
        """Return the pieces of ``box`` from the nearest and fewest shards; raise if a part of it is missing."""
        locations = self.tensors.get(fqn)
        if locations is None:
            raise MismatchError(f"step {self.group.version} has no tensor {fqn}")
        if len(locations) == 1 and locations[0].entry.box == box:
            return [TensorPiece(locations[0].part, locations[0].entry, box, locations[0].item)]
        nearest = sorted(locations, key=lambda location: (self._distance(location.part), location.part))
        found = cover_box(box, ((one.part, one.entry, one.item) for one in nearest))
        if found is None:
            raise CheckpointDamagedError(f"step {self.group.version} lacks some of {fqn} at {box.offsets}")
        return [TensorPiece(*one) for one in found]

    def object_part(self, fqn: str, rank: int) -> int:
        """Return the part with this rank's value of an object.

        It is the rank's own part if every rank saved a value, otherwise the nearest one.
        """
        parts = self.objects.get(fqn)
        if parts is None:
            raise MismatchError(f"step {self.group.version} has no object {fqn}")
        return (
            rank
            if rank in parts and self.manifest.parts == len(parts)
            else min(parts, key=lambda p: (self._distance(p), p))
        )

    def tensor_range(self, piece: TensorPiece) -> ByteRange:
        """Return the smallest range of the shard that contains all of ``piece``."""
        if piece.item >= 0:
            return self.item_range(piece.part, piece.item)
        return _range_of(piece, self.layouts[piece.part].header_bytes + piece.entry.start)

    def item_range(self, part: int, number: int) -> ByteRange:
        shard, layout = self.shards[part], self.layouts[part]
        start = layout.header_bytes + layout.item_starts(shard.meta.item_sizes)[number]
        return ByteRange(start, start + shard.meta.item_sizes[number])

    def tier(self, part: int) -> Tier:
        """Return the tier that a shard is read from."""
        return self.found[part][0]

    def _distance(self, part: int) -> int:
        return list(Tier).index(self.found[part][0])


class RankReadPlan:
    """Reads of one rank from a step, with the locations of this rank's pieces only.

    ``names`` covers the whole state, for DCP's load plan. ``unreadable`` parts are in this node's memory, which cannot
    read them for now.
    """

    def __init__(self, node: NodeAgentAPI, job: str, group: VersionId, unreadable: Collection[int] = ()) -> None:
        self._node = node
        self._unreadable = frozenset(unreadable)
        self._job = job
        self.version_id = group
        self.names = node.steps.names(job, group)
        self.shards: dict[int, ShardIndex] = {}
        self.found: dict[int, tuple[Tier, ...]] = {}
        self.sources: dict[int, tuple[PeerSource, ...]] = {}
        self.pieces: dict[tuple[str, Box], tuple[TensorPiece, ...]] = {}
        self._headers: dict[int, int] = {}
        self._objects: dict[str, ItemLocation] = {}
        self._items: dict[tuple[int, int], ItemLocation] = {}
        self.whole_parts: frozenset[int] = frozenset()
        """Shards in this node's memory of which this rank reads at least half of the touched chunks."""

    def plan(self, rank: int, needs: Sequence[tuple[str, Box]], objects: Sequence[str]) -> dict[int, list[ByteRange]]:
        """Locate pieces and objects through the agent; return the byte ranges to read, by part."""
        for _ in range(_MAX_PLANS):
            self._request_pieces(rank, needs, objects)
            if self._request_parts():
                self.whole_parts = self._mostly_read_parts()
                return self._ranges(needs, objects)
        raise PeersLostError(
            f"step {self.version_id.version} of {self._job}: the nodes that hold it go away one by one"
        )

    def _request_pieces(self, rank: int, needs: Sequence[tuple[str, Box]], objects: Sequence[str]) -> None:
        self.pieces.clear()
        self._objects.clear()
        self._items.clear()
        done, requests = 0, 0
        while done < len(needs) or not requests:
            some = needs[done : done + _PIECES_PER_REQUEST]
            last = done + len(some) == len(needs)
            wanted = [(fqn, box.offsets, box.sizes) for fqn, box in some]
            answer = self._node.steps.pieces(self._job, self.version_id, rank, wanted, objects if last else ())
            found: list[list[TensorPiece]] = [[] for _ in range(answer.answered)]
            for one in answer.pieces:
                fqn, _, _ = wanted[one.need]
                stored = Box(one.offsets, one.sizes)
                entry = TensorEntry(fqn, one.dtype, one.shape, stored, one.itemsize, start=one.start)
                box = stored if one.box is None else Box(*one.box)
                found[one.need].append(TensorPiece(one.part, entry, box, one.item))
            for need, pieces in zip(some, found, strict=False):
                self.pieces[need] = tuple(pieces)
            done, requests = done + answer.answered, requests + 1
            items = answer.items
            if last and answer.answered == len(some):
                items, values = items[: len(items) - len(objects)], items[len(items) - len(objects) :]
                self._objects.update(zip(objects, values, strict=True))
            self._items.update(((item.part, item.number), item) for item in items)

    def _request_parts(self) -> bool:
        """Request the shards of the pieces; return ``False`` if some are lost, so that a new plan is needed."""
        used = {piece.part for pieces in self.pieces.values() for piece in pieces}
        left = sorted(used | {item.part for item in self._objects.values()})
        is_lossy = False
        while left:
            answer = self._node.steps.parts(self._job, self.version_id, left)
            for one in answer.parts:
                part = one.index.key.part
                self.shards[part], self._headers[part] = one.index, one.header_bytes
                self.found[part], self.sources[part] = self._readable(part, one.found), one.sources
            done = {one.index.key.part for one in answer.parts} | {*answer.lost}
            is_lossy |= bool(answer.lost)
            left = [part for part in left if part not in done] if done else []
        return not is_lossy

    def _readable(self, part: int, found: tuple[Tier, ...]) -> tuple[Tier, ...]:
        if part not in self._unreadable:
            return found
        rest = tuple(tier for tier in found if tier is not Tier.MEMORY)
        if not rest:
            raise TierUnavailableError(
                f"part {part} of {self._job} step {self.version_id.version} is only in this node's memory, and cannot "
                "be read for now. The agent's log has the reason: open files, memory or an I/O error. The part is not "
                "lost: load again"
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
        """Return the byte ranges, by part, of objects and archived tensors."""
        ranges: dict[int, list[ByteRange]] = {}
        for pieces in self.pieces.values():
            for piece in pieces:
                if piece.item >= 0:
                    ranges.setdefault(piece.part, []).append(self.archive_range(piece))
        for fqn in objects:
            part, span = self.object(fqn)
            ranges.setdefault(part, []).append(span)
        return ranges

    def _mostly_read_parts(self) -> frozenset[int]:
        ranges: defaultdict[int, list[ByteRange]] = defaultdict(list)
        wanted: defaultdict[int, int] = defaultdict(int)
        for pieces in self.pieces.values():
            for piece in pieces:
                if piece.item < 0 and self.tier(piece.part) is Tier.MEMORY:
                    span = self.tensor_range(piece)
                    ranges[piece.part].append(span)
                    is_whole = piece.box == piece.entry.box
                    wanted[piece.part] += (
                        span.stop - span.start if is_whole else piece.box.volume * piece.entry.itemsize
                    )
        found = set()
        for part, spans in ranges.items():
            size = self.shards[part].chunk_bytes
            touched = sum(stop - first for first, stop in chunk_ranges(spans, size)) * size
            if touched <= 2 * wanted[part] + 4 * size:
                found.add(part)
        return frozenset(found)

    def tier(self, part: int) -> Tier:
        """Return the tier that a shard is read from."""
        return self.found[part][0]

    def start(self, piece: TensorPiece) -> int:
        """Return the offset in the shard of the entry with this piece."""
        return self._headers[piece.part] + piece.entry.start

    def tensor_range(self, piece: TensorPiece) -> ByteRange:
        """Return the smallest range of the shard that contains all of ``piece``."""
        return self.archive_range(piece) if piece.item >= 0 else _range_of(piece, self.start(piece))

    def archive_range(self, piece: TensorPiece) -> ByteRange:
        return self._range(self._items[piece.part, piece.item])

    def object(self, fqn: str) -> tuple[int, ByteRange]:
        """Return the part that this rank reads an object from, and the range in its shard."""
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
    """Return the runs of chunks ``[first, stop)`` that cover every range, merged if they touch."""
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
