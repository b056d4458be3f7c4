"""A namespace below a base path in S3 (or any durable URL), in both layouts of AWS's library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import Buffer

from integration.sagemaker.layouts import METADATA, SHARD, DefaultS3PathStrategy, RayS3PathStrategy
from integration.sagemaker.metadata import MOST_METADATA_BYTES, Written, read_metadata
from peerstore.names import job_name
from tieredckpt.durable.open import open_store
from tieredckpt.durable.store import ObjectInfo, ObjectNotFoundError, ObjectStore
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError
from tieredckpt.settings import DurableSettings


class _Step(NamedTuple):
    shards: dict[int, ObjectInfo]
    metadata: list[ObjectInfo]


class BucketPlace:
    """What one namespace has in an object store. Listed once, when first asked."""

    def __init__(self, store: ObjectStore, namespace: str) -> None:
        self.name = f"{store.url}/{namespace}"
        self._store = store
        self._below = f"{job_name(namespace)}/"
        self._steps: dict[int, list[_Step]] | None = None
        """By step: one for each layout that has anything of it."""
        self._chosen: dict[int, tuple[_Step, Written]] = {}

    @classmethod
    def open(cls, base_path: str, namespace: str, settings: DurableSettings) -> BucketPlace:
        return cls(open_store(base_path.rstrip("/"), settings), namespace)

    def steps(self) -> Sequence[int]:
        return sorted(self._listed(), reverse=True)

    def written(self, step: int) -> Written:
        """Of the layout that has metadata; of the newest metadata, wherever a coordinator has put it."""
        if step not in self._chosen:
            found = [(info, one) for one in self._listed().get(step, []) for info in one.metadata]
            if not found:
                raise CheckpointNotFoundError("its metadata was never written")
            info, one = max(found, key=lambda each: each[0].modified_s)
            if info.size_bytes > MOST_METADATA_BYTES:
                raise CheckpointDamagedError(f"{info.name} has {info.size_bytes} bytes, which no metadata has")
            self._chosen[step] = one, read_metadata(self._store.get(info.name), f"{self._store.url}/{info.name}")
        return self._chosen[step][1]

    def size(self, step: int, rank: int) -> int:
        return self._shard(step, rank).size_bytes

    def blob(self, step: int, rank: int) -> BucketBlob:
        return BucketBlob(self._store, self._shard(step, rank))

    def close(self) -> None:
        self._store.close()

    def _shard(self, step: int, rank: int) -> ObjectInfo:
        self.written(step)
        info = self._chosen[step][0].shards.get(rank)
        if info is None:
            raise CheckpointNotFoundError(f"{self.name} has nothing of rank {rank} in step {step}")
        return info

    def _listed(self) -> dict[int, list[_Step]]:
        if self._steps is None:
            self._steps = {}
            infos = list(self._store.list(self._below))
            for layout in (DefaultS3PathStrategy(""), RayS3PathStrategy("")):
                found: dict[int, _Step] = {}
                for info in infos:
                    named = layout.parse(info.name.removeprefix(self._below))
                    if named is None:
                        continue
                    step = found.setdefault(named.step, _Step({}, []))
                    if named.file == SHARD:
                        step.shards[named.rank] = info
                    elif named.file == METADATA:
                        step.metadata.append(info)
                for number, step in found.items():
                    self._steps.setdefault(number, []).append(step)
        return self._steps


class BucketBlob:
    """An object, of which only what is asked for is fetched."""

    def __init__(self, store: ObjectStore, info: ObjectInfo) -> None:
        self.size_bytes = info.size_bytes
        self._store = store
        self._name = info.name

    def read(self, extents: Sequence[tuple[int, int]]) -> list[Buffer]:
        try:
            return self._store.get_ranges(self._name, extents)
        except ObjectNotFoundError as error:
            raise CheckpointDamagedError(f"{self._store.url}/{self._name} is gone") from error

    def close(self) -> None:
        pass
