"""Recording of a step boundary: references and version counters, with copies of small tensors.

At most boundaries only the values of tensors have changed. Names, addresses and the save plan are computed once and
then only compared. The cost of each boundary:

- Parameters and moments are not copied. Their version counters are read. Fused optimizers and DTensor operations on
  lists do not increment counters, but they run in an optimizer's step, which a hook detects.
- Other tensors of up to 1 MiB, mostly buffers, are copied. BatchNorm changes its buffers in the forward pass without
  incrementing their counters.
- Python objects (schedulers, cursors, learning rates) are copied.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from tieredckpt.live import abort_fence
from tieredckpt.live.survivor_state import RetainedState, current_survivor_state, names_digest
from tieredckpt.settings import Settings
from tieredckpt.tensors.device import accelerator
from tieredckpt.tensors.state_dict import resolve_stateful
from tieredckpt.tensors.state_structure import (
    StateStructure,
    copied_value,
    local_values,
    state_structure,
    tensor_address,
)

log = logging.getLogger(__name__)


_MAX_COPIED_TENSOR_BYTES = 1 << 20
_MAX_COPIED_BYTES = 64 << 20
_version = operator.attrgetter("_version")


class BoundaryRecorder:
    """Recorder of the step boundaries of one job's state."""

    def __init__(self, job: str, settings: Settings) -> None:
        self._job = job
        self._settings = settings
        self._structure: _Structure | None = None
        self._disabled = not (settings.enabled and settings.memory.live)
        self._has_warned = False

    def record(self, state: Mapping[str, Any], step: int) -> None:
        """Record ``state`` as the state after ``step``.

        Errors are logged and turn recording off. Only a broken world raises.
        """
        abort_fence.raise_if_aborted()
        held = current_survivor_state()
        if self._disabled or held is None:
            return
        noted = held.boundaries.get(self._job)
        if noted is not None and noted.step == step and not held.optimizer_stepped:
            return  # recorded twice: by the recovery loop and by a save
        held.boundaries.pop(self._job, None)  # its copies are overwritten below
        if why := held.why_not():
            held.reached_steps[self._job] = step
            if not self._has_warned:
                log.warning("%s: after a fault the job can resume only from a save: %s", self._job, why)
            self._has_warned = True
            return
        try:
            held.record(self._job, self._boundary(state, step))
        except Exception as error:  # noqa: BLE001 - from the user's objects; saved steps are not affected
            self._disabled, self._structure = True, None
            log.warning("%s: step boundaries are not recorded: %s: %s", self._job, type(error).__name__, error)

    def _boundary(self, state: Mapping[str, Any], step: int) -> StepBoundary:
        loose = None if self._structure is None else self._structure.state.loose(state)
        if self._structure is None or loose is None:
            self._structure = None
            found, loose = state_structure(state)
            self._structure = _Structure(state, found, loose)
        return StepBoundary(self._structure, step, self._settings, loose)

    @property
    def names(self) -> str:
        """Digest of the names in the state that was recorded last. Empty: none was recorded."""
        return "" if self._structure is None else self._structure.names

    def mark_names_complete(self) -> None:
        """Record that the states of all ranks have the names of this rank's state."""
        held = current_survivor_state()
        if held is not None and self._structure is not None:
            held.mark_names_complete(self._job, self._structure.names)

    def release_tensors(self) -> None:
        """Drop the references to the state's tensors."""
        self._structure = None


class StepBoundary:
    """One step boundary. Implements :class:`~tieredckpt.live.survivor_state.RecordedBoundary`."""

    def __init__(self, structure: _Structure, step: int, settings: Settings, loose: Mapping[str, Any]) -> None:
        self.step = step
        self.settings = settings
        self._structure = structure
        self.names_digest = structure.names
        tensors = {name: one for name, one in loose.items() if isinstance(one, torch.Tensor)}
        small, large = _split_by_size(tensors, tensors)
        self._copies = {name: local_values(one).detach().clone() for name, one in small.items()}
        self._objects = {name: copied_value(one) for name, one in loose.items() if name not in tensors}
        self._watches = [*structure.watches, *([_Watch(large, large)] if large else [])]
        self._versions = [watch.versions() for watch in self._watches]
        structure.copy()
        self._objects.update(structure.state.objects())
        self.device_work = abort_fence.current_fence().record(
            [*structure.placed, *(local_values(one) for one in tensors.values())]
        )
        """Device work of the step and of the copies above."""

    def why_changed(self) -> str:
        """Return the name of a tensor that changed after the boundary. Empty: none changed."""
        moved = (watch.moved(before) for watch, before in zip(self._watches, self._versions, strict=True))
        return next((f"{name} was changed after it" for name in moved if name), "")

    def retain(self, left: int, *, complete: bool) -> RetainedState:
        values = {name: one for watch in self._watches for name, one in watch.locals().items()}
        values |= self._structure.copies | self._copies | self._objects
        compared = frozenset(name for watch in self._watches for name in watch.locals())
        return RetainedState(self.step, left, values, self._structure.plan, self.settings, complete, compared)


class _Watched(NamedTuple):
    """A tensor that is compared instead of copied."""

    name: str
    owner: torch.Tensor
    local: torch.Tensor
    """Local values, without gradient."""
    address: int


class _Watch:
    """Detection of changes to tensors that are not copied."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]) -> None:
        self._all = [
            _Watched(name, owners[name], local_values(one).detach(), tensor_address(one))
            for name, one in tensors.items()
        ]
        counting = [(one.name, one.owner) for one in self._all]
        # An operation increments the counter of the DTensor, of its local tensor, or neither.
        counting += [(name, local_values(owner)) for name, owner in counting if isinstance(owner, DTensor)]
        self._names = [name for name, _ in counting]
        self._counting = [tensor for _, tensor in counting]

    def versions(self) -> list[int]:
        return list(map(_version, self._counting))

    def moved(self, before: list[int]) -> str:
        now = self.versions()
        if now != before:
            return next(name for name, a, b in zip(self._names, before, now, strict=True) if a != b)
        return next((one.name for one in self._all if tensor_address(one.owner) != one.address), "")

    def locals(self) -> dict[str, torch.Tensor]:
        return {one.name: one.local for one in self._all}


class _Structure:
    """Properties of a state that stay the same from boundary to boundary."""

    def __init__(self, state: Mapping[str, Any], structure: StateStructure, loose: Mapping[str, Any]) -> None:
        self.state = structure
        flat = {**loose, **structure.objects(), **structure.tensors}
        items = create_default_local_save_plan(flat, is_coordinator=False).items
        self.plan = SavePlan(items, planner_data=flatten_state_dict(resolve_stateful(state))[1])
        self.names = names_digest(item.index.fqn for item in items)
        self.watches: list[_Watch] = []
        self._sources: list[torch.Tensor] = []
        self.copies: dict[str, torch.Tensor] = {}
        for part in structure.parts.values():
            small, _ = _split_by_size({name: part.tensors[name] for name in part.uncounted_names}, part.owners)
            self._sources += [local_values(one).detach() for one in small.values()]
            self.copies.update({name: local_values(one).detach().clone() for name, one in small.items()})
            watched = {name: one for name, one in part.tensors.items() if name not in small}
            self.watches.append(_Watch(watched, part.owners))
        self._targets = list(self.copies.values())
        every = [*self._sources, *(one for watch in self.watches for one in watch.locals().values())]
        self.placed = [*{accelerator().device_of(one): one for one in every}.values()]
        """One tensor for each device of the state."""

    def copy(self) -> None:
        """Copy the small tensors that kernels may change without incrementing their counters."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._sources)


def _split_by_size(
    tensors: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors that are small enough to copy at every boundary, and the other tensors."""
    room = _MAX_COPIED_BYTES
    small: dict[str, torch.Tensor] = {}
    for name in tensors:
        local = local_values(owners[name])
        if local.layout is torch.strided and local.nbytes <= min(room, _MAX_COPIED_TENSOR_BYTES):
            small[name] = tensors[name]
            room -= local.nbytes
    return small, {name: one for name, one in tensors.items() if name not in small}
