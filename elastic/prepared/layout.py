"""The bytes of one prepared batch, without torch.

::

    0         8              12              20            start = next multiple of 64      end of file
    "TCBATCH1" header length  xxh3 of header  header (msgpack) ...0  tensor ...0 tensor ... tensor
                u32 little     u64 little

The header has the batch's place (fingerprint, index), its structure, and for each tensor element type, shape and start,
counted from ``start``, a multiple of 64. Everything behind ``start`` is covered by the header's checksum. Limits are
checked before anything is allocated or mapped for what a header claims, and nothing in it is code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from elastic.prepared.errors import BatchDamagedError, BatchKindError
from tieredckpt.dtypes import SAFETENSORS_NAMES, WIDTHS

MAGIC = b"TCBATCH1"
ALIGN = 64
PREFIX_BYTES = 20
MAX_HEADER_BYTES = 4 << 20
MAX_TENSORS = 1 << 16
MAX_RANK = 64
MAX_DEPTH = 32
MAX_INDEX = (1 << 62) - 1
DTYPES = frozenset(SAFETENSORS_NAMES) | {"complex64", "complex128"}
"""Types whose bytes are all there is to them."""

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class PlainNode(msgspec.Struct, frozen=True, array_like=True, tag="p", forbid_unknown_fields=True):
    value: bool | int | float | str | None


class BytesNode(msgspec.Struct, frozen=True, array_like=True, tag="b", forbid_unknown_fields=True):
    value: bytes


class TensorNode(msgspec.Struct, frozen=True, array_like=True, tag="t", forbid_unknown_fields=True):
    number: _Size


class ListNode(msgspec.Struct, frozen=True, array_like=True, tag="l", forbid_unknown_fields=True):
    items: tuple[Node, ...]


class TupleNode(msgspec.Struct, frozen=True, array_like=True, tag="u", forbid_unknown_fields=True):
    items: tuple[Node, ...]


class DictNode(msgspec.Struct, frozen=True, array_like=True, tag="d", forbid_unknown_fields=True):
    keys: tuple[str | int, ...]
    items: tuple[Node, ...]


Node: TypeAlias = PlainNode | BytesNode | TensorNode | ListNode | TupleNode | DictNode


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one tensor lies."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_RANK)]
    start: _Size

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: str
    index: _Size
    tree: Node
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    checksum: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    """xxh3-64 of all bytes from ``start`` on."""


class Laid(NamedTuple):
    """A batch ready to be written."""

    head: bytes
    """Prefix, header and zeros up to ``start``."""
    parts: tuple[Part, ...]
    size_bytes: int


class Read(NamedTuple):
    """What a head says, after all of it was compared with the file."""

    header: Header
    start: int


_decoder = msgspec.msgpack.Decoder(Header)


def padding(size_bytes: int) -> int:
    return -size_bytes % ALIGN


def place(shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[tuple[Part, ...], int]:
    """Each tensor's place, and where the last one ends."""
    parts, at, end = [], 0, 0
    for dtype, shape in shapes:
        part = Part(dtype, shape, at)
        end = at + part.size_bytes
        at = end + padding(end)
        parts.append(part)
    return tuple(parts), end


def lay_out(fingerprint: str, index: int, tree: Node, parts: tuple[Part, ...], checksum: bytes) -> Laid:
    """The head of a batch whose tensors have these places and this checksum."""
    if len(parts) > MAX_TENSORS:
        raise BatchKindError(f"batch {index} has {len(parts)} tensors, at most {MAX_TENSORS} are kept")
    try:
        header = msgspec.msgpack.encode(Header(fingerprint, index, tree, parts, checksum))
    except (OverflowError, UnicodeEncodeError) as error:
        raise BatchKindError(f"batch {index} has a value that cannot be kept: {error}") from error
    if len(header) > MAX_HEADER_BYTES:
        raise BatchKindError(
            f"batch {index} has {len(header)} bytes beside its tensors, at most {MAX_HEADER_BYTES} are kept: "
            "put what is large into tensors"
        )
    prefix = MAGIC + len(header).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(header).to_bytes(8, "little")
    start = PREFIX_BYTES + len(header)
    start += padding(start)
    end = parts[-1].start + parts[-1].size_bytes if parts else 0
    return Laid((prefix + header).ljust(start, b"\0"), parts, start + end)


def read_head(data: memoryview) -> Read:
    """The head of a whole file, or :class:`BatchDamagedError`. The tensors' bytes are not looked at."""
    if len(data) < PREFIX_BYTES or data[: len(MAGIC)] != MAGIC:
        raise BatchDamagedError(f"{len(data)} bytes that do not begin as a batch does")
    length = int.from_bytes(data[8:12], "little")
    start = PREFIX_BYTES + length
    start += padding(start)
    if length > MAX_HEADER_BYTES or start > len(data):
        raise BatchDamagedError(f"a header of {length} bytes in a file of {len(data)}")
    encoded = data[PREFIX_BYTES : PREFIX_BYTES + length]
    if xxhash.xxh3_64_intdigest(encoded) != int.from_bytes(data[12:20], "little"):
        raise BatchDamagedError("the header is not what was written")
    if any(data[PREFIX_BYTES + length : start]):
        raise BatchDamagedError("something lies between the header and the tensors")
    try:
        header = _decoder.decode(encoded)
        _check(header, len(data) - start)
    except (ValueError, RecursionError) as error:  # msgspec's own errors, and text that is none
        raise BatchDamagedError(f"the header cannot be understood: {error}") from error
    return Read(header, start)


def _check(header: Header, payload_bytes: int) -> None:
    end = 0
    for part in header.parts:
        if part.dtype not in DTYPES:
            raise BatchDamagedError(f"unknown element type {part.dtype!r}")
        if part.start != end + padding(end):
            raise BatchDamagedError(f"a tensor at {part.start}, where {end + padding(end)} was expected")
        end = part.start + part.size_bytes
        if end > payload_bytes:
            raise BatchDamagedError(f"a tensor that ends at {end} of {payload_bytes} bytes")
    if end != payload_bytes:
        raise BatchDamagedError(f"{payload_bytes} bytes of tensors, {end} were expected")
    named = sorted(node.number for node in _nodes(header.tree) if isinstance(node, TensorNode))
    if named != list(range(len(header.parts))):
        raise BatchDamagedError("the structure does not have each tensor once")


def _nodes(root: Node) -> Iterator[Node]:
    level: list[Node] = [root]
    for _ in range(MAX_DEPTH + 1):
        yield from level
        inner: list[Node] = []
        for node in level:
            if isinstance(node, DictNode) and not len(node.keys) == len(set(node.keys)) == len(node.items):
                raise BatchDamagedError("a dict with keys that are not its own")
            if isinstance(node, (ListNode, TupleNode, DictNode)):
                inner += node.items
        if not inner:
            return
        level = inner
    raise BatchDamagedError(f"nested deeper than {MAX_DEPTH}")


def checked(data: memoryview, read: Read) -> None:
    """Compare all tensors' bytes with the checksum."""
    if xxhash.xxh3_64_digest(data[read.start :]) != read.header.checksum:
        raise BatchDamagedError("the tensors' bytes are not what was written")


def fold(tree: Node, tensors: list[Any]) -> Any:
    """The batch, out of its structure and its tensors."""
    if isinstance(tree, (PlainNode, BytesNode)):
        return tree.value
    if isinstance(tree, TensorNode):
        return tensors[tree.number]
    items = [fold(item, tensors) for item in tree.items]
    if isinstance(tree, DictNode):
        return dict(zip(tree.keys, items, strict=True))
    return tuple(items) if isinstance(tree, TupleNode) else items
