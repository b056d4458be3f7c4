"""Failure domains, the redundancy of each step, and the outcome of losing nodes, as values. Pure."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.shard_records import ShardInfo, VersionId
from tieredckpt.agent.agent_api import ClusterNode, ClusterStatus, DrainStatus, StepInventory, StepStatus
from tieredckpt.errors import CheckpointDamagedError, UsageError
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT, decode_meta
from tieredckpt.resolve_step import Resolution, incomplete_state

NODE_LEVEL = "node"
_NAMED = 12


@dataclass(frozen=True)
class FailureDomain:
    """Nodes that are lost together: all of a rack, say, or one node alone."""

    level: str
    name: str
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.level}:{self.name}"


def cluster_failure_domains(view: ClusterStatus) -> tuple[FailureDomain, ...]:
    """Every node alone, then every failure domain, the innermost level first.

    Domains are nested, as for placement: rack r1 of zone a is another one than r1 of zone b. Where that happens they
    are called ``a/r1`` and ``b/r1``.
    """
    found = [FailureDomain(NODE_LEVEL, one.node.id, (one.node.id,)) for one in view.nodes]
    for level in _levels(view):
        members: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for one in view.nodes:
            path = _path(dict(one.node.labels), level, view.levels)
            if path:
                members[path].append(one.node.id)
        short = [path[-1] for path in members]
        for path, nodes in sorted(members.items()):
            name = path[-1] if short.count(path[-1]) == 1 else "/".join(filter(None, path))
            found.append(FailureDomain(level, name, tuple(nodes)))
    return tuple(found)


def find_failure_domain(text: str, known: Sequence[FailureDomain]) -> FailureDomain:
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


def innermost_domains(view: ClusterStatus) -> tuple[str, Mapping[str, str]]:
    """The innermost level that anybody is labelled with, and every node's domain there. Unlabelled ones fail alone."""
    labelled = {level for one in view.nodes for level, _ in one.node.labels}
    level = next((level for level in reversed(view.levels) if level in labelled), NODE_LEVEL)
    names: dict[str, str] = {}
    for one in view.nodes:
        path = _path(dict(one.node.labels), level, view.levels)
        names[one.node.id] = "/".join(path) if path else f"{NODE_LEVEL}:{one.node.id}"
    return level, names


def _levels(view: ClusterStatus) -> list[str]:
    """The levels that placement looks at, innermost first; then other labels nodes have."""
    labelled = {level for one in view.nodes for level, _ in one.node.labels if level != NODE_LEVEL}
    known = [level for level in reversed(view.levels) if level in labelled]
    return [*known, *sorted(labelled.difference(known))]


def _path(labels: Mapping[str, str], level: str, levels: Sequence[str]) -> tuple[str, ...]:
    """Where a node is at ``level``, from the outermost level that it is nested in; empty for one without a label."""
    if level not in labels:
        return ()
    outer = levels[: levels.index(level)] if level in levels else ()
    return (*(labels.get(name, "") for name in outer), labels[level])


def _there_is(known: Sequence[FailureDomain]) -> str:
    by_level: dict[str, list[str]] = defaultdict(list)
    for one in known:
        by_level[one.level].append(one.name)
    return "there is " + "; ".join(f"{level}: {_list(names)}" for level, names in by_level.items())


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


_MISSING_NAMED = 1 << 17
"""Of a step with more missing parts than any job has ranks only that there are some is said."""


@dataclass(frozen=True)
class HeldStep:
    """One attempt at one step in the nodes' memory."""

    version_id: VersionId
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


def held_steps(view: ClusterStatus) -> dict[VersionId, HeldStep]:
    """Everything that was seen, the oldest step first. Nodes that could not be asked add nothing and prove nothing."""
    found: dict[VersionId, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    facts: dict[VersionId, dict[int, ShardInfo]] = defaultdict(dict)
    for one in view.nodes:
        for fact in one.shards:
            found[fact.key.version_id][fact.key.part].append(one.node.id)
            facts[fact.key.version_id][fact.key.part] = fact
    return {
        group: HeldStep(
            group,
            next(iter(facts[group].values())).parts,
            {part: tuple(sorted(nodes)) for part, nodes in sorted(parts.items())},
            {part: fact.size_bytes for part, fact in facts[group].items()},
            next((base for base in map(_base, facts[group].values()) if base is not None), None),
            max(fact.sealed_ns for fact in facts[group].values()),
        )
        for group, parts in sorted(found.items(), key=lambda item: step_sort_key(item[0]))
    }


def unknown_nodes(view: ClusterStatus) -> dict[str, str]:
    """The nodes that may hold more than they said, and why that is not known."""
    found: dict[str, str] = {one.node.id: one.unreachable for one in view.nodes if one.unreachable}
    for one in view.nodes:
        if one.verifying and not one.unreachable:
            found[one.node.id] = f"it still verifies {one.verifying} shards that a killed agent left"
    return found


def step_sort_key(group: VersionId) -> tuple[int, int, int, int, str]:
    """A step's place in a list: attempts at one step beside each other."""
    return group.version, *group


def _base(fact: ShardInfo) -> int | None:
    try:
        return decode_meta(fact.meta).base
    except CheckpointDamagedError:  # a shard of somebody else's
        return None


# -- how well each step is kept -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnderReplicatedParts:
    """Parts of a step that have fewer copies than was asked for."""

    parts: tuple[int, ...]
    nodes: tuple[str, ...]
    """Where the copies are; none: no node that was asked has one."""


@dataclass(frozen=True)
class StepRedundancy:
    """How well one step is kept, over all nodes that could be asked and the durable tier."""

    version_id: VersionId
    parts: int
    """How many a whole one has; 0 where nobody said."""
    parts_in_memory: int
    """Parts in the memory of some node."""
    state: str
    """State as listed: whole, damaged, quarantined, or a result of ``incomplete_state``."""
    copies: int
    """Of the part in memory that has the fewest."""
    domains: int
    """Failure domains of the part that is in the fewest."""
    level: str
    under_replicated: tuple[UnderReplicatedParts, ...]
    is_replicated: bool
    durable: bool
    drain: DrainStatus | None
    quarantined: str
    damaged: Mapping[int, str]
    size_bytes: int
    saved_ns: int

    def describe(self, *, or_more: bool = False) -> str:
        """``2 copies in 2 racks``: what the weakest part has; ``or_more`` where not every node could be asked."""
        if not self.copies:
            return "none"
        more = "+" if or_more else ""
        copies = f"{self.copies}{more} {'copy' if self.copies == 1 and not more else 'copies'}"
        return f"{copies} in {self.domains}{more} {self.level}{'' if self.domains == 1 and not more else 's'}"


def redundancy_by_step(
    view: ClusterStatus, survey: StepInventory, drains: Iterable[DrainStatus] = ()
) -> list[StepRedundancy]:
    """Every attempt at every step that was seen anywhere, the newest last."""
    seen = {one.version_id: one for one in survey.views}
    here = held_steps(view)
    draining = {one.version_id: one for one in drains}
    groups = sorted(here.keys() | seen.keys(), key=step_sort_key)
    judge = _Judge(view, survey)
    return [judge.kept(group, here.get(group), seen.get(group), draining.get(group)) for group in groups]


def pending_drains(drains: Iterable[DrainStatus], survey: StepInventory) -> tuple[DrainStatus, ...]:
    """What is still to become durable. Who uploads only its own parts learns late that all others are there."""
    durable = {one.version_id for one in survey.views if one.durable}
    return tuple(one for one in drains if one.state not in ("done", "skipped") and one.version_id not in durable)


def newest_replicated(view: ClusterStatus) -> VersionId | None:
    """The newest version all of whose parts have their copies, as far as any node that was asked knows."""
    return max((one.newest_replicated for one in view.nodes if one.newest_replicated is not None), default=None)


class _Judge:
    """What all steps of a job are measured by."""

    def __init__(self, view: ClusterStatus, survey: StepInventory) -> None:
        self._once_whole = survey.once_whole
        self._aborted = frozenset(survey.torn)
        self._newest_complete = survey.newest_complete
        self._unsure = bool(survey.unreachable or unknown_nodes(view))
        self._copies = view.copies if view.member_list_version and view.mode == "mirror" else 1
        self._replicated = newest_replicated(view)
        self._level, self._domain = innermost_domains(view)

    def kept(
        self, group: VersionId, held: HeldStep | None, seen: StepStatus | None, drain: DrainStatus | None
    ) -> StepRedundancy:
        nodes = held.nodes if held is not None else {}
        parts = held.parts if held is not None else seen.parts if seen is not None else 0
        whole = (seen is not None and seen.candidate.is_complete) or len(nodes) >= parts > 0
        quarantined = seen.quarantined if seen is not None else ""
        damaged = seen.damaged if seen is not None else {}
        open_ended = parts == UNKNOWN_PART_COUNT
        needed = 0 if open_ended or (seen is not None and seen.covered) else parts
        incomplete = incomplete_state(
            group,
            newest_complete=self._newest_complete,
            once_complete=self._once_whole,
            aborted=self._aborted,
            unsure=self._unsure,
            needed=(seen is not None and seen.kept) or (drain is not None and drain.state not in ("done", "skipped")),
        )
        state = "quarantined" if quarantined else "whole" if whole else "damaged" if damaged else incomplete
        wanted = state != "superseded" and (self._replicated is None or group >= self._replicated)
        return StepRedundancy(
            version_id=group,
            parts=len(nodes) if open_ended else parts,
            parts_in_memory=len(nodes),
            state=state,
            copies=min(map(len, nodes.values()), default=0),
            domains=min((len({self._domain[node] for node in there}) for there in nodes.values()), default=0),
            level=self._level,
            under_replicated=_weak(nodes, needed, self._copies) if wanted else (),
            is_replicated=self._replicated is not None and group <= self._replicated and whole,
            durable=seen is not None and seen.durable,
            drain=drain,
            quarantined=quarantined,
            damaged=damaged,
            size_bytes=held.size_bytes if held is not None else seen.size_bytes if seen is not None else 0,
            saved_ns=held.saved_ns if held is not None else seen.saved_ns if seen is not None else 0,
        )


def _weak(nodes: Mapping[int, tuple[str, ...]], parts: int, copies: int) -> tuple[UnderReplicatedParts, ...]:
    """Parts with too few copies, those with the same copies together, the worst first."""
    found: dict[tuple[str, ...], list[int]] = defaultdict(list)
    if nodes and parts <= _MISSING_NAMED:
        found[()] = [part for part in range(parts) if part not in nodes]
    for part, there in nodes.items():
        if len(there) < copies:
            found[there].append(part)
    return tuple(
        UnderReplicatedParts(tuple(which), there)
        for there, which in sorted(found.items(), key=lambda i: (len(i[0]), i))
        if which
    )


# -- what each node holds -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeShare:
    """What one node holds of a job."""

    steps: int
    parts: int
    own_bytes: int
    copied_bytes: int
    """Of shards that another node wrote."""


def node_share(node: ClusterNode) -> NodeShare:
    own = sum(fact.size_bytes for fact in node.shards if not fact.holders)
    copied = sum(fact.size_bytes for fact in node.shards if fact.holders)
    return NodeShare(len({fact.key.version_id for fact in node.shards}), len(node.shards), own, copied)


def loadable_steps(survey: StepInventory) -> list[int]:
    """Steps a load could use, in any tier."""
    return sorted({one.version_id.version for one in survey.views if one.candidate.is_complete and not one.quarantined})


class ResumeOutlook(str, enum.Enum):
    """What would become of the job."""

    RESUMES = "resumes"
    UNKNOWN = "unknown"
    """Nothing that is known of would be left; what could not be asked may have something."""
    NOTHING = "nothing"


@dataclass(frozen=True)
class ReadSource:
    """Parts that would be read from the same places."""

    parts: tuple[int, ...]
    """Empty: all of them, however many there are."""
    nodes: tuple[str, ...]
    """Whose memory has them; none: the durable tier."""


@dataclass(frozen=True)
class LostStep:
    """A whole step that would not be whole any more."""

    version_id: VersionId
    parts: tuple[int, ...]
    """The parts all of whose known copies would be lost."""
    nodes: tuple[str, ...]
    """The lost nodes that had them."""


@dataclass(frozen=True)
class QuorumAfterLoss:
    """Whether those who are left may begin a new incarnation of the job."""

    enough: bool
    alive: int
    of: int

    def explain(self) -> str:
        text = f"{self.alive} of {self.of} nodes would be left"
        if self.enough:
            return f"{text}: a quorum, a new run may begin on them"
        return f"{text}: no quorum, they let no new run begin before the list of the job's nodes names who is there"


@dataclass(frozen=True)
class LossOutcome:
    """What losing something comes to."""

    lost: tuple[FailureDomain, ...]
    nodes: tuple[str, ...]
    """The nodes that would be lost."""
    resolution: Resolution
    plain_step: int | None
    """A plain checkpoint in the durable tier that is newer than anything else left."""
    step_before_loss: int | None
    """The step the job would be resumed from if nothing were lost."""
    from_memory: bool = False
    """Some of it would be read from the memory of nodes that are left."""
    from_durable: bool = False
    """Some of it would be read from the durable tier."""
    lost_steps: tuple[LostStep, ...] = ()
    """What would have been used rather than what is left, the best first."""
    lost_s: float | None = None
    """Time between the saves of the step that is there and the one that would be left, where both are known."""
    quorum: QuorumAfterLoss | None = None
    """None where the job has only one node."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """What could not be asked and would not be lost (nodes, the durable tier), and why."""
    uncertain_steps: tuple[VersionId, ...] = ()
    """Steps that would be used if the unknown has what is missing from them."""

    @property
    def step(self) -> int | None:
        """The step the job would be resumed from, as far as is known."""
        if self.plain_step is not None:
            return self.plain_step
        return self.resolution.chosen.version_id.version if self.resolution.chosen is not None else None

    @property
    def outlook(self) -> ResumeOutlook:
        if self.step is not None:
            return ResumeOutlook.RESUMES
        return ResumeOutlook.UNKNOWN if self.unknown else ResumeOutlook.NOTHING


def worst_first(outcomes: Sequence[LossOutcome]) -> list[LossOutcome]:
    """Nothing left, then what is not known, then the oldest steps; losses as bad as each other in the given order."""
    fates = (ResumeOutlook.NOTHING, ResumeOutlook.UNKNOWN, ResumeOutlook.RESUMES)

    def badness(one: LossOutcome) -> tuple[int, int, bool, bool]:
        enough = one.quorum is None or one.quorum.enough
        return fates.index(one.outlook), -1 if one.step is None else one.step, not one.from_durable, enough

    return sorted(outcomes, key=badness)
