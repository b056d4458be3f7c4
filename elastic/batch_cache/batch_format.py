"""Batches as bytes: the file format, its encoder and its decoder.

::

    0         8              12              20            start = next multiple of 64      end of file
    "TCBATCH1" header length  xxh3 of header  header (msgpack) ...0  tensor ...0 tensor ... tensor
                u32 little     u64 little

The header has the batch's identity (fingerprint, index), its structure, and the element type, shape and start of each
tensor. Starts count from ``start`` and are multiples of 64. The header's checksum covers everything after ``start``.
Limits are checked before memory is allocated or mapped for a header's values, and the header contains no code.

Only functions for batches with tensors import torch.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from elastic.errors import BatchDamagedError, UnsupportedBatchError
from tieredckpt.format.shard_layout import DTYPE_WIDTHS, SAFETENSORS_DTYPES

if TYPE_CHECKING:
    import torch

BATCH_MAGIC = b"TCBATCH1"
TENSOR_ALIGN = 64
BATCH_PREFIX_BYTES = 20
MAX_BATCH_HEADER_BYTES = 4 << 20
MAX_TENSORS = 1 << 16
MAX_TENSOR_DIMS = 64
MAX_BATCH_DEPTH = 32
MAX_BATCH_INDEX = (1 << 62) - 1
BATCH_DTYPES = frozenset(SAFETENSORS_DTYPES) | {"complex64", "complex128"}
"""Types that are fully described by their bytes."""

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class PlainNode(msgspec.Struct, frozen=True, array_like=True, tag="p", forbid_unknown_fields=True):
    value: bool | int | float | str | None


class BytesNode(msgspec.Struct, frozen=True, array_like=True, tag="b", forbid_unknown_fields=True):
    value: bytes


class TensorNode(msgspec.Struct, frozen=True, array_like=True, tag="t", forbid_unknown_fields=True):
    number: _Size


class ListNode(msgspec.Struct, frozen=True, array_like=True, tag="l", forbid_unknown_fields=True):
    items: tuple[BatchNode, ...]


class TupleNode(msgspec.Struct, frozen=True, array_like=True, tag="u", forbid_unknown_fields=True):
    items: tuple[BatchNode, ...]


class DictNode(msgspec.Struct, frozen=True, array_like=True, tag="d", forbid_unknown_fields=True):
    keys: tuple[str | int, ...]
    items: tuple[BatchNode, ...]


BatchNode: TypeAlias = PlainNode | BytesNode | TensorNode | ListNode | TupleNode | DictNode


class BatchTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Element type, shape and position of one tensor."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_TENSOR_DIMS)]
    start: _Size

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_WIDTHS[self.dtype]


class BatchHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: str
    index: _Size
    tree: BatchNode
    tensors: Annotated[tuple[BatchTensor, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    checksum: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    """xxh3-64 of all bytes after ``start``."""


class BatchLayout(NamedTuple):
    """A batch ready to write."""

    head: bytes
    """Prefix, header and zeros up to ``start``."""
    parts: tuple[BatchTensor, ...]
    size_bytes: int


class BatchHead(NamedTuple):
    """Header of a file, validated against its size."""

    header: BatchHeader
    start: int


_decoder = msgspec.msgpack.Decoder(BatchHeader)


def padding(size_bytes: int) -> int:
    return -size_bytes % TENSOR_ALIGN


def place_tensors(shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[tuple[BatchTensor, ...], int]:
    """Return the position of each tensor, and the end of the last one."""
    parts, at, end = [], 0, 0
    for dtype, shape in shapes:
        part = BatchTensor(dtype, shape, at)
        end = at + part.size_bytes
        at = end + padding(end)
        parts.append(part)
    return tuple(parts), end


def lay_out_batch(
    fingerprint: str, index: int, tree: BatchNode, parts: tuple[BatchTensor, ...], checksum: bytes
) -> BatchLayout:
    """Return the layout of a batch with these tensors and this checksum."""
    if len(parts) > MAX_TENSORS:
        raise UnsupportedBatchError(f"batch {index} has {len(parts)} tensors, at most {MAX_TENSORS} are kept")
    try:
        header = msgspec.msgpack.encode(BatchHeader(fingerprint, index, tree, parts, checksum))
    except (OverflowError, UnicodeEncodeError) as error:
        raise UnsupportedBatchError(f"batch {index} has a value that cannot be kept: {error}") from error
    if len(header) > MAX_BATCH_HEADER_BYTES:
        raise UnsupportedBatchError(
            f"batch {index} has {len(header)} bytes outside its tensors, and the limit is {MAX_BATCH_HEADER_BYTES}: "
            "put large values into tensors"
        )
    prefix = BATCH_MAGIC + len(header).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(header).to_bytes(8, "little")
    start = BATCH_PREFIX_BYTES + len(header)
    start += padding(start)
    end = parts[-1].start + parts[-1].size_bytes if parts else 0
    return BatchLayout((prefix + header).ljust(start, b"\0"), parts, start + end)


def read_head(data: memoryview) -> BatchHead:
    """Return the validated header of a whole file, without checking the tensors' bytes.

    Raises :class:`BatchDamagedError` for an invalid one.
    """
    if len(data) < BATCH_PREFIX_BYTES or data[: len(BATCH_MAGIC)] != BATCH_MAGIC:
        raise BatchDamagedError(f"{len(data)} bytes that do not begin as a batch does")
    length = int.from_bytes(data[8:12], "little")
    start = BATCH_PREFIX_BYTES + length
    start += padding(start)
    if length > MAX_BATCH_HEADER_BYTES or start > len(data):
        raise BatchDamagedError(f"a header of {length} bytes in a file of {len(data)}")
    encoded = data[BATCH_PREFIX_BYTES : BATCH_PREFIX_BYTES + length]
    if xxhash.xxh3_64_intdigest(encoded) != int.from_bytes(data[12:20], "little"):
        raise BatchDamagedError("the header is not what was written")
    if any(data[BATCH_PREFIX_BYTES + length : start]):
        raise BatchDamagedError("something lies between the header and the tensors")
    try:
        header = _decoder.decode(encoded)
        _check(header, len(data) - start)
    except (ValueError, RecursionError) as error:  # msgspec's errors, and invalid text
        raise BatchDamagedError(f"the header cannot be understood: {error}") from error
    return BatchHead(header, start)


def _check(header: BatchHeader, payload_bytes: int) -> None:
    end = 0
    for part in header.tensors:
        if part.dtype not in BATCH_DTYPES:
            raise BatchDamagedError(f"unknown element type {part.dtype!r}")
        if part.start != end + padding(end):
            raise BatchDamagedError(f"a tensor at {part.start}, where {end + padding(end)} was expected")
        end = part.start + part.size_bytes
        if end > payload_bytes:
            raise BatchDamagedError(f"a tensor that ends at {end} of {payload_bytes} bytes")
    if end != payload_bytes:
        raise BatchDamagedError(f"{payload_bytes} bytes of tensors, {end} were expected")
    named = sorted(node.number for node in _nodes(header.tree) if isinstance(node, TensorNode))
    if named != list(range(len(header.tensors))):
        raise BatchDamagedError("the structure does not have each tensor once")


def _nodes(root: BatchNode) -> Iterator[BatchNode]:
    level: list[BatchNode] = [root]
    for _ in range(MAX_BATCH_DEPTH + 1):
        yield from level
        inner: list[BatchNode] = []
        for node in level:
            if isinstance(node, DictNode) and not len(node.keys) == len(set(node.keys)) == len(node.items):
                raise BatchDamagedError("a dict with keys that are not its own")
            if isinstance(node, (ListNode, TupleNode, DictNode)):
                inner += node.items
        if not inner:
            return
        level = inner
    raise BatchDamagedError(f"nested deeper than {MAX_BATCH_DEPTH}")


def verify_batch_bytes(data: memoryview, read: BatchHead) -> None:
    """Raise :class:`BatchDamagedError` if the tensors' bytes do not match the checksum."""
    if xxhash.xxh3_64_digest(data[read.start :]) != read.header.checksum:
        raise BatchDamagedError("the tensors' bytes are not what was written")


def rebuild_batch(tree: BatchNode, tensors: list[Any]) -> Any:
    """Return the batch with this structure and these tensors."""
    if isinstance(tree, (PlainNode, BytesNode)):
        return tree.value
    if isinstance(tree, TensorNode):
        return tensors[tree.number]
    items = [rebuild_batch(item, tensors) for item in tree.items]
    if isinstance(tree, DictNode):
        return dict(zip(tree.keys, items, strict=True))
    return tuple(items) if isinstance(tree, TupleNode) else items


_PLAIN = (type(None), bool, int, float, str)


class EncodedBatch(NamedTuple):
    """A batch ready to write, with its bytes."""

    layout: BatchLayout
    views: list[memoryview]
    """Bytes of each tensor."""
    tensors: list[torch.Tensor]
    """Tensors that own the memory of the views."""

    def to_bytes(self) -> bytearray:
        whole = bytearray(self.layout.size_bytes)
        whole[: len(self.layout.head)] = self.layout.head
        for part, view in zip(self.layout.parts, self.views, strict=True):
            start = len(self.layout.head) + part.start
            whole[start : start + len(view)] = view
        return whole


def encode_batch(fingerprint: str, index: int, batch: Any) -> EncodedBatch:
    """Return ``batch`` with its layout.

    Raises :class:`UnsupportedBatchError` that names an unsupported part.
    """
    tensors: list[torch.Tensor] = []
    tree = _build_tree(batch, f"batch {index}", 0, tensors)
    views = [_bytes_of(tensor) for tensor in tensors]
    parts, _ = place_tensors([(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors])
    return EncodedBatch(lay_out_batch(fingerprint, index, tree, parts, _checksum(views)), views, tensors)


def decode_batch(data: bytearray | mmap.mmap, fingerprint: str, index: int, *, verify: bool) -> Any:
    """Return the batch whose tensors share the memory of ``data``, or raise :class:`BatchDamagedError`."""
    with memoryview(data) as view:
        read = read_head(view)
        header = read.header
        if (header.fingerprint, header.index) != (fingerprint, index):
            raise BatchDamagedError(f"this is batch {header.index} of {header.fingerprint}")
        if verify:
            verify_batch_bytes(view, read)
    return rebuild_batch(header.tree, [_tensor(data, read.start, part) for part in header.tensors])


def _build_tree(value: Any, where: str, depth: int, tensors: list[torch.Tensor]) -> BatchNode:
    kind = type(value)
    if kind in _PLAIN:
        return PlainNode(value)
    if kind is bytes:
        return BytesNode(value)
    if depth >= MAX_BATCH_DEPTH:
        raise UnsupportedBatchError(f"{where} is nested deeper than {MAX_BATCH_DEPTH}")
    if kind is list or kind is tuple:
        items = tuple(_build_tree(item, f"{where}[{at}]", depth + 1, tensors) for at, item in enumerate(value))
        return ListNode(items) if kind is list else TupleNode(items)
    if kind is dict:
        for key in value:
            if type(key) not in (str, int):
                raise UnsupportedBatchError(f"{where} has the key {key!r}; keys are text or whole numbers")
        items = tuple(_build_tree(item, f"{where}[{key!r}]", depth + 1, tensors) for key, item in value.items())
        return DictNode(tuple(value), items)
    tensors.append(_plain_tensor(value, where))
    return TensorNode(len(tensors) - 1)


def _plain_tensor(value: Any, where: str) -> torch.Tensor:
    if "torch" not in sys.modules or not _is_tensor(value):  # without torch there are no tensors
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsupportedBatchError(
            f"{where} is a {kind}, which cannot be kept: tensors, numbers, text, bytes and None can, in lists, tuples "
            "and dicts of exactly these types. Convert it in prepare (torch.from_numpy, dict(...))"
        )
    from tieredckpt.tensors.plain_tensors import dtype_name, is_plain_tensor

    tensor: torch.Tensor = value.detach()
    if not is_plain_tensor(tensor) or tensor.device.type != "cpu" or dtype_name(tensor.dtype) not in BATCH_DTYPES:
        raise UnsupportedBatchError(
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


def _tensor(data: bytearray | mmap.mmap, start: int, part: BatchTensor) -> torch.Tensor:
    import torch

    from tieredckpt.tensors.plain_tensors import dtype_from_name

    dtype = dtype_from_name(part.dtype)
    if not part.size_bytes:
        return torch.empty(part.shape, dtype=dtype)
    count = part.size_bytes // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + part.start).view(part.shape)
