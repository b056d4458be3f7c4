"""From DCP's save plan to a shard: this rank's tensors and items, and the layout of their bytes."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from tieredckpt.errors import SaveFailedError, TieredCheckpointError, UsageError
from tieredckpt.format.manifest import StateTable, TableTensor
from tieredckpt.format.shard_layout import ARCHIVE_ITEM, OBJECT_ITEM, ItemEntry, Layout, TensorEntry, build_layout
from tieredckpt.format.slice_boxes import Box
from tieredckpt.session.incarnation import IncarnationTracker
from tieredckpt.tensors.plain_tensors import dtype_name, is_plain_tensor
from tieredckpt.tensors.safe_objects import warn_unsafe_object
from tieredckpt.tensors.state_dict import (
    UNPICKLABLE_ADVICE,
    Fingerprint,
    archive_object,
    local_tensor,
    require_materialized,
)

PlanSignature = tuple[Any, ...]
_KEPT_PLANS = 4


@dataclass(frozen=True)
class PlannedSave:
    """One process's part of a save, reusable while names, types and shapes of the state are unchanged."""

    layout: Layout
    part: int
    parts: int
    table: StateTable | None
    fingerprint: tuple[Fingerprint, ...] | None = None
    """Fingerprint of the planned state; ``None`` if the planner is not the default one."""
    signature: PlanSignature | None = None
    """Signature of the plan, in addition to the state's fingerprint."""


class PlanCache:
    """Plans of the last saves of one job, for the current incarnation. Any thread may call it."""

    def __init__(self, incarnation: IncarnationTracker) -> None:
        self._incarnation = incarnation
        self._plans: list[PlannedSave] = []
        self._lock = threading.Lock()
        # On all ranks alike, because a rank with a cached plan would skip DCP's collectives.
        incarnation.on_change = self._clear

    @property
    def layouts(self) -> list[Layout]:
        return [planned.layout for planned in self._plans]

    def find(self, found: Sequence[Fingerprint]) -> PlannedSave | None:
        """Return this world's plan for a state with these fingerprints, or ``None``."""
        wanted, parts = tuple(found), self._incarnation.part_count
        return next((one for one in self._plans if one.fingerprint == wanted and one.parts == parts), None)

    def has(self, planned: PlannedSave) -> bool:
        """Return whether ``planned`` is still this world's plan for such a state."""
        return planned.parts == self._incarnation.part_count and any(one is planned for one in self._plans)

    def add(self, planned: PlannedSave) -> None:
        with self._lock:
            others = [
                old for old in self._plans if old.fingerprint != planned.fingerprint or old.layout != planned.layout
            ]
            self._plans = [planned, *others][:_KEPT_PLANS]

    def _clear(self) -> None:
        with self._lock:
            self._plans = []


def save_planner_is_transparent(planner: SavePlanner) -> bool:
    """Return whether the planner resolves to the state's own tensors, without cost or side effects."""
    kind: Any = type(planner)
    return (
        issubclass(kind, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.lookup_object is DefaultSavePlanner.lookup_object
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


def is_default_save_planner(planner: SavePlanner) -> bool:
    """Return whether this is DCP's own planner, which plans from the state alone."""
    return type(planner) is DefaultSavePlanner and planner.flatten_state_dict


def plan_signature(plan: SavePlan) -> PlanSignature:
    """Return the values of a DCP plan that a layout needs and the state's fingerprint lacks."""
    places = [
        (item.index.fqn, item.index.offset, item.tensor_data is not None and item.tensor_data.properties.requires_grad)
        for item in plan.items
    ]
    return places, plan.planner_data


def resolve_write_item(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the planner's data for an item: a detached local tensor, or bytes."""
    try:
        data = planner.resolve_data(item)
    except Exception as error:  # the object's own pickling may raise any exception
        if item.type is not WriteItemType.BYTE_IO or isinstance(error, TieredCheckpointError):
            raise
        raise UsageError(f"{item.index.fqn} cannot be pickled: {error}. {UNPICKLABLE_ADVICE}") from error
    if item.type is WriteItemType.BYTE_IO:
        if not hasattr(data, "getvalue"):
            raise UsageError(f"the planner gave a {type(data).__name__} for {item.index.fqn}, expected a BytesIO")
        return data.getvalue()  # not getbuffer: a buffer that outlives its BytesIO is an error in newer Pythons
    if not isinstance(data, torch.Tensor):
        raise UsageError(f"the planner gave a {type(data).__name__} for tensor {item.index.fqn}")
    data = data.detach()
    data = data.to_local() if isinstance(data, DTensor) else data
    if is_plain_tensor(data) and not data.is_meta:
        require_materialized(item.index.fqn, data)
    return data


def tensor_entry(item: WriteItem, tensor: torch.Tensor) -> TensorEntry:
    """Return the layout entry of ``tensor`` from its plan item."""
    plan = item.tensor_data
    if plan is None:
        raise UsageError(f"the plan's item {item.index.fqn} has no tensor data")
    sizes = tuple(plan.chunk.sizes)
    if not _fits(tensor, sizes):
        raise UsageError(f"{item.index.fqn}: the planner planned {sizes} and gave {tuple(tensor.shape)}")
    return TensorEntry(
        fqn=item.index.fqn,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(plan.size),
        box=Box(tuple(plan.chunk.offsets), sizes),
        itemsize=tensor.dtype.itemsize,
        sharded=item.type is WriteItemType.SHARD,
        requires_grad=bool(plan.properties.requires_grad),
    )


def _fits(tensor: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    """Return whether the tensor has these sizes; an empty one may have another empty shape.

    FSDP2 creates such tensors over an empty TP shard.
    """
    return tuple(tensor.shape) == sizes or tensor.numel() == math.prod(sizes) == 0


class PlannedWrites:
    """One final plan, split into tensors to copy and items to write as bytes."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, *, staged: bool = False) -> None:
        self._planner = planner
        self.is_transparent = save_planner_is_transparent(planner)
        """Whether the planner's tensors are the state's own, so that references to them cost nothing."""
        self._by_key: dict[tuple[str, tuple[int, ...]], WriteItem] = {}
        self._tensors: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._bytes: dict[str, bytes | memoryview] = {}
        entries: list[TensorEntry] = []
        items: list[ItemEntry] = []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                items.append(ItemEntry(item.index.fqn, OBJECT_ITEM))
                self._bytes[item.index.fqn] = resolve_write_item(planner, item)
                continue
            tensor = resolve_write_item(planner, item)
            if tensor.is_meta:
                raise _meta_tensor_error(item.index.fqn, staged=staged)
            entry = tensor_entry(item, tensor)
            if is_plain_tensor(tensor):
                entries.append(entry)
                self._by_key[_entry_key(entry)] = item
                if self.is_transparent:
                    self._tensors[_entry_key(entry)] = tensor
            else:
                items.append(ItemEntry(entry.fqn, ARCHIVE_ITEM, entry))
                self._bytes[_archive_name(entry)] = _archived(entry, tensor)
        self.entries, self.items = tuple(entries), tuple(items)
        self.paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else None

    def layout(self, known: Sequence[Layout]) -> Layout:
        """Return the layout of these writes: an equal one of ``known``, or a new one."""
        wanted = build_layout(self.entries, self.items, _clean_paths(self.paths))
        return next((one for one in known if one == wanted), wanted)

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor of an entry; a transforming planner computes it at each call."""
        kept = self._tensors.get(_entry_key(entry))
        if kept is not None:
            return kept
        tensor: torch.Tensor = resolve_write_item(self._planner, self._by_key[_entry_key(entry)])
        if dtype_name(tensor.dtype) != entry.dtype or not _fits(tensor, entry.box.sizes):
            raise SaveFailedError(
                f"{entry.fqn}: the planner gave {entry.dtype} {entry.box.sizes} at first and then "
                f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            )
        return tensor

    def warn_unsafe_objects(self) -> None:
        for item in self.items:
            if item.tensor is None:
                warn_unsafe_object(item.fqn, bytes(self._bytes[item.fqn]))

    def item_bytes(self, layout: Layout) -> list[bytes | memoryview]:
        return [self._bytes[item.fqn if item.tensor is None else _archive_name(item.tensor)] for item in layout.items]


class CachedWrites(PlannedWrites):
    """The plan of an earlier save of the same state, with its layout and the state's tensors."""

    def __init__(self, planned: PlannedSave, plan: SavePlan, planner: SavePlanner) -> None:
        self.is_transparent = True
        self.planned = planned
        self.entries, self.items = planned.layout.tensors, planned.layout.items
        self._state: Mapping[str, Any] = planner.state_dict  # type: ignore[attr-defined]
        objects = (item for item in plan.items if item.type is WriteItemType.BYTE_IO)
        self._bytes = {item.index.fqn: resolve_write_item(planner, item) for item in objects}

    def layout(self, known: Sequence[Layout]) -> Layout:
        return self.planned.layout

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        tensor = local_tensor(self._state, entry)
        if tensor.is_meta:
            raise _meta_tensor_error(entry.fqn, staged=False)
        return tensor


def _meta_tensor_error(fqn: str, *, staged: bool) -> SaveFailedError:
    if staged:
        return SaveFailedError(
            f"{fqn} is to be written by this rank, but when the state was staged another rank wrote it: the plan "
            "changed in between. This save is lost, the next one stages everything"
        )
    return SaveFailedError(
        f"{fqn} is on the meta device and has no values to save: materialise it (to_empty(device=...), then load or "
        "initialise it), or leave it out of the state"
    )


def state_table_of_plans(plans: Sequence[SavePlan]) -> StateTable:
    """Return the table of the whole state from the final plans of all ranks."""
    tensors: dict[str, TableTensor] = {}
    objects: dict[str, int] = {}
    paths: dict[str, tuple[str | int, ...]] | None = None
    for part, plan in enumerate(plans):
        known = _clean_paths(plan.planner_data if isinstance(plan.planner_data, Mapping) else None)
        if known is not None:
            # Most paths are the name split at its dots, and the table omits those.
            odd = {name: path for name, path in known.items() if path != tuple(name.split("."))}
            paths = odd if paths is None else paths | odd
        for item in plan.items:
            name = item.index.fqn
            if item.tensor_data is None:
                objects[name] = part if objects.get(name, part) == part else -1
            elif name not in tensors:
                size, kind = tuple(item.tensor_data.size), item.tensor_data.properties
                tensors[name] = TableTensor(name, dtype_name(kind.dtype), size, bool(kind.requires_grad), part)
            elif tensors[name].part not in (part, -1):
                tensors[name] = msgspec.structs.replace(tensors[name], part=-1)
    return StateTable(
        tuple(tensors[name] for name in sorted(tensors)),
        tuple(sorted(objects)),
        tuple(objects[name] for name in sorted(objects)),
        described=True,
        paths=paths,
        split=paths is not None,
    )


def state_table_for_planner(planner: SavePlanner, table: StateTable | None) -> StateTable | None:
    """Return the table that holds for this planner; a transforming one may have saved other types."""
    if table is None or save_planner_is_transparent(planner):
        return table
    return msgspec.structs.replace(table, described=False, paths=None, split=False)


def _clean_paths(paths: Mapping[str, Any] | None) -> dict[str, tuple[str | int, ...]] | None:
    return None if paths is None else {name: tuple(path) for name, path in paths.items()}


def _archived(entry: TensorEntry, tensor: torch.Tensor) -> bytes:
    try:
        return archive_object(tensor)
    except Exception as error:  # the class's own pickling may raise any exception
        raise UsageError(f"{entry.fqn} is a {type(tensor).__name__} that cannot be pickled: {error}") from error


def _entry_key(entry: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return entry.fqn, entry.box.offsets


def _archive_name(entry: TensorEntry) -> str:
    return f"{entry.fqn}@{entry.box.offsets}"
