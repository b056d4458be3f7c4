"""SageMakerTieredStorageWriter and -Reader: AWS's names and arguments over this project's store."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from integration.sagemaker.checkpoint_config import (
    SageMakerCheckpointConfig,
    settings_for_config,
    step_from_path,
    validated_config,
)
from integration.sagemaker.checkpoint_stores import CheckpointStore, MemoryServiceStore, S3CheckpointStore
from integration.sagemaker.errors import (
    S3TierUnreachableError,
    SageMakerTieredStorageConfigError,
    SageMakerTieredStorageError,
    sagemaker_errors,
    to_sagemaker_error,
)
from integration.sagemaker.format_reader import SageMakerFormatReader
from peerstore.errors import PeerStoreError
from tieredckpt.dcp.restore_report import RestoreReport
from tieredckpt.dcp.tiered_reader import TieredReader
from tieredckpt.dcp.tiered_writer import TieredWriter
from tieredckpt.errors import CheckpointNotFoundError, TieredCheckpointError, TierUnavailableError
from tieredckpt.location import check_step
from tieredckpt.session.session import Session
from tieredckpt.settings import Settings

log = logging.getLogger(__name__)


class SageMakerTieredStorageWriter(TieredWriter):
    """Writer for ``dcp.save`` and ``dcp.async_save``, for one save, as in AWS's library, or for many.

    A save returns when this rank's shard is sealed in memory. With ``save_to_s3`` the node agent uploads the step in
    the background: :attr:`s3_success` states whether it finished, and :meth:`wait_for_s3` waits for it.
    """

    def __init__(
        self,
        checkpoint_config: SageMakerCheckpointConfig,
        path: str | os.PathLike[str] = "",
        step: int = -1,
        *args: Any,
        settings: Settings | None = None,
        **kwargs: Any,
    ) -> None:
        self.checkpoint_config = validated_config(checkpoint_config)
        self.step = step_from_path(step, path)
        with sagemaker_errors():
            super().__init__(
                checkpoint_config.namespace, self.step, settings=settings_for_config(checkpoint_config, settings)
            )
        self.in_memory_success = True
        self.is_coordinator = False
        self._to_s3 = False

    @property
    def rank(self) -> int:
        return self._call.rank

    @property
    def s3_checkpoint_dir(self) -> str | None:
        """URL of the step in the durable tier, which ``elastic reshard`` accepts. Known before the save."""
        base = self.checkpoint_config.s3_base_path
        return f"{base}/{self.checkpoint_config.namespace}/step-{self.step}" if base else None

    @property
    def s3_success(self) -> bool:
        """Whether the step is in the durable tier."""
        if not self._to_s3 or self.record is None:
            return False
        view = self.session.agent.wait_durable(self._location.job, self.record.key.version_id, 0.0)
        return view is not None and view.state == "done"

    def wait_for_s3(self, timeout_s: float = 600.0) -> None:
        """Wait until the step is in the durable tier.

        Raise :class:`S3TierUnreachableError` if that fails or takes longer than ``timeout_s`` seconds.
        """
        if not self._to_s3 or self.record is None:
            raise SageMakerTieredStorageConfigError(f"step {self.step} was not saved with save_to_s3")
        with sagemaker_errors():
            view = self.session.agent.wait_durable(self._location.job, self.record.key.version_id, timeout_s)
        if view is None or view.state != "done":
            reason = "nobody knows of it" if view is None else view.error or view.state
            raise S3TierUnreachableError(f"step {self.step} is not durable: {reason}")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the constructor received step and namespace."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - any will do
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        self.in_memory_success = True
        validated_config(self.checkpoint_config)
        with sagemaker_errors():
            super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def stage(self, state_dict: Any) -> Any:
        with sagemaker_errors():
            return super().stage(state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with self._recorded_failure():
            return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._recorded_failure():
            return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._recorded_failure():
            written = super().write_data(plan, planner)
        if self.error is not None:
            self.error, self.in_memory_success = to_sagemaker_error(self.error), False
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._recorded_failure():
            super().finish(metadata, results)

    # -- inside -----------------------------------------------------------------------------------------------

    def _becomes_durable(self, session: Session) -> bool:
        self._to_s3 = self.checkpoint_config.saves_durably
        return self._to_s3

    @contextmanager
    def _recorded_failure(self) -> Iterator[None]:
        """Record a failure of the block and raise it as AWS's error."""
        try:
            with sagemaker_errors():
                yield
        except BaseException:
            self.in_memory_success = False
            raise


class _TieredReader(TieredReader):
    """Reader of this project's checkpoints."""

    @property
    def planned_step(self) -> int:
        """Return the step that :meth:`read_metadata` described."""
        return self._plain[0] if self._plain is not None else self._order[0].version_id.version


class SageMakerTieredStorageReader(StorageReader):
    """Reader for ``dcp.load``: the newest complete step, or the given one, of either library.

    It includes steps of AWS's library below the same S3 base path and in the memory service at ``memory_url``. If both
    libraries wrote a step, this project's is loaded. After a load :attr:`step` is the loaded step.
    """

    def __init__(
        self,
        checkpoint_config: SageMakerCheckpointConfig,
        step: int | None = None,
        *,
        settings: Settings | None = None,
        on_dtype_mismatch: Literal["error", "cast"] = "cast",
        trust_objects: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint_config = validated_config(checkpoint_config)
        self.step = step
        self._requested_step = step
        self._cast: Literal["error", "cast"] = on_dtype_mismatch
        self._trust = trust_objects
        with sagemaker_errors():
            if step is not None:
                check_step(step)
            self._settings = settings_for_config(checkpoint_config, settings)
        self._own = self._own_reader()
        self._stores: list[CheckpointStore] = []
        self._aws_reader: SageMakerFormatReader | None = None
        """Reader of AWS's format during such a load, otherwise None."""
        self.error: SageMakerTieredStorageError | None = None
        """Error of the last load on this rank."""

    @property
    def checkpoint_id(self) -> str:
        return self._own.checkpoint_id

    @property
    def report(self) -> RestoreReport | None:
        """Bytes and tiers of the last load of a checkpoint of this project; None for AWS's."""
        return self._own.report if self._aws_reader is None else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the constructor received step and namespace."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - any will do
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata. After an error the second call returns empty metadata.

        See :meth:`tieredckpt.TieredReader.read_metadata`.
        """
        if "rank" in kwargs and self.error is not None:
            return Metadata({})
        self.error = None
        self._close()
        try:
            with sagemaker_errors():
                return self._choose()
        except SageMakerTieredStorageError as error:
            self.error = error
            self._close()
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        with self._recorded_error():
            self._chosen.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        with self._recorded_error():
            return self._chosen.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Plan the load.

        Raise :class:`TierUnavailableError` if the ranks chose different libraries' checkpoints.
        """
        with self._recorded_error():
            mine = type(plans[0].storage_data)
            if any(type(plan.storage_data) is not mine for plan in plans):
                raise TierUnavailableError(
                    "some ranks found what AWS's library wrote, and others what this one did: not all tiers are seen "
                    "by all of them"
                )
            return self._chosen.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self._recorded_error():
            done = self._chosen.read_data(plan, planner)
            self.step = self._own.restored_step if self._aws_reader is None else self._aws_reader.restored_step
        self._close_stores()
        return done

    # -- inside -----------------------------------------------------------------------------------------------

    @property
    def _chosen(self) -> StorageReader:
        return self._own if self._aws_reader is None else self._aws_reader

    def _own_reader(self) -> _TieredReader:
        return _TieredReader(
            self.checkpoint_config.namespace,
            self._requested_step,
            settings=self._settings,
            on_dtype_mismatch=self._cast,
        )

    def _choose(self) -> Metadata:
        """Choose this project's newest step, or AWS's if it is newer or the only one."""
        own: Metadata | None = None
        absent: CheckpointNotFoundError | None = None
        try:
            own = self._own.read_metadata()
        except CheckpointNotFoundError as error:
            absent = error
        if own is not None and self._requested_step is not None:
            return own
        try:
            aws_reader = self._find_aws_checkpoint()
        except CheckpointNotFoundError as error:
            if own is None:
                raise absent or error from error
            return own
        except (TieredCheckpointError, PeerStoreError) as error:
            if own is None:
                raise
            log.warning("cannot look for checkpoints of AWS's library: %s", error)
            return own
        if own is not None and self._own.planned_step >= aws_reader.planned_step:
            return own
        self._aws_reader = aws_reader
        log.info("%s: step %d, which AWS's library wrote", self.checkpoint_config.namespace, aws_reader.planned_step)
        return aws_reader.read_metadata()

    def _find_aws_checkpoint(self) -> SageMakerFormatReader:
        self._stores = checkpoint_stores_for(self.checkpoint_config, self._settings)
        if not self._stores:
            raise CheckpointNotFoundError("no place is named where AWS's library could have written")
        reader = SageMakerFormatReader(
            self._stores, self._requested_step, trust_objects=self._trust, on_dtype_mismatch=self._cast
        )
        reader.choose_step()
        return reader

    @contextmanager
    def _recorded_error(self) -> Iterator[None]:
        """Convert errors of the block into AWS's errors and record them."""
        try:
            with sagemaker_errors():
                yield
        except SageMakerTieredStorageError as error:
            self.error = error
            self._close_stores()
            raise

    def _close(self) -> None:
        self._aws_reader = None
        self._close_stores()

    def _close_stores(self) -> None:
        for store in self._stores:
            store.close()
        self._stores = []


def checkpoint_stores_for(config: SageMakerCheckpointConfig, settings: Settings) -> list[CheckpointStore]:
    """Return the stores that AWS's library would use with this configuration; memory before S3."""
    stores: list[CheckpointStore] = []
    if config.memory_url:
        stores.append(
            MemoryServiceStore(
                config.memory_url, config.namespace, world_size=config.world_size, token=config.memory_token
            )
        )
    if config.s3_base_path:
        stores.append(S3CheckpointStore.open(config.s3_base_path, config.namespace, settings.durable))
    return stores
