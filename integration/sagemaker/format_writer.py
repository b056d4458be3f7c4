"""DCP's StorageWriter in AWS's format, for a return to AWS's library.

Like AWS's writer it waits for S3 and the memory service in turn. It does not use this project's tiers.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import pickle
from typing import Any
from urllib.parse import quote, urlsplit

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from integration.sagemaker.aws_format import BlobRange
from integration.sagemaker.checkpoint_config import (
    METADATA_FILE,
    SHARD_FILE,
    SageMakerCheckpointConfig,
    step_from_path,
    validated_config,
)
from integration.sagemaker.errors import MemorySaveFailedError, SageMakerTieredStorageConfigError, sagemaker_errors
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import TierUnavailableError
from tieredckpt.settings import Settings, load_settings

_STEPS_RETAINED = 3
_TIMEOUT_S = 60.0
_INFO_MODULE = "amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info"
_INFO_NAME = "_SageMakerStorageInfo"


class SageMakerFormatWriter(StorageWriter):
    """Writer for the memory service at ``memory_url``, if set, and with ``save_to_s3`` for S3.

    ``world_size`` must be the number of saving ranks: AWS's reader expects the metadata after the last rank.
    """

    def __init__(
        self,
        checkpoint_config: SageMakerCheckpointConfig,
        path: str | os.PathLike[str] = "",
        step: int = -1,
        *,
        settings: Settings | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_config = validated_config(checkpoint_config)
        self.step = step_from_path(step, path)
        if not checkpoint_config.memory_url and not checkpoint_config.save_to_s3:
            raise SageMakerTieredStorageConfigError("no target to save to: set memory_url or save_to_s3")
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if checkpoint_config.world_size != ranks:
            raise SageMakerTieredStorageConfigError(
                f"world_size is {checkpoint_config.world_size} and {ranks} ranks save: a reader of AWS's format "
                "would confuse the metadata with a rank's data, or not find it"
            )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._settings = settings or load_settings()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the constructor received step and namespace."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - any will do
        return True

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        config = self.checkpoint_config
        if is_coordinator and config.memory_url:
            query = f"?num_ranks={config.world_size + 1}&steps_retained={_STEPS_RETAINED}"
            with sagemaker_errors():
                self._post(
                    f"/v1/cp/namespaces/{quote(config.namespace)}{query}", b"", {}, also=http.HTTPStatus.CONFLICT
                )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        blob = io.BytesIO()
        results = [self._write(item, planner, blob) for item in plan.items]
        self._upload(blob.getvalue(), self.rank, SHARD_FILE, self.rank)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {
            result.index: result.storage_data for rank_results in results for result in rank_results
        }
        metadata.storage_meta = self.storage_meta()
        data = io.BytesIO()
        _Pickler(data, protocol=4).dump(metadata)
        # AWS's reader expects it next to rank 0's shard, even if another rank coordinates.
        self._upload(data.getvalue(), self.checkpoint_config.world_size, METADATA_FILE, 0)

    def _write(self, item: WriteItem, planner: SavePlanner, blob: io.BytesIO) -> WriteResult:
        start, data = blob.tell(), planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)  # noqa: S101 - guaranteed by DCP
            blob.write(data.getbuffer())
        else:
            assert isinstance(data, torch.Tensor)  # noqa: S101 - guaranteed by DCP
            tensor = data.detach().cpu().contiguous()
            view = tensor.untyped_storage().nbytes() != tensor.nbytes
            torch.save(tensor.clone() if view else tensor, blob)
        size = blob.tell() - start
        return WriteResult(item.index, size, BlobRange(self.rank, start, size))

    def _upload(self, data: bytes, memory_rank: int, filename: str, s3_rank: int) -> None:
        config = self.checkpoint_config
        with sagemaker_errors():
            if config.memory_url:
                digest = base64.b64encode(xxhash.xxh3_128_digest(data)).decode()
                meta = json.dumps({"checksum": digest, "algorithm": "xxh3_128"})
                path = f"/v1/cp/checkpoints/{quote(config.namespace)}/{memory_rank}/{self.step}"
                self._post(path, data, {"Shard-Meta": meta})
            strategy = config.get_s3_strategy()
            if config.save_to_s3 and strategy is not None:
                store = open_store(config.s3_base_path, self._settings.durable)
                try:
                    store.put(f"{config.namespace}/{strategy.name(s3_rank, self.step, filename)}", data)
                finally:
                    store.close()

    def _post(self, path: str, data: bytes, headers: dict[str, str], *, also: int = 0) -> None:
        parts = urlsplit(self.checkpoint_config.memory_url)
        if parts.scheme != "http" or not parts.hostname:
            raise SageMakerTieredStorageConfigError("memory_url must be http://HOST:PORT")
        token = self.checkpoint_config.memory_token or parts.password
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", parts.path.rstrip("/") + path, body=data, headers=headers)
            response = connection.getresponse()
            detail = response.read(1000).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise TierUnavailableError(f"the memory service at {parts.hostname} cannot be reached: {error}") from error
        finally:
            connection.close()
        if not http.HTTPStatus.OK <= response.status < http.HTTPStatus.MULTIPLE_CHOICES and response.status != also:
            raise MemorySaveFailedError(f"{path}: {response.status} {response.reason}: {detail}")


class _Pickler(pickle._Pickler):  # the C pickler cannot write custom opcodes
    """Pickler that writes a :class:`BlobRange` as AWS's class, which need not be installed."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:  # noqa: FBT002 - as in pickle
        python: Any = super()
        if type(obj) is not BlobRange:
            python.save(obj, save_persistent_id)
            return
        write: Any = getattr(self, "write")  # noqa: B009 - missing in typeshed
        python.save(_INFO_MODULE)
        python.save(_INFO_NAME)
        write(pickle.STACK_GLOBAL + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        python.save({"rank": obj.rank, "offset": obj.start, "length": obj.length})
        write(pickle.BUILD)
