"""DCP's StorageReader for AWS's format at any world size, and a source for resharding."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as Pending
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import Buffer

from elastic.reshard.offline import CheckpointTensor
from integration.sagemaker.aws_format import BlobRange, CheckpointContents, TensorChunk, read_archived_tensor
from integration.sagemaker.checkpoint_stores import CheckpointStore, CompleteCheckpoints, StoredCheckpoint
from peerstore.shard_records import VersionId
from tieredckpt.dcp.load_vote import LoadDecision, LoadVote, elect
from tieredckpt.dcp.rank_group import PlanMessage, clear_plan_messages, received_plan_messages
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    MismatchError,
    TieredCheckpointError,
    UntrustedObjectError,
    UsageError,
)
from tieredckpt.export.step_source import without_torch_warnings
from tieredckpt.format.slice_boxes import Box, Tiling, relative_box, uncovered
from tieredckpt.restore.read_executor import read_item_box
from tieredckpt.tensors.plain_tensors import dtype_from_name, dtype_name

log = logging.getLogger(__name__)

_READ_THREADS = 8
_READ_AHEAD = 16
"""Items read ahead, in memory in addition to their targets."""


class SageMakerFormatReader(StorageReader):
    """Reader for ``dcp.load`` at any world size: the newest complete step, or the given one, in any store.

    Every rank verifies the bytes it needs of the newest step, and votes for it and older ones. All ranks load the
    newest step that all voted for. Reads use global coordinates, so it may be sharded differently from the planned one.
    """

    def __init__(
        self,
        places: Sequence[CheckpointStore],
        step: int | None = None,
        *,
        trust_objects: bool = False,
        on_dtype_mismatch: Literal["error", "cast"] = "error",
    ) -> None:
        super().__init__()
        self._places = places
        self._step = step
        self._trust = trust_objects
        self._cast = on_dtype_mismatch == "cast"
        self._planned: list[StoredCheckpoint] = []
        """Candidates examined so far. The plan uses the last one."""
        self._rest = CompleteCheckpoints(places, step)
        self._voted = LoadVote(())
        self._decided: LoadDecision | None = None
        """Decision of this rank as the coordinator, for loads without communication between ranks."""
        self.error: TieredCheckpointError | None = None
        """Error of the last load on this rank."""
        self.restored_step: int | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the constructor received the stores."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - any will do
        return True

    @property
    def planned_step(self) -> int:
        """Return the step that this rank plans to load."""
        return self._planned[-1].step

    def choose_step(self) -> int:
        """Return the newest complete step; raise the error of a load if none exists."""
        self._close_blobs()
        self._rest = CompleteCheckpoints(self._places, self._step)
        self._planned = [next(self._rest)]
        for reason in self._planned[0].skipped:
            log.warning("passed over: %s", reason)
        return self.planned_step

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata. After an error the second call returns empty metadata.

        See :meth:`tieredckpt.TieredReader.read_metadata`.
        """
        if "rank" in kwargs and self.error is not None:
            return Metadata({})
        self.error = None
        try:
            if not self._planned or self.restored_step is not None:
                self.choose_step()
        except TieredCheckpointError as error:
            self.error = error
            raise
        return _metadata(self._planned[-1].contents, self._planned[-1].name)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        try:
            self._voted = self._vote(plan)
        except TieredCheckpointError as error:
            self.error = error
            self._close_blobs()
            raise
        self._decided = None
        clear_plan_messages()
        return dataclasses.replace(plan, storage_data=PlanMessage(self._voted, stays=True))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        votes = received_plan_messages(LoadVote) or [self._voted]
        clear_plan_messages()
        where = " and ".join(store.name for store in self._places)
        if len(votes) != len(plans):
            raise UsageError(f"{where}: {len(votes)} of {len(plans)} ranks voted on the step")
        self._decided = LoadDecision(elect(votes, where), len(plans))
        return [dataclasses.replace(plan, storage_data=PlanMessage(self._decided)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        decision = next(iter(received_plan_messages(LoadDecision)), self._decided)
        clear_plan_messages()
        if decision is None:
            raise UsageError(
                "nothing arrived from the coordinator of this load: DCP has to plan and read in one thread"
            )
        step = decision.version_id.version
        try:
            checkpoint = self._candidate(step)
            for item, found in self._load_items(checkpoint, plan.items):
                self._store_item(item, found, planner)
        except TieredCheckpointError as error:
            self.error = error
            raise
        finally:
            self._close_blobs()
        self.restored_step = step
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _vote(self, plan: LoadPlan) -> LoadVote:
        """Return the vote for a step that was read completely, and for older ones, which were not read."""
        refused: list[str] = []
        while True:
            checkpoint = self._planned[-1]
            try:
                for _ in self._load_items(checkpoint, plan.items):
                    pass
                break
            except UntrustedObjectError:
                raise
            except (CheckpointDamagedError, CheckpointNotFoundError) as error:
                refused.append(f"step {checkpoint.step}: {error}")
                log.error("%s cannot be loaded: %s", checkpoint.name, error)
            try:
                self._planned.append(next(self._rest))
            except CheckpointNotFoundError as error:
                raise CheckpointDamagedError("; ".join(refused)) from error
            except CheckpointDamagedError as error:
                raise CheckpointDamagedError("; ".join([*refused, str(error)])) from error
        steps = (step for step in self._rest.steps if step <= checkpoint.step)
        return LoadVote(tuple(VersionId(0, step, 0, "") for step in steps), tuple(refused))

    def _candidate(self, step: int) -> StoredCheckpoint:
        """Return the candidate of that step: an examined one, or an older one that another rank requires."""
        candidate = next((checkpoint for checkpoint in self._planned if checkpoint.step == step), None)
        while candidate is None:
            self._planned.append(next(self._rest))
            if self._planned[-1].step < step:
                raise CheckpointDamagedError(f"other ranks can only load step {step}, which is incomplete for this one")
            candidate = self._planned[-1] if self._planned[-1].step == step else None
        return candidate

    def _load_items(self, checkpoint: StoredCheckpoint, items: Sequence[ReadItem]) -> Any:
        """Yield each item with its verified data, some of them read ahead."""
        source = SageMakerFormatSource(checkpoint, trust_objects=self._trust)
        waiting: list[tuple[ReadItem, Pending[torch.Tensor | bytes]]] = []
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="sagemaker-read") as pool:
            try:
                for item in items:
                    waiting.append((item, pool.submit(_load, source, item)))
                    if len(waiting) >= _READ_AHEAD:
                        done, found = waiting.pop(0)
                        yield done, found.result()
                for done, found in waiting:
                    yield done, found.result()
            finally:
                for _, found in waiting:
                    found.cancel()

    def _store_item(self, item: ReadItem, found: torch.Tensor | bytes, planner: LoadPlanner) -> None:
        if isinstance(found, bytes):
            planner.load_bytes(item, io.BytesIO(found))
            return
        target = planner.resolve_tensor(item).detach()
        name = item.storage_index.fqn
        if target.size() != found.size():
            raise MismatchError(f"{name}: {tuple(found.shape)} was saved, {tuple(target.shape)} is to be filled")
        if target.dtype != found.dtype and not self._cast:
            raise MismatchError(
                f"{name}: {dtype_name(found.dtype)} was saved, {dtype_name(target.dtype)} is to be filled; "
                'on_dtype_mismatch="cast" converts'
            )
        target.copy_(found)
        planner.commit_tensor(item, target)

    def _close_blobs(self) -> None:
        for checkpoint in self._planned:
            checkpoint.close_blobs()


def _load(source: SageMakerFormatSource, item: ReadItem) -> torch.Tensor | bytes:
    name = item.storage_index.fqn
    if item.type is LoadItemType.BYTE_IO:
        if name not in source.checkpoint.contents.objects:
            raise CheckpointDamagedError(f"{source.name} has no object {name}")
        return source.object_bytes(name)
    box = read_item_box(item)
    tensor = source.tensors.get(name)
    if tensor is None or len(tensor.shape) != len(box.sizes):
        raise CheckpointDamagedError(f"{source.name} has no tensor {name} with the dimensions of the target")
    return source.read(name, box)


def _metadata(written: CheckpointContents, name: str) -> Metadata:
    """Return the contents as DCP metadata."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for fqn, tensor in written.tensors.items():
        described[fqn] = TensorStorageMetadata(
            TensorProperties(dtype=dtype_from_name(tensor.dtype), requires_grad=tensor.requires_grad),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(c.box.offsets), torch.Size(c.box.sizes)) for c in tensor.chunks],
        )
    described |= {fqn: BytesStorageMetadata() for fqn in written.objects}
    paths: Any = written.paths
    return Metadata(described, planner_data=paths, storage_data={}, storage_meta=StorageMeta(checkpoint_id=name))


_CACHE_BYTES = 64 << 20
"""Bytes of the cache of recent chunks. It holds at least one chunk."""


class SageMakerFormatSource:
    """Checkpoint as an :class:`elastic.reshard.offline.ReshardSource`. Any thread may read.

    Objects remain bytes, which the program that loads them unpickles. Unless ``trust_objects``, only objects are
    returned that ``torch.load(weights_only=True)`` can read: numbers, strings, tensors and containers of them.
    """

    def __init__(self, checkpoint: StoredCheckpoint, *, trust_objects: bool = False) -> None:
        self.checkpoint = checkpoint
        self.name = checkpoint.name
        self.step: int | None = checkpoint.step
        self.parts = checkpoint.world_size
        written = checkpoint.contents
        self.objects: tuple[str, ...] = tuple(sorted(written.objects))
        self.paths: Mapping[str, tuple[str | int, ...]] | None = written.paths
        self.tensors: Mapping[str, CheckpointTensor] = {
            name: CheckpointTensor(
                tensor.dtype,
                tensor.shape,
                dtype_from_name(tensor.dtype).itemsize,
                tuple((chunk.extent.rank, chunk.box) for chunk in tensor.chunks),
                requires_grad=tensor.requires_grad,
            )
            for name, tensor in sorted(written.tensors.items())
        }
        self._trust = trust_objects
        self._cache: OrderedDict[tuple[str, Box], torch.Tensor] = OrderedDict()
        self._lock = Lock()

    def read(self, name: str, box: Box) -> torch.Tensor:
        tensor = self.checkpoint.contents.tensors[name]
        dtype = dtype_from_name(tensor.dtype)
        if not box.volume:
            return torch.empty(box.sizes, dtype=dtype)
        missing = uncovered(box, (chunk.box for chunk in tensor.chunks))
        if missing:
            raise CheckpointDamagedError(f"{self.name}: nothing holds {missing[0]} of {name}")
        out: torch.Tensor | None = None
        tiling = Tiling(box)
        for chunk in tensor.chunks:
            for common in tiling.add(chunk.box):
                found = _cut(self._chunk(name, chunk, dtype), relative_box(common, chunk.box))
                if common == box:
                    return found.contiguous()
                out = torch.empty(box.sizes, dtype=dtype) if out is None else out
                _cut(out, relative_box(common, box)).copy_(found)
        assert out is not None  # noqa: S101 - the chunks cover the box
        return out

    def object_bytes(self, name: str) -> bytes:
        data = bytes(self._bytes(self.checkpoint.contents.objects[name]))
        if not self._trust:
            _check_object(data, f"{name} of {self.name}")
        return data

    def close(self) -> None:
        self._cache.clear()
        self.checkpoint.close_blobs()

    def _chunk(self, name: str, chunk: TensorChunk, dtype: torch.dtype) -> torch.Tensor:
        key = name, chunk.box
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        where = f"{self.name}: {name} at {chunk.box.offsets}"
        found = read_archived_tensor(memoryview(self._bytes(chunk.extent)), chunk.box.sizes, dtype, where)
        with self._lock:
            while self._cache and sum(tensor.nbytes for tensor in self._cache.values()) + found.nbytes > _CACHE_BYTES:
                self._cache.popitem(last=False)
            self._cache[key] = found
        return found

    def _bytes(self, extent: BlobRange) -> Buffer:
        with self._lock:  # so that a blob of the memory service is fetched only once
            blob = self.checkpoint.blob(extent.rank)
        return blob.read([(extent.start, extent.start + extent.length)])[0]


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(axis, start, size)
    return tensor


def _check_object(data: bytes, name: str) -> None:
    try:
        with without_torch_warnings():
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        lines = str(error).strip().splitlines()
        raise UntrustedObjectError(
            f"{name} is not data alone, so loading it could run anything: {lines[-1] if lines else error}. If you "
            "trust every writer to that place, set trust_objects=True (--trust-objects)"
        ) from error
    except (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(f"{name} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
