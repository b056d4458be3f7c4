"""Noting a step boundary: where its state is, and a copy of what may change without anybody seeing it.

At most boundaries nothing has changed but the numbers in tensors: names, places and the save plan are made once, and
then only compared. What costs something every time:

- parameters and moments are not copied. Their version counters are read; fused optimizers and DTensors' operations on
  lists count nothing, but those are an optimizer's step, which is seen by a hook.
- other tensors of up to 1 MiB, buffers mostly, are copied: BatchNorm changes its own in the forward pass, uncounted.
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

from tieredckpt.device import accelerator
from tieredckpt.live import fence
from tieredckpt.live.keeping import Kept, digest_of_names, keeper
from tieredckpt.live.parts import Part, address_of, copied, local_of, part_of
from tieredckpt.settings import Settings
from tieredckpt.state import as_plain, fingerprint, flatten

log = logging.getLogger(__name__)

_MOST_OF_ONE = 1 << 20
_MOST_COPIED = 64 << 20
_version = operator.attrgetter("_version")


class Noter:
    """Notes the boundaries of one job's state."""

    def __init__(self, job: str, settings: Settings) -> None:
        self._job = job
        self._settings = settings
        self._structure: _Structure | None = None
        self._given_up = not (settings.enabled and settings.memory.live)
        self._said = False

    def note(self, state: Mapping[str, Any], step: int) -> None:
        """``state`` is what ``step`` has left. Never worth an error of the training, but for that of a broken world."""
        fence.ask()
        held = keeper()
        if self._given_up or held is None:
            return
        noted = held.notes.get(self._job)
        if noted is not None and noted.step == step and not held.stepped:
            return  # said twice: by the loop, and by who saves
        held.notes.pop(self._job, None)  # its copies are written over now
        if why := held.why_not():
            held.reached[self._job] = step
            if not self._said:
                log.warning("%s: after a fault only what was saved is used: %s", self._job, why)
            self._said = True
            return
        try:
            held.note(self._job, self._boundary(state, step))
        except Exception as error:  # noqa: BLE001 - from objects of the user's; what is saved is there all the same
            self._given_up, self._structure = True, None
            log.warning("%s: step boundaries are not noted: %s: %s", self._job, type(error).__name__, error)

    def _boundary(self, state: Mapping[str, Any], step: int) -> Boundary:
        loose = None if self._structure is None else self._structure.loose(state)
        if self._structure is None or loose is None:
            self._structure = None
            self._structure, loose = _structure_of(state)
        return Boundary(self._structure, step, self._settings, loose)

    @property
    def names(self) -> str:
        """A digest of what the state has by name, as it was noted last."""
        return "" if self._structure is None else self._structure.names

    def is_complete(self) -> None:
        """Every rank's state has the names that this one's has."""
        held = keeper()
        if held is not None and self._structure is not None:
            held.completes(self._job, self._structure.names)

    def forget(self) -> None:
        """Let go of the state's tensors."""
        self._structure = None


class Boundary:
    """One step boundary; :class:`~tieredckpt.live.keeping.Noted`."""

    def __init__(self, structure: _Structure, step: int, settings: Settings, loose: Mapping[str, Any]) -> None:
        self.step = step
        self.settings = settings
        self._structure = structure
        self.names = structure.names
        tensors = {name: one for name, one in loose.items() if isinstance(one, torch.Tensor)}
        small, large = _sorted(tensors, tensors)
        self._own = {name: local_of(one).detach().clone() for name, one in small.items()}
        self._objects = {name: copied(one) for name, one in loose.items() if name not in tensors}
        self._watches = [*structure.watches, *([_Watch(large, large)] if large else [])]
        self._versions = [watch.versions() for watch in self._watches]
        structure.copy()
        self._objects.update(structure.objects())
        self.work = fence.fence().record([*structure.placed, *(local_of(one) for one in tensors.values())])
        """Of the step, and the copies above."""

    def torn(self) -> str:
        """The name of something that is not what it was."""
        moved = (watch.moved(before) for watch, before in zip(self._watches, self._versions, strict=True))
        return next((f"{name} was changed after it" for name in moved if name), "")

    def kept(self, left: int, *, complete: bool) -> Kept:
        values = {name: one for watch in self._watches for name, one in watch.locals().items()}
        values |= self._structure.copies | self._own | self._objects
        compared = frozenset(name for watch in self._watches for name in watch.locals())
        return Kept(self.step, left, values, self._structure.plan, self.settings, complete, compared)


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
            _Watched(name, owners[name], local_of(one).detach(), address_of(one)) for name, one in tensors.items()
        ]
        counting = [(one.name, one.owner) for one in self._all]
        # A DTensor counts for itself, or has its part count, or neither.
        counting += [(name, local_of(owner)) for name, owner in counting if isinstance(owner, DTensor)]
        self._names = [name for name, _ in counting]
        self._counting = [tensor for _, tensor in counting]

    def versions(self) -> list[int]:
        return list(map(_version, self._counting))

    def moved(self, before: list[int]) -> str:
        now = self.versions()
        if now != before:
            return next(name for name, a, b in zip(self._names, before, now, strict=True) if a != b)
        return next((one.name for one in self._all if address_of(one.owner) != one.address), "")

    def locals(self) -> dict[str, torch.Tensor]:
        return {one.name: one.local for one in self._all}


class _Structure:
    """Everything about a state that is the same at the next boundary."""

    def __init__(self, state: Mapping[str, Any], parts: dict[str, Part], loose: Mapping[str, Any]) -> None:
        self._keys = list(state)
        self._values = {key: state[key] for key in parts}
        self._parts = parts
        self._fingerprint = fingerprint(loose)
        flat = {**loose, **self.objects()}
        for part in parts.values():
            flat.update(part.tensors)
        items = create_default_local_save_plan(flat, is_coordinator=False).items
        self.plan = SavePlan(items, planner_data=flatten_state_dict(as_plain(state))[1])
        self.names = digest_of_names(item.index.fqn for item in items)
        self.watches: list[_Watch] = []
        self._sources: list[torch.Tensor] = []
        self.copies: dict[str, torch.Tensor] = {}
        for part in self._parts.values():
            small, _ = _sorted({name: part.tensors[name] for name in part.unseen}, part.owners)
            self._sources += [local_of(one).detach() for one in small.values()]
            self.copies.update({name: local_of(one).detach().clone() for name, one in small.items()})
            watched = {name: one for name, one in part.tensors.items() if name not in small}
            self.watches.append(_Watch(watched, part.owners))
        self._targets = list(self.copies.values())
        every = [*self._sources, *(one for watch in self.watches for one in watch.locals().values())]
        self.placed = [*{accelerator().place_of(one): one for one in every}.values()]
        """A tensor of each device that the state is on."""

    def loose(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """What is made anew at every boundary; ``None`` where ``state`` is made of other things than before."""
        if list(state) != self._keys or any(state[key] is not value for key, value in self._values.items()):
            return None
        if not all(part.is_same() for part in self._parts.values()):
            return None
        made = _loose(state, self._parts)
        return made if fingerprint(made) == self._fingerprint else None

    def objects(self) -> dict[str, Any]:
        return {name: value for part in self._parts.values() for name, value in part.objects().items()}

    def copy(self) -> None:
        """What kernels may change uncounted, as it is now."""
        if self._targets:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, self._sources)


def _structure_of(state: Mapping[str, Any]) -> tuple[_Structure, dict[str, Any]]:
    """And what is made anew at every boundary, as it is now."""
    parts = {key: part for key, value in state.items() if (part := part_of(key, value)) is not None}
    loose = _loose(state, parts)
    return _Structure(state, parts, loose), loose


def _loose(state: Mapping[str, Any], parts: Mapping[str, Part]) -> dict[str, Any]:
    return flatten(as_plain({key: value for key, value in state.items() if key not in parts}))


def _sorted(
    tensors: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Those that are small enough to be copied at every boundary, and the others."""
    room = _MOST_COPIED
    small: dict[str, torch.Tensor] = {}
    for name in tensors:
        local = local_of(owners[name])
        if local.layout is torch.strided and local.nbytes <= min(room, _MOST_OF_ONE):
            small[name] = tensors[name]
            room -= local.nbytes
    return small, {name: one for name, one in tensors.items() if name not in small}
