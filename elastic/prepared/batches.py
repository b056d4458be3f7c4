"""Batches as bytes and back: tensors are written from where they are, and read where they lie.

torch is needed for batches with tensors in them, and imported for nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from elastic.prepared.errors import BatchDamagedError, BatchKindError
from elastic.prepared.layout import (
    DTYPES,
    MAX_DEPTH,
    BytesNode,
    DictNode,
    Laid,
    ListNode,
    Node,
    Part,
    PlainNode,
    TensorNode,
    TupleNode,
    checked,
    fold,
    lay_out,
    padding,
    place,
    read_head,
)

if TYPE_CHECKING:
    import torch

_PLAIN = (type(None), bool, int, float, str)


class Encoded(NamedTuple):
    """A batch ready to be written, and what holds its bytes."""

    laid: Laid
    views: list[memoryview]
    """Of each tensor."""
    tensors: list[torch.Tensor]
    """Kept alive as long as the views."""

    def to_bytes(self) -> bytearray:
        whole = bytearray(self.laid.size_bytes)
        whole[: len(self.laid.head)] = self.laid.head
        for part, view in zip(self.laid.parts, self.views, strict=True):
            start = len(self.laid.head) + part.start
            whole[start : start + len(view)] = view
        return whole


def encode(fingerprint: str, index: int, batch: Any) -> Encoded:
    """``batch`` laid out, or :class:`BatchKindError` that says what in it cannot be kept."""
    tensors: list[torch.Tensor] = []
    tree = _unfold(batch, f"batch {index}", 0, tensors)
    views = [_bytes_of(tensor) for tensor in tensors]
    parts, _ = place([(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors])
    return Encoded(lay_out(fingerprint, index, tree, parts, _checksum(views)), views, tensors)


def decode(data: bytearray | mmap.mmap, fingerprint: str, index: int, *, verify: bool) -> Any:
    """The batch whose tensors are the bytes of ``data``, or :class:`BatchDamagedError`."""
    with memoryview(data) as view:
        read = read_head(view)
        header = read.header
        if (header.fingerprint, header.index) != (fingerprint, index):
            raise BatchDamagedError(f"this is batch {header.index} of {header.fingerprint}")
        if verify:
            checked(view, read)
    return fold(header.tree, [_tensor(data, read.start, part) for part in header.parts])


def _unfold(value: Any, where: str, depth: int, tensors: list[torch.Tensor]) -> Node:
    kind = type(value)
    if kind in _PLAIN:
        return PlainNode(value)
    if kind is bytes:
        return BytesNode(value)
    if depth >= MAX_DEPTH:
        raise BatchKindError(f"{where} is nested deeper than {MAX_DEPTH}")
    if kind is list or kind is tuple:
        items = tuple(_unfold(item, f"{where}[{at}]", depth + 1, tensors) for at, item in enumerate(value))
        return ListNode(items) if kind is list else TupleNode(items)
    if kind is dict:
        for key in value:
            if type(key) not in (str, int):
                raise BatchKindError(f"{where} has the key {key!r}; keys are text or whole numbers")
        items = tuple(_unfold(item, f"{where}[{key!r}]", depth + 1, tensors) for key, item in value.items())
        return DictNode(tuple(value), items)
    tensors.append(_plain_tensor(value, where))
    return TensorNode(len(tensors) - 1)


def _plain_tensor(value: Any, where: str) -> torch.Tensor:
    if "torch" not in sys.modules or not _is_tensor(value):  # where nobody has imported it, there are no tensors
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise BatchKindError(
            f"{where} is a {kind}, which cannot be kept: tensors, numbers, text, bytes and None can, in lists, tuples "
            "and dicts of exactly these types. Convert it in prepare (torch.from_numpy, dict(...))"
        )
    from tieredckpt.tensors import dtype_name, is_plain

    tensor: torch.Tensor = value.detach()
    if not is_plain(tensor) or tensor.device.type != "cpu" or dtype_name(tensor.dtype) not in DTYPES:
        raise BatchKindError(
            f"{where} is a tensor that cannot be kept ({tensor.dtype}, {tensor.layout}, on {tensor.device}): "
            "prepare dense tensors on the CPU"
        )
    return tensor.resolve_conj().resolve_neg().contiguous()


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _checksum(views: list[memoryview]) -> bytes:
    state, last = xxhash.xxh3_64(), 0
    for view in views:
        state.update(bytes(padding(last)))
        state.update(view)
        last = len(view)
    return state.digest()


def _tensor(data: bytearray | mmap.mmap, start: int, part: Part) -> torch.Tensor:
    import torch

    from tieredckpt.tensors import dtype_named

    dtype = dtype_named(part.dtype)
    if not part.size_bytes:
        return torch.empty(part.shape, dtype=dtype)
    count = part.size_bytes // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + part.start).view(part.shape)
