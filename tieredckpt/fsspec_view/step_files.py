"""View of a stored step as the files of DCP's own writer, and files written into slots.

Reads convert nothing in advance. ``.metadata`` is built on request. A data file consists of heads that ``torch.load``
expects, each followed by a tensor's bytes from its shard. The heads use the format before zip archives: its file sizes
follow from names, types and shapes alone.

A :class:`~tieredckpt.dcp.tiered_writer.TieredWriter` saves written files as a step like any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from peerstore.errors import ArenaBusyError, PeerStoreError, UnavailableError
from peerstore.shard_records import Lease, VersionId
from tieredckpt.agent.agent_api import LAYOUT_BLOB_PREFIX, TABLE_BLOB_PREFIX
from tieredckpt.dcp.plain_checkpoints import plain_steps
from tieredckpt.dcp.rank_group import dcp_call_world_size
from tieredckpt.dcp.tiered_writer import TieredWriter, dcp_storage_meta
from tieredckpt.durable.object_store import ObjectStore
from tieredckpt.durable.plain_objects import DCP_METADATA_NAME, delete_plain_checkpoint
from tieredckpt.errors import (
    CheckpointNotFoundError,
    SaveFailedError,
    StoreBusyError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.export.export_formats import deferred_tensor
from tieredckpt.export.step_source import StepSource, without_torch_warnings
from tieredckpt.format.manifest import ShardMeta, StateTable, encode_meta, encode_table, pack_blob
from tieredckpt.format.shard_layout import OBJECT_ITEM, ItemEntry, Layout, TensorEntry, encode_layout
from tieredckpt.fsspec_view.plain_files import PENDING_SUFFIX, DurableAccess, PlainFiles
from tieredckpt.fsspec_view.segmented_file import READ_BUFFER_BYTES, Segment, SegmentedFile, segment_size
from tieredckpt.location import Location, parse_location
from tieredckpt.restore.step_index import ByteRange, StepIndex
from tieredckpt.session.session import Session, open_session
from tieredckpt.settings import load_complete_settings
from tieredckpt.step_inventory import LoadChoice, StepInventory
from tieredckpt.tensors.plain_tensors import dtype_from_name
from tieredckpt.tensors.safe_objects import load_dcp_metadata

_CACHED_STEPS = 4
_FRESH_S = 5.0
"""Seconds for which a description of a step is reused.

A load opens all files of a step. A new description for each file would take quadratic time.
"""


def save_from_files(writer: TieredWriter, metadata: Metadata, source: StepSource) -> None:
    """Save with ``writer`` the state in the files that ``source`` has as objects.

    ``metadata`` describes the files.
    """
    items = [_write_item(metadata, index) for index in metadata.storage_data]
    planner = _FilesSavePlanner(metadata.storage_data, source)
    writer.set_up_storage_writer(True, rank=0)
    plan = writer.prepare_local_plan(SavePlan(items, planner_data=metadata.planner_data))
    (plan,) = writer.prepare_global_plan([plan])
    results = writer.write_data(plan, planner).wait()
    writer.finish(dataclasses.replace(metadata), [results])


def _write_item(metadata: Metadata, index: MetadataIndex) -> WriteItem:
    entry = metadata.state_dict_metadata[index.fqn]
    if isinstance(entry, BytesStorageMetadata):
        return WriteItem(index, WriteItemType.BYTE_IO)
    chunk = next((one for one in entry.chunks if index.offset in (None, one.offsets)), None)
    if chunk is None:
        raise SaveFailedError(f"{index.fqn}: the metadata has no piece of it at {index.offset}")
    kind = WriteItemType.TENSOR if chunk.sizes == entry.size else WriteItemType.SHARD
    return WriteItem(index, kind, tensor_data=TensorWriteData(chunk, entry.properties, entry.size))


class _FilesSavePlanner(DefaultSavePlanner):
    """Save planner that reads the data from the files, like DCP's reader."""

    def __init__(self, places: Mapping[MetadataIndex, _StorageInfo], source: StepSource) -> None:
        super().__init__()
        self._places = places
        self._source = source

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = self._bytes(self._places[write_item.index])
        if write_item.type is WriteItemType.BYTE_IO:
            return data
        fqn = write_item.index.fqn
        try:
            found = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:
            raise SaveFailedError(
                f"{fqn}, as it was written, cannot be loaded again: {error}. Save with tieredckpt.enable_urls() or a "
                "TieredWriter"
            ) from error
        if not isinstance(found, torch.Tensor):
            raise SaveFailedError(f"{fqn} must be a tensor, but its file has a {type(found).__name__}")
        return found

    def _bytes(self, place: _StorageInfo) -> io.BytesIO:
        step, name = self._source.step, str(place.relative_path)
        part = step.object_part(name, 0)
        start, stop = step.item_range(part, step.objects[name][part])
        span = ByteRange(start + place.offset, start + place.offset + place.length)
        if not start <= span.start <= span.stop <= stop:
            raise SaveFailedError(f"the metadata names bytes of {name} that it does not have")
        data = bytearray(place.length)
        self._source.read_into(memoryview(data), part, span)
        stream = io.BytesIO(data)
        changed_by = getattr(place, "transform_descriptors", None)
        if not changed_by:
            return stream
        transforms = filesystem._StorageReaderTransforms()
        return io.BytesIO(transforms.transform_load_stream(None, changed_by, stream).read())  # type: ignore[arg-type]


class StepAsFiles:
    """Files of one step, and the locations of their bytes."""

    def __init__(self, step: StepIndex, location: Location) -> None:
        self._segments: dict[str, list[Segment]] = {}
        sizes: dict[str, int] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        heads: dict[tuple[str, tuple[int, ...]], bytes] = {}

        def add(index: MetadataIndex, part: int, *segments: Segment) -> None:
            name = f"__{part}_0.distcp"
            size = sum(segment_size(segment) for segment in segments)
            places[index] = _StorageInfo(name, sizes.get(name, 0), size)
            sizes[name] = sizes.get(name, 0) + size
            self._segments.setdefault(name, []).extend(segments)

        for name, found in step.tensors.items():
            for place in {place.entry.box: place for place in found}.values():
                entry, index = place.entry, MetadataIndex(name, torch.Size(place.entry.box.offsets))
                if place.item >= 0:
                    add(index, place.part, (place.part, step.item_range(place.part, place.item)))
                    continue
                kind = entry.dtype, entry.box.sizes
                head = heads.get(kind) or heads.setdefault(kind, _tensor_head(entry))
                base = step.layouts[place.part].header_bytes + entry.start
                add(index, place.part, head, (place.part, ByteRange(base, base + entry.size_bytes)))
        for name in step.objects:
            part = step.object_part(name, 0)
            add(MetadataIndex(name), part, (part, step.item_range(part, step.objects[name][part])))
        entries = {**{name: _tensor_metadata(step.chunks(name)) for name in step.tensors}}
        metadata = Metadata(
            {**entries, **{name: BytesStorageMetadata() for name in step.objects}},
            planner_data=step.paths,
            storage_data=places,
            storage_meta=dcp_storage_meta(location, step.group),
        )
        data = pickle.dumps(metadata)
        self._segments[DCP_METADATA_NAME] = [data]
        self.sizes: Mapping[str, int] = {DCP_METADATA_NAME: len(data), **sizes}
        self.saved_ns = max(shard.meta.saved_ns for shard in step.shards.values())

    def open(self, name: str, source: StepSource, read: Callable[[], None]) -> io.BufferedReader:
        """Open a file with verified reads; see :class:`SegmentedFile`."""
        return io.BufferedReader(SegmentedFile(self._segments[name], source, read), READ_BUFFER_BYTES)


def _tensor_metadata(chunks: list[TensorEntry]) -> TensorStorageMetadata:
    entry = chunks[0]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype_from_name(entry.dtype), requires_grad=entry.requires_grad),
        torch.Size(entry.shape),
        [ChunkStorageMetadata(torch.Size(one.box.offsets), torch.Size(one.box.sizes)) for one in chunks],
    )


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A step's last description by the agent."""

    at: float
    session: Session
    step: StepIndex
    files: StepAsFiles


@dataclasses.dataclass(frozen=True)
class _PlainSeen:
    """The last list of a plain checkpoint's files."""

    at: float
    store: ObjectStore
    files: PlainFiles


class JobStepFiles:
    """Complete steps of one job as files, plain checkpoints in the durable tier included."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._durable = DurableAccess(job)
        self._files_by_version: dict[VersionId, StepAsFiles] = {}
        self._seen: dict[VersionId, _Seen] = {}
        self._plain_seen: _PlainSeen | None = None
        self._loading: dict[int, VersionId | int] = {}
        """Attempt of each step whose metadata a load has opened: it must read the data of the same attempt.
        A plain checkpoint has only a number."""
        self._lock = threading.Lock()

    @property
    def session(self) -> Session:
        return open_session(self.job, load_complete_settings())

    def steps(self) -> list[int]:
        """Return the steps that a load can choose, oldest first. Steps of other branches are skipped."""
        seen = self._survey()
        loadable = self._choose(seen).loadable
        return sorted({*(one.version_id.version for one in loadable), *seen.plain})

    def find(self, step: int) -> StepAsFiles | PlainFiles | None:
        """Return the files of a complete step. ``None``: the step does not exist."""
        try:
            version = self._chosen_version(step)
            return self._plain_files(version) if isinstance(version, int) else self._described(version).files
        except CheckpointNotFoundError:
            return None

    def open(self, step: int, name: str) -> io.BufferedIOBase:
        """Open one file of a step. After a read by ``dcp.load`` the job continues from this step."""
        ranks = dcp_call_world_size()
        version, fresh = self._version(step, name, loading=ranks is not None), name == DCP_METADATA_NAME
        if isinstance(version, int):
            return self._plain_files(version, fresh=fresh).open(name)
        seen = self._described(version, fresh=fresh)
        if name not in seen.files.sizes:
            raise FileNotFoundError(f"tiered://{self.job}/step-{step} has no file {name}")
        session = seen.session

        def read() -> None:
            if ranks is not None and name != DCP_METADATA_NAME:
                session.loads.report_restored(version, ranks)

        return seen.files.open(
            name, StepSource(seen.step, session.agent.store, session.durable.open, session.peers), read
        )

    def remove(self, step: int) -> bool:
        """Delete a step in all tiers and on all nodes, as far as it is listed. False: it does not exist."""
        seen = self._survey()
        groups = [view.version_id for view in seen.views if view.version_id.version == step]
        with translated_store_errors(f"step {step} of {self.job} cannot be deleted"):
            if groups:
                self.session.commits.drop_steps(groups)
            if step in seen.plain:
                delete_plain_checkpoint(self._durable.open(), self.job, step)
        return bool(groups) or step in seen.plain

    def _version(self, step: int, name: str, *, loading: bool) -> VersionId | int:
        with self._lock:
            known = self._loading.get(step)
        if loading and known is not None and name != DCP_METADATA_NAME:
            return known
        version = self._chosen_version(step)
        if loading:
            with self._lock:
                self._loading[step] = version
        return version

    def _survey(self) -> StepInventory:
        """Return the steps that a load sees: only plain checkpoints while the package is disabled."""
        settings = load_complete_settings()
        if not settings.enabled:
            return StepInventory((), plain=plain_steps(settings.durable, self.job))
        with translated_store_errors(f"{self.job} cannot be looked up"):
            return self.session.list_steps(fresh=True)

    def _choose(self, seen: StepInventory, step: int | None = None) -> LoadChoice:
        return seen.choose(step, avoid_after=load_complete_settings().memory.avoid_after_crashed_loads)

    def _chosen_version(self, step: int) -> VersionId | int:
        """Return the attempt at ``step`` that a load would choose; its number for a plain checkpoint."""
        choice = self._choose(self._survey(), step)
        version = choice.version_id if choice.plain is None else choice.plain
        if version is None:
            raise choice.error(Location(parse_location(self.job).job, step))
        return version

    def _plain_files(self, step: int, *, fresh: bool = True) -> PlainFiles:
        """Return a plain checkpoint's files. Unless ``fresh``, the list may be ``_FRESH_S`` seconds old."""
        store = self._durable.open()
        with self._lock:
            seen = self._plain_seen
        is_same = seen is not None and seen.store is store and seen.files.step == step
        if not fresh and seen is not None and is_same and time.monotonic() - seen.at < _FRESH_S:
            return seen.files
        seen = _PlainSeen(time.monotonic(), store, PlainFiles(self._durable.open, self.job, step))
        with self._lock:
            self._plain_seen = seen
        return seen.files

    def _described(self, group: VersionId, *, fresh: bool = True) -> _Seen:
        """Return the description of a step. Unless ``fresh``, it may be up to ``_FRESH_S`` seconds old."""
        session = self.session
        with self._lock:
            files, seen = self._files_by_version.get(group), self._seen.get(group)
        if not fresh and seen is not None and seen.session is session and time.monotonic() - seen.at < _FRESH_S:
            return seen
        with translated_store_errors(f"step {group.version} of {self.job} cannot be read"):
            at, step = time.monotonic(), StepIndex(session.agent.steps.describe(self.job, group))
        files = files or StepAsFiles(step, Location(parse_location(self.job).job, group.version))
        seen = _Seen(at, session, step, files)
        with self._lock:
            self._files_by_version[group], self._seen = files, {group: seen}
            while len(self._files_by_version) > _CACHED_STEPS:
                del self._files_by_version[next(iter(self._files_by_version))]
        return seen


class _Pickler(pickle.Pickler):
    """Pickler that writes a reference instead of the single storage."""

    numel = 0

    def persistent_id(self, value: Any) -> tuple[object, ...] | None:
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        self.numel = value._size()
        return "storage", getattr(torch, value._pickle_storage_type()), "0", "cpu", self.numel, None


def _tensor_head(entry: TensorEntry) -> bytes:
    """Return the bytes that ``torch.save`` writes before the elements of such a tensor."""
    out = io.BytesIO()
    system = {"protocol_version": torch.serialization.PROTOCOL_VERSION, "little_endian": True}
    system["type_sizes"] = {"short": 2, "int": 4, "long": 4}  # type: ignore[assignment]
    for value in (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, system):
        pickle.dump(value, out, protocol=2)
    pickler = _Pickler(out, protocol=2)
    with without_torch_warnings():
        pickler.dump(deferred_tensor(entry.box.sizes, dtype_from_name(entry.dtype)))
    pickle.dump(["0"], out, protocol=2)
    return out.getvalue() + struct.pack("<q", pickler.numel)


_MAX_GROWTH_BYTES = 1 << 30


class SlotFile(io.RawIOBase):
    """File that writes into a leased slot, after the header of its shard."""

    _fd = -1

    def __init__(
        self, closed: Callable[[SlotFile], None], space: str, session: Session, lease: Lease, name: str
    ) -> None:
        super().__init__()
        self.name = name
        self._closed = closed
        self._space = space
        self._session = session
        self._lease = lease
        self._start = one_file_layout(name.removesuffix(PENDING_SUFFIX)).header_bytes
        self._at = self._size = 0
        self._sealed = False
        self._fd = session.agent.store.open_slot(lease.slot)

    @property
    def step(self) -> int:
        return self._lease.key.version

    @property
    def group(self) -> VersionId:
        return self._lease.key.version_id

    @property
    def slot_bytes(self) -> int:
        """Size of the leased slot in bytes."""
        return self._lease.size_bytes

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset}")
        self._at = start + offset
        return self._at

    def write(self, data: object, /) -> int:
        with memoryview(data) as view, view.cast("B") as flat:  # type: ignore[arg-type]
            self._require(self._start + self._at + len(flat))
            done = 0
            with translated_store_errors(f"{self.name} of step {self.step} cannot be written"):
                while done < len(flat):
                    done += os.pwrite(self._fd, flat[done:], self._start + self._at + done)
            self._at += done
            self._size = max(self._size, self._at)
            return done

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._fd >= 0:
            self._closed(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:  # unlike other files, it does not close: an unclosed file is incomplete
        self.detach()

    def seal(self, final: str, table: StateTable | None) -> None:
        store = self._session.agent.store
        layout, sizes = one_file_layout(final), (self._size,)
        total = layout.size_bytes(sizes)
        try:
            with translated_store_errors(f"{final} of step {self.step} was not sealed"):
                self._require(total)
                os.pwrite(self._fd, layout.header(sizes), 0)
                store.blobs.put(self._space, LAYOUT_BLOB_PREFIX + layout.digest, pack_blob(encode_layout(layout)))
                if table is not None:
                    store.blobs.put(self._space, TABLE_BLOB_PREFIX + table.digest, pack_blob(encode_table(table)))
                meta = ShardMeta(
                    layout=layout.digest,
                    item_sizes=sizes,
                    table=table.digest if table else "",
                    saved_ns=time.time_ns(),
                )
                store.seal(self._lease.id, total, encode_meta(meta))
                self._sealed = True
        finally:
            self.detach()

    def discard(self) -> None:
        """Release the slot, unless it is sealed."""
        self.detach()
        if not self._sealed:
            with contextlib.suppress(PeerStoreError):  # the lease would expire anyway
                self._session.agent.store.release(self._lease.id)

    def read_dcp_metadata(self) -> Metadata:
        """Return this file as DCP's metadata. Unless objects are trusted, no code from the file runs."""
        data = io.BytesIO(os.pread(self._fd, self._size, self._start))
        trusted = self._session.settings.memory.trust_objects
        try:
            found = pickle.load(data) if trusted else load_dcp_metadata(data)  # noqa: S301 - only if the user trusts objects
        except Exception as error:
            raise UsageError(f"{DCP_METADATA_NAME} of step {self.step} is not what DCP writes: {error}") from error
        if not isinstance(found, Metadata):
            raise UsageError(
                f"{DCP_METADATA_NAME} of step {self.step} is not what DCP writes, but a {type(found).__name__}"
            )
        return found

    def detach(self) -> None:
        """Close the file descriptor. The lease ends with its connection to the agent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _require(self, size_bytes: int) -> None:
        if size_bytes <= self._lease.size_bytes:
            return
        more = max(min(self._lease.size_bytes, _MAX_GROWTH_BYTES), self._lease.size_bytes // 2)
        wanted = max(size_bytes, self._lease.size_bytes + more)
        with translated_store_errors(f"{self.name} of step {self.step} cannot grow"):
            wait_s = self._session.settings.memory.wait_s
            before, self._lease = self._lease, self._session.agent.store.grow(self._lease.id, wanted, wait_s=wait_s)
            if self._lease.generation != before.generation:  # the agent moved the file to another slot
                fd = self._session.agent.store.open_slot(self._lease.slot)
                self.detach()
                self._fd = fd


def one_file_layout(name: str) -> Layout:
    return Layout((), (ItemEntry(name, OBJECT_ITEM),), None)


@contextlib.contextmanager
def translated_store_errors(what: str) -> Iterator[None]:
    """Translate errors of the store to errors of this package. ``what`` begins their messages."""
    try:
        yield
    except TieredCheckpointError:
        raise
    except ArenaBusyError as error:
        raise StoreBusyError(f"{what}: {error}") from error
    except UnavailableError as error:
        raise TierUnavailableError(f"{what}: {error}") from error
    except (PeerStoreError, OSError) as error:
        raise SaveFailedError(f"{what}: {error}") from error
