"""Whether some shards hold a whole state, although others are missing. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tieredckpt.boxes import Box, uncovered, whole
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.layout import Layout
from tieredckpt.manifest import StateTable


def gaps(table: StateTable, layouts: Iterable[Layout]) -> list[str]:
    """Names of which something is missing from ``layouts``; empty when they cover the whole state."""
    boxes: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
    """By name and global shape: a piece of another shape covers nothing."""
    objects = set()
    for layout in layouts:
        for entry in layout.tensors:
            boxes.setdefault((entry.fqn, entry.shape), []).append(entry.box)
        for item in layout.items:
            if item.tensor is not None:
                boxes.setdefault((item.fqn, item.tensor.shape), []).append(item.tensor.box)
            else:
                objects.add(item.fqn)
    torn = [t.fqn for t in table.tensors if (t.fqn, t.shape) not in boxes or not _whole(t.shape, boxes[t.fqn, t.shape])]
    return torn + [name for name in table.objects if name not in objects]


def _whole(shape: tuple[int, ...], found: list[Box]) -> bool:
    try:
        return not uncovered(whole(shape), found)
    except CheckpointDamagedError:  # pieces that no save writes cover nothing
        return False
