"""Whether some shards hold a whole state, although others are missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tieredckpt.boxes import Box, uncovered, whole
from tieredckpt.layout import Layout
from tieredckpt.manifest import StateTable


def gaps(table: StateTable, layouts: Iterable[Layout]) -> list[str]:
    """Names of which something is missing from ``layouts``; empty when they cover the whole state."""
    boxes: dict[str, list[Box]] = {}
    objects = set()
    for layout in layouts:
        for entry in layout.tensors:
            boxes.setdefault(entry.fqn, []).append(entry.box)
        for item in layout.items:
            if item.tensor is not None:
                boxes.setdefault(item.fqn, []).append(item.tensor.box)
            else:
                objects.add(item.fqn)
    torn = [t.fqn for t in table.tensors if t.fqn not in boxes or uncovered(whole(t.shape), boxes[t.fqn])]
    return torn + [name for name in table.objects if name not in objects]
