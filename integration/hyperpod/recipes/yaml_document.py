"""A YAML document that tracks which keys were read, so that the others can be reported."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from elastic.errors import PolicyError
from tieredckpt.bounded_yaml import BoundedYamlLoader, load_yaml

_REFERENCE = re.compile(r"\$\{(?:recipes\.)?([A-Za-z0-9_.]+)\}")
_MISSING = "???"
_MAX_REFERENCES = 64


class _Loader(BoundedYamlLoader):
    """Loader that rejects duplicate keys: YAML's loaders silently use the last one."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            name, line = loader.construct_object(key), key.start_mark.line + 1
            if name in seen:
                raise PolicyError(f"key {name!r} occurs twice, in lines {seen[name]} and {line}")
            seen[name] = line
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


class RecipeDocument:
    """Checked values by dotted paths.

    Null, ``???`` and references to other files count as absent.
    """

    def __init__(self, name: str, tree: Mapping[Any, Any]) -> None:
        self.name = name
        self.tree = tree
        self._read: set[str] = set()

    def error(self, path: str, why: str) -> PolicyError:
        return PolicyError(f"{self.name}: {path} {why}")

    def get(self, path: str) -> Any:
        """Return the value, with references within the file resolved; None if absent."""
        self._read.add(path)
        value, hops = _at(self.tree, path), 0
        while isinstance(value, str) and (found := _REFERENCE.fullmatch(value)):
            value, hops = _at(self.tree, found[1]), hops + 1
            if hops > _MAX_REFERENCES:
                raise self.error(path, "refers to itself")
        return None if isinstance(value, str) and value == _MISSING else value

    def section(self, path: str) -> Mapping[Any, Any]:
        """Return a mapping, empty if absent. Only its values read later count as read."""
        value = self.get(path)
        self._read.discard(path)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(path, f"is {value!r}: it must be a mapping")
        return value

    def integer(self, path: str, *, least: int = 1) -> int | None:
        value = self.get(path)
        if value is None:
            return None
        number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise self.error(path, f"is {value!r}: it must be a whole number, {least} or more")
        return number

    def number(self, path: str, *, least: float = 0.0) -> float | None:
        """Return a number, or None. YAML parses ``1e-4`` as text, so text is accepted."""
        value = self.get(path)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or number < least:
            raise self.error(path, f"is {value!r}: it must be a number, {least:g} or more")
        return number

    def boolean(self, path: str) -> bool | None:
        value = self.get(path)
        if value is not None and not isinstance(value, bool):
            raise self.error(path, f"is {value!r}: it must be true or false")
        return value

    def string(self, path: str) -> str | None:
        """Return text, or None if it is absent or refers to another file."""
        value = self.get(path)
        if value is None or isinstance(value, (Mapping, list)):
            return None
        return None if "${" in str(value) else str(value)

    def strings(self, path: str) -> tuple[str, ...]:
        value = self.get(path)
        return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()

    def mappings(self, path: str) -> list[Mapping[Any, Any]]:
        """Return the mappings of a list."""
        value = self.get(path)
        self._read.discard(path)
        return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []

    def mark_read(self, *paths: str) -> None:
        """Mark keys as read that other code reads."""
        self._read.update(paths)

    def unread_keys(self) -> tuple[str, ...]:
        """Return the topmost unread keys, as dotted paths."""
        return tuple(self._unread(self.tree, ""))

    def _unread(self, tree: Mapping[Any, Any], above: str) -> Iterator[str]:
        for key, value in tree.items():
            path = f"{above}{key}"
            if path in self._read:
                continue
            inside = any(one.startswith(f"{path}.") for one in self._read)
            if inside and isinstance(value, Mapping):
                yield from self._unread(value, f"{path}.")
            elif value is not None:
                yield path


def open_recipe_document(path: str | Path) -> RecipeDocument:
    """Open a recipe's file.

    Raise :class:`~elastic.errors.PolicyError` with its name if it is not a recipe.
    """
    path = Path(path)
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"), _Loader)
    except PolicyError as error:
        raise PolicyError(f"{path.name}: {error}") from None
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, Mapping):
        raise PolicyError(f"{path} holds no recipe: its top is to be a mapping")
    return RecipeDocument(path.name, tree)


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(name)
    return tree
