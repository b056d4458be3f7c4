"""What describes a shard and a step, as bytes: ``docs/format.md`` is the contract, this module keeps it.

Everything is msgpack decoded into declared types, compressed, with a magic number in front and a checksum behind.
Nothing is pickled.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
import xxhash
import zstandard

from peerstore.checksum import chunk_count
from peerstore.records import Group, ShardKey, ShardRecord
from tieredckpt.durable.names import parse_shard
from tieredckpt.errors import CheckpointDamagedError, FormatVersionError
from tieredckpt.layout import ItemEntry, Layout, TensorEntry, decode

FORMAT = 1
MAX_DECODED_BYTES = 1 << 31
MAX_CHUNK_BYTES = 64 << 20
"""A chunk is read whole before any of it is used, so whoever claims a large one asks for that much memory."""
_KINDS = {"raw": "safetensors", "zstd": "safetensors.zst"}
OPEN_ENDED = 1 << 20
"""As the number of a step's parts: not known in advance, its table says what makes it whole."""
_MAGIC = b"TCKP"
T = TypeVar("T")


class TableTensor(msgspec.Struct, frozen=True, array_like=True):
    fqn: str
    dtype: str
    shape: tuple[int, ...]


class StateTable(msgspec.Struct, frozen=True, dict=True):
    """The names of the whole state, known to whoever planned the save: what coverage is measured against."""

    tensors: tuple[TableTensor, ...]
    objects: tuple[str, ...]

    @functools.cached_property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self))


class ShardMeta(msgspec.Struct, frozen=True):
    """What the trainer tells the agent about a shard it seals, beside the bytes."""

    layout: str
    """Digest."""
    item_sizes: tuple[int, ...]
    base: int | None = None
    """The step this incarnation was restored from; -1 when it started from nothing; None when it did not say."""
    table: str = ""
    """Digest of the :class:`StateTable`, where one is known."""
    durable: bool = False
    """Whether policy wants this step in the durable tier."""
    saved_ns: int = 0


class ShardIndex(msgspec.Struct, frozen=True):
    """One shard completely described: enough to read it and to rebuild a manifest."""

    key: ShardKey
    parts: int
    size_bytes: int
    chunk_bytes: int
    checksums: bytes
    meta: ShardMeta
    object: str = ""
    """Its name in the durable tier, relative to the job's URL."""
    encoding: Literal["raw", "zstd"] = "raw"
    """How the object's bytes are stored; checksums are always of the raw bytes."""
    frames: tuple[int, ...] = ()
    """For zstd: the stored size of each chunk, in order."""

    def __post_init__(self) -> None:
        if not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunks of {self.chunk_bytes} bytes, at most {MAX_CHUNK_BYTES} are allowed")
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
    """One whole step: every shard's index and every layout and table they name. World-independent."""

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
    def group(self) -> Group:
        return Group(self.epoch, self.step, self.attempt, self.incarnation)

    def layout_of(self, shard: ShardIndex) -> Layout:
        data = self.layouts[shard.meta.layout]
        if xxhash.xxh3_128_hexdigest(data) != shard.meta.layout:
            raise CheckpointDamagedError(f"{shard.key}: its layout is not the one it names")
        return decode(data)


class _ShardFile(msgspec.Struct, frozen=True):
    """What lies beside each shard in the durable tier."""

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
        return msgspec.msgpack.decode(data, type=ShardMeta)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"not a shard's notes: {error}") from error


def encode_table(table: StateTable) -> bytes:
    return msgspec.msgpack.encode(table)


def decode_table(data: bytes) -> StateTable:
    try:
        return msgspec.msgpack.decode(data, type=StateTable)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"not a state table: {error}") from error


def encode_manifest(manifest: Manifest) -> bytes:
    return _seal("manifest", manifest)


def decode_manifest(data: bytes) -> Manifest:
    manifest = _open("manifest", data, Manifest)
    _check_manifest(manifest)
    if not manifest.shards or (len(manifest.shards) < manifest.parts and not manifest.tables):
        raise CheckpointDamagedError(
            f"a manifest of {manifest.job} step {manifest.step} names {len(manifest.shards)} of {manifest.parts} parts"
        )
    return manifest


def encode_shard_file(index: ShardIndex, layout: bytes, table: bytes = b"") -> bytes:
    return _seal("shard", _ShardFile(index, layout, table))


def decode_shard_file(data: bytes) -> tuple[ShardIndex, bytes, bytes]:
    """A shard's index, its layout and the state table (``b""`` when it has none)."""
    file = _open("shard", data, _ShardFile)
    if decode(file.layout).digest != file.index.meta.layout:
        raise CheckpointDamagedError(f"{file.index.key}: its layout is not the one it names")
    return file.index, file.layout, file.table


def build_manifest(
    shards: Sequence[ShardIndex],
    layouts: Mapping[str, bytes],
    tables: Mapping[str, bytes],
    *,
    created_ns: int,
    writer: str,
) -> Manifest:
    """The manifest of one step out of its shards' own indexes."""
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
        if shard.key.group != manifest.group or shard.key.job != manifest.job:
            raise CheckpointDamagedError(f"a manifest of {manifest.job} step {manifest.step} names {shard.key}")
        if shard.parts != manifest.parts:
            raise CheckpointDamagedError(f"a manifest of {manifest.parts} parts names {shard.key} of {shard.parts}")
        if shard.object and parse_shard(shard.object, manifest.job) != (
            shard.key.group,
            shard.key.part,
            _KINDS[shard.encoding],
        ):
            # Also what is deleted with the step: it must not be another's, nor anything outside.
            raise CheckpointDamagedError(f"a manifest names {shard.object!r} as the object of {shard.key}")
        if shard.key.part in seen:
            raise CheckpointDamagedError(f"a manifest names part {shard.key.part} twice")
        if shard.meta.layout not in manifest.layouts:
            raise CheckpointDamagedError(f"a manifest lacks the layout of {shard.key}")
        seen.add(shard.key.part)


def _seal(kind: str, body: object) -> bytes:
    inner = msgspec.msgpack.encode(_Envelope(FORMAT, kind, msgspec.Raw(msgspec.msgpack.encode(body))))
    packed = zstandard.ZstdCompressor(level=3, write_checksum=False).compress(inner)
    return _MAGIC + packed + xxhash.xxh3_64_digest(packed)


def _open(kind: str, data: bytes, into: type[T]) -> T:
    packed = data[len(_MAGIC) : -8]
    if data[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_64_digest(packed) != data[-8:]:
        raise CheckpointDamagedError(f"not a {kind}, or damaged: {len(data)} bytes")
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= MAX_DECODED_BYTES:
            raise ValueError(f"it unpacks to {size} bytes")
        inner = zstandard.ZstdDecompressor().decompress(packed, max_output_size=max(size, 1))
        envelope = msgspec.msgpack.decode(inner, type=_Envelope)
        if envelope.format > FORMAT:
            raise FormatVersionError(
                f"this {kind} has format {envelope.format}, this release reads up to {FORMAT}: upgrade tieredckpt"
            )
        if envelope.kind != kind:
            raise ValueError(f"it is a {envelope.kind}")
        return msgspec.msgpack.decode(envelope.body, type=into)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError, zstandard.ZstdError) as error:
        raise CheckpointDamagedError(f"not a {kind}: {error}") from error


def entries_by_name(
    layouts: Mapping[int, Layout],
) -> tuple[dict[str, list[tuple[int, TensorEntry]]], dict[str, list[tuple[int, int, ItemEntry]]]]:
    """For every name: which parts hold a piece of the tensor, and which parts hold an item (with its number)."""
    tensors: dict[str, list[tuple[int, TensorEntry]]] = {}
    items: dict[str, list[tuple[int, int, ItemEntry]]] = {}
    for part, layout in layouts.items():
        for entry in layout.tensors:
            tensors.setdefault(entry.fqn, []).append((part, entry))
        for number, item in enumerate(layout.items):
            items.setdefault(item.fqn, []).append((part, number, item))
    return tensors, items
