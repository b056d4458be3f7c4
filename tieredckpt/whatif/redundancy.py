"""Failure domains, the redundancy of each step, and the outcome of losing nodes, as values. Pure."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.shard_records import ShardInfo, VersionId
from tieredckpt.agent.agent_api import ClusterNode, ClusterStatus, DrainStatus
from tieredckpt.errors import CheckpointDamagedError, UsageError
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT, decode_meta
from tieredckpt.resolve_step import Resolution, incomplete_state
from tieredckpt.step_inventory import StepInventory, StepStatus

NODE_LEVEL = "node"
_MAX_NAMES = 12


@dataclass(frozen=True)
class FailureDomain:
    """Nodes that fail together: all nodes of a rack, for example, or one node alone."""

    level: str
    name: str
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.level}:{self.name}"


def cluster_failure_domains(view: ClusterStatus) -> tuple[FailureDomain, ...]:
    """Return every node alone, then every failure domain, innermost level first.

    Domains are nested, as for placement: rack r1 of zone a and rack r1 of zone b differ. They are then named ``a/r1``
    and ``b/r1``.
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
    """Return the domain with a name such as ``rack:r1``.

    Raise :class:`UsageError` with the known names if no domain has this name.
    """
    level, colon, name = text.partition(":")
    if not colon:
        raise UsageError(f"--lose {text}: say what it is, as in node:n1 or rack:r1; {_list_domains(known)}")
    of_level = [one for one in known if one.level == level]
    if not of_level:
        raise UsageError(f"--lose {text}: no node has a {level}; {_list_domains(known)}")
    for one in of_level:
        if one.name == name:
            return one
    alike = [one for one in of_level if one.name.rpartition("/")[2] == name]
    if alike:
        raise UsageError(f"--lose {text}: there is more than one, say which: {', '.join(map(str, alike))}")
    raise UsageError(f"--lose {text}: there is no such {level}; {_list_domains(of_level)}")


def innermost_domains(view: ClusterStatus) -> tuple[str, Mapping[str, str]]:
    """Return the innermost level with labels, and every node's domain at it.

    A node without a label fails alone.
    """
    labelled = {level for one in view.nodes for level, _ in one.node.labels}
    level = next((level for level in reversed(view.levels) if level in labelled), NODE_LEVEL)
    names: dict[str, str] = {}
    for one in view.nodes:
        path = _path(dict(one.node.labels), level, view.levels)
        names[one.node.id] = "/".join(path) if path else f"{NODE_LEVEL}:{one.node.id}"
    return level, names


def _levels(view: ClusterStatus) -> list[str]:
    """Return the levels that placement uses, innermost first, then the other labels of nodes."""
    labelled = {level for one in view.nodes for level, _ in one.node.labels if level != NODE_LEVEL}
    known = [level for level in reversed(view.levels) if level in labelled]
    return [*known, *sorted(labelled.difference(known))]


def _path(labels: Mapping[str, str], level: str, levels: Sequence[str]) -> tuple[str, ...]:
    """Return a node's domains from the outermost level to ``level``; empty for a node without this label."""
    if level not in labels:
        return ()
    outer = levels[: levels.index(level)] if level in levels else ()
    return (*(labels.get(name, "") for name in outer), labels[level])


def _list_domains(known: Sequence[FailureDomain]) -> str:
    by_level: dict[str, list[str]] = defaultdict(list)
    for one in known:
        by_level[one.level].append(one.name)
    return "there is " + "; ".join(f"{level}: {_list_names(names)}" for level, names in by_level.items())


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


_MAX_LISTED_PARTS = 1 << 17
"""Most parts of a step for which missing parts are listed; no job has as many ranks."""


@dataclass(frozen=True)
class HeldStep:
    """One version in the nodes' memory."""

    version_id: VersionId
    parts: int
    nodes: Mapping[int, tuple[str, ...]]
    """Nodes that report each part, sorted by name."""
    sizes: Mapping[int, int]
    base: int | None = None
    saved_ns: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of one copy of all parts in memory."""
        return sum(self.sizes.values())


def held_steps(view: ClusterStatus) -> dict[VersionId, HeldStep]:
    """Return all versions in memory, oldest step first. Nodes that did not answer contribute nothing."""
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
    """Return the nodes that may hold more shards than they reported, with the reasons."""
    found: dict[str, str] = {one.node.id: one.unreachable for one in view.nodes if one.unreachable}
    for one in view.nodes:
        if one.verifying and not one.unreachable:
            found[one.node.id] = f"it still verifies {one.verifying} shards that a killed agent left"
    return found


def step_sort_key(group: VersionId) -> tuple[int, int, int, int, str]:
    """Return a sort key that groups the attempts at each step."""
    return group.version, *group


def _base(fact: ShardInfo) -> int | None:
    try:
        return decode_meta(fact.meta).base
    except CheckpointDamagedError:  # not a shard of a step
        return None


@dataclass(frozen=True)
class UnderReplicatedParts:
    """Parts of a step with fewer copies than configured."""

    parts: tuple[int, ...]
    nodes: tuple[str, ...]
    """Nodes with copies; empty if no node that answered has one."""


@dataclass(frozen=True)
class StepRedundancy:
    """Redundancy of one step, over all nodes that answered and the durable tier."""

    version_id: VersionId
    parts: int
    """Number of parts of the complete step; 0 if unknown."""
    parts_in_memory: int
    """Number of parts in some node's memory."""
    state: str
    """State as listed: complete, damaged, quarantined, or a result of ``incomplete_state``."""
    copies: int
    """Smallest number of copies of any part in memory."""
    domains: int
    """Smallest number of failure domains of any part in memory."""
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
        """Return text such as ``2 copies in 2 racks`` for the weakest part.

        With ``or_more``, the text states minimums, because some node did not answer.
        """
        if not self.copies:
            return "none"
        more = "+" if or_more else ""
        copies = f"{self.copies}{more} {'copy' if self.copies == 1 and not more else 'copies'}"
        return f"{copies} in {self.domains}{more} {self.level}{'' if self.domains == 1 and not more else 's'}"


def redundancy_by_step(
    view: ClusterStatus, survey: StepInventory, drains: Iterable[DrainStatus] = ()
) -> list[StepRedundancy]:
    """Return the redundancy of every version in any tier, newest last."""
    seen = {one.version_id: one for one in survey.views}
    held = held_steps(view)
    draining = {one.version_id: one for one in drains}
    groups = sorted(held.keys() | seen.keys(), key=step_sort_key)
    assessor = _RedundancyAssessor(view, survey)
    return [assessor.assess(group, held.get(group), seen.get(group), draining.get(group)) for group in groups]


def pending_drains(drains: Iterable[DrainStatus], survey: StepInventory) -> tuple[DrainStatus, ...]:
    """Return the unfinished drains of steps that are not durable.

    A node that uploads only its own parts updates its status late after another node has committed the step.
    """
    durable = {one.version_id for one in survey.views if one.durable}
    return tuple(one for one in drains if one.state not in ("done", "skipped") and one.version_id not in durable)


def newest_replicated(view: ClusterStatus) -> VersionId | None:
    """Return the newest replicated version that any node that answered knows, or ``None``."""
    return max((one.newest_replicated for one in view.nodes if one.newest_replicated is not None), default=None)


class _RedundancyAssessor:
    """Criteria that are common to all steps of a job."""

    def __init__(self, view: ClusterStatus, survey: StepInventory) -> None:
        self._once_complete = survey.once_complete
        self._aborted = frozenset(survey.torn)
        self._newest_complete = survey.newest_complete
        self._unsure = bool(survey.unreachable or unknown_nodes(view))
        self._copies = view.copies if view.member_list_version and view.mode == "mirror" else 1
        self._replicated = newest_replicated(view)
        self._level, self._domain = innermost_domains(view)

    def assess(
        self, group: VersionId, held: HeldStep | None, seen: StepStatus | None, drain: DrainStatus | None
    ) -> StepRedundancy:
        nodes = held.nodes if held is not None else {}
        parts = held.parts if held is not None else seen.parts if seen is not None else 0
        is_complete = (seen is not None and seen.candidate.is_complete) or len(nodes) >= parts > 0
        quarantined = seen.quarantined if seen is not None else ""
        damaged = seen.damaged if seen is not None else {}
        open_ended = parts == UNKNOWN_PART_COUNT
        needed = 0 if open_ended or (seen is not None and seen.covered) else parts
        incomplete = incomplete_state(
            group,
            newest_complete=self._newest_complete,
            once_complete=self._once_complete,
            aborted=self._aborted,
            unsure=self._unsure,
            needed=(seen is not None and seen.kept) or (drain is not None and drain.state not in ("done", "skipped")),
        )
        state = "quarantined" if quarantined else "complete" if is_complete else "damaged" if damaged else incomplete
        wanted = state != "superseded" and (self._replicated is None or group >= self._replicated)
        return StepRedundancy(
            version_id=group,
            parts=len(nodes) if open_ended else parts,
            parts_in_memory=len(nodes),
            state=state,
            copies=min(map(len, nodes.values()), default=0),
            domains=min((len({self._domain[node] for node in there}) for there in nodes.values()), default=0),
            level=self._level,
            under_replicated=_under_replicated(nodes, needed, self._copies) if wanted else (),
            is_replicated=self._replicated is not None and group <= self._replicated and is_complete,
            durable=seen is not None and seen.durable,
            drain=drain,
            quarantined=quarantined,
            damaged=damaged,
            size_bytes=held.size_bytes if held is not None else seen.size_bytes if seen is not None else 0,
            saved_ns=held.saved_ns if held is not None else seen.saved_ns if seen is not None else 0,
        )


def _under_replicated(
    nodes: Mapping[int, tuple[str, ...]], parts: int, copies: int
) -> tuple[UnderReplicatedParts, ...]:
    """Return the parts with too few copies, grouped by the nodes that hold them, fewest copies first."""
    found: dict[tuple[str, ...], list[int]] = defaultdict(list)
    if nodes and parts <= _MAX_LISTED_PARTS:
        found[()] = [part for part in range(parts) if part not in nodes]
    for part, holders in nodes.items():
        if len(holders) < copies:
            found[holders].append(part)
    return tuple(
        UnderReplicatedParts(tuple(numbers), holders)
        for holders, numbers in sorted(found.items(), key=lambda i: (len(i[0]), i))
        if numbers
    )


@dataclass(frozen=True)
class NodeShare:
    """Amount of a job's data that one node holds."""

    steps: int
    parts: int
    own_bytes: int
    copied_bytes: int
    """Bytes of shards that other nodes wrote."""


def node_share(node: ClusterNode) -> NodeShare:
    own = sum(fact.size_bytes for fact in node.shards if not fact.holders)
    copied = sum(fact.size_bytes for fact in node.shards if fact.holders)
    return NodeShare(len({fact.key.version_id for fact in node.shards}), len(node.shards), own, copied)


class ResumeOutlook(str, enum.Enum):
    """Whether the job could resume after a loss."""

    RESUMES = "resumes"
    UNKNOWN = "unknown"
    """No known step would remain, but nodes or a tier that did not answer may have one."""
    NOTHING = "nothing"


@dataclass(frozen=True)
class ReadSource:
    """Parts that would be read from the same nodes or the durable tier."""

    parts: tuple[int, ...]
    """Part numbers; empty for all parts."""
    nodes: tuple[str, ...]
    """Nodes that hold them in memory; empty for the durable tier."""


@dataclass(frozen=True)
class LostStep:
    """A complete step that would no longer be complete."""

    version_id: VersionId
    parts: tuple[int, ...]
    """Parts with no known copy on the remaining nodes."""
    nodes: tuple[str, ...]
    """Lost nodes that held these parts."""


@dataclass(frozen=True)
class QuorumAfterLoss:
    """Whether the remaining nodes may start a new incarnation of the job."""

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
    """Outcome of losing some failure domains at once."""

    lost: tuple[FailureDomain, ...]
    nodes: tuple[str, ...]
    """Names of the lost nodes."""
    resolution: Resolution
    plain_step: int | None
    """Step of a plain checkpoint that is newer than any other remaining step, or ``None``."""
    step_before_loss: int | None
    """Step that the job would resume from without the loss."""
    from_memory: bool = False
    """Whether some of the step would be read from the memory of remaining nodes."""
    from_durable: bool = False
    """Whether some of the step would be read from the durable tier."""
    lost_steps: tuple[LostStep, ...] = ()
    """Lost steps that a load prefers to the remaining one, best first."""
    lost_s: float | None = None
    """Seconds between the saves of the step without the loss and the step after it; ``None`` if unknown."""
    quorum: QuorumAfterLoss | None = None
    """Quorum of the remaining nodes; ``None`` if the job has no member list."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Reasons why remaining nodes or the durable tier did not answer, by name."""
    uncertain_steps: tuple[VersionId, ...] = ()
    """Steps that would be used if the unknown nodes or tier have their missing parts."""

    @property
    def step(self) -> int | None:
        """The step that the job would resume from, as far as known, or ``None``."""
        if self.plain_step is not None:
            return self.plain_step
        return self.resolution.chosen.version_id.version if self.resolution.chosen is not None else None

    @property
    def outlook(self) -> ResumeOutlook:
        if self.step is not None:
            return ResumeOutlook.RESUMES
        return ResumeOutlook.UNKNOWN if self.unknown else ResumeOutlook.NOTHING


def worst_first(outcomes: Sequence[LossOutcome]) -> list[LossOutcome]:
    """Return the outcomes, worst first.

    An outcome without a step is worst, then unknown ones, then those with the oldest steps. Equal ones remain in order.
    """
    order = (ResumeOutlook.NOTHING, ResumeOutlook.UNKNOWN, ResumeOutlook.RESUMES)

    def badness(one: LossOutcome) -> tuple[int, int, bool, bool]:
        enough = one.quorum is None or one.quorum.enough
        return order.index(one.outlook), -1 if one.step is None else one.step, not one.from_durable, enough

    return sorted(outcomes, key=badness)
