"""Steps as the memory of a job's nodes shows them. Pure: facts in, views out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from peerstore.peers.messages import Looked
from peerstore.records import Group, ShardFact
from tieredckpt.manifest import ShardMeta, decode_meta
from tieredckpt.node import StepView
from tieredckpt.resolve import Tier

Facts = Mapping[Group, Mapping[int, ShardFact]]
"""By version and part."""


def elsewhere(nodes: Mapping[str, Looked], me: str) -> Facts:
    """What nodes other than ``me`` hold."""
    found: dict[Group, dict[int, ShardFact]] = defaultdict(dict)
    for node, looked in nodes.items():
        if node != me:
            for fact in looked.facts:
                found[fact.key.group].setdefault(fact.key.part, fact)
    return found


def memory_views(
    inventory: Iterable[ShardFact], others: Facts, covers: Callable[[Sequence[ShardMeta]], bool]
) -> list[StepView]:
    """Each step of which this node or another holds something; ``covers`` says whether less than all parts will do."""
    here: dict[Group, dict[int, ShardFact]] = defaultdict(dict)
    for fact in inventory:
        here[fact.key.group][fact.key.part] = fact
    groups = sorted(here.keys() | others.keys())
    return [_view(group, here.get(group, {}), others.get(group, {}), covers) for group in groups]


def _view(
    group: Group,
    here: Mapping[int, ShardFact],
    others: Mapping[int, ShardFact],
    covers: Callable[[Sequence[ShardMeta]], bool],
) -> StepView:
    facts = [*{**others, **here}.values()]
    metas = [decode_meta(fact.meta) for fact in facts]
    found: dict[int, tuple[Tier, ...]] = {}
    for part in sorted(here.keys() | others.keys()):
        near = (Tier.MEMORY,) if part in here else ()
        found[part] = (*near, Tier.PEER) if part in others else near
    return StepView(
        group=group,
        parts=facts[0].parts,
        found=found,
        base=next((meta.base for meta in metas if meta.base is not None), None),
        covered=len(facts) < facts[0].parts and covers(metas),
        size_bytes=sum(fact.size_bytes for fact in facts),
        saved_ns=max(fact.sealed_ns for fact in facts),
    )
