"""Compact builders for a job's cluster view: one line per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from peerstore.membership.topology import NodeId, PeerNode, parse_labels
from peerstore.shard_records import ShardInfo, ShardKey, VersionId
from tieredckpt.agent.agent_api import ClusterNode, ClusterStatus
from tieredckpt.format.manifest import ShardMeta, encode_meta
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import StepInventory, StepStatus

SIZE = 1 << 20


def version_id(step: int, epoch: int = 1) -> VersionId:
    return VersionId(epoch, step, 0, "a")


def shard_info(
    job: str, which: VersionId, part: int, parts: int, *, base: int | None = None, layout: str = "", copy: bool = False
) -> ShardInfo:
    key = ShardKey(job, which.version, which.epoch, which.incarnation, which.attempt, part)
    meta = encode_meta(ShardMeta(layout or f"layout-{part}", (), base))
    holders = ("elsewhere", "here") if copy else ()
    return ShardInfo(key, parts, SIZE, meta, which.version * 10**9, marked_committed=False, holders=holders)


def cluster_node(
    name: str,
    labels: str = "",
    holds: Mapping[int | VersionId, Sequence[int]] | None = None,
    *,
    parts: int = 2,
    state: str = "alive",
    unreachable: str = "",
    bases: Mapping[int, int] | None = None,
    **more: Any,
) -> ClusterNode:
    """Return a node; ``holds={7: [0, ~1]}`` gives it part 0 of step 7 and a copy of part 1."""
    facts = []
    for step, held in (holds or {}).items():
        which = step if isinstance(step, VersionId) else version_id(step)
        base = (bases or {}).get(which.epoch)
        facts += [shard_info("job", which, p if p >= 0 else ~p, parts, base=base, copy=p < 0) for p in held]
    peer = PeerNode(NodeId(name), f"{name}:7070", parse_labels(labels))
    return ClusterNode(peer, state, tuple(facts), epoch=1, unreachable=unreachable, **more)


def cluster_status(*nodes: ClusterNode, **changes: Any) -> ClusterStatus:
    given = {
        "member_list_version": 1,
        "sees": f"sees {len(nodes)} of {len(nodes)} nodes",
        "copies": 2,
        "levels": ("zone", "rack"),
    }
    return ClusterStatus("job", nodes[0].node.id, nodes, **{**given, **changes})


def step_inventory(
    *steps: int | VersionId | StepStatus,
    durable: Sequence[int] = (),
    unreachable: Mapping[Tier, str] | None = None,
    **more: Any,
) -> StepInventory:
    """Return an inventory of the given steps, with the ``durable`` ones marked durable."""
    views = {one.version_id: one for one in steps if isinstance(one, StepStatus)}
    for step in durable:
        which = version_id(step)
        views[which] = (
            msgspec.structs.replace(views[which], durable=True)
            if which in views
            else StepStatus(which, 0, {}, durable=True)
        )
    return StepInventory(tuple(views.values()), dict(unreachable or {}), **more)
