"""Recording of a step boundary: references and version counters, with copies of small tensors.

Making a state dict of 4,096 tensors takes 20 times as long as seeing that it would be made of the same ones.

At most boundaries nothing has changed but the numbers in tensors: names, places and the save plan are made once, and
then only compared. What costs something every time:

- parameters and moments are not copied. Their version counters are read; fused optimizers and DTensors' operations on
  lists count nothing, but those are an optimizer's step, which is seen by a hook.
- other tensors of up to 1 MiB, buffers mostly, are copied: BatchNorm changes its own in the forward pass, uncounted.
- Python objects (schedulers, cursors, learning rates) are copied.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
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
from tieredckpt.tensors.state_dict import flatten_state, resolve_stateful, state_fingerprint

log = logging.getLogger(__name__)


_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values that this process has of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def tensor_address(tensor: torch.Tensor) -> int:
    local = local_values(tensor)
    return local.data_ptr() if local.layout is torch.strided else 0


def copied_value(value: Any) -> Any:
    """``value`` as it is now."""
    if type(value) in _IMMUTABLE or (type(value) is tuple and all(type(one) in _IMMUTABLE for one in value)):
        return value
    return copy.deepcopy(value)


@dataclass(frozen=True)
class StatefulTensors:
    """The tensors of one module or optimizer, by their names in the state."""

    tensors: Mapping[str, torch.Tensor]
    owners: Mapping[str, torch.Tensor]
    """The tensors that the training changes; those above have the same memory, but no gradients."""
    uncounted_names: frozenset[str]
    """Those that may be changed outside of an optimizer's step, by kernels that count no versions."""
    places: tuple[dict[Any, Any], ...]
    found: tuple[Any, ...]
    """What was in ``places``."""
    optimizer: torch.optim.Optimizer | None = None
    groups: tuple[dict[str, Any], ...] = ()
    sizes: tuple[int, ...] = ()
    numbers: tuple[Any, ...] = ()
    """Of each group, its parameters as a state dict has them."""
    name: str = ""

    def is_same(self) -> bool:
        if self.optimizer is not None and self.optimizer.state is not self.places[0]:
            return False  # it was loaded anew
        now = [*chain.from_iterable(map(dict.values, self.places)), *self._groups_now()]
        return (
            len(now) == len(self.found)
            and all(map(operator.is_, now, self.found))
            and tuple(map(len, self.groups)) == self.sizes
        )

    def _groups_now(self) -> Iterator[Any]:
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return chain(groups, chain.from_iterable(group["params"] for group in groups))

    def objects(self) -> dict[str, Any]:
        """What is no tensor, as it is now."""
        if not self.groups:
            return {}
        found: dict[str, Any] = {}
        for number, (group, params) in enumerate(zip(self.groups, self.numbers, strict=True)):
            name = f"{self.name}.param_groups.{number}"
            found.update({f"{name}.{key}": copied_value(value) for key, value in group.items() if key != "params"})
            found[f"{name}.params"] = params
        return found


def stateful_tensors(name: str, value: Any) -> StatefulTensors | None:
    """``value`` as a part, where it is one: a module or optimizer that says its state the usual way."""
    if isinstance(value, torch.nn.Module) and type(value).state_dict is torch.nn.Module.state_dict:
        return _module(name, value)
    if isinstance(value, torch.optim.Optimizer) and type(value).state_dict is torch.optim.Optimizer.state_dict:
        return _optimizer(name, value)
    return None


def _module(name: str, module: torch.nn.Module) -> StatefulTensors | None:
    tensors = flatten_state({name: module.state_dict()})
    if not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        return None
    buffers = {id(one) for one in module.buffers()}
    owners = _owners(tensors, [*module.parameters(), *module.buffers()])
    strangers = tensors.keys() - owners.keys()
    if strangers:
        # To have these made at every boundary could cost collectives.
        raise ValueError(f"the state dict of {name} has tensors that are not the module's own: {min(strangers)}")
    unseen = frozenset(key for key, owner in owners.items() if id(owner) in buffers)
    inside = [one.__dict__ for one in module.modules()]
    places = tuple(chain.from_iterable((one["_parameters"], one["_buffers"], one["_modules"]) for one in inside))
    return StatefulTensors(tensors, owners, unseen, places, tuple(chain.from_iterable(map(dict.values, places))))


def _owners(tensors: Mapping[str, torch.Tensor], own: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    by_place = {(tensor_address(one), one.shape, one.dtype): one for one in reversed(own)}
    found = {}
    for name, tensor in tensors.items():
        owner = by_place.get((tensor_address(tensor), tensor.shape, tensor.dtype))
        if owner is not None:
            found[name] = owner
        elif not local_values(tensor).numel():
            found[name] = tensor
    return found


def _nested(value: Any) -> bool:
    """Whether it would not be one object in a flat state."""
    return list(flatten_state({"": value})) != [""] or isinstance(value, torch.Tensor)


def _optimizer(name: str, optimizer: torch.optim.Optimizer) -> StatefulTensors | None:
    if optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks:
        return None
    said = optimizer.state_dict()
    tensors = flatten_state({name: {"state": said["state"]}})
    groups = tuple(optimizer.param_groups)
    if not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        return None
    if any(_nested(value) for group in said["param_groups"] for value in group.values()):
        return None
    places = (optimizer.state, *optimizer.state.values())
    if not all(type(one) is dict for one in places[1:]):
        return None
    of_groups = chain(groups, chain.from_iterable(group["params"] for group in groups))
    found = (*chain.from_iterable(map(dict.values, places)), *of_groups)
    numbers = tuple(group["params"] for group in said["param_groups"])
    sizes = tuple(map(len, groups))
    return StatefulTensors(tensors, tensors, frozenset(), places, found, optimizer, groups, sizes, numbers, name)


_MOST_OF_ONE = 1 << 20
_MOST_COPIED = 64 << 20
_version = operator.attrgetter("_version")


class BoundaryRecorder:
    """Notes the boundaries of one job's state."""

    def __init__(self, job: str, settings: Settings) -> None:
        self._job = job
        self._settings = settings
        self._structure: _Structure | None = None
        self._given_up = not (settings.enabled and settings.memory.live)
        self._said = False

    def record(self, state: Mapping[str, Any], step: int) -> None:
        """``state`` is what ``step`` has left. Never worth an error of the training, but for that of a broken world."""
        abort_fence.raise_if_aborted()
        held = current_survivor_state()
        if self._given_up or held is None:
            return
        noted = held.boundaries.get(self._job)
        if noted is not None and noted.step == step and not held.optimizer_stepped:
            return  # said twice: by the loop, and by who saves
        held.boundaries.pop(self._job, None)  # its copies are written over now
        if why := held.why_not():
            held.reached_steps[self._job] = step
            if not self._said:
                log.warning("%s: after a fault only what was saved is used: %s", self._job, why)
            self._said = True
            return
        try:
            held.record(self._job, self._boundary(state, step))
        except Exception as error:  # noqa: BLE001 - from objects of the user's; what is saved is there all the same
            self._given_up, self._structure = True, None
            log.warning("%s: step boundaries are not noted: %s: %s", self._job, type(error).__name__, error)

    def _boundary(self, state: Mapping[str, Any], step: int) -> StepBoundary:
        loose = None if self._structure is None else self._structure.loose(state)
        if self._structure is None or loose is None:
            self._structure = None
            self._structure, loose = _structure_of(state)
        return StepBoundary(self._structure, step, self._settings, loose)

    @property
    def names(self) -> str:
        """A digest of what the state has by name, as it was noted last."""
        return "" if self._structure is None else self._structure.names

    def mark_names_complete(self) -> None:
        """Every rank's state has the names that this one's has."""
        held = current_survivor_state()
        if held is not None and self._structure is not None:
            held.mark_names_complete(self._job, self._structure.names)

    def release_tensors(self) -> None:
        """Let go of the state's tensors."""
        self._structure = None


class StepBoundary:
    """One step boundary; :class:`~tieredckpt.live.survivor_state.RecordedBoundary`."""

    def __init__(self, structure: _Structure, step: int, settings: Settings, loose: Mapping[str, Any]) -> None:
        self.step = step
        self.settings = settings
        self._structure = structure
        self.names_digest = structure.names
        tensors = {name: one for name, one in loose.items() if isinstance(one, torch.Tensor)}
        small, large = _sorted(tensors, tensors)
        self._own = {name: local_values(one).detach().clone() for name, one in small.items()}
        self._objects = {name: copied_value(one) for name, one in loose.items() if name not in tensors}
        self._watches = [*structure.watches, *([_Watch(large, large)] if large else [])]
        self._versions = [watch.versions() for watch in self._watches]
        structure.copy()
        self._objects.update(structure.objects())
        self.device_work = abort_fence.current_fence().record(
            [*structure.placed, *(local_values(one) for one in tensors.values())]
        )
        """Of the step, and the copies above."""

    def why_changed(self) -> str:
        """The name of something that is not what it was."""
        moved = (watch.moved(before) for watch, before in zip(self._watches, self._versions, strict=True))
        return next((f"{name} was changed after it" for name in moved if name), "")

    def retain(self, left: int, *, complete: bool) -> RetainedState:
        values = {name: one for watch in self._watches for name, one in watch.locals().items()}
        values |= self._structure.copies | self._own | self._objects
        compared = frozenset(name for watch in self._watches for name in watch.locals())
        return RetainedState(self.step, left, values, self._structure.plan, self.settings, complete, compared)


class _Watched(NamedTuple):
    """A tensor that is not copied."""

    name: str
    owner: torch.Tensor
    local: torch.Tensor
    """Its values, without its gradient."""
    address: int


class _Watch:
    """Tensors of which it is to be known whether they were changed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]) -> None:
        self._all = [
            _Watched(name, owners[name], local_values(one).detach(), tensor_address(one))
            for name, one in tensors.items()
        ]
        counting = [(one.name, one.owner) for one in self._all]
        # A DTensor counts for itself, or has its part count, or neither.
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
    """Everything about a state that is the same at the next boundary."""

    def __init__(self, state: Mapping[str, Any], parts: dict[str, StatefulTensors], loose: Mapping[str, Any]) -> None:
        self._keys = list(state)
        self._values = {key: state[key] for key in parts}
        self._parts = parts
        self._fingerprint = state_fingerprint(loose)
        flat = {**loose, **self.objects()}
        for part in parts.values():
            flat.update(part.tensors)
        items = create_default_local_save_plan(flat, is_coordinator=False).items
        self.plan = SavePlan(items, planner_data=flatten_state_dict(resolve_stateful(state))[1])
        self.names = names_digest(item.index.fqn for item in items)
        self.watches: list[_Watch] = []
        self._sources: list[torch.Tensor] = []
        self.copies: dict[str, torch.Tensor] = {}
        for part in self._parts.values():
            small, _ = _sorted({name: part.tensors[name] for name in part.uncounted_names}, part.owners)
            self._sources += [local_values(one).detach() for one in small.values()]
            self.copies.update({name: local_values(one).detach().clone() for name, one in small.items()})
            watched = {name: one for name, one in part.tensors.items() if name not in small}
            self.watches.append(_Watch(watched, part.owners))
        self._targets = list(self.copies.values())
        every = [*self._sources, *(one for watch in self.watches for one in watch.locals().values())]
        self.placed = [*{accelerator().device_of(one): one for one in every}.values()]
        """A tensor of each device that the state is on."""

    def loose(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is made anew at every boundary; ``None`` where ``state`` is made of other things than before."""
        if list(state) != self._keys or any(state[key] is not value for key, value in self._values.items()):
            return None
        if not all(part.is_same() for part in self._parts.values()):
            return None
        made = _loose(state, self._parts)
        return made if state_fingerprint(made) == self._fingerprint else None

    def objects(self) -> dict[str, Any]:
        return {name: value for part in self._parts.values() for name, value in part.objects().items()}

    def copy(self) -> None:
        """What kernels may change uncounted, as it is now."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._sources)


def _structure_of(state: Mapping[str, Any]) -> tuple[_Structure, dict[str, Any]]:
    """And what is made anew at every boundary, as it is now."""
    parts = {key: part for key, value in state.items() if (part := stateful_tensors(key, value)) is not None}
    loose = _loose(state, parts)
    return _Structure(state, parts, loose), loose


def _loose(state: Mapping[str, Any], parts: Mapping[str, StatefulTensors]) -> dict[str, Any]:
    return flatten_state(resolve_stateful({key: value for key, value in state.items() if key not in parts}))


def _sorted(
    tensors: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Those that are small enough to be copied at every boundary, and the others."""
    room = _MOST_COPIED
    small: dict[str, torch.Tensor] = {}
    for name in tensors:
        local = local_values(owners[name])
        if local.layout is torch.strided and local.nbytes <= min(room, _MOST_OF_ONE):
            small[name] = tensors[name]
            room -= local.nbytes
    return small, {name: one for name, one in tensors.items() if name not in small}
