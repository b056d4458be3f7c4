"""Checkpoints to write: a step in an object store, a plain DCP folder."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
import xxhash
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

from elastic.reshard.checkpoint_urls import CheckpointUrl, DurableUrl, PlainFolder
from elastic.reshard.offline import (
    AdvanceBytes,
    CheckpointTensor,
    ReshardPlan,
    ReshardSource,
    ReshardTarget,
    TensorSlice,
    split_into_windows,
)
from elastic.reshard.sources import PlainSource, TieredSource
from peerstore.checksums import file_checksums
from peerstore.shard_records import CHUNK_BYTES, ShardKey, VersionId, clock_ms, next_epoch
from tieredckpt.agent.agent_api import StepDescription
from tieredckpt.agent.durable_catalog import DurableCatalog, delete_step, manifest_from_shard_files
from tieredckpt.cli.export import source_of
from tieredckpt.cli.tier_client import TierClient, open_tier_client
from tieredckpt.dcp.plain_checkpoints import folder_reader, plain_reader
from tieredckpt.durable.object_store import ObjectStore
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import CheckpointNotFoundError, TieredCheckpointError, UsageError
from tieredckpt.export.atomic_output import atomic_folder, check_export_folder
from tieredckpt.export.step_source import StepSource, tensor_raw_bytes, without_torch_warnings
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import (
    Manifest,
    ShardIndex,
    ShardMeta,
    StateTable,
    TableTensor,
    compressed_shard,
    encode_shard_file,
    encode_table,
)
from tieredckpt.format.shard_layout import OBJECT_ITEM, ItemEntry, Layout, TensorEntry, build_layout, encode_layout
from tieredckpt.location import Location
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import DurableSettings, Settings, override_settings
from tieredckpt.tensors.plain_tensors import dtype_from_name

_WRITER = "elastic reshard"
ShardFile = tuple[ShardIndex, bytes, bytes]


class DurableTarget:
    """A step of a job in an object store; ``force`` replaces an existing checkpoint of that step."""

    def __init__(self, store: ObjectStore, settings: DurableSettings, location: Location, *, force: bool) -> None:
        if location.step is None:
            raise UsageError(f"which step of {location.job} is this? The source does not say: name it, .../step-N")
        step = self.step = location.step
        self._job = location.job
        self._store = store
        self._settings = settings
        self._catalog = DurableCatalog(store, location.job)
        self.name = f"{store.url}/{location.job}/step-{step}"
        listing = self._catalog.listing(fresh=True)
        self._replaced_versions = sorted(group for group in listing.manifests if group.version == step)
        if step in listing.plain.complete:
            raise UsageError(f"{self.name} is a plain DCP checkpoint: choose another job's name")
        if self._replaced_versions and not force:
            raise UsageError(f"{self.name} exists; --force replaces it")
        epoch = next_epoch(max((group.epoch for group in listing.manifests), default=0), clock_ms())
        self._uploaded_names: list[str] = []
        """Names of the objects that were uploaded or are being uploaded."""
        self._version_id = VersionId(epoch, step, 0, f"reshard-{secrets.token_hex(6)}")

    @contextmanager
    def write(self, source: ReshardSource, cut: ReshardPlan, advance: AdvanceBytes) -> Iterator[ReshardSource]:
        """Upload the shards and yield them for verification; write the manifest after a successful block."""
        try:
            files = [self._shard(part, source, cut, advance) for part in range(len(cut.parts))]
            manifest = manifest_from_shard_files(files, created_ns=time.time_ns(), writer=_WRITER)
            found: dict[int, tuple[Tier, ...]] = {shard.key.part: (Tier.DURABLE,) for shard in manifest.shards}
            step = StepSource(StepDescription(manifest, found), None, lambda: self._store)
            with contextlib.closing(TieredSource(self.name, step)) as written:
                yield written
        except BaseException:
            self._discard()
            raise
        self._commit(manifest)

    def _commit(self, manifest: Manifest) -> None:
        self._catalog.commit(manifest, None)
        for group in self._replaced_versions:
            delete_step(self._catalog, self._job, group)

    def _discard(self) -> None:
        with contextlib.suppress(TieredCheckpointError, OSError):  # without a manifest no reader finds these objects
            self._store.delete(self._uploaded_names)

    def _shard(self, part: int, source: ReshardSource, cut: ReshardPlan, advance: AdvanceBytes) -> ShardFile:
        """Write one shard to a temporary file, upload it with its index, and return its description."""
        objects = source.objects if part == cut.objects else ()
        items = [source.object_bytes(name) for name in objects]
        layout = _layout(source, cut.parts[part], objects)
        table = _table(source) if part == cut.objects else None
        key = ShardKey(self._job, self.step, self._version_id.epoch, self._version_id.incarnation, 0, part)
        meta = ShardMeta(
            layout.digest,
            tuple(map(len, items)),
            table=table.digest if table else "",
            durable=True,
            saved_ns=time.time_ns(),
        )
        size = layout.size_bytes(meta.item_sizes)
        with tempfile.NamedTemporaryFile(prefix="elastic-reshard-", suffix=".safetensors") as file:
            file.write(layout.header(meta.item_sizes))
            for entry in layout.tensors:
                for window in split_into_windows(entry.box, entry.shape, entry.itemsize):
                    data = tensor_raw_bytes(source.read(entry.fqn, window))
                    file.write(data)
                    advance(len(data))
            for item in items:
                file.write(item)
            file.flush()
            with ThreadPoolExecutor(2) as pool:
                sums = file_checksums(file.fileno(), size, pool=pool)
            index = ShardIndex(key, len(cut.parts), size, CHUNK_BYTES, sums, meta)
            index = self._send(Path(file.name), index)
        found = index, encode_layout(layout), encode_table(table) if table else b""
        self._uploaded_names.append(object_keys.shard_index_key(key))
        self._store.put(object_keys.shard_index_key(key), encode_shard_file(*found))
        return found

    def _send(self, path: Path, index: ShardIndex) -> ShardIndex:
        with compressed_shard(path, index, wanted=self._settings.compress == "zstd") as (packed, frames):
            name = object_keys.shard_object_key(
                index.key, spread=self._settings.hashed_keys, compressed=frames is not None
            )
            size = index.size_bytes if frames is None else sum(frames)
            self._uploaded_names.append(name)
            self._store.upload(
                name, packed, size, journal=_NoJournal(), identity=xxhash.xxh3_128_hexdigest(index.checksums)
            )
        encoded = "raw" if frames is None else "zstd"
        return msgspec.structs.replace(index, object=name, encoding=encoded, frames=tuple(frames or ()))


class _NoJournal:
    """An upload journal without entries: an interrupted command starts again."""

    def get(self, name: str) -> bytes | None:
        return None

    def put(self, name: str, data: bytes) -> None:
        pass

    def remove(self, name: str) -> None:
        pass


def _layout(source: ReshardSource, pieces: Sequence[TensorSlice], objects: Sequence[str]) -> Layout:
    entries = [_entry(source, piece) for piece in pieces]
    return build_layout(entries, [ItemEntry(name, OBJECT_ITEM) for name in objects], source.paths)


def _entry(source: ReshardSource, piece: TensorSlice) -> TensorEntry:
    form = source.tensors[piece.name]
    return TensorEntry(
        fqn=piece.name,
        dtype=form.dtype,
        shape=form.shape,
        box=piece.box,
        itemsize=form.itemsize,
        sharded=piece.box.sizes != form.shape,
        requires_grad=form.requires_grad,
    )


def _table(source: ReshardSource) -> StateTable:
    tensors = tuple(TableTensor(name, form.dtype, form.shape) for name, form in source.tensors.items())
    return StateTable(tensors, source.objects)


class FolderTarget:
    """A plain DCP folder. It exists only if the block of :meth:`write` ends without an error."""

    def __init__(self, path: Path, step: int | None, *, force: bool) -> None:
        self.name = str(path)
        self.step = step
        self._path = path
        self._force = force

    @contextmanager
    def write(self, source: ReshardSource, cut: ReshardPlan, advance: AdvanceBytes) -> Iterator[ReshardSource]:
        """Write to a temporary folder and yield it for verification, then rename it."""
        with atomic_folder(self._path, force=self._force) as folder:
            with without_torch_warnings():
                _write(folder, source, cut, advance)
            yield PlainSource(self.name, FileSystemReader(folder), self.step)


def _write(folder: Path, source: ReshardSource, cut: ReshardPlan, advance: AdvanceBytes) -> None:
    results = [_part(folder, part, source, cut, advance) for part in range(len(cut.parts))]
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, form in source.tensors.items():
        described[name] = TensorStorageMetadata(_properties(form), torch.Size(form.shape), [])
    for piece in (piece for part in cut.parts for piece in part):
        chunk = ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))
        tensor = described[piece.name]
        assert isinstance(tensor, TensorStorageMetadata)  # noqa: S101 - slices belong to tensors
        tensor.chunks.append(chunk)
    described |= {name: BytesStorageMetadata() for name in source.objects}
    paths: Mapping[str, tuple[str | int, ...]] | None = source.paths
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(Metadata(described, planner_data=None if paths is None else dict(paths)), results)


def _part(folder: Path, part: int, source: ReshardSource, cut: ReshardPlan, advance: AdvanceBytes) -> list[WriteResult]:
    """Write one rank's file with slices and objects in the format of DCP's writer."""
    name = f"__{part}_0.distcp"
    results: list[WriteResult] = []
    objects = source.objects if part == cut.objects else ()
    if not cut.parts[part] and not objects:
        return results
    with (folder / name).open("wb") as file:

        def record_result(index: MetadataIndex, start: int) -> None:
            size = file.tell() - start
            results.append(WriteResult(index, size, _StorageInfo(name, start, size)))

        for piece in cut.parts[part]:
            start, data = file.tell(), source.read(piece.name, piece.box)
            torch.save(data if data.untyped_storage().nbytes() == data.nbytes else data.clone(), file)
            record_result(MetadataIndex(piece.name, torch.Size(piece.box.offsets)), start)
            advance(data.nbytes)
        for fqn in objects:
            start = file.tell()
            file.write(source.object_bytes(fqn))
            record_result(MetadataIndex(fqn), start)
    return results


def _properties(form: CheckpointTensor) -> TensorProperties:
    return TensorProperties(dtype=dtype_from_name(form.dtype), requires_grad=form.requires_grad)


@contextmanager
def open_source(place: CheckpointUrl, settings: Settings) -> Iterator[ReshardSource]:
    """Open the checkpoint at ``place``, or its newest complete step if ``place`` names none."""
    with contextlib.ExitStack() as cleanup:
        if isinstance(place, PlainFolder):
            source: ReshardSource = _folder_source(place.path)
        elif isinstance(place, DurableUrl):
            client = cleanup.enter_context(open_tier_client(_settings_for_url(place.url, settings), memory=False))
            source = _job_source(client, place.location, str(place))
        else:
            client = cleanup.enter_context(open_tier_client(settings))
            source = _job_source(client, place, str(place))
        cleanup.callback(source.close)
        yield source


@contextmanager
def open_target(
    place: DurableUrl | PlainFolder, step: int | None, settings: Settings, *, force: bool
) -> Iterator[ReshardTarget]:
    """Open the target at ``place``. Raise an error if a checkpoint exists there and ``force`` is not set."""
    if isinstance(place, PlainFolder):
        check_export_folder(place.path, force=force)
        yield FolderTarget(place.path, step, force=force)
        return
    durable = _settings_for_url(place.url, settings).durable
    location = place.location if place.location.step is not None else Location(place.job, step)
    with contextlib.closing(open_store(place.url, durable)) as store:
        yield DurableTarget(store, durable, location, force=force)


def _settings_for_url(url: str, settings: Settings) -> Settings:
    """Return the settings for the store of a URL, without the object store's options for a file URL."""
    changes: dict[str, object] = {"url": url}
    if url.startswith("file:"):
        changes["options"] = {}
    return override_settings(settings, durable=changes)


def _folder_source(path: Path) -> ReshardSource:
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no {path}")
    return PlainSource(str(path), folder_reader(path, trust_objects=True))


def _job_source(client: TierClient, location: Location, name: str) -> ReshardSource:
    """Return the source that a load would read: the newest step, tiered or plain."""
    job, survey = location.job, client.survey(location.job)
    plain = client.choose(location, survey).plain
    if plain is not None:
        return PlainSource(name, plain_reader(client.durable_settings(job), job, plain, trust_objects=True), plain)
    return TieredSource(name, source_of(client, job, client.choose_attempt(location, survey).version_id))
