"""Checkpoints in AWS's format, made without AWS's library, and an in-memory store for them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from integration.sagemaker.aws_format import BlobRange, CheckpointContents, parse_metadata
from integration.sagemaker.checkpoint_stores import RankBlob
from integration.sagemaker.format_writer import _Pickler
from tieredckpt.errors import CheckpointNotFoundError

Piece = tuple[str, tuple[int, ...], torch.Tensor]
"""A tensor's name, the piece's offsets in the whole tensor, and the piece."""


def torch_archive(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def encode_checkpoint(
    ranks: Sequence[Sequence[Piece]],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> tuple[list[bytes], Metadata]:
    """Return each rank's blob and the metadata; rank 0 writes the objects."""
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, BlobRange] = {}
    blobs = []
    for rank, pieces in enumerate(ranks):
        blob = b""
        for name, offsets, tensor in pieces:
            data = torch_archive(tensor)
            full = (shapes or {}).get(name, tuple(tensor.shape))
            entry = described.setdefault(
                name, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(full), [])
            )
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
            stored[MetadataIndex(name, offsets)] = BlobRange(rank, len(blob), len(data))
            blob += data
        if rank == 0:
            for name, value in (objects or {}).items():
                data = torch_archive(value)
                described[name] = BytesStorageMetadata()
                stored[MetadataIndex(name)] = BlobRange(0, len(blob), len(data))
                blob += data
        blobs.append(blob)
    paths: Any = {name: (name,) for name in described}
    return blobs, Metadata(described, planner_data=paths, storage_data=stored, storage_meta=StorageMeta())


def pickle_metadata(metadata: Metadata) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 4).dump(metadata)
    return out.getvalue()


class FakeBlob:
    def __init__(self, data: bytes) -> None:
        self.size_bytes = len(data)
        self.closed = False
        self._data = data

    def read(self, extents: Sequence[tuple[int, int]]) -> list[Any]:
        return [self._data[start:stop] for start, stop in extents]

    def close(self) -> None:
        self.closed = True


class FakeCheckpointStore:
    """An in-memory checkpoint store; ``trouble`` has errors to raise instead of a step's metadata."""

    def __init__(self, name: str = "here") -> None:
        self.name = name
        self.blobs: dict[tuple[int, int], bytes] = {}
        self.metadata: dict[int, bytes] = {}
        self.trouble: dict[int, Exception] = {}
        self.down: Exception | None = None

    def put(self, step: int, blobs: Sequence[bytes], metadata: Metadata | bytes) -> None:
        for rank, blob in enumerate(blobs):
            self.blobs[step, rank] = blob
        self.metadata[step] = metadata if isinstance(metadata, bytes) else pickle_metadata(metadata)

    def steps(self) -> Sequence[int]:
        if self.down is not None:
            raise self.down
        return sorted({step for step, _ in self.blobs} | self.metadata.keys() | self.trouble.keys(), reverse=True)

    def contents(self, step: int) -> CheckpointContents:
        if step in self.trouble:
            raise self.trouble[step]
        if step not in self.metadata:
            raise CheckpointNotFoundError("its metadata was never written")
        return parse_metadata(self.metadata[step], f"{self.name} step {step}")

    def blob_size(self, step: int, rank: int) -> int:
        return self.open_blob(step, rank).size_bytes

    def open_blob(self, step: int, rank: int) -> RankBlob:
        if (step, rank) not in self.blobs:
            raise CheckpointNotFoundError(f"nothing of rank {rank} in step {step}")
        return FakeBlob(self.blobs[step, rank])

    def close(self) -> None:
        pass
