"""SlotStager: DCP's AsyncStager over the node's memory tier.

The first asynchronous save of a state has no plan of this rank's writes, because planning runs later in the background.
So it copies everything into private memory. Later saves copy the tensors of the last plan into a leased slot. The
staged state dict consists of views of the slot, and ``write_data`` finds every byte in place.
"""

from __future__ import annotations

import abc
import copy
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
from torch.distributed.tensor import DTensor

from tieredckpt.errors import (
    StoreBusyError,
)
from tieredckpt.format.shard_layout import TensorEntry
from tieredckpt.gc_pause import gc_paused
from tieredckpt.session.incarnation import CapturePoint, IncarnationHandover
from tieredckpt.session.save_plan import (
    PlannedSave,
    PlannedWrites,
)
from tieredckpt.session.session import Session
from tieredckpt.session.slot_pool import StagedShard
from tieredckpt.settings import Settings
from tieredckpt.tensors.plain_tensors import is_plain_tensor
from tieredckpt.tensors.slot_copy import SlotWrite
from tieredckpt.tensors.state_dict import (
    flatten_state,
    local_tensor,
    private_copy,
    require_materialized,
    state_fingerprint,
    tensor_shards,
)


class SlotStager:
    """Staging of :class:`~tieredckpt.dcp.tiered_writer.TieredWriter`: copies a state into a slot."""

    settings: Settings
    _starts_over = False
    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._staged: StagedShard | None = None
        self._point: CapturePoint | None = None
        """The job's incarnation at the capture of the staged state."""
        self._handed_over: IncarnationHandover | None = None
        """Incarnation state of the trainer, in a process that saves for it."""
        self._in_use = threading.Semaphore(1)
        self._is_staging = False

    @property
    @abc.abstractmethod
    def session(self) -> Session: ...

    @property
    def should_synchronize_after_execute(self) -> bool:
        """``stage`` returns after the copy, so no later synchronization is needed."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Do nothing: ``stage`` has waited for the copy."""

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """Wait for this writer's last save and return a copy of ``state_dict``."""
        wait_s = self.settings.memory.wait_s
        if not self._in_use.acquire(timeout=wait_s):
            raise StoreBusyError(f"the last asynchronous save of this writer did not end within {wait_s:.0f} s")
        self._is_staging = True
        try:
            if not self.settings.enabled:
                return _private_state(state_dict)
            self.capture_point()
            with gc_paused():
                flat = flatten_state(state_dict)
                planned = self.session.plans.find(state_fingerprint(flat))
                if planned is None or any(tensor_shards(one) for one in flat.values() if isinstance(one, torch.Tensor)):
                    return _private_state(state_dict)
                self._staged = self.session.slots.lease_before_step(planned, wait_s=wait_s)
                if self._staged is None:
                    return _private_state(state_dict)
                return self._stage_into(self._staged, planned, state_dict, flat)
        except BaseException:
            self._discard_staged()
            raise

    def capture_point(self) -> None:
        """Record that this writer or another stager has just staged the state of the next save."""
        if self.settings.enabled:
            self._abandon_earlier_steps()
            self._point = self.session.incarnation.capture()

    def _abandon_earlier_steps(self) -> None:
        if self._starts_over:
            self.session.start_over()

    def close(self) -> None:
        """Release a slot that was staged and never written."""
        self._discard_staged()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a background process that writes; it takes over the slot without a copy."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("_in_use", "_staged")}
        state["_slot"] = None if self._staged is None else (self._staged.lease, self._staged.layout, self._staged.owner)
        state["_is_staging"] = False
        if self.settings.enabled:
            self.session.loads.report_continued()  # the save process has not loaded the step
            self._abandon_earlier_steps()
            state["_handed_over"] = self.session.incarnation.hand_over()
        self._end_staging()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        slot = state.pop("_slot")
        self.__dict__.update(state)
        self._in_use = threading.Semaphore(1)
        self._staged = None
        if slot is not None:
            self._staged = self.session.slots.adopt(*slot)

    def _stage_into(
        self, staged: StagedShard, planned: PlannedSave, state_dict: STATE_DICT_TYPE, flat: Mapping[str, Any]
    ) -> STATE_DICT_TYPE:
        layout, memory, header = planned.layout, staged.memory, planned.layout.header_bytes
        pieces = [SlotWrite(local_tensor(flat, entry), header + entry.start) for entry in layout.tensors]
        memory.copy_in(pieces, self.session.copier)
        views = {
            entry.fqn: memory.shared_tensor(
                staged.lease.size_bytes, header + entry.start, piece.tensor.dtype, entry.box.sizes
            )
            for entry, piece in zip(layout.tensors, pieces, strict=True)
        }
        return _rebuild(state_dict, "", views)

    def _take_staged(self, work: PlannedWrites, part: int, parts: int) -> StagedShard | None:
        """Return the staged slot with all data of ``work``, or ``None`` if it does not fit."""
        staged = self._staged
        if staged is None or (staged.lease.key.part, staged.lease.parts) != (part, parts):
            return None
        if work.layout([staged.layout]) is not staged.layout:
            return None
        moved = [entry for entry in staged.layout.tensors if not _in_place(staged, entry, work.tensor(entry))]
        header = staged.layout.header_bytes
        for entry in moved:
            staged.memory.copy_in(
                [SlotWrite(work.tensor(entry), header + entry.start)],
                self.session.copier,
            )
        return staged

    def _end_staging(self) -> None:
        self._staged = self._point = None
        if self._is_staging:
            self._is_staging = False
            self._in_use.release()

    def _discard_staged(self) -> None:
        staged = self._staged
        self._end_staging()
        if staged is not None:
            self.session.slots.release(staged)


def _in_place(staged: StagedShard, entry: TensorEntry, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view of the slot; each process maps it at another address."""
    start = staged.layout.header_bytes + entry.start
    if tensor.nbytes == 0:
        return True
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    return (
        storage.is_shared()
        and storage.nbytes() == staged.lease.size_bytes
        and tensor.storage_offset() * tensor.element_size() == start
    )


def _rebuild(value: Any, name: str, views: Mapping[str, torch.Tensor]) -> Any:
    """Return ``value`` with its tensors as views of the slot, or as shapes if another rank writes them."""
    if isinstance(value, torch.Tensor):
        view = views.get(name)
        if type(value) is DTensor:
            local = view if view is not None else torch.empty_like(value._local_tensor, device="meta")
            return _like(value, local)
        return view if view is not None else torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {key: _rebuild(inner, f"{name}.{key}" if name else str(key), views) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rebuild(inner, f"{name}.{index}", views) for index, inner in enumerate(value)]
    return copy.deepcopy(value)


def _private_state(value: Any, name: str = "") -> Any:
    """Return a copy in private memory; a tensor's copy is as large as its elements, even for a view."""
    if type(value) is DTensor:
        return _like(value, _private_state(value._local_tensor, name))
    if isinstance(value, torch.Tensor):
        if is_plain_tensor(value):
            require_materialized(name, value)
        return private_copy(value)
    if isinstance(value, Mapping):
        return {key: _private_state(inner, f"{name}.{key}" if name else str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_private_state(inner, f"{name}.{index}") for index, inner in enumerate(value)]
    return copy.deepcopy(value)


def _like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor of the same distribution over another local tensor, on any device."""
    return DTensor(local, tensor._spec, requires_grad=False)
