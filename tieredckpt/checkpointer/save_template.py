"""Templates of saved states: the position of each tensor, reused while the state has the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tieredckpt.session.save_plan import PlannedSave
from tieredckpt.session.session import Session
from tieredckpt.tensors.slot_copy import SlotWrite
from tieredckpt.tensors.state_dict import flatten_state, local_tensor, resolve_stateful, state_fingerprint
from tieredckpt.tensors.state_structure import Addresses, StateStructure, state_structure

_MOST_MISSES = 3
"""Changed states in a row after which no template is made, and each save flattens the whole state."""


class PlannedState(NamedTuple):
    """A state and the plan of an earlier save of it."""

    planned: PlannedSave
    objects: Mapping[str, Any]
    """All leaves that are not tensors, and possibly some tensors, by name."""
    writes: list[SlotWrite]
    """Each tensor of the layout and its position in the slot, in the layout's order."""


class StateTemplates:
    """The plan of an earlier save for each state of one job."""

    def __init__(self) -> None:
        self._template: _Template | None = None
        self._misses = 0

    def find(self, session: Session, state: Mapping[str, Any]) -> PlannedState | None:
        """Return the state with the plan of an earlier save, or ``None`` if this world has no such plan."""
        template = self._template
        if template is not None and session.plans.has(template.planned):
            flat = template.flat(state)
            if flat is not None:
                self._misses = 0
                return PlannedState(template.planned, flat, template.writes(flat))
        self._template = None
        flat = flatten_state(resolve_stateful(state))
        planned = session.plans.find(state_fingerprint(flat))
        if planned is None:
            return None
        writes = [_write(planned, number, flat) for number in range(len(planned.layout.tensors))]
        if self._misses < _MOST_MISSES:
            self._misses += 1
            self._template = _template_of(state, planned, flat)
        return PlannedState(planned, flat, writes)

    def close(self) -> None:
        """Release the state's tensors."""
        self._template = None


def _write(planned: PlannedSave, number: int, flat: Mapping[str, Any]) -> SlotWrite:
    entry = planned.layout.tensors[number]
    return SlotWrite(local_tensor(flat, entry), planned.layout.header_bytes + entry.start)


def _template_of(state: Mapping[str, Any], planned: PlannedSave, flat: Mapping[str, Any]) -> _Template | None:
    """Return a template of the state, or ``None`` if its parts do not cover all of it."""
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
    """The tensors of one state, and where one plan writes them."""

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
        """Return the leaves that each save collects again, or ``None`` if the state's structure changed."""
        loose = self._structure.loose(state)
        if loose is None or not self._addresses.are_same():
            return None
        return loose | self._structure.objects()

    def writes(self, flat: Mapping[str, Any]) -> list[SlotWrite]:
        """Return each tensor of the layout and its position, including the tensors of ``flat``."""
        found = list(self._writes)
        for number in self._loose:
            found[number] = _write(self.planned, number, flat)
        return [write for write in found if write is not None]
