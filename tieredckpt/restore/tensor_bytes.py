"""Bytes of tensors in this process's memory, copies of others, and digests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tieredckpt.format.slice_boxes import Box
from tieredckpt.tensors.device import accelerator
from tieredckpt.tensors.plain_tensors import has_ordinary_dispatch
from tieredckpt.tensors.slot_copy import Copier, memory_at_address
from tieredckpt.tensors.state_dict import is_contiguous_in_memory

_BLOCK_BYTES = 4 << 20


def is_flat_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements are in order in this process's memory, and not on a device."""
    return is_contiguous_in_memory(tensor) and has_ordinary_dispatch(tensor) and accelerator().device_of(tensor) is None


def flat_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy, with its elements in order in this process's memory."""
    tensor = tensor.detach()
    if is_flat_in_memory(tensor):
        return tensor
    device = accelerator()
    here = tensor.cpu() if device.device_of(tensor) is None else device.to_host(tensor)
    return here.resolve_conj().resolve_neg().contiguous()


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor; the caller must hold the tensor while it uses them."""
    return memory_at_address(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else memoryview(b"")


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    tensor = flat_in_memory(tensor)
    return bytes(tensor_memory(tensor))


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that ``tensor`` consists of; none if they cannot be determined."""
    tensor = tensor.detach()
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        return [part for name in names for part in inner_tensors(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [flat_in_memory(tensor.indices()), flat_in_memory(tensor.values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [flat_in_memory(one) for one in (tensor.crow_indices(), tensor.col_indices(), tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [flat_in_memory(one) for one in (tensor.ccol_indices(), tensor.row_indices(), tensor.values())]
    if tensor.layout is not torch.strided or tensor.is_nested or not has_ordinary_dispatch(tensor):
        return []
    return [flat_in_memory(tensor.int_repr() if tensor.is_quantized else tensor)]


def tensor_digests(tensors: Sequence[torch.Tensor], copier: Copier) -> list[bytes]:
    """Return a digest of each tensor's elements in order; empty if they cannot be read."""
    references, jobs = [], []
    found: list[list[int]] = []
    for tensor in tensors:
        parts = inner_tensors(tensor)
        references.append(parts)
        sums: list[int] = []
        found.append(sums)
        for part in parts:
            view = tensor_memory(part)
            for start in range(0, max(1, len(view)), _BLOCK_BYTES):
                jobs.append((sums, len(sums), view[start : start + _BLOCK_BYTES]))
                sums.append(0)

    def hash_block(job: tuple[list[int], int, memoryview]) -> None:
        sums, number, view = job
        sums[number] = xxhash.xxh3_64_intdigest(view)

    copier.run_parallel(jobs, hash_block, sum(len(view) for _, _, view in jobs))
    return [struct.pack(f"<{len(sums)}Q", *sums) for sums in found]


def part_of_tensor(tensor: torch.Tensor, box: Box | None) -> torch.Tensor:
    """Return the part of a tensor in ``box``, relative to the tensor; ``None`` is all of it."""
    return tensor if box is None or tensor.layout is not torch.strided else narrow_to_box(tensor, box)


def narrow_to_box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a tensor in ``box``, relative to the tensor."""
    for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if tensor.size(axis) != size:
            tensor = tensor.narrow(axis, offset, size)
    return tensor
