"""What may be lost at once: single nodes, and all nodes that fail together. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.errors import UsageError
from tieredckpt.node import ClusterView

NODE = "node"
_NAMED = 12


@dataclass(frozen=True)
class Domain:
    """Nodes that are lost together: all of a rack, say, or one node alone."""

    level: str
    name: str
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.level}:{self.name}"


def domains(view: ClusterView) -> tuple[Domain, ...]:
    """Every node alone, then every failure domain, the innermost level first.

    Domains are nested, as for placement: rack r1 of zone a is another one than r1 of zone b. Where that happens they
    are called ``a/r1`` and ``b/r1``.
    """
    found = [Domain(NODE, one.node.id, (one.node.id,)) for one in view.nodes]
    for level in _levels(view):
        members: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for one in view.nodes:
            path = _path(dict(one.node.labels), level, view.levels)
            if path:
                members[path].append(one.node.id)
        short = [path[-1] for path in members]
        for path, nodes in sorted(members.items()):
            name = path[-1] if short.count(path[-1]) == 1 else "/".join(filter(None, path))
            found.append(Domain(level, name, tuple(nodes)))
    return tuple(found)


def find(text: str, known: Sequence[Domain]) -> Domain:
    """The domain that ``rack:r1`` means; an error that names what there is when there is no such one."""
    level, colon, name = text.partition(":")
    if not colon:
        raise UsageError(f"--lose {text}: say what it is, as in node:n1 or rack:r1; {_there_is(known)}")
    of_level = [one for one in known if one.level == level]
    if not of_level:
        raise UsageError(f"--lose {text}: no node has a {level}; {_there_is(known)}")
    for one in of_level:
        if one.name == name:
            return one
    alike = [one for one in of_level if one.name.rpartition("/")[2] == name]
    if alike:
        raise UsageError(f"--lose {text}: there is more than one, say which: {', '.join(map(str, alike))}")
    raise UsageError(f"--lose {text}: there is no such {level}; {_there_is(of_level)}")


def innermost(view: ClusterView) -> tuple[str, Mapping[str, str]]:
    """The innermost level that anybody is labelled with, and every node's domain there. Unlabelled ones fail alone."""
    labelled = {level for one in view.nodes for level, _ in one.node.labels}
    level = next((level for level in reversed(view.levels) if level in labelled), NODE)
    names: dict[str, str] = {}
    for one in view.nodes:
        path = _path(dict(one.node.labels), level, view.levels)
        names[one.node.id] = "/".join(path) if path else f"{NODE}:{one.node.id}"
    return level, names


def _levels(view: ClusterView) -> list[str]:
    """The levels that placement looks at, innermost first; then other labels nodes have."""
    labelled = {level for one in view.nodes for level, _ in one.node.labels if level != NODE}
    known = [level for level in reversed(view.levels) if level in labelled]
    return [*known, *sorted(labelled.difference(known))]


def _path(labels: Mapping[str, str], level: str, levels: Sequence[str]) -> tuple[str, ...]:
    """Where a node is at ``level``, from the outermost level that it is nested in; empty for one without a label."""
    if level not in labels:
        return ()
    outer = levels[: levels.index(level)] if level in levels else ()
    return (*(labels.get(name, "") for name in outer), labels[level])


def _there_is(known: Sequence[Domain]) -> str:
    by_level: dict[str, list[str]] = defaultdict(list)
    for one in known:
        by_level[one.level].append(one.name)
    return "there is " + "; ".join(f"{level}: {_list(names)}" for level, names in by_level.items())


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
