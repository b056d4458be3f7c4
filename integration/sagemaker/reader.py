"""``SageMakerTieredStorageReader``: AWS's name and arguments, over this project's store and what AWS's library left."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from integration.sagemaker.bucket import BucketPlace
from integration.sagemaker.config import SageMakerCheckpointConfig, checked, settings_of
from integration.sagemaker.errors import SageMakerTieredStorageError, renamed
from integration.sagemaker.memory import MemoryPlace
from integration.sagemaker.places import Place
from integration.sagemaker.written import WrittenReader
from peerstore.errors import PeerStoreError
from tieredckpt.errors import CheckpointNotFoundError, TieredCheckpointError, TierUnavailableError
from tieredckpt.location import check_step
from tieredckpt.reader import RestoreReport, TieredReader
from tieredckpt.settings import Settings

log = logging.getLogger(__name__)


class _Own(TieredReader):
    """What this project saved."""

    @property
    def planned_step(self) -> int:
        """What :meth:`read_metadata` described."""
        return self._plain[0] if self._plain is not None else self._order[0].group.version


class SageMakerTieredStorageReader(StorageReader):
    """Loads with ``dcp.load``: the newest whole step (or the one named), whichever library wrote it.

    Steps that AWS's library left below the same S3 base path, and in the memory service at ``memory_url``, are found
    beside this project's own; of one step in both, its own is taken. After a load :attr:`step` says what was loaded.
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
        self.checkpoint_config = checked(checkpoint_config)
        self.step = step
        self._asked = step
        self._cast: Literal["error", "cast"] = on_dtype_mismatch
        self._trust = trust_objects
        with renamed():
            if step is not None:
                check_step(step)
            self._settings = settings_of(checkpoint_config, settings)
        self._own = self._own_reader()
        self._places: list[Place] = []
        self._written: WrittenReader | None = None
        """While what AWS's library wrote is being loaded."""
        self.error: SageMakerTieredStorageError | None = None
        """Why the last load failed on this rank."""

    @property
    def checkpoint_id(self) -> str:
        return self._own.checkpoint_id

    @property
    def report(self) -> RestoreReport | None:
        """What the last load read, and from which tiers, where this project had saved it."""
        return self._own.report if self._written is None else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Step and namespace were given when this was made; ``checkpoint_id`` may be anything."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - any will do
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As for :meth:`tieredckpt.TieredReader.read_metadata`, the second question gets an empty answer."""
        if "rank" in kwargs and self.error is not None:
            return Metadata({})
        self.error = None
        self._close()
        try:
            with renamed():
                return self._choose()
        except SageMakerTieredStorageError as error:
            self.error = error
            self._close()
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        with self._noting():
            self._chosen.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        with self._noting():
            return self._chosen.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks that see different things are not to load different things."""
        with self._noting():
            mine = type(plans[0].storage_data)
            if any(type(plan.storage_data) is not mine for plan in plans):
                raise TierUnavailableError(
                    "some ranks found what AWS's library wrote, and others what this one did: not all tiers are seen "
                    "by all of them"
                )
            return self._chosen.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self._noting():
            done = self._chosen.read_data(plan, planner)
            self.step = self._own.restored_step if self._written is None else self._written.restored_step
        self._close_places()
        return done

    # -- inside -----------------------------------------------------------------------------------------------

    @property
    def _chosen(self) -> StorageReader:
        return self._own if self._written is None else self._written

    def _own_reader(self) -> _Own:
        return _Own(
            self.checkpoint_config.namespace, self._asked, settings=self._settings, on_dtype_mismatch=self._cast
        )

    def _choose(self) -> Metadata:
        """This project's newest step, or what AWS's library wrote where that is newer or all there is."""
        own: Metadata | None = None
        absent: CheckpointNotFoundError | None = None
        try:
            own = self._own.read_metadata()
        except CheckpointNotFoundError as error:
            absent = error
        if own is not None and self._asked is not None:
            return own
        try:
            written = self._find_written()
        except CheckpointNotFoundError as error:
            if own is None:
                raise absent or error from error
            return own
        except (TieredCheckpointError, PeerStoreError) as error:
            if own is None:
                raise
            log.warning("what AWS's library may have written could not be looked at: %s", error)
            return own
        if own is not None and self._own.planned_step >= written.planned_step:
            return own
        self._written = written
        log.info("%s: step %d, which AWS's library wrote", self.checkpoint_config.namespace, written.planned_step)
        return written.read_metadata()

    def _find_written(self) -> WrittenReader:
        self._places = places_of(self.checkpoint_config, self._settings)
        if not self._places:
            raise CheckpointNotFoundError("no place is named where AWS's library could have written")
        reader = WrittenReader(self._places, self._asked, trust_objects=self._trust, on_dtype_mismatch=self._cast)
        reader.choose()
        return reader

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Errors inside the block come out under AWS's names, and are kept."""
        try:
            with renamed():
                yield
        except SageMakerTieredStorageError as error:
            self.error = error
            self._close_places()
            raise

    def _close(self) -> None:
        self._written = None
        self._close_places()

    def _close_places(self) -> None:
        for place in self._places:
            place.close()
        self._places = []


def places_of(config: SageMakerCheckpointConfig, settings: Settings) -> list[Place]:
    """Where AWS's library would have written with this configuration; memory before S3."""
    found: list[Place] = []
    if config.memory_url:
        found.append(
            MemoryPlace(config.memory_url, config.namespace, world_size=config.world_size, token=config.memory_token)
        )
    if config.s3_base_path:
        found.append(BucketPlace.open(config.s3_base_path, config.namespace, settings.durable))
    return found
