"""What the memory of a job's nodes holds, step by step, as far as they could be asked. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from peerstore.records import Group, ShardFact
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.losses import innermost
from tieredckpt.manifest import OPEN_ENDED, decode_meta
from tieredckpt.node import ClusterView, DrainView, NodeView, StepView, Survey

_MISSING_NAMED = 1 << 17
"""Of a step with more missing parts than any job has ranks only that there are some is said."""


@dataclass(frozen=True)
class Holding:
    """One attempt at one step in the nodes' memory."""

    group: Group
    parts: int
    nodes: Mapping[int, tuple[str, ...]]
    """By part, the nodes that said they hold it, in the order of their names."""
    sizes: Mapping[int, int]
    base: int | None = None
    saved_ns: int = 0

    @property
    def size_bytes(self) -> int:
        """Of one copy of everything."""
        return sum(self.sizes.values())


def holdings(view: ClusterView) -> dict[Group, Holding]:
    """Everything that was seen, the oldest step first. Nodes that could not be asked add nothing and prove nothing."""
    found: dict[Group, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    facts: dict[Group, dict[int, ShardFact]] = defaultdict(dict)
    for one in view.nodes:
        for fact in one.facts:
            found[fact.key.group][fact.key.part].append(one.node.id)
            facts[fact.key.group][fact.key.part] = fact
    return {
        group: Holding(
            group,
            next(iter(facts[group].values())).parts,
            {part: tuple(sorted(nodes)) for part, nodes in sorted(parts.items())},
            {part: fact.size_bytes for part, fact in facts[group].items()},
            next((base for base in map(_base, facts[group].values()) if base is not None), None),
            max(fact.sealed_ns for fact in facts[group].values()),
        )
        for group, parts in sorted(found.items(), key=lambda item: by_step(item[0]))
    }


def unknown(view: ClusterView) -> dict[str, str]:
    """The nodes that may hold more than they said, and why that is not known."""
    found: dict[str, str] = {one.node.id: one.silent for one in view.nodes if one.silent}
    for one in view.nodes:
        if one.verifying and not one.silent:
            found[one.node.id] = f"it still verifies {one.verifying} shards that a killed agent left"
    return found


def by_step(group: Group) -> tuple[int, int, int, int, str]:
    """A step's place in a list: attempts at one step beside each other."""
    return group.version, *group


def _base(fact: ShardFact) -> int | None:
    try:
        return decode_meta(fact.meta).base
    except CheckpointDamagedError:  # a shard of somebody else's
        return None


# -- how well each step is kept -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weak:
    """Parts of a step that have fewer copies than was asked for."""

    parts: tuple[int, ...]
    nodes: tuple[str, ...]
    """Where the copies are; none: no node that was asked has one."""


@dataclass(frozen=True)
class Kept:
    """How well one step is kept, over all nodes that could be asked and the durable tier."""

    group: Group
    parts: int
    """How many a whole one has; 0 where nobody said."""
    held: int
    """Parts in the memory of some node."""
    state: str
    """whole, torn, lost (it was whole once), damaged, quarantined; unknown: who was not asked may have the rest."""
    copies: int
    """Of the part in memory that has the fewest."""
    domains: int
    """Failure domains of the part that is in the fewest."""
    level: str
    weak: tuple[Weak, ...]
    settled: bool
    durable: bool
    drain: DrainView | None
    quarantined: str
    damaged: Mapping[int, str]
    size_bytes: int
    saved_ns: int

    def in_words(self, *, or_more: bool = False) -> str:
        """``2 copies in 2 racks``: what the weakest part has; ``or_more`` where not every node could be asked."""
        if not self.copies:
            return "none"
        more = "+" if or_more else ""
        copies = f"{self.copies}{more} {'copy' if self.copies == 1 and not more else 'copies'}"
        return f"{copies} in {self.domains}{more} {self.level}{'' if self.domains == 1 and not more else 's'}"


def kept(view: ClusterView, survey: Survey, drains: Iterable[DrainView] = ()) -> list[Kept]:
    """Every attempt at every step that was seen anywhere, the newest last."""
    seen = {one.group: one for one in survey.views}
    here = holdings(view)
    draining = {one.group: one for one in drains}
    groups = sorted(here.keys() | seen.keys(), key=by_step)
    judge = _Judge(view, survey)
    return [judge.kept(group, here.get(group), seen.get(group), draining.get(group)) for group in groups]


def pending(drains: Iterable[DrainView], survey: Survey) -> tuple[DrainView, ...]:
    """What is still to become durable. Who uploads only its own parts learns late that all others are there."""
    durable = {one.group for one in survey.views if one.durable}
    return tuple(one for one in drains if one.state not in ("done", "skipped") and one.group not in durable)


def newest_settled(view: ClusterView) -> Group | None:
    """The newest version all of whose parts have their copies, as far as any node that was asked knows."""
    return max((one.settled for one in view.nodes if one.settled is not None), default=None)


class _Judge:
    """What all steps of a job are measured by."""

    def __init__(self, view: ClusterView, survey: Survey) -> None:
        self._once_whole = survey.once_whole
        self._torn = frozenset(survey.torn)
        self._unsure = bool(survey.unreachable or unknown(view))
        self._copies = view.copies if view.roster and view.mode == "mirror" else 1
        self._settled = newest_settled(view)
        self._level, self._domain = innermost(view)

    def kept(self, group: Group, held: Holding | None, seen: StepView | None, drain: DrainView | None) -> Kept:
        nodes = held.nodes if held is not None else {}
        parts = held.parts if held is not None else seen.parts if seen is not None else 0
        whole = (seen is not None and seen.candidate.whole) or len(nodes) >= parts > 0
        quarantined = seen.quarantined if seen is not None else ""
        damaged = seen.damaged if seen is not None else {}
        open_ended = parts == OPEN_ENDED
        needed = 0 if open_ended or (seen is not None and seen.covered) else parts
        wanted = self._settled is None or group >= self._settled
        unfinished = "lost" if group == self._once_whole else "torn"
        if self._unsure and group not in self._torn:
            unfinished = "unknown"
        return Kept(
            group=group,
            parts=len(nodes) if open_ended else parts,
            held=len(nodes),
            state="quarantined" if quarantined else "whole" if whole else "damaged" if damaged else unfinished,
            copies=min(map(len, nodes.values()), default=0),
            domains=min((len({self._domain[node] for node in there}) for there in nodes.values()), default=0),
            level=self._level,
            weak=_weak(nodes, needed, self._copies) if wanted else (),
            settled=self._settled is not None and group <= self._settled and whole,
            durable=seen is not None and seen.durable,
            drain=drain,
            quarantined=quarantined,
            damaged=damaged,
            size_bytes=held.size_bytes if held is not None else seen.size_bytes if seen is not None else 0,
            saved_ns=held.saved_ns if held is not None else seen.saved_ns if seen is not None else 0,
        )


def _weak(nodes: Mapping[int, tuple[str, ...]], parts: int, copies: int) -> tuple[Weak, ...]:
    """Parts with too few copies, those with the same copies together, the worst first."""
    found: dict[tuple[str, ...], list[int]] = defaultdict(list)
    if nodes and parts <= _MISSING_NAMED:
        found[()] = [part for part in range(parts) if part not in nodes]
    for part, there in nodes.items():
        if len(there) < copies:
            found[there].append(part)
    return tuple(
        Weak(tuple(which), there) for there, which in sorted(found.items(), key=lambda i: (len(i[0]), i)) if which
    )


# -- what each node holds -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one node holds of a job."""

    steps: int
    parts: int
    own_bytes: int
    copied_bytes: int
    """Of shards that another node wrote."""


def share(node: NodeView) -> Share:
    own = sum(fact.size_bytes for fact in node.facts if not fact.holders)
    copied = sum(fact.size_bytes for fact in node.facts if fact.holders)
    return Share(len({fact.key.group for fact in node.facts}), len(node.facts), own, copied)


def whole_steps(survey: Survey) -> list[int]:
    """Steps a load could use, in any tier."""
    return sorted({one.group.version for one in survey.views if one.candidate.whole and not one.quarantined})
