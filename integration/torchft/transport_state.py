"""A torchft state as a flat state of tensors and one object, and back.

The object describes containers, other values and the specs of DTensors. A load checks it before it unpickles it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from tieredckpt.errors import CheckpointDamagedError, MismatchError, UntrustedObjectError, UsageError
from tieredckpt.tensors.plain_tensors import is_plain_tensor
from tieredckpt.tensors.state_dict import check_safe_value

_DESCRIPTION = "description"
"""Name of the object in the flat state. Tensors have the numbers of their leaves as names."""


class _SavedSpec(msgspec.Struct, frozen=True):
    """Spec of one DTensor as plain data."""

    device: str
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    mesh_names: tuple[str, ...] | None
    placements: tuple[tuple[str | int, ...], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def flatten_for_transport(state: object, step: int, *, trust_objects: bool) -> dict[str, Any]:
    """Return ``state`` as tensors by leaf number, and one object that describes the rest.

    Raise :class:`~tieredckpt.errors.UntrustedObjectError` for a value that the receiver would refuse to load.
    """
    paths, structure = tree_flatten_with_path(state)
    tensors: dict[str, Any] = {}
    values, specs = {}, {}
    for number, (path, value) in enumerate(paths):
        local = value.to_local() if isinstance(value, DTensor) else value
        if not isinstance(local, torch.Tensor) or not is_plain_tensor(local):
            values[number] = value
            continue
        tensors[str(number)] = local.detach()
        if isinstance(value, DTensor):
            specs[number] = msgspec.to_builtins(_save_spec(keystr(path), value))
    skeleton = tree_unflatten(list(range(len(paths))), structure)
    # DCP would flatten a dict and change the type of its keys.
    description = SimpleNamespace(step=step, skeleton=skeleton, values=values, specs=specs)
    if not trust_objects:
        check_safe_value("the state's containers", skeleton)
        try:
            check_safe_value("the state", description)
        except UntrustedObjectError:
            for number, value in values.items():
                check_safe_value(keystr(paths[number][0]), value)
            raise
    return {**tensors, _DESCRIPTION: description}


def unflatten_from_transport(flat: Mapping[str, Any], step: int) -> Any:
    """Return the state of :func:`flatten_for_transport`; raise unless it is the state of ``step``."""
    description = flat.get(_DESCRIPTION)
    if not isinstance(description, SimpleNamespace):
        raise CheckpointDamagedError(f"step {step}: the received state has no description")
    if description.step != step:
        raise MismatchError(f"The sender has step {description.step}, and step {step} was requested")
    numbers, structure = tree_flatten(description.skeleton)
    meshes: dict[object, DeviceMesh] = {}
    leaves = []
    for number in numbers:
        if number in description.values:
            leaves.append(description.values[number])
        elif str(number) not in flat:
            raise CheckpointDamagedError(f"step {step}: the received state has no leaf {number}")
        elif number in description.specs:
            saved = msgspec.convert(description.specs[number], _SavedSpec)
            leaves.append(_build_dtensor(flat[str(number)], saved, meshes))
        else:
            leaves.append(flat[str(number)])
    return tree_unflatten(leaves, structure)


def _save_spec(name: str, value: DTensor) -> _SavedSpec:
    mesh = value.device_mesh
    return _SavedSpec(
        mesh.device_type,
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        mesh.mesh_dim_names,
        tuple(_save_placement(name, placement) for placement in value.placements),
        tuple(value.shape),
        tuple(value.stride()),
    )


def _save_placement(name: str, placement: Placement) -> tuple[str | int, ...]:
    if isinstance(placement, _StridedShard):
        return "strided", placement.dim, int(placement.split_factor)
    if isinstance(placement, Shard):
        return "shard", placement.dim
    if isinstance(placement, Replicate):
        return ("replicate",)
    if isinstance(placement, Partial):
        return "partial", placement.reduce_op
    raise UsageError(f"{name}: a DTensor with placement {placement} cannot be sent to another replica")


def _load_placement(saved: tuple[str | int, ...]) -> Placement:
    match saved:
        case ("strided", int(dim), int(factor)):
            return _StridedShard(dim, split_factor=factor)
        case ("shard", int(dim)):
            return Shard(dim)
        case ("replicate",):
            return Replicate()
        case ("partial", str(operation)):
            return Partial(operation)
    raise CheckpointDamagedError(f"the received state has an unknown placement {saved}")


def _build_dtensor(local: torch.Tensor, saved: _SavedSpec, meshes: dict[object, DeviceMesh]) -> DTensor:
    """Return the DTensor of this rank. Its mesh has the sender's ranks, and no process groups."""
    key = saved.device, saved.mesh_shape, saved.mesh_ranks, saved.mesh_names
    if key not in meshes:
        ranks = torch.tensor(saved.mesh_ranks, dtype=torch.int).reshape(saved.mesh_shape)
        meshes[key] = DeviceMesh(saved.device, ranks, mesh_dim_names=saved.mesh_names, _init_backend=False)
    placements = tuple(map(_load_placement, saved.placements))
    meta = TensorMeta(torch.Size(saved.shape), saved.stride, local.dtype)
    return DTensor(local, DTensorSpec(meshes[key], placements, tensor_meta=meta), requires_grad=False)
