"""``TieredLocalCheckpointManager``: NVRx's local checkpoints as steps of a job in the memory tier."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict, TensorPlaceholder
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    BaseCheckpointManager,
    CheckpointingException,
    CkptID,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import keystr, tree_flatten_with_path

from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveHandle
from tieredckpt.dcp.rank_group import RankGroup
from tieredckpt.dcp.tiered_reader import TieredReader
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    MismatchError,
    TieredCheckpointError,
    UntrustedObjectError,
    UsageError,
)
from tieredckpt.resolve_step import Candidate
from tieredckpt.settings import Settings, load_settings, override_settings
from tieredckpt.tensors.plain_tensors import is_plain_tensor
from tieredckpt.tensors.state_dict import check_safe_value

log = logging.getLogger(__name__)
_REST = "rest"
"""Name of the state without its tensors. The tensors have their numbers as names."""

# Instances of both classes are data, and NVRx's own states consist of them.
torch.serialization.add_safe_globals([BasicTensorAwareStateDict, TensorPlaceholder])


class TieredLocalCheckpointManager(BaseCheckpointManager):
    """NVRx's checkpoint manager that saves to node memory, with verified copies on other nodes.

    All ranks construct it after ``init_process_group``, and call its methods at the same points. It needs no
    ``repl_strategy``, because the node agents send the copies.

    ``job``: name of the job whose steps the local checkpoints are.
    """

    def __init__(self, job: str, *, settings: Settings | None = None) -> None:
        super().__init__(job)
        settings = settings or load_settings()
        if not settings.enabled:
            raise UsageError(f"The local checkpoints of job {job!r} need the memory tier: set enabled to true")
        # The caller may change its tensors in place as soon as a save returns.
        self._settings = override_settings(settings, memory={"every": 1, "on_busy": "wait", "staging": "blocking"})
        self._ranks = RankGroup(None)
        self._checkpointer = Checkpointer(job, settings=self._settings, on_sigterm="ignore")
        self._loadable: list[int] = []
        """Steps that this rank can load, from the last :meth:`find_latest`."""

    @property
    def job(self) -> str:
        """Name of the job whose steps the local checkpoints are."""
        return self._checkpointer.job

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:  # noqa: FBT002 - NVRx's signature
        """Stage ``state_dict`` as step ``iteration``, and wait until all ranks have sealed it.

        ``is_async``: wait in the finalization of the returned request instead, which needs no other process.
        """
        self.latest_iteration = -1
        state_dict.copy_tensors_to_cpu(non_blocking=False)
        saved = self._save(state_dict, self._ckpt_id(iteration))

        def finalize() -> None:
            try:
                self._ranks.call_on_all(saved.wait)
            except TieredCheckpointError as error:
                self._cleanup_failed_save(iteration)
                raise CheckpointingException(f"Local checkpoint {iteration} was not saved: {error}") from error
            self._cleanup(iteration)

        if is_async:
            return AsyncRequest(None, (), [finalize])
        finalize()
        return None

    def find_latest(self) -> int:
        """Return the newest step that all ranks can load, or -1.

        Raise :class:`~tieredckpt.errors.MismatchError` if another number of ranks saved it, and
        :class:`~tieredckpt.errors.TierUnavailableError` if other nodes do not answer and no step remains.
        """
        if self.latest_iteration == -1:
            self._loadable = self._list_loadable()
        return int(super().find_latest())

    def close(self) -> None:
        """Seal the staged saves. The node agent retains them for the next run."""
        self._checkpointer.close()
        self._ranks.close()

    def _list_loadable(self) -> list[int]:
        try:
            versions = self._checkpointer.loadable_versions()
        except (CheckpointNotFoundError, CheckpointDamagedError, CheckpointLostError) as error:
            if not isinstance(error, CheckpointNotFoundError):
                log.error("job %r has no local checkpoint to load: %s", self.job, error)
            self._checkpointer.session.start_over()
            return []
        return self._ranks.call_on_all(lambda: self._check_world_size(versions))

    def _check_world_size(self, versions: Sequence[Candidate]) -> list[int]:
        """Return the steps of ``versions`` up to the first one; raise if other ranks saved that."""
        newest, size = versions[0], self._ranks.size
        step = newest.version_id.version
        if newest.parts != size:
            raise MismatchError(
                f"Step {step} of job {self.job!r} was saved by {newest.parts} ranks, and {size} ranks cannot load it "
                "as a local checkpoint. Use the same number of ranks, or another job name"
            )
        return [one.version_id.version for one in versions if one.parts == size and one.version_id.version <= step]

    def _my_ckpt_ids(self) -> list[CkptID]:
        return [self._ckpt_id(step) for step in self._loadable]

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> SaveHandle:
        iteration, rank, _ = ckpt_id
        tensors = state_dict.pop_tensors()
        try:
            state = self._ranks.call_on_all(lambda: self._flatten(state_dict, tensors, rank))
            return self._checkpointer.save(state, iteration)
        finally:
            state_dict.insert_tensors(tensors)

    def _flatten(self, hollow: TensorAwareStateDict, tensors: Sequence[torch.Tensor], rank: int) -> dict[str, Any]:
        for number, tensor in enumerate(tensors):
            if not is_plain_tensor(tensor):
                raise UsageError(f"Tensor {number} of the state is a {type(tensor).__name__}, which cannot be saved")
        rest = SimpleNamespace(state=hollow)  # DCP would flatten a state that is a dict
        if not self._settings.memory.trust_objects:
            try:
                check_safe_value("the state without its tensors", rest)
            except UntrustedObjectError:
                for path, value in tree_flatten_with_path(vars(hollow))[0]:
                    check_safe_value(keystr(path), value)
                raise
        named = {f"{rank}.{number}": tensor.detach() for number, tensor in enumerate(tensors)}
        return {**named, f"{rank}.{_REST}": rest}

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        iteration, rank, _ = ckpt_id
        try:
            state = self._ranks.call_on_all(lambda: self._empty_state(iteration, rank))
            self._checkpointer.restore(state, iteration)
        except TieredCheckpointError as error:
            self.latest_iteration = -1  # the next search passes over it
            raise CheckpointingException(f"Local checkpoint {iteration} cannot be loaded: {error}") from error
        hollow: TensorAwareStateDict = state.pop(f"{rank}.{_REST}").state
        hollow.insert_tensors([state[f"{rank}.{number}"] for number in range(len(state))])
        return hollow

    def _empty_state(self, step: int, rank: int) -> dict[str, Any]:
        """Return uninitialized tensors for the rank's entries of the step, and ``None`` for its object."""
        entries = TieredReader(self.job, step, settings=self._settings).read_metadata().state_dict_metadata
        state: dict[str, Any] = {}
        for name in entries:
            if name.startswith(f"{rank}."):
                entry = entries[name]  # an entry is built when it is read
                if isinstance(entry, TensorStorageMetadata):
                    state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
                else:
                    state[name] = None
        return state

    def _cleanup(self, iteration: int) -> None:
        """Delete nothing: the node agents evict old steps once newer ones have their copies."""

    def _cleanup_failed_save(self, iteration: int) -> None:
        """Delete nothing: no search lists a step with missing parts, and newer saves evict it."""
