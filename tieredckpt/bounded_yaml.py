"""YAML documents of limited size, with the line and column of a mistake."""

from __future__ import annotations

from typing import Any

import yaml

MAX_YAML_VALUES = 200_000
"""Maximum number of values. A value counts once per alias. The largest recipes have some thousands."""


class BoundedYamlLoader(yaml.SafeLoader):
    """YAML loader that raises ``YAMLError`` above a number of values.

    Nested aliases can expand a few lines to more values than fit in memory.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._count = 0
        self._counts: dict[str | None, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self._add(self._counts.get(event.anchor, 1))
            return super().compose_node(parent, index)
        before = self._count
        self._add(1)
        node = super().compose_node(parent, index)
        if event.anchor is not None:
            self._counts[event.anchor] = self._count - before
        return node

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_YAML_VALUES} values, those of its aliases included")


def load_yaml(text: str, loader: type[BoundedYamlLoader] = BoundedYamlLoader) -> Any:
    """Return the values of ``text``, or raise ``yaml.YAMLError`` with the line and column of the mistake."""
    try:
        return yaml.load(text, loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        began = error.context_mark
        if began is not None and mark is not None and began.line != mark.line:
            context = f" {error.context} that begins in line {began.line + 1}"
        else:
            context = f" {error.context}" if error.context else ""
        raise yaml.YAMLError(f"{where}{error.problem or 'syntax error'}{context}") from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise yaml.YAMLError(
            f"line {line}, column {column}: the character {chr(error.character)!r} is not allowed"
        ) from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # PyYAML does not wrap errors of its constructors: invalid dates and numbers, a thousand nested brackets.
        raise yaml.YAMLError(str(error) or type(error).__name__) from error
