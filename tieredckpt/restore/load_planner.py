"""RestorePlanner: DCP's load plan, created directly for tensors that were saved as one piece."""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from tieredckpt.agent.agent_api import StateNames
from tieredckpt.tensors.plain_tensors import dtype_from_name
from tieredckpt.tensors.state_dict import StateDict, is_leaf_list

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class RestorePlanner(DefaultLoadPlanner):
    """Planner of the same read items as DCP's planner, in one pass over the state without searches.

    It returns objects to the keys that they have in the state. DCP's paths have the keys of mappings as strings: its
    own planner adds a second entry if a key is a number.
    """

    def set_up_planner(
        self,
        state_dict: StateDict,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT002 - torch's own signature
    ) -> None:
        found = _FlatState()
        self._places = found.places
        if not found.add_all(state_dict):
            _add_places(self._places, "", state_dict)
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.original_state_dict, self.state_dict, self.mappings = state_dict, found.values, found.paths
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None or self.state_dict.keys() != self.metadata.state_dict_metadata.keys():
            return super().create_local_plan()
        items: list[ReadItem] = []
        for fqn, value in self.state_dict.items():
            found = _tensor_items(fqn, value, self.metadata)
            if found is None:
                found = create_default_local_load_plan({fqn: value}, self.metadata, strict=True).items
            items += found
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        place = self._places.get(read_item.dest_index.fqn)
        if place is None:
            super().load_bytes(read_item, value)
            return
        container, key = place
        container[key] = torch.load(value, weights_only=False)  # the reader has checked the bytes

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        value: Any = self.state_dict.get(read_item.dest_index.fqn)
        if type(value) in _PLAIN and value.shape == read_item.lengths:
            whole: torch.Tensor = value
            return whole
        resolved: torch.Tensor = super().resolve_tensor(read_item)
        return resolved


class _FlatState:
    """Leaves of a state by their names in DCP's ``flatten_state_dict``."""

    def __init__(self) -> None:
        self.values: StateDict = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.places: dict[str, tuple[Any, Any]] = {}
        """Container and key of each leaf."""

    def add_all(self, state: Mapping[str, Any]) -> bool:
        """Add a state; return False if it has values that DCP itself must set up."""
        return all(self._add(str(key), (str(key),), value, (state, key)) for key, value in state.items())

    def _add(self, fqn: str, path: tuple[str | int, ...], value: Any, place: tuple[Any, Any]) -> bool:
        if isinstance(value, torch.Tensor):
            if (type(value) not in _PLAIN and type(value) is not DTensor) or value.is_meta:
                return False
        elif isinstance(value, Mapping):
            return all(
                self._add(f"{fqn}.{key}", (*path, str(key)), inner, (value, key)) for key, inner in value.items()
            )
        elif isinstance(value, list) and not is_leaf_list(value):
            return all(
                self._add(f"{fqn}.{number}", (*path, number), inner, (value, number))
                for number, inner in enumerate(value)
            )
        if fqn in self.values:
            return False
        self.values[fqn], self.paths[fqn], self.places[fqn] = value, path, place
        return True


def _add_places(places: dict[str, tuple[Any, Any]], prefix: str, container: Any) -> None:
    """Add container and key of each leaf, by its name in DCP's ``flatten_state_dict``."""
    for key, value in container.items() if isinstance(container, Mapping) else enumerate(container):
        if isinstance(value, Mapping) or (isinstance(value, list) and not is_leaf_list(value)):
            _add_places(places, f"{prefix}{key}.", value)
        else:
            places[f"{prefix}{key}"] = container, key


def _tensor_items(fqn: str, value: Any, metadata: Metadata) -> list[ReadItem] | None:
    """Return the read items of a tensor that was saved as one chunk; ``None`` if DCP must plan."""
    distributed = type(value) is DTensor
    if not distributed and (type(value) not in _PLAIN or hasattr(value, "__create_chunk_list__")):
        return None
    if _one_chunk(fqn, metadata) != tuple(value.shape) or not value.numel():
        return None
    start = torch.Size([0] * value.dim())
    if not distributed:
        index = MetadataIndex(fqn, start, 0)
        return [ReadItem(LoadItemType.TENSOR, index, start, index, start, value.shape)]
    if value.device_mesh.get_coordinate() is None:
        return []
    chunks: list[ChunkStorageMetadata] = value.__create_chunk_list__()
    if not all(map(_has_elements, chunks)):
        return None
    saved = MetadataIndex(fqn, start, 0)
    return [
        ReadItem(
            LoadItemType.TENSOR, MetadataIndex(fqn, chunk.offsets, number), start, saved, chunk.offsets, chunk.sizes
        )
        for number, chunk in enumerate(chunks)
    ]


def _one_chunk(fqn: str, metadata: Metadata) -> tuple[int, ...] | None:
    """Return the shape of a tensor that was saved as one chunk; ``None`` for other entries."""
    entries = metadata.state_dict_metadata
    if isinstance(entries, LazyStateMetadata):
        return entries.shape(fqn)
    saved = entries[fqn]
    if not isinstance(saved, TensorStorageMetadata) or [chunk.sizes for chunk in saved.chunks] != [saved.size]:
        return None
    return tuple(saved.size)


def _has_elements(chunk: ChunkStorageMetadata) -> bool:
    return all(chunk.sizes)


class LazyStateMetadata(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """Metadata of a step's entries, each created at its lookup."""

    def __init__(self, names: StateNames) -> None:
        self._names = names
        self._index_of = {name: index for index, name in enumerate(names.names)}
        self._objects = dict.fromkeys(names.objects)
        self._dtype_of = array("H", names.dtype_of)

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        index = self._index_of.get(name)
        if index is None:
            if name in self._objects:
                return BytesStorageMetadata()
            raise KeyError(name)
        size = torch.Size(self._names.shapes[index])
        dtype = dtype_from_name(self._names.dtypes[self._dtype_of[index]])
        properties = TensorProperties(dtype=dtype, requires_grad=bool(self._names.requires_grad[index]))
        return TensorStorageMetadata(properties, size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, ``None`` for an object."""
        index = self._index_of.get(name)
        return None if index is None else self._names.shapes[index]

    def in_pieces(self, name: str) -> bool:
        """Return whether several ranks have written parts of this tensor."""
        index = self._index_of.get(name, len(self._names.in_pieces))
        return any(self._names.in_pieces[index : index + 1])

    def __iter__(self) -> Iterator[str]:
        yield from self._index_of
        yield from (name for name in self._objects if name not in self._index_of)

    def __contains__(self, name: object) -> bool:
        return name in self._index_of or name in self._objects

    def __len__(self) -> int:
        return len(self._index_of.keys() | self._objects.keys())
