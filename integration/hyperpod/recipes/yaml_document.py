"""A YAML document that tracks which keys were read, so that the others can be reported."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from elastic.errors import PolicyError
from tieredckpt.settings import BoundedYamlLoader, load_yaml

_WHOLE = re.compile(r"\$\{(?:recipes\.)?([A-Za-z0-9_.]+)\}")
_MISSING = "???"
_DEEPEST = 64


class _Loader(BoundedYamlLoader):
    """One that refuses a key that is there twice: YAML's readers keep the last, and the first is lost unseen."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            name, line = loader.construct_object(key), key.start_mark.line + 1
            if name in seen:
                raise PolicyError(f"key {name!r} is there twice, in lines {seen[name]} and {line}")
            seen[name] = line
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


class RecipeDocument:
    """Dotted paths in, checked values out. What is null, ``???`` or refers to other files counts as not said."""

    def __init__(self, name: str, tree: Mapping[Any, Any]) -> None:
        self.name = name
        self.tree = tree
        self._read: set[str] = set()

    def error(self, path: str, why: str) -> PolicyError:
        return PolicyError(f"{self.name}: {path} {why}")

    def get(self, path: str) -> Any:
        """What is there, references within the file resolved; ``None`` where nothing is said."""
        self._read.add(path)
        value, hops = _at(self.tree, path), 0
        while isinstance(value, str) and (found := _WHOLE.fullmatch(value)):
            value, hops = _at(self.tree, found[1]), hops + 1
            if hops > _DEEPEST:
                raise self.error(path, "refers to itself")
        return None if isinstance(value, str) and value == _MISSING else value

    def section(self, path: str) -> Mapping[Any, Any]:
        """A mapping; an empty one where nothing is said. What is read of it is said by asking for it."""
        value = self.get(path)
        self._read.discard(path)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(path, f"is {value!r}: it is to be a mapping")
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
        """YAML takes ``1e-4`` for text."""
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
        """``None`` also for what only another file completes."""
        value = self.get(path)
        if value is None or isinstance(value, (Mapping, list)):
            return None
        return None if "${" in str(value) else str(value)

    def strings(self, path: str) -> tuple[str, ...]:
        value = self.get(path)
        return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()

    def mappings(self, path: str) -> list[Mapping[Any, Any]]:
        """The mappings of a list."""
        value = self.get(path)
        self._read.discard(path)
        return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []

    def mark_read(self, *paths: str) -> None:
        """Somebody else here reads these."""
        self._read.update(paths)

    def unread_keys(self) -> tuple[str, ...]:
        """The topmost keys of which nothing was read, as dotted paths."""
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
    """A recipe's file, or :class:`~elastic.errors.PolicyError` that names it and says what it is instead."""
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
