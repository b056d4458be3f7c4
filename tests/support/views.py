"""A job's nodes as one of them would see them, written in a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from peerstore.cluster.nodes import Node, NodeId, parse_labels
from peerstore.records import Group, ShardFact, ShardKey
from tieredckpt.manifest import ShardMeta, encode_meta
from tieredckpt.node import ClusterView, NodeView, StepView, Survey
from tieredckpt.resolve import Tier

SIZE = 1 << 20


def group(step: int, epoch: int = 1) -> Group:
    return Group(epoch, step, 0, "a")


def fact(
    job: str, which: Group, part: int, parts: int, *, base: int | None = None, layout: str = "", copy: bool = False
) -> ShardFact:
    key = ShardKey(job, which.version, which.epoch, which.incarnation, which.attempt, part)
    meta = encode_meta(ShardMeta(layout or f"layout-{part}", (), base))
    holders = ("elsewhere", "here") if copy else ()
    return ShardFact(key, parts, SIZE, meta, which.version * 10**9, marked_whole=False, holders=holders)


def node(
    name: str,
    labels: str = "",
    holds: Mapping[int | Group, Sequence[int]] | None = None,
    *,
    parts: int = 2,
    standing: str = "alive",
    silent: str = "",
    bases: Mapping[int, int] | None = None,
    **more: Any,
) -> NodeView:
    """``holds={7: [0, 1]}``: parts 0 and 1 of step 7; a negative part, ``~1``, is a copy of part 1."""
    facts = []
    for step, held in (holds or {}).items():
        which = step if isinstance(step, Group) else group(step)
        base = (bases or {}).get(which.epoch)
        facts += [fact("job", which, p if p >= 0 else ~p, parts, base=base, copy=p < 0) for p in held]
    peer = Node(NodeId(name), f"{name}:7070", parse_labels(labels))
    return NodeView(peer, standing, tuple(facts), epoch=1, silent=silent, **more)


def view(*nodes: NodeView, **changes: Any) -> ClusterView:
    given = {"roster": 1, "sees": f"sees {len(nodes)} of {len(nodes)} nodes", "copies": 2, "levels": ("zone", "rack")}
    return ClusterView("job", nodes[0].node.id, nodes, **{**given, **changes})


def survey(
    *steps: int | Group | StepView,
    durable: Sequence[int] = (),
    unreachable: Mapping[Tier, str] | None = None,
    **more: Any,
) -> Survey:
    """What the durable tier has beside: ``durable`` steps, and whatever is given in full."""
    views = {one.group: one for one in steps if isinstance(one, StepView)}
    for step in durable:
        which = group(step)
        views[which] = (
            msgspec.structs.replace(views[which], durable=True)
            if which in views
            else StepView(which, 0, {}, durable=True)
        )
    return Survey(tuple(views.values()), dict(unreachable or {}), **more)
