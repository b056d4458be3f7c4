"""``SageMakerTieredStorageWriter``: AWS's name and arguments, over this project's store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from integration.sagemaker.config import SageMakerCheckpointConfig, checked, settings_of, step_of
from integration.sagemaker.errors import (
    S3TierUnreachableError,
    SageMakerTieredStorageConfigError,
    named,
    renamed,
)
from tieredckpt.session import Session
from tieredckpt.settings import Settings
from tieredckpt.writer import TieredWriter


class SageMakerTieredStorageWriter(TieredWriter):
    """Saves with ``dcp.save`` and ``dcp.async_save``; one for each save, as AWS's is used, or one for many.

    A save returns when this rank's shard is sealed in memory. With ``save_to_s3`` the node agent takes the step to S3
    behind its back: :attr:`s3_success` says whether it got there, and :meth:`wait_for_s3` waits for it.
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
        self.checkpoint_config = checked(checkpoint_config)
        self.step = step_of(step, path)
        with renamed():
            super().__init__(checkpoint_config.namespace, self.step, settings=settings_of(checkpoint_config, settings))
        self.in_memory_success = True
        self.is_coordinator = False
        self._to_s3 = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def s3_checkpoint_dir(self) -> str | None:
        """Where the step is in the durable tier; ``elastic reshard`` takes it as it is. Known before the save."""
        base = self.checkpoint_config.s3_base_path
        return f"{base}/{self.checkpoint_config.namespace}/step-{self.step}" if base else None

    @property
    def s3_success(self) -> bool:
        """Whether the step is in the durable tier by now."""
        if not self._to_s3 or self.record is None:
            return False
        view = self.session.node.wait_durable(self._location.job, self.record.key.group, 0.0)
        return view is not None and view.state == "done"

    def wait_for_s3(self, timeout_s: float = 600.0) -> None:
        """Until the step is in the durable tier; an error when it is not within ``timeout_s``, or never will be."""
        if not self._to_s3 or self.record is None:
            raise SageMakerTieredStorageConfigError(f"step {self.step} was not saved with save_to_s3")
        with renamed():
            view = self.session.node.wait_durable(self._location.job, self.record.key.group, timeout_s)
        if view is None or view.state != "done":
            said = "nobody knows of it" if view is None else view.error or view.state
            raise S3TierUnreachableError(f"step {self.step} is not durable: {said}")

    # -- StorageWriter ----------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Step and namespace were given when this was made; ``checkpoint_id`` may be anything."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - any will do
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator
        self.in_memory_success = True
        checked(self.checkpoint_config)
        with renamed():
            super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def stage(self, state_dict: Any) -> Any:
        with renamed():
            return super().stage(state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with self._noted():
            return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._noted():
            return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._noted():
            written = super().write_data(plan, planner)
        if self.error is not None:
            self.error, self.in_memory_success = named(self.error), False
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._noted():
            super().finish(metadata, results)

    # -- inside -----------------------------------------------------------------------------------------------

    def _becomes_durable(self, session: Session) -> bool:
        self._to_s3 = self.checkpoint_config.saves_durably
        return self._to_s3

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """A failure inside the block is noted, and raised by AWS's name for it."""
        try:
            with renamed():
                yield
        except BaseException:
            self.in_memory_success = False
            raise
