"""YAML that somebody else may have written: what it says is not larger than what one reads."""

from __future__ import annotations

from typing import Any

import yaml

MOST_VALUES = 200_000
"""Every value as often as an alias repeats it. The largest recipes have some thousands."""


class Loader(yaml.SafeLoader):
    """A few lines of aliases of aliases say more values than there is memory for; those are a ``YAMLError``."""

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
        if self._count > MOST_VALUES:
            raise yaml.YAMLError(f"it has more than {MOST_VALUES} values, those of its aliases included")


def load_yaml(text: str) -> Any:
    """What ``text`` says; ``yaml.YAMLError`` and what else PyYAML raises."""
    return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
