"""Which stored pieces make up what a rank asks for, out of layouts that stay columns. Pure.

A job's layouts name millions of pieces, and a rank needs a few thousand of them: names are kept once for all layouts
that have the same ones, and an object is made only of a piece that is the answer to something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tieredckpt.boxes import Box, Tiling
from tieredckpt.errors import CheckpointDamagedError, MismatchError
from tieredckpt.layout import LayoutColumns, TensorEntry

_STACKED_FROM = 8
"""From so many layouts with the same names on, their boxes are compared all at once."""
Order = Callable[[str], tuple[int, int]]
"""How far away the nearest shard with a layout is, and which part it is."""


class LayoutPiece(NamedTuple):
    """Part of a tensor, in a shard with this layout."""

    layout: str
    entry: TensorEntry
    box: Box
    """In the tensor's global coordinates."""
    item: int
    """For a tensor kept as an archive: the number of the item it is in; else -1."""


class _Group:
    """Layouts with the same names in the same order: most often those of all ranks."""

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
        """The layouts, by number, whose piece in ``row`` has something of ``box`` or is exactly that."""
        if len(self.columns) < _STACKED_FROM:
            yield from range(len(self.columns))
            return
        import numpy as np

        if self._stack is None:
            self._stack = np.stack([np.frombuffer(one.numbers, np.int64) for one in self.columns])
        rank, at = len(box.sizes), self.columns[0].at(row) + 1
        offsets, sizes = (self._stack[:, at + rank * i : at + rank * (i + 1)] for i in (1, 2))
        first = np.asarray(box.offsets, np.int64)
        stop = first + np.asarray(box.sizes, np.int64)
        common = ((offsets < stop) & (offsets + sizes > first)).all(axis=1)
        yield from np.nonzero(common)[0].tolist()

    def shape_differs(self, row: int) -> bool:
        """Whether layouts that were compared all at once disagree about the shape of the tensor in ``row``."""
        if self._stack is None:
            return False
        rank, at = self.columns[0].ranks[row], self.columns[0].at(row) + 1
        shapes = self._stack[:, at : at + rank]
        return bool((shapes != shapes[0]).any())


class PieceIndex:
    """Everything in some layouts, by name."""

    def __init__(self, layouts: Mapping[str, LayoutColumns]) -> None:
        self.layouts = layouts
        groups: dict[tuple[tuple[str, ...], bytes], _Group] = {}
        self.objects: dict[str, dict[str, int]] = {}
        """By name the layouts with an object of that name, and its number as an item."""
        self._archives: dict[str, list[tuple[str, int, TensorEntry]]] = {}
        for digest, columns in layouts.items():
            if columns.names:
                alike = (tuple(columns.names), columns.ranks)
                group = groups.get(alike) or groups.setdefault(alike, _Group(columns.names))
                group.add(digest, columns)
            for number, item in enumerate(columns.items):
                if item.tensor is None:
                    self.objects.setdefault(item.fqn, {})[digest] = number
                else:
                    self._archives.setdefault(item.fqn, []).append((digest, number, item.tensor))
        self._groups = list(groups.values())
        self._where: dict[str, int | tuple[int, ...]] = {}
        if len(self._groups) > 1:
            for number, group in enumerate(self._groups):
                for name in group.rows:
                    known = self._where.get(name)
                    self._where[name] = number if known is None else (*_several(known), number)

    def tensors(self) -> Iterator[TensorEntry]:
        """One piece of every tensor."""
        seen: set[str] = set()
        for group in self._groups:
            for name, rows in group.rows.items():
                if name not in seen:
                    seen.add(name)
                    yield group.columns[0].entry(_several(rows)[0])
        for name, kept in self._archives.items():
            if name not in seen:
                yield kept[0][2]

    def paths(self) -> dict[str, tuple[str | int, ...]] | None:
        """Where every name was in the nested state dict, as the planner had it."""
        known = [paths for columns in self.layouts.values() if (paths := columns.paths) is not None]
        return {name: path for paths in known for name, path in paths.items()} if known else None

    def find(self, fqn: str, box: Box, order: Order) -> list[LayoutPiece] | None:
        """``box`` out of as near and as few shards as there are; ``None`` when some of it is in no layout here.

        ``KeyError``: nothing of that name is.
        """
        groups = self._in(fqn)
        if len(groups) == 1 and len(groups[0].columns) == 1 and fqn not in self._archives:
            group, rows = groups[0], groups[0].rows[fqn]
            if isinstance(rows, int) and group.columns[0].box(rows) == box:
                return [LayoutPiece(group.digests[0], group.columns[0].entry(rows), box, -1)]
        places = sorted(self._places(fqn, box, groups), key=lambda place: order(place[0]))
        if not places and (groups or fqn in self._archives):  # what there is, is elsewhere in the tensor
            self._check_rank(next(self._any(fqn, groups)), box)
        shapes: set[tuple[int, ...]] = set()
        tiling, found = Tiling(box), list[LayoutPiece]()
        for digest, entry, item in places:
            self._check_rank(entry, box)
            shapes.add(entry.shape)
            if len(shapes) > 1:
                raise CheckpointDamagedError(f"{fqn} is there in several shapes: {sorted(shapes)}")
            if tiling.missing:
                found += [LayoutPiece(digest, entry, common, item) for common in tiling.lay(entry.box)]
        return None if tiling.missing else found

    def _in(self, fqn: str) -> list[_Group]:
        if len(self._groups) == 1:
            return self._groups if fqn in self._groups[0].rows else []
        known = self._where.get(fqn)
        return [] if known is None else [self._groups[number] for number in _several(known)]

    def _any(self, fqn: str, groups: Iterable[_Group]) -> Iterator[TensorEntry]:
        for group in groups:
            yield group.columns[0].entry(_several(group.rows[fqn])[0])
        for _, _, tensor in self._archives.get(fqn, ()):
            yield tensor

    def _places(self, fqn: str, box: Box, groups: Iterable[_Group]) -> Iterator[tuple[str, TensorEntry, int]]:
        known = False
        for group in groups:
            known = True
            for row in _several(group.rows[fqn]):
                if group.columns[0].ranks[row] != len(box.sizes):
                    self._check_rank(group.columns[0].entry(row), box)
                for number in group.overlapping(row, box):
                    yield group.digests[number], group.columns[number].entry(row), -1
                if group.shape_differs(row):
                    raise CheckpointDamagedError(f"{fqn} is there in several shapes")
        for digest, number, tensor in self._archives.get(fqn, ()):
            known = True
            yield digest, tensor, number
        if not known:
            raise KeyError(fqn)

    @staticmethod
    def _check_rank(entry: TensorEntry, box: Box) -> None:
        if len(entry.shape) != len(box.sizes):
            raise MismatchError(f"{entry.fqn} has shape {entry.shape}, a piece at {box.offsets} was asked for")


def _several(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else numbers
