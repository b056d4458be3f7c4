"""The manifest of a step and the index of a shard as bytes, coverage of a state, compressed chunks.

Files are compressed msgpack between a magic number and a checksum, decoded into declared types. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import xxhash
import zstandard

from peerstore.checksums import chunk_count
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import ShardKey, ShardRecord, VersionId
from peerstore.store.arena import FileMapping
from tieredckpt.errors import CheckpointDamagedError, FormatVersionError
from tieredckpt.format.object_keys import parse_shard_object_key
from tieredckpt.format.shard_layout import Layout, LayoutColumns, decode_layout
from tieredckpt.format.slice_boxes import Box, full_box, uncovered

FORMAT_VERSION = 1
MAX_DECODED_BYTES = 1 << 33
_MIN_UNPACKED_BYTES, _MAX_RATIO = 1 << 20, 256
"""Bytes, and multiples of the packed size, to which a blob may unpack.

No writer exceeds the sum; a damaged or forged blob could otherwise exhaust memory.
"""
MAX_STORED_CHUNK_BYTES = 64 << 20
"""Largest chunk that is accepted. A chunk is read as a whole, so this bounds the memory of a read."""
_KINDS = {"raw": "safetensors", "zstd": "safetensors.zst"}
UNKNOWN_PART_COUNT = 1 << 20
"""Value of ``parts`` if the number is not known in advance.

The state table then defines a complete step.
"""
_MAGIC = b"TCKP"
_LEVEL = 3
T = TypeVar("T")


class TableTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False
    part: int = -1
    """The only part that has data of it; -1 if several have, or if unknown."""


class StateTable(msgspec.Struct, frozen=True, dict=True, omit_defaults=True):
    """Names of the whole state, from the planner of the save. Coverage is checked against them."""

    tensors: tuple[TableTensor, ...]
    objects: tuple[str, ...]
    object_parts: tuple[int, ...] = ()
    """The only part that has each object, or -1."""
    described: bool = False
    """Whether types and paths are those of the saved state, so that no layout is needed for them."""
    paths: dict[str, tuple[str | int, ...]] | None = None
    """Paths that differ from the name split at its dots, as in a layout."""
    split: bool = False

    @functools.cached_property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self))

    @functools.cached_property
    def single_parts(self) -> dict[str, int]:
        """The only part that has each name, for names with a known one."""
        parts = dict(zip(self.objects, self.object_parts, strict=False))
        parts.update((tensor.fqn, tensor.part) for tensor in self.tensors)
        return {name: part for name, part in parts.items() if part >= 0}


class ShardMeta(msgspec.Struct, frozen=True):
    """Metadata that the trainer sends to the agent with the seal of a shard."""

    layout: str
    """Digest of the layout."""
    item_sizes: tuple[int, ...]
    base: int | None = None
    """Step that this incarnation was restored from; -1 if it started without one; ``None`` if unknown."""
    table: str = ""
    """Digest of the :class:`StateTable`; "" if unknown."""
    durable: bool = False
    """Whether the policy requests this step in the durable tier."""
    saved_ns: int = 0
    required: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether the caller requested this step in the durable tier explicitly.

    It is never skipped for newer steps.
    """


class ShardIndex(msgspec.Struct, frozen=True):
    """Complete description of one shard: enough to read it and to rebuild a manifest."""

    key: ShardKey
    parts: int
    size_bytes: int
    chunk_bytes: int
    checksums: bytes
    meta: ShardMeta
    object: str = ""
    """Name of its object in the durable tier, relative to durable.url."""
    encoding: Literal["raw", "zstd"] = "raw"
    """Encoding of the object's bytes. Checksums are always of the raw bytes."""
    frames: tuple[int, ...] = ()
    """Stored size of each chunk in order, with zstd."""

    def __post_init__(self) -> None:
        if not 0 < self.chunk_bytes <= MAX_STORED_CHUNK_BYTES:
            raise ValueError(f"chunks of {self.chunk_bytes} bytes, at most {MAX_STORED_CHUNK_BYTES} are allowed")
        count = chunk_count(self.size_bytes, self.chunk_bytes)
        if self.size_bytes < 0 or len(self.checksums) != 8 * count:
            raise ValueError(f"{len(self.checksums) // 8} checksums for {self.size_bytes} bytes")
        if self.encoding == "zstd" and (len(self.frames) != count or min(self.frames, default=1) <= 0):
            raise ValueError(
                f"{len(self.frames)} frames for {count} chunks, the smallest {min(self.frames, default=0)}"
            )
        if not 0 <= self.key.part < self.parts:
            raise ValueError(f"part {self.key.part} of {self.parts}")

    @property
    def record(self) -> ShardRecord:
        return ShardRecord(
            self.key,
            self.parts,
            self.size_bytes,
            self.chunk_bytes,
            self.checksums,
            encode_meta(self.meta),
            self.meta.saved_ns,
        )


class Manifest(msgspec.Struct, frozen=True):
    """One complete step: the index of every shard, and the layouts and tables they name.

    Independent of the world.
    """

    job: str
    step: int
    epoch: int
    incarnation: str
    attempt: int
    parts: int
    created_ns: int
    shards: tuple[ShardIndex, ...]
    layouts: Mapping[str, bytes]
    tables: Mapping[str, bytes] = {}
    writer: str = ""

    @property
    def group(self) -> VersionId:
        return VersionId(self.epoch, self.step, self.attempt, self.incarnation)

    def layout_of(self, shard: ShardIndex) -> Layout:
        return decode_layout(checked_layout(shard.meta.layout, self.layouts[shard.meta.layout]))


class _ShardFile(msgspec.Struct, frozen=True):
    """Content of a shard's index object in the durable tier."""

    index: ShardIndex
    layout: bytes
    table: bytes = b""


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    kind: str
    body: msgspec.Raw


def encode_meta(meta: ShardMeta) -> bytes:
    return msgspec.msgpack.encode(meta)


def decode_meta(data: bytes) -> ShardMeta:
    try:
        return from_msgpack(data, ShardMeta)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"not a shard's notes: {error}") from error


def encode_table(table: StateTable) -> bytes:
    return msgspec.msgpack.encode(table)


def decode_table(data: bytes) -> StateTable:
    try:
        return from_msgpack(data, StateTable)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"not a state table: {error}") from error


def pack_blob(data: bytes) -> bytes:
    """Return a layout or table, compressed for storage and messages. Its repetitive names compress well."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)


def unpack_blob(packed: bytes) -> bytes:
    """Return the unpacked layout or table, or raise :class:`CheckpointDamagedError`."""
    try:
        return _decompressed(packed)
    except (ValueError, MemoryError, zstandard.ZstdError) as error:
        raise CheckpointDamagedError(f"not a layout or table: {error}") from error


def _decompressed(packed: bytes) -> bytes:
    size = zstandard.frame_content_size(packed)
    most = min(MAX_DECODED_BYTES, _MIN_UNPACKED_BYTES + _MAX_RATIO * len(packed))
    if not 0 <= size <= most:
        raise ValueError(f"{len(packed)} bytes that unpack to {size}, at most {most} are believed")
    return zstandard.ZstdDecompressor().decompress(packed, max_output_size=max(size, 1))


def checked_layout(digest: str, data: bytes) -> bytes:
    """Return ``data`` if it has this digest; else raise :class:`CheckpointDamagedError`."""
    if xxhash.xxh3_128_hexdigest(data) != digest:
        raise CheckpointDamagedError(f"a layout is not the one it is called, {digest}")
    return data


def encode_manifest(manifest: Manifest) -> bytes:
    return _encode_envelope("manifest", manifest)


def decode_manifest(data: bytes) -> Manifest:
    manifest = _decode_envelope("manifest", data, Manifest)
    _check_manifest(manifest)
    if not manifest.shards or (len(manifest.shards) < manifest.parts and not manifest.tables):
        raise CheckpointDamagedError(
            f"a manifest of {manifest.job} step {manifest.step} names {len(manifest.shards)} of {manifest.parts} parts"
        )
    return manifest


def encode_shard_file(index: ShardIndex, layout: bytes, table: bytes = b"") -> bytes:
    return _encode_envelope("shard", _ShardFile(index, layout, table))


def decode_shard_file(data: bytes) -> tuple[ShardIndex, bytes, bytes]:
    """Return a shard's index, its layout and its state table (``b""`` if it has none)."""
    file = _decode_envelope("shard", data, _ShardFile)
    LayoutColumns(checked_layout(file.index.meta.layout, file.layout))
    return file.index, file.layout, file.table


def build_manifest(
    shards: Sequence[ShardIndex],
    layouts: Mapping[str, bytes],
    tables: Mapping[str, bytes],
    *,
    created_ns: int,
    writer: str,
) -> Manifest:
    """Return the manifest of one step, built from the indexes of its shards."""
    shards = sorted(shards, key=lambda shard: shard.key.part)
    first = shards[0]
    key = first.key
    manifest = Manifest(
        job=key.job,
        step=key.version,
        epoch=key.epoch,
        incarnation=key.incarnation,
        attempt=key.attempt,
        parts=first.parts,
        created_ns=created_ns,
        shards=tuple(shards),
        layouts={shard.meta.layout: layouts[shard.meta.layout] for shard in shards},
        tables={s.meta.table: tables[s.meta.table] for s in shards if s.meta.table and s.meta.table in tables},
        writer=writer,
    )
    _check_manifest(manifest)
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    seen = set()
    for shard in manifest.shards:
        if shard.key.version_id != manifest.group or shard.key.job != manifest.job:
            raise CheckpointDamagedError(f"a manifest of {manifest.job} step {manifest.step} names {shard.key}")
        if shard.parts != manifest.parts:
            raise CheckpointDamagedError(f"a manifest of {manifest.parts} parts names {shard.key} of {shard.parts}")
        if shard.object and parse_shard_object_key(shard.object, manifest.job) != (
            shard.key.version_id,
            shard.key.part,
            _KINDS[shard.encoding],
        ):
            # Deleting the step also deletes this object, so it must belong to this shard.
            raise CheckpointDamagedError(f"a manifest names {shard.object!r} as the object of {shard.key}")
        if shard.key.part in seen:
            raise CheckpointDamagedError(f"a manifest names part {shard.key.part} twice")
        if shard.meta.layout not in manifest.layouts:
            raise CheckpointDamagedError(f"a manifest lacks the layout of {shard.key}")
        seen.add(shard.key.part)


def _encode_envelope(kind: str, body: object) -> bytes:
    inner = msgspec.msgpack.encode(_Envelope(FORMAT_VERSION, kind, msgspec.Raw(msgspec.msgpack.encode(body))))
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(inner)
    return _MAGIC + packed + xxhash.xxh3_64_digest(packed)


def _decode_envelope(kind: str, data: bytes, into: type[T]) -> T:
    packed = data[len(_MAGIC) : -8]
    if data[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_64_digest(packed) != data[-8:]:
        raise CheckpointDamagedError(f"not a {kind}, or damaged: {len(data)} bytes")
    try:
        envelope = from_msgpack(_decompressed(packed), _Envelope)
        if envelope.format > FORMAT_VERSION:
            raise FormatVersionError(
                f"this {kind} has format {envelope.format}, this release reads up to {FORMAT_VERSION}: upgrade "
                "tieredckpt to a newer release"
            )
        if envelope.kind != kind:
            raise ValueError(f"it is a {envelope.kind}")
        return from_msgpack(envelope.body, into)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError, zstandard.ZstdError) as error:
        raise CheckpointDamagedError(f"not a {kind}: {error}") from error


def missing_entries(table: StateTable, layouts: Iterable[Layout]) -> list[str]:
    """Return the names that ``layouts`` do not cover completely; empty if they cover the whole state."""
    boxes: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
    """Boxes by name and global shape. A piece with another shape covers nothing."""
    objects = set()
    for layout in layouts:
        for entry in layout.tensors:
            boxes.setdefault((entry.fqn, entry.shape), []).append(entry.box)
        for item in layout.items:
            if item.tensor is not None:
                boxes.setdefault((item.fqn, item.tensor.shape), []).append(item.tensor.box)
            else:
                objects.add(item.fqn)
    incomplete = [
        t.fqn
        for t in table.tensors
        if (t.fqn, t.shape) not in boxes or not _covers_shape(t.shape, boxes[t.fqn, t.shape])
    ]
    return incomplete + [name for name in table.objects if name not in objects]


def _covers_shape(shape: tuple[int, ...], found: list[Box]) -> bool:
    try:
        return not uncovered(full_box(shape), found)
    except CheckpointDamagedError:  # pieces that no save would write cover nothing
        return False


_SAMPLES = 16
_MAX_COMPRESSED_SHARE = 0.95
_SHARD_COMPRESSION_LEVEL = 1


@contextlib.contextmanager
def compressed_shard(source: Path, index: ShardIndex, *, wanted: bool) -> Iterator[tuple[Path, list[int] | None]]:
    """Yield the file to upload and, if it is compressed, the stored size of each chunk."""
    if not wanted or not index.size_bytes or not _is_compressible(source, index):
        yield source, None
        return
    with tempfile.NamedTemporaryFile(prefix="tieredckpt-", suffix=".zst") as spool:
        packer = zstandard.ZstdCompressor(level=_SHARD_COMPRESSION_LEVEL)
        frames = []
        with source.open("rb") as file, FileMapping(file.fileno(), index.size_bytes) as mapping, mapping.view as view:
            for start in range(0, index.size_bytes, index.chunk_bytes):
                with view[start : start + index.chunk_bytes] as chunk:
                    frame = packer.compress(chunk)
                spool.write(frame)
                frames.append(len(frame))
        spool.flush()
        yield Path(spool.name), frames


def decompress_chunk(frame: bytes | memoryview, size_bytes: int) -> bytes:
    """Return one chunk; raise ``zstandard.ZstdError`` unless ``frame`` holds exactly ``size_bytes``."""
    if zstandard.frame_content_size(frame) != size_bytes:
        raise zstandard.ZstdError(f"a frame of {zstandard.frame_content_size(frame)} bytes, expected {size_bytes}")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size_bytes)


def _is_compressible(source: Path, index: ShardIndex) -> bool:
    """Return whether a sample of the chunks compresses enough to be worth the time."""
    count = -(-index.size_bytes // index.chunk_bytes)
    packer = zstandard.ZstdCompressor(level=_SHARD_COMPRESSION_LEVEL)
    before = after = 0
    with source.open("rb") as file, FileMapping(file.fileno(), index.size_bytes) as mapping, mapping.view as view:
        for chunk in range(0, count, max(1, count // _SAMPLES)):
            with view[chunk * index.chunk_bytes : (chunk + 1) * index.chunk_bytes] as sample:
                before += len(sample)
                after += len(packer.compress(sample))
    return after < before * _MAX_COMPRESSED_SHARE
