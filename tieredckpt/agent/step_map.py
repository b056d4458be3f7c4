"""Where everything of one step is, as this node sees it: what ranks ask of it page by page.

A rank that goes on as the part it was finds nearly all it needs in the shards of this node, so layouts are looked at in
three turns: those of the shards that are here and of the rank's own part, then those of the parts that the table names,
then all.
"""

from __future__ import annotations

import functools
import itertools
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
import xxhash

from peerstore.records import Group, ShardFact, ShardRecord
from tieredckpt.boxes import Box
from tieredckpt.errors import CheckpointDamagedError, MismatchError, PeersLostError
from tieredckpt.layout import HEADER_ALIGNMENT, LayoutColumns, TensorEntry
from tieredckpt.manifest import Manifest, ShardIndex, ShardMeta, StateTable, TableTensor, decode_meta, pack
from tieredckpt.node import (
    FoundParts,
    FoundPieces,
    ItemAt,
    Need,
    PartAt,
    PieceAt,
    Source,
    StateNames,
)
from tieredckpt.pieces import LayoutPiece, PieceIndex
from tieredckpt.quiet import collector_paused
from tieredckpt.resolve import Tier

PAGE_BYTES = 8 << 20
"""About as much is said in one message, whatever there is to say."""
_NEED_BYTES = 150
"""A piece in an answer, names left out."""
_TIERS = {tier: number for number, tier in enumerate(Tier)}

Layouts = Callable[[Collection[str]], Mapping[str, bytes]]
Records = Callable[[Mapping[int, tuple[Source, ...]]], Mapping[int, ShardRecord]]


class StepLayouts:
    """The layouts of one step and what it has by name, decoded once for all who ask, however often it is looked at."""

    def __init__(self) -> None:
        self._naming = threading.Lock()
        """Before the other lock."""
        self._tables: dict[str, StateTable] = {}
        self._packed: dict[str | frozenset[str], tuple[str, bytes]] = {}
        self._lock = threading.Lock()
        self._columns: dict[str, LayoutColumns] = {}
        self._indexes: dict[frozenset[str], PieceIndex] = {}

    def index(self, digests: Collection[str], fetch: Layouts) -> PieceIndex:
        """All that is in these layouts, by name."""
        wanted = frozenset(digests)
        # The ranks of a node ask at the same time: one of them has it made. Millions of pieces, and none in a circle.
        with self._lock, collector_paused():
            known = self._indexes.get(wanted)
            if known is None:
                lacking = wanted - self._columns.keys()
                for digest, data in fetch(sorted(lacking)).items() if lacking else ():
                    self._columns[digest] = LayoutColumns(data)
                known = PieceIndex({digest: self._columns[digest] for digest in sorted(wanted)})
                self._indexes[wanted] = known
            return known

    def table(self, digests: Iterable[str], fetch: Callable[[str], StateTable | None]) -> tuple[str, StateTable] | None:
        """The first of these that anybody has."""
        with self._naming, collector_paused():
            for digest in digests:
                found = self._tables.get(digest) or fetch(digest)
                if found is not None:
                    self._tables[digest] = found
                    return digest, found
            return None

    def packed(self, source: str | frozenset[str], names: Callable[[], StateNames]) -> tuple[str, bytes]:
        """A digest, and the names that follow from the table or the layouts ``source``, packed."""
        with self._naming, collector_paused():
            known = self._packed.get(source)
            if known is None:
                data = pack(msgspec.msgpack.encode(names()))
                known = self._packed[source] = xxhash.xxh3_128_hexdigest(data), data
            return known

    def columns(self, digest: str, fetch: Layouts) -> LayoutColumns:
        with self._lock:
            if digest not in self._columns:
                self._columns[digest] = LayoutColumns(fetch([digest])[digest])
            return self._columns[digest]


class StepMap:
    """One step. Any thread may call."""

    def __init__(
        self,
        group: Group,
        *,
        here: Mapping[int, ShardRecord],
        elsewhere: Mapping[int, ShardFact],
        sources: Mapping[int, tuple[Source, ...]],
        durable: Manifest | None,
        layouts: Layouts,
        records: Records,
        table: Callable[[str], StateTable | None],
        known: StepLayouts,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self.group = group
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
        self._sought = False
        """Whether the table was looked for."""
        self.metas: dict[int, ShardMeta] = {}
        self.sizes: dict[int, int] = {}
        self.found: dict[int, tuple[Tier, ...]] = {}
        indexes = {} if durable is None else {shard.key.part: shard for shard in durable.shards}
        self._stored = indexes
        facts: dict[int, ShardFact | ShardRecord] = {**elsewhere, **here}
        for part in sorted(facts.keys() | indexes.keys()):
            fact = facts.get(part)
            near = (Tier.MEMORY,) if part in here else ()
            tiers = (*near, Tier.PEER) if part in sources else near
            self.found[part] = tiers or (Tier.DURABLE,)
            self.metas[part] = decode_meta(fact.meta) if fact is not None else indexes[part].meta
            self.sizes[part] = fact.size_bytes if fact is not None else indexes[part].size_bytes
        self.in_all = next((fact.parts for fact in facts.values()), 0) or (durable.parts if durable else 0)
        self._starts: dict[int, list[int]] = {}

    # -- what there is ----------------------------------------------------------------------------------------

    def names(self) -> tuple[str, bytes]:
        """A digest, and :class:`~tieredckpt.node.StateNames`, packed."""
        found = self._state_table()
        if found is not None and found[1].described:
            return self.known.packed(found[0], lambda: _from_table(found[1]))
        return self.known.packed(self._left(), lambda: _from_layouts(self._all()))

    def _state_table(self) -> tuple[str, StateTable] | None:
        if not self._sought:
            digests = dict.fromkeys(meta.table for meta in self.metas.values() if meta.table)
            self._table = self.known.table(digests, self._table_of)
            self._sought = True
        return self._table

    # -- where it is ------------------------------------------------------------------------------------------

    def pieces(self, rank: int, needs: Sequence[Need], objects: Sequence[str]) -> FoundPieces:
        """As many of the needs, in their order, as fit into a page; the objects once all of them do."""
        best = self._best(rank)
        order = {digest: (distance, number) for digest, (distance, number, _) in best.items()}.__getitem__
        turns = self._turns(rank)
        found: list[PieceAt] = []
        items: dict[tuple[int, int], ItemAt] = {}
        room = self._page_bytes
        for number, (fqn, offsets, sizes) in enumerate(needs):
            box = Box(offsets, sizes)
            for one in self._find(turns, fqn, box, order):
                part = best[one.layout][2]
                entry = one.entry
                wanted = None if one.box == entry.box else (one.box.offsets, one.box.sizes)
                place = (entry.dtype, entry.itemsize, entry.start, entry.shape, *entry.box)
                found.append(PieceAt(number, part, one.item, *place, wanted))
                if one.item >= 0:
                    items[part, one.item] = self.item(part, one.item)
                room -= _NEED_BYTES + 8 * len(sizes)
            if room < 0 and number + 1 < len(needs):
                return FoundPieces(number + 1, found, list(items.values()))
        return FoundPieces(len(needs), found, [*items.values(), *(self._object(turns, name, rank) for name in objects)])

    def _best(self, rank: int) -> dict[str, tuple[int, int, int]]:
        """For each layout how near its nearest shard is, that one's place among those as near, and its part."""
        best: dict[str, tuple[int, int, int]] = {}
        for part, meta in self.metas.items():
            if part in self._lost:
                continue
            place = (_TIERS[self.found[part][0]], -1 if part == rank else part, part)
            if meta.layout not in best or place < best[meta.layout]:
                best[meta.layout] = place
        return best

    def _turns(self, rank: int) -> Callable[[str, int], PieceIndex | None]:
        """The layouts to look at, turn by turn; ``None`` when there is no other turn."""
        near = {self.metas[part].layout for part, tiers in self.found.items() if tiers[0] is Tier.MEMORY}
        if rank in self.metas and rank not in self._lost:
            near.add(self.metas[rank].layout)

        nearest = functools.cache(lambda: self._index(near) if near else None)
        everywhere = functools.cache(self._all)  # not for each piece anew: a job may have thousands of layouts

        def turn(name: str, number: int) -> PieceIndex | None:
            if number == 0:
                return nearest()
            if number == 1:
                home = self._homes().get(name, -1)
                return self._index({self.metas[home].layout}) if home in self.metas and home not in self._lost else None
            return everywhere()

        return turn

    def _find(
        self,
        turns: Callable[[str, int], PieceIndex | None],
        fqn: str,
        box: Box,
        order: Callable[[str], tuple[int, int]],
    ) -> list[LayoutPiece]:
        known = False
        for number in range(3):
            index = turns(fqn, number)
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
                f"step {self.group.version}: nobody who held parts {sorted(self._lost)} answers, and {fqn} is in them"
            )
        if not known:
            raise MismatchError(f"step {self.group.version} has no tensor {fqn}")
        raise CheckpointDamagedError(f"step {self.group.version} lacks some of {fqn} at {box.offsets} of {box.sizes}")

    def _object(self, turns: Callable[[str, int], PieceIndex | None], name: str, rank: int) -> ItemAt:
        """Whose value of an object this rank gets: its own where every rank saved one, else the first one's."""
        home = self._homes().get(name, -1)
        if home in self.metas and home not in self._lost:
            digest = self.metas[home].layout
            number = self._index({digest}).objects.get(name, {}).get(digest)
            if number is not None:
                return self.item(home, number)
        index = turns(name, 2)
        numbers = index.objects.get(name, {}) if index is not None else {}
        parts = {
            part: numbers[meta.layout]
            for part, meta in self.metas.items()
            if part not in self._lost and meta.layout in numbers
        }
        if not parts:
            if self._lost:
                raise PeersLostError(f"step {self.group.version}: who held {name} does not answer")
            raise MismatchError(f"step {self.group.version} has no object {name}")
        if rank in parts and len(parts) == self.in_all:
            return self.item(rank, parts[rank])
        part = min(parts, key=lambda part: (_TIERS[self.found[part][0]], part))
        return self.item(part, parts[part])

    def item(self, part: int, number: int) -> ItemAt:
        starts = self._item_starts(part)
        return ItemAt(part, number, starts[number], starts[number + 1])

    def _item_starts(self, part: int) -> list[int]:
        """Where each item of a shard begins, and where the last one ends."""
        known = self._starts.get(part)
        if known is None:
            meta = self.metas[part]
            columns = self.known.columns(meta.layout, self._layouts)
            if len(meta.item_sizes) != len(columns.items) or min(meta.item_sizes, default=0) < 0:
                raise CheckpointDamagedError(
                    f"step {self.group.version} part {part}: {len(columns.items)} items of {len(meta.item_sizes)} sizes"
                )
            known = list(itertools.accumulate(meta.item_sizes, initial=columns.tensor_bytes))
            self._starts[part] = known
        return known

    def _homes(self) -> Mapping[str, int]:
        """The part that a name is only in, as far as somebody said."""
        found = self._state_table()
        return found[1].homes if found is not None else {}

    def _all(self) -> PieceIndex:
        return self._index(self._left())

    def _left(self) -> frozenset[str]:
        """The layouts of the shards that are not lost."""
        return frozenset(meta.layout for part, meta in self.metas.items() if part not in self._lost)

    def _index(self, digests: Collection[str]) -> PieceIndex:
        return self.known.index(digests, self._layouts)

    # -- the shards themselves --------------------------------------------------------------------------------

    def parts(self, wanted: Sequence[int], *, item_sizes: bool = False) -> FoundParts:
        """As many of these shards as fit into a page, at least one of those that anybody can still describe."""
        self._look_up(wanted)
        found: list[PartAt] = []
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
            found.append(PartAt(index, header, tiers, sources))
        return FoundParts(found, lost)

    def _look_up(self, wanted: Iterable[int]) -> None:
        missing = {part for part in wanted if part in self.metas and part not in self._indexes}
        ask = {part: self._sources[part] for part in missing if part not in self._here and part in self._sources}
        records = {**(self._records(ask) if ask else {}), **self._here}
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
                raise PeersLostError(f"{index.key} is described in two ways: look again what there is")
            self._indexes[part] = index

    def _header_bytes(self, index: ShardIndex) -> int:
        """A shard is its header, its tensors and its items: what is left is the header."""
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


def _named(
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
        bytes(_in_pieces(tensor) for tensor in tensors),
    )


def _in_pieces(tensor: TableTensor | TensorEntry) -> bool:
    return tensor.part < 0 if isinstance(tensor, TableTensor) else tensor.box.sizes != tensor.shape


def _from_table(table: StateTable) -> StateNames:
    return _named(table.tensors, table.objects, table.paths, split=table.split)


def _from_layouts(index: PieceIndex) -> StateNames:
    paths = index.paths()
    return _named(list(index.tensors()), index.objects, paths, split=paths is not None)
