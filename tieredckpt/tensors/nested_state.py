"""Nested states from DCP's flat names and paths. Paths have the keys of mappings as strings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

Path = tuple[str | int, ...]


def nested_state(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the nested state of ``flat``.

    ``paths`` has all names of the step. The ``state`` of a torch optimizer has the numbers of its parameters as keys
    again. If the step has no names of it, it is an empty mapping.
    """
    nested: dict[str, Any] = unflatten_state_dict(dict(flat), {name: paths[name] for name in flat})
    saved = {path[:depth] for path in paths.values() for depth in range(1, len(path))}
    for path, optimizer in _optimizers(nested, ()):
        if "state" in optimizer:
            numbers = {str(number): number for group in optimizer["param_groups"] for number in group["params"]}
            optimizer["state"] = _renamed(optimizer["state"], numbers)
        elif (*path, "state") not in saved:
            optimizer["state"] = {}
    return nested


def _optimizers(value: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the state dicts of optimizers with numbered parameters, and their paths."""
    if isinstance(value, dict):
        if _has_numbered_parameters(value):
            yield path, value
        for key, inner in value.items():
            yield from _optimizers(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _optimizers(inner, (*path, index))


def _has_numbered_parameters(value: dict[str, Any]) -> bool:
    groups = value.get("param_groups")
    return (
        isinstance(groups, list)
        and isinstance(value.get("state", {}), dict)
        and all(isinstance(group, dict) and _are_numbers(group.get("params")) for group in groups)
    )


def _are_numbers(params: Any) -> bool:
    return isinstance(params, list) and all(type(number) is int for number in params)


def _renamed(state: dict[Any, Any], numbers: Mapping[str, int]) -> dict[Any, Any]:
    """Return ``state`` with numbers as keys, in the order of the parameters. Other keys follow."""
    first = {number: state[name] for name, number in numbers.items() if name in state}
    return first | {name: value for name, value in state.items() if name not in numbers}
