"""Location of every piece of one step, answered page by page.

A job's layouts name millions of pieces, and a rank needs a few thousand of them. Layouts with the same names share
them, and Python objects are created only for the pieces in an answer.

A rank that resumes as the same part finds nearly all its pieces in this node's shards. Layouts are therefore searched
in three stages. The first has the layouts of this node's shards and of the rank's own part. The second has the layout
of the part that the state table names, and the third has all layouts.
"""

from __future__ import annotations

import functools
import itertools
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from peerstore.shard_records import ShardInfo, ShardRecord, VersionId
from tieredckpt.agent.agent_api import (
    ItemLocation,
    PeerSource,
    PieceLocation,
    PieceLocations,
    ShardLocation,
    ShardLocations,
    StateNames,
    TensorSliceNeed,
)
from tieredckpt.errors import CheckpointDamagedError, MismatchError, PeersLostError
from tieredckpt.format.manifest import Manifest, ShardIndex, ShardMeta, StateTable, TableTensor, decode_meta, pack_blob
from tieredckpt.format.shard_layout import HEADER_ALIGNMENT, LayoutColumns, TensorEntry
from tieredckpt.format.slice_boxes import Box, Tiling
from tieredckpt.gc_pause import gc_paused
from tieredckpt.resolve_step import Tier

_MIN_STACKED = 8
"""Number of layouts with the same names from which their boxes are compared in one numpy operation."""
PieceOrder = Callable[[str], tuple[int, int]]
"""Sort key of a layout: the distance of its nearest shard, and the part of that shard."""


class LayoutPiece(NamedTuple):
    """Part of a tensor in a shard with this layout."""

    layout: str
    entry: TensorEntry
    box: Box
    """Box in the tensor's global coordinates."""
    item: int
    """Number of the item that holds a tensor stored as an archive; -1 for other tensors."""


class _LayoutGroup:
    """Layouts with the same names in the same order, usually those of all ranks."""

    def __init__(self, names: list[str]) -> None:
        self.digests: list[str] = []
        self.columns: list[LayoutColumns] = []
        self.rows: dict[str, int | tuple[int, ...]] = {name: row for row, name in enumerate(names)}
        if len(self.rows) < len(names):  # several slices of one tensor
            rows: dict[str, tuple[int, ...]] = {}
            for row, name in enumerate(names):
                rows[name] = (*rows.get(name, ()), row)
            self.rows = {name: found[0] if len(found) == 1 else found for name, found in rows.items()}
        self._stack: Any = None

    def add(self, digest: str, columns: LayoutColumns) -> None:
        self.digests.append(digest)
        self.columns.append(columns)

    def overlapping(self, row: int, box: Box) -> Iterator[int]:
        """Yield the numbers of the layouts with a piece in ``row`` that may overlap ``box``."""
        if len(self.columns) < _MIN_STACKED:
            yield from range(len(self.columns))
            return
        import numpy as np

        if self._stack is None:
            self._stack = np.stack([np.frombuffer(one.numbers, np.int64) for one in self.columns])
        rank, at = len(box.sizes), self.columns[0].numbers_offset(row) + 1
        offsets, sizes = (self._stack[:, at + rank * i : at + rank * (i + 1)] for i in (1, 2))
        first = np.asarray(box.offsets, np.int64)
        stop = first + np.asarray(box.sizes, np.int64)
        common = ((offsets < stop) & (offsets + sizes > first)).all(axis=1)
        yield from np.nonzero(common)[0].tolist()

    def shape_differs(self, row: int) -> bool:
        """Return whether layouts that were compared at once disagree about the shape of the tensor in ``row``."""
        if self._stack is None:
            return False
        rank, at = self.columns[0].ranks[row], self.columns[0].numbers_offset(row) + 1
        shapes = self._stack[:, at : at + rank]
        return bool((shapes != shapes[0]).any())


class PieceIndex:
    """Index by name of everything in some layouts."""

    def __init__(self, layouts: Mapping[str, LayoutColumns]) -> None:
        self.layouts = layouts
        groups: dict[tuple[tuple[str, ...], bytes], _LayoutGroup] = {}
        self.objects: dict[str, dict[str, int]] = {}
        """By object name: its item number in each layout that has it."""
        self._archives: dict[str, list[tuple[str, int, TensorEntry]]] = {}
        for digest, columns in layouts.items():
            if columns.names:
                alike = (tuple(columns.names), columns.ranks)
                group = groups.get(alike) or groups.setdefault(alike, _LayoutGroup(columns.names))
                group.add(digest, columns)
            for number, item in enumerate(columns.items):
                if item.tensor is None:
                    self.objects.setdefault(item.fqn, {})[digest] = number
                else:
                    self._archives.setdefault(item.fqn, []).append((digest, number, item.tensor))
        self._groups = list(groups.values())
        self._groups_by_name: dict[str, int | tuple[int, ...]] = {}
        if len(self._groups) > 1:
            for number, group in enumerate(self._groups):
                for name in group.rows:
                    known = self._groups_by_name.get(name)
                    self._groups_by_name[name] = number if known is None else (*_as_tuple(known), number)

    def tensors(self) -> Iterator[TensorEntry]:
        """Yield one piece of every tensor."""
        seen: set[str] = set()
        for group in self._groups:
            for name, rows in group.rows.items():
                if name not in seen:
                    seen.add(name)
                    yield group.columns[0].entry(_as_tuple(rows)[0])
        for name, kept in self._archives.items():
            if name not in seen:
                yield kept[0][2]

    def paths(self) -> dict[str, tuple[str | int, ...]] | None:
        """Return the path of each name in the nested state dict, or ``None`` if no layout has paths."""
        known = [paths for columns in self.layouts.values() if (paths := columns.paths) is not None]
        return {name: path for paths in known for name, path in paths.items()} if known else None

    def find(self, fqn: str, box: Box, order: PieceOrder) -> list[LayoutPiece] | None:
        """Return pieces that cover ``box``, nearest shards first.

        Return ``None`` if these layouts lack some of it.

        Raise ``KeyError`` if they have nothing with this name.
        """
        groups = self._groups_with(fqn)
        if len(groups) == 1 and len(groups[0].columns) == 1 and fqn not in self._archives:
            group, rows = groups[0], groups[0].rows[fqn]
            if isinstance(rows, int) and group.columns[0].box(rows) == box:
                return [LayoutPiece(group.digests[0], group.columns[0].entry(rows), box, -1)]
        places = sorted(self._candidates(fqn, box, groups), key=lambda place: order(place[0]))
        if not places and (groups or fqn in self._archives):  # the layouts have other parts of the tensor
            _check_rank(next(self._entries_named(fqn, groups)), box)
        found = cover_box(box, places)
        return None if found is None else [LayoutPiece(*one) for one in found]

    def _groups_with(self, fqn: str) -> list[_LayoutGroup]:
        if len(self._groups) == 1:
            return self._groups if fqn in self._groups[0].rows else []
        known = self._groups_by_name.get(fqn)
        return [] if known is None else [self._groups[number] for number in _as_tuple(known)]

    def _entries_named(self, fqn: str, groups: Iterable[_LayoutGroup]) -> Iterator[TensorEntry]:
        for group in groups:
            yield group.columns[0].entry(_as_tuple(group.rows[fqn])[0])
        for _, _, tensor in self._archives.get(fqn, ()):
            yield tensor

    def _candidates(self, fqn: str, box: Box, groups: Iterable[_LayoutGroup]) -> Iterator[tuple[str, TensorEntry, int]]:
        known = False
        for group in groups:
            known = True
            for row in _as_tuple(group.rows[fqn]):
                if group.columns[0].ranks[row] != len(box.sizes):
                    _check_rank(group.columns[0].entry(row), box)
                for number in group.overlapping(row, box):
                    yield group.digests[number], group.columns[number].entry(row), -1
                if group.shape_differs(row):
                    raise CheckpointDamagedError(f"{fqn} has several shapes")
        for digest, number, tensor in self._archives.get(fqn, ()):
            known = True
            yield digest, tensor, number
        if not known:
            raise KeyError(fqn)


_Place = TypeVar("_Place")


def cover_box(
    box: Box, entries: Iterable[tuple[_Place, TensorEntry, int]]
) -> list[tuple[_Place, TensorEntry, Box, int]] | None:
    """Return the parts of ``entries`` that cover ``box`` once, or ``None`` if some of it is missing.

    Each entry has its place and item number. Earlier entries are preferred. All must have the same shape.
    """
    shapes = set[tuple[int, ...]]()
    tiling, found = Tiling(box), list[tuple[_Place, TensorEntry, Box, int]]()
    for place, entry, item in entries:
        shapes.add(entry.shape)
        if len(shapes) > 1:
            raise CheckpointDamagedError(f"{entry.fqn} has several shapes: {sorted(shapes)}")
        _check_rank(entry, box)
        if tiling.missing:
            found += [(place, entry, common, item) for common in tiling.add(entry.box)]
    return None if tiling.missing else found


def _check_rank(entry: TensorEntry, box: Box) -> None:
    if len(entry.shape) != len(box.sizes):
        raise MismatchError(f"{entry.fqn} has shape {entry.shape}, but a piece at {box.offsets} was requested")


def _as_tuple(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else numbers


STEP_PAGE_BYTES = 8 << 20
"""Approximate size of a page, in bytes."""
_NEED_BYTES = 150
"""Approximate size of one piece in a page without names, in bytes."""
_TIERS = {tier: number for number, tier in enumerate(Tier)}

FetchLayouts = Callable[[Collection[str]], Mapping[str, bytes]]
FetchRecords = Callable[[Mapping[int, tuple[PeerSource, ...]]], Mapping[int, ShardRecord]]


class StepLayoutCache:
    """Decoded layouts and names of one step, shared by all requests and by later locators of the step."""

    def __init__(self) -> None:
        self._names_lock = threading.Lock()
        """Guards tables and packed names. Taken before ``_lock``."""
        self._tables: dict[str, StateTable] = {}
        self._packed: dict[str | frozenset[str], tuple[str, bytes]] = {}
        self._lock = threading.Lock()
        self._columns: dict[str, LayoutColumns] = {}
        self._indexes: dict[frozenset[str], PieceIndex] = {}

    def index(self, digests: Collection[str], fetch: FetchLayouts) -> PieceIndex:
        """Return the index of these layouts."""
        wanted = frozenset(digests)
        # The ranks of a node request the index together, and one of them builds it. Its millions of objects have no
        # reference cycles.
        with self._lock, gc_paused():
            known = self._indexes.get(wanted)
            if known is None:
                missing = wanted - self._columns.keys()
                if len(missing) >= _MIN_STACKED:
                    import numpy as np  # noqa: F401 - so that it checks these layouts, too
                for digest, data in fetch(sorted(missing)).items() if missing else ():
                    self._columns[digest] = LayoutColumns(data)
                known = PieceIndex({digest: self._columns[digest] for digest in sorted(wanted)})
                self._indexes[wanted] = known
            return known

    def table(self, digests: Iterable[str], fetch: Callable[[str], StateTable | None]) -> tuple[str, StateTable] | None:
        """Return digest and content of the first of these tables that exists, or ``None``."""
        with self._names_lock, gc_paused():
            for digest in digests:
                found = self._tables.get(digest) or fetch(digest)
                if found is not None:
                    self._tables[digest] = found
                    return digest, found
            return None

    def packed(self, source: str | frozenset[str], names: Callable[[], StateNames]) -> tuple[str, bytes]:
        """Return a digest and the packed names of ``source``, which is a table or a set of layouts."""
        with self._names_lock, gc_paused():
            known = self._packed.get(source)
            if known is None:
                data = pack_blob(msgspec.msgpack.encode(names()))
                known = self._packed[source] = xxhash.xxh3_128_hexdigest(data), data
            return known

    def columns(self, digest: str, fetch: FetchLayouts) -> LayoutColumns:
        with self._lock:
            if digest not in self._columns:
                self._columns[digest] = LayoutColumns(fetch([digest])[digest])
            return self._columns[digest]


class StepLocator:
    """Locations of everything in one step. Any thread may call its methods."""

    def __init__(
        self,
        group: VersionId,
        *,
        here: Mapping[int, ShardRecord],
        elsewhere: Mapping[int, ShardInfo],
        sources: Mapping[int, tuple[PeerSource, ...]],
        durable: Manifest | None,
        layouts: FetchLayouts,
        records: FetchRecords,
        table: Callable[[str], StateTable | None],
        known: StepLayoutCache,
        page_bytes: int = STEP_PAGE_BYTES,
    ) -> None:
        self.version_id = group
        self.durable = durable
        self.known = known
        self._here = here
        self._sources = sources
        self._layouts = layouts
        self._records = records
        self._table_of = table
        self._page_bytes = page_bytes
        self._lost: set[int] = set()
        self._indexes: dict[int, ShardIndex] = {}
        self._table: tuple[str, StateTable] | None = None
        self._table_requested = False
        """Whether the table was requested."""
        self.metas: dict[int, ShardMeta] = {}
        self.sizes: dict[int, int] = {}
        self.found: dict[int, tuple[Tier, ...]] = {}
        indexes = {} if durable is None else {shard.key.part: shard for shard in durable.shards}
        self._stored = indexes
        facts: dict[int, ShardInfo | ShardRecord] = {**elsewhere, **here}
        for part in sorted(facts.keys() | indexes.keys()):
            fact = facts.get(part)
            near = (Tier.MEMORY,) if part in here else ()
            tiers = (*near, Tier.PEER) if part in sources else near
            self.found[part] = tiers or (Tier.DURABLE,)
            self.metas[part] = decode_meta(fact.meta) if fact is not None else indexes[part].meta
            self.sizes[part] = fact.size_bytes if fact is not None else indexes[part].size_bytes
        self.in_all = next((fact.parts for fact in facts.values()), 0) or (durable.parts if durable else 0)
        self._starts: dict[int, list[int]] = {}

    def names(self) -> tuple[str, bytes]:
        """Return a digest and the packed :class:`~tieredckpt.agent.agent_api.StateNames`."""
        found = self._state_table()
        if found is not None and found[1].described:
            return self.known.packed(found[0], lambda: _from_table(found[1]))
        return self.known.packed(self._available_layouts(), lambda: _from_layouts(self._full_index()))

    def _state_table(self) -> tuple[str, StateTable] | None:
        if not self._table_requested:
            digests = dict.fromkeys(meta.table for meta in self.metas.values() if meta.table)
            self._table = self.known.table(digests, self._table_of)
            self._table_requested = True
        return self._table

    def pieces(self, rank: int, needs: Sequence[TensorSliceNeed], objects: Sequence[str]) -> PieceLocations:
        """Return the locations of the first needs, one page of them.

        Once all needs are answered, the page includes the objects.
        """
        best = self._nearest_shards(rank)
        order = {digest: (distance, number) for digest, (distance, number, _) in best.items()}.__getitem__
        stages = self._search_stages(rank)
        found: list[PieceLocation] = []
        items: dict[tuple[int, int], ItemLocation] = {}
        room_bytes = self._page_bytes
        for number, (fqn, offsets, sizes) in enumerate(needs):
            box = Box(offsets, sizes)
            for one in self._find(stages, fqn, box, order):
                part = best[one.layout][2]
                entry = one.entry
                wanted = None if one.box == entry.box else (one.box.offsets, one.box.sizes)
                place = (entry.dtype, entry.itemsize, entry.start, entry.shape, *entry.box)
                found.append(PieceLocation(number, part, one.item, *place, wanted))
                if one.item >= 0:
                    items[part, one.item] = self.item(part, one.item)
                room_bytes -= _NEED_BYTES + 8 * len(sizes)
            if room_bytes < 0 and number + 1 < len(needs):
                return PieceLocations(number + 1, found, list(items.values()))
        return PieceLocations(
            len(needs), found, [*items.values(), *(self._object(stages, name, rank) for name in objects)]
        )

    def _nearest_shards(self, rank: int) -> dict[str, tuple[int, int, int]]:
        """Return distance, order and part of the nearest shard with each layout.

        The rank's own part is the first of equally distant ones.
        """
        best: dict[str, tuple[int, int, int]] = {}
        for part, meta in self.metas.items():
            if part in self._lost:
                continue
            place = (_TIERS[self.found[part][0]], -1 if part == rank else part, part)
            if meta.layout not in best or place < best[meta.layout]:
                best[meta.layout] = place
        return best

    def _search_stages(self, rank: int) -> Callable[[str, int], PieceIndex | None]:
        """Return a function from a name and a search stage (0 to 2) to an index.

        It returns ``None`` to skip the stage.
        """
        near = {self.metas[part].layout for part, tiers in self.found.items() if tiers[0] is Tier.MEMORY}
        if rank in self.metas and rank not in self._lost:
            near.add(self.metas[rank].layout)

        nearest = functools.cache(lambda: self._index(near) if near else None)
        everywhere = functools.cache(self._full_index)  # a job may have thousands of layouts

        def stage(name: str, number: int) -> PieceIndex | None:
            if number == 0:
                return nearest()
            if number == 1:
                home = self._single_parts().get(name, -1)
                return self._index({self.metas[home].layout}) if home in self.metas and home not in self._lost else None
            return everywhere()

        return stage

    def _find(
        self,
        stages: Callable[[str, int], PieceIndex | None],
        fqn: str,
        box: Box,
        order: Callable[[str], tuple[int, int]],
    ) -> list[LayoutPiece]:
        known = False
        for number in range(3):
            index = stages(fqn, number)
            if index is None:
                continue
            try:
                found = index.find(fqn, box, order)
            except KeyError:
                continue
            known = True
            if found is not None:
                return found
        if self._lost:
            raise PeersLostError(
                f"step {self.version_id.version}: no reachable node has parts {sorted(self._lost)}, "
                f"and the other parts lack some of {fqn}"
            )
        if not known:
            raise MismatchError(f"step {self.version_id.version} has no tensor {fqn}")
        raise CheckpointDamagedError(
            f"step {self.version_id.version} lacks some of {fqn} at {box.offsets} of {box.sizes}"
        )

    def _object(self, stages: Callable[[str, int], PieceIndex | None], name: str, rank: int) -> ItemLocation:
        """Return the location of an object for this rank.

        It is the rank's own if every part has the object, otherwise that in the nearest part.

        Of equally near parts it is the lowest.
        """
        home = self._single_parts().get(name, -1)
        if home in self.metas and home not in self._lost:
            digest = self.metas[home].layout
            number = self._index({digest}).objects.get(name, {}).get(digest)
            if number is not None:
                return self.item(home, number)
        index = stages(name, 2)
        numbers = index.objects.get(name, {}) if index is not None else {}
        parts = {
            part: numbers[meta.layout]
            for part, meta in self.metas.items()
            if part not in self._lost and meta.layout in numbers
        }
        if not parts:
            if self._lost:
                raise PeersLostError(
                    f"step {self.version_id.version}: no reachable node has parts {sorted(self._lost)}, "
                    f"and the other parts lack {name}"
                )
            raise MismatchError(f"step {self.version_id.version} has no object {name}")
        if rank in parts and len(parts) == self.in_all:
            return self.item(rank, parts[rank])
        part = min(parts, key=lambda part: (_TIERS[self.found[part][0]], part))
        return self.item(part, parts[part])

    def item(self, part: int, number: int) -> ItemLocation:
        starts = self._item_starts(part)
        return ItemLocation(part, number, starts[number], starts[number + 1])

    def _item_starts(self, part: int) -> list[int]:
        """Return the start of each item of a shard, and the end of the last one."""
        known = self._starts.get(part)
        if known is None:
            meta = self.metas[part]
            columns = self.known.columns(meta.layout, self._layouts)
            if len(meta.item_sizes) != len(columns.items) or min(meta.item_sizes, default=0) < 0:
                raise CheckpointDamagedError(
                    f"step {self.version_id.version} part {part}: {len(columns.items)} items "
                    f"of {len(meta.item_sizes)} sizes"
                )
            known = list(itertools.accumulate(meta.item_sizes, initial=columns.tensor_bytes))
            self._starts[part] = known
        return known

    def _single_parts(self) -> Mapping[str, int]:
        """Return the only part that has each name, for names that the state table lists with one part."""
        found = self._state_table()
        return found[1].single_parts if found is not None else {}

    def _full_index(self) -> PieceIndex:
        return self._index(self._available_layouts())

    def _available_layouts(self) -> frozenset[str]:
        """Return the layouts of the shards that are not lost."""
        return frozenset(meta.layout for part, meta in self.metas.items() if part not in self._lost)

    def _index(self, digests: Collection[str]) -> PieceIndex:
        return self.known.index(digests, self._layouts)

    def parts(self, wanted: Sequence[int], *, item_sizes: bool = False) -> ShardLocations:
        """Return one page of these shards: at least one, unless no node or store can still describe any."""
        self._load_indexes(wanted)
        found: list[ShardLocation] = []
        lost: list[int] = []
        room = self._page_bytes
        for part in wanted:
            index = self._indexes.get(part)
            if index is None:
                lost.append(part)
                continue
            room -= 512 + len(index.checksums) + 5 * len(index.frames) + 5 * len(index.meta.item_sizes) * item_sizes
            if found and room < 0:
                break
            header = self._header_bytes(index)
            if not item_sizes:
                index = msgspec.structs.replace(index, meta=msgspec.structs.replace(index.meta, item_sizes=()))
            tiers = self.found[part]
            sources = self._sources.get(part, ()) if Tier.PEER in tiers else ()
            found.append(ShardLocation(index, header, tiers, sources))
        return ShardLocations(found, lost)

    def _load_indexes(self, wanted: Iterable[int]) -> None:
        missing = {part for part in wanted if part in self.metas and part not in self._indexes}
        to_fetch = {part: self._sources[part] for part in missing if part not in self._here and part in self._sources}
        records = {**(self._records(to_fetch) if to_fetch else {}), **self._here}
        for part in missing:
            record, stored = records.get(part), self._stored.get(part)
            if record is None and stored is None:
                self._lost.add(part)
                continue
            if record is None or stored is None:
                index = stored if record is None else _index_of(record)
            elif stored.checksums == record.checksums:
                index = stored
                self.found[part] = (*(t for t in self.found[part] if t is not Tier.DURABLE), Tier.DURABLE)
            else:
                raise CheckpointDamagedError(
                    f"{record.key}: the durable copy has other checksums than the one in memory"
                )
            if record is None:
                self.found[part] = (Tier.DURABLE,)
            assert index is not None  # noqa: S101 - one of them is there
            if index.meta.layout != self.metas[part].layout:
                raise PeersLostError(
                    f"{index.key} has another layout than the step's description. Resolve the step again"
                )
            self._indexes[part] = index

    def _header_bytes(self, index: ShardIndex) -> int:
        """Return the size of a shard's header: the shard without its tensors and items."""
        rest = self._item_starts(index.key.part)[-1]
        header = index.size_bytes - rest
        if header <= 0 or header % HEADER_ALIGNMENT:
            raise CheckpointDamagedError(
                f"{index.key} has {index.size_bytes} bytes, its layout makes {rest} and a header"
            )
        return header


def _index_of(record: ShardRecord) -> ShardIndex:
    return ShardIndex(
        record.key, record.parts, record.size_bytes, record.chunk_bytes, record.checksums, decode_meta(record.meta)
    )


def _state_names(
    tensors: Sequence[TableTensor | TensorEntry],
    objects: Iterable[str],
    paths: Mapping[str, tuple[str | int, ...]] | None,
    *,
    split: bool,
) -> StateNames:
    dtypes = {dtype: number for number, dtype in enumerate(dict.fromkeys(tensor.dtype for tensor in tensors))}
    return StateNames(
        [tensor.fqn for tensor in tensors],
        list(dtypes),
        array("H", (dtypes[tensor.dtype] for tensor in tensors)).tobytes(),
        [tensor.shape for tensor in tensors],
        bytes(tensor.requires_grad for tensor in tensors),
        list(objects),
        None if paths is None else {name: path for name, path in paths.items() if path != tuple(name.split("."))},
        split,
        bytes(_is_split(tensor) for tensor in tensors),
    )


def _is_split(tensor: TableTensor | TensorEntry) -> bool:
    return tensor.part < 0 if isinstance(tensor, TableTensor) else tensor.box.sizes != tensor.shape


def _from_table(table: StateTable) -> StateNames:
    return _state_names(table.tensors, table.objects, table.paths, split=table.split)


def _from_layouts(index: PieceIndex) -> StateNames:
    paths = index.paths()
    return _state_names(list(index.tensors()), index.objects, paths, split=paths is not None)
