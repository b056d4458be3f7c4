"""A plain DCP folder, written part by part; it is there when its ``.metadata`` is, and that comes last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from elastic.reshard.cutting import Cut
from elastic.reshard.forms import Advance, Form, Source
from elastic.reshard.plain import PlainSource
from tieredckpt.export.output import whole_folder
from tieredckpt.export.source import quiet
from tieredckpt.tensors import dtype_named


class FolderTarget:
    """Appears under its name when the block of :meth:`written` ends well, and nothing stays when it does not."""

    def __init__(self, path: Path, step: int | None, *, force: bool) -> None:
        self.name = str(path)
        self.step = step
        self._path = path
        self._force = force

    @contextmanager
    def written(self, source: Source, cut: Cut, advance: Advance) -> Iterator[Source]:
        """What was written, to be looked at before it counts."""
        with whole_folder(self._path, force=self._force) as folder:
            with quiet():
                _write(folder, source, cut, advance)
            yield PlainSource(self.name, FileSystemReader(folder), self.step)


def _write(folder: Path, source: Source, cut: Cut, advance: Advance) -> None:
    results = [_part(folder, part, source, cut, advance) for part in range(len(cut.parts))]
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, form in source.tensors.items():
        described[name] = TensorStorageMetadata(_properties(form), torch.Size(form.shape), [])
    for piece in (piece for part in cut.parts for piece in part):
        chunk = ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))
        tensor = described[piece.name]
        assert isinstance(tensor, TensorStorageMetadata)  # noqa: S101 - a slice is of a tensor
        tensor.chunks.append(chunk)
    described |= {name: BytesStorageMetadata() for name in source.objects}
    paths: Mapping[str, tuple[str | int, ...]] | None = source.paths
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(Metadata(described, planner_data=None if paths is None else dict(paths)), results)


def _part(folder: Path, part: int, source: Source, cut: Cut, advance: Advance) -> list[WriteResult]:
    """One rank's file: each slice and object as DCP's own writer stores it."""
    name = f"__{part}_0.distcp"
    results: list[WriteResult] = []
    objects = source.objects if part == cut.objects else ()
    if not cut.parts[part] and not objects:
        return results
    with (folder / name).open("wb") as file:

        def noted(index: MetadataIndex, start: int) -> None:
            size = file.tell() - start
            results.append(WriteResult(index, size, _StorageInfo(name, start, size)))

        for piece in cut.parts[part]:
            start, data = file.tell(), source.read(piece.name, piece.box)
            torch.save(data if data.untyped_storage().nbytes() == data.nbytes else data.clone(), file)
            noted(MetadataIndex(piece.name, torch.Size(piece.box.offsets)), start)
            advance(data.nbytes)
        for fqn in objects:
            start = file.tell()
            file.write(source.object_bytes(fqn))
            noted(MetadataIndex(fqn), start)
    return results


def _properties(form: Form) -> TensorProperties:
    return TensorProperties(dtype=dtype_named(form.dtype), requires_grad=form.requires_grad)
