"""A node as its peers know it."""

from __future__ import annotations

import re
from typing import NewType

import msgspec

from peerstore.errors import InvalidNameError

NodeId = NewType("NodeId", str)

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


class Node(msgspec.Struct, frozen=True, order=True):
    """One node agent: what it is called, where it listens, and what it would fail together with."""

    id: NodeId
    address: str
    """``host:port`` where its agent listens for other agents; "" when it does not."""
    labels: tuple[tuple[str, str], ...] = ()
    """Its failure domains by level, sorted by level: ``(("rack", "r1"), ("zone", "a"))``."""
    memory_bytes: int = 0
    """Its arena's budget; 0 when it is not known, which counts as much as any other."""

    def label(self, level: str) -> str:
        """Its failure domain at ``level``. A node nobody labelled fails alone."""
        return next((name for known, name in self.labels if known == level), f"node:{self.id}")


def node_id(text: str) -> NodeId:
    """``text`` as a node's name, or :class:`InvalidNameError` that says what is allowed."""
    if not isinstance(text, str) or not _NODE.fullmatch(text):
        raise InvalidNameError(
            f"node name {text!r} is not allowed: use 1 to 128 letters, digits, '.', '_' or '-', "
            "the first one a letter or a digit"
        )
    return NodeId(text)


def parse_labels(text: str) -> tuple[tuple[str, str], ...]:
    """``rack=r1,zone=a`` as labels."""
    labels: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        level, _, name = pair.partition("=")
        if not _LABEL.fullmatch(level) or not _LABEL.fullmatch(name):
            raise InvalidNameError(f"label {pair!r} is not allowed: write for example rack=r1,zone=a")
        if level in labels:
            raise InvalidNameError(f"label {level!r} is given twice in {text!r}")
        labels[level] = name
    return tuple(sorted(labels.items()))
