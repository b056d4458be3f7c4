"""What a planned save finds out once: which tensors go where, for as long as the state is made of the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tieredckpt.session.save_plan import PlannedSave
from tieredckpt.session.session import Session
from tieredckpt.tensors.slot_copy import SlotWrite
from tieredckpt.tensors.state_dict import flatten_state, local_tensor, resolve_stateful, state_fingerprint
from tieredckpt.tensors.state_structure import Addresses, StateStructure, state_structure

_MOST_MISSES = 3
"""A state that is another one at so many saves in a row is looked at as a whole each time."""


class PlannedState(NamedTuple):
    """A state and the plan by which it was saved before."""

    planned: PlannedSave
    objects: Mapping[str, Any]
    """Its leaves that are no tensors, and perhaps some that are."""
    writes: list[SlotWrite]
    """Every tensor of the layout, in its order, and its place."""


class StateTemplates:
    """Plans one job's states as they were planned before."""

    def __init__(self) -> None:
        self._template: _Template | None = None
        self._misses = 0

    def find(self, session: Session, state: Mapping[str, Any]) -> PlannedState | None:
        """Return the state with the plan of an earlier save, or ``None`` where it was not planned in this world."""
        template = self._template
        if template is not None and session.has_plan(template.planned):
            flat = template.flat(state)
            if flat is not None:
                self._misses = 0
                return PlannedState(template.planned, flat, template.writes(flat))
        self._template = None
        flat = flatten_state(resolve_stateful(state))
        planned = session.cached_plan(state_fingerprint(flat))
        if planned is None:
            return None
        writes = [_write(planned, number, flat) for number in range(len(planned.layout.tensors))]
        if self._misses < _MOST_MISSES:
            self._misses += 1
            self._template = _template_of(state, planned, flat)
        return PlannedState(planned, flat, writes)

    def close(self) -> None:
        """Let go of the state's tensors."""
        self._template = None


def _write(planned: PlannedSave, number: int, flat: Mapping[str, Any]) -> SlotWrite:
    entry = planned.layout.tensors[number]
    return SlotWrite(local_tensor(flat, entry), planned.layout.header_bytes + entry.start)


def _template_of(state: Mapping[str, Any], planned: PlannedSave, flat: Mapping[str, Any]) -> _Template | None:
    """``None`` where the parts of the state do not account for all of it."""
    try:
        structure, loose = state_structure(state)
    except ValueError:
        return None
    tensors = structure.tensors
    if not tensors or {*loose, *structure.objects(), *tensors} != flat.keys():
        return None
    if any(set(part.owners) != set(part.tensors) for part in structure.parts.values()):
        return None
    return _Template(structure, planned)


class _Template:
    """One state's tensors as one plan writes them."""

    def __init__(self, structure: StateStructure, planned: PlannedSave) -> None:
        self.planned = planned
        self._structure = structure
        tensors, entries = structure.tensors, planned.layout.tensors
        self._loose = [number for number, entry in enumerate(entries) if entry.fqn not in tensors]
        self._writes = [
            _write(planned, number, tensors) if entry.fqn in tensors else None for number, entry in enumerate(entries)
        ]
        self._addresses = Addresses([one for part in structure.parts.values() for one in part.owners.values()])

    def flat(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the leaves that are made anew at every save, or ``None`` where ``state`` is another one by now."""
        loose = self._structure.loose(state)
        if loose is None or not self._addresses.are_same():
            return None
        return loose | self._structure.objects()

    def writes(self, flat: Mapping[str, Any]) -> list[SlotWrite]:
        """Return every tensor of the layout and its place, those of ``flat`` among them."""
        found = list(self._writes)
        for number in self._loose:
            found[number] = _write(self.planned, number, flat)
        return [write for write in found if write is not None]
