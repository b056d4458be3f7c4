"""Equality of states, bit for bit: NaNs, signed zeros and padding included."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    return (
        bytes(flat[start : start + tensor.nbytes].tolist())
        if tensor.nbytes < 4096
        else flat[start : start + tensor.nbytes].numpy().tobytes()
    )


def assert_same_bits(a: Any, b: Any, where: str = "state") -> None:
    """Fail with the path of the first difference."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), where
        assert (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout), where
        assert tensor_bytes(a) == tensor_bytes(b), f"{where} differs"
    elif isinstance(a, Mapping):
        assert isinstance(b, Mapping), where
        assert list(a) == list(b), f"{where}: keys {list(a)} and {list(b)}"
        for key in a:
            assert_same_bits(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert type(a) is type(b), where
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{where}[{index}]")
    else:
        assert type(a) is type(b), f"{where}: {a!r} and {b!r}"
        assert pickle.dumps(a) == pickle.dumps(b) or a == b, f"{where}: {a!r} and {b!r}"


def zeros_like_state(value: Any) -> Any:
    """Return a state of the same structure with zeroed tensors and no other values."""
    if isinstance(value, DTensor):
        return torch.zeros_like(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value * 0
        blank = torch.empty_like(value)
        blank.untyped_storage().fill_(0)
        return blank
    if isinstance(value, Mapping):
        return {key: zeros_like_state(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [zeros_like_state(inner) for inner in value]
    return None
