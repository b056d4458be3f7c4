"""The step that a job would resume from if some of its nodes were lost at once. Pure.

:func:`tieredckpt.resolve_step.resolve_step` chooses the step from the data that would remain. The shards of a node that
did not answer are unknown, and results that depend on them are reported as unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from peerstore.membership.topology import member_list
from peerstore.shard_records import VersionId
from tieredckpt.agent.agent_api import ClusterStatus
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT
from tieredckpt.resolve_step import Candidate, Resolution, StepVerdict, Tier, resolve_step
from tieredckpt.step_inventory import StepInventory, StepStatus
from tieredckpt.whatif.redundancy import (
    FailureDomain,
    HeldStep,
    LossOutcome,
    LostStep,
    QuorumAfterLoss,
    ReadSource,
    held_steps,
    step_sort_key,
    unknown_nodes,
)

CoverageCheck = Callable[[VersionId, Collection[int]], bool]
"""Function that returns whether these parts of a step hold the whole state."""


class LossAnalysis:
    """Analysis of several possible losses, from one inventory of a job."""

    def __init__(
        self, view: ClusterStatus, survey: StepInventory, covers: CoverageCheck, *, worn_after: int = 0
    ) -> None:
        """Prepare the analysis.

        A load prefers older steps to one with ``worn_after`` crashed loads; 0 for no limit.
        """
        self._view = view
        self._covers = covers
        self._statuses = {one.version_id: one for one in survey.views}
        self._held = held_steps(view)
        self._groups = sorted(self._held.keys() | self._statuses.keys(), key=step_sort_key)
        self._parts_on_node: dict[str, dict[VersionId, list[int]]] = defaultdict(lambda: defaultdict(list))
        for group, held in self._held.items():
            for part, nodes in held.nodes.items():
                for node in nodes:
                    self._parts_on_node[node][group].append(part)
        self._quarantined = {one.version_id for one in survey.views if one.quarantined}
        self._worn = {one.version_id for one in survey.views if worn_after and one.crashed_loads >= worn_after}
        self._plain = max(survey.plain, default=None)
        self._unknown = unknown_nodes(view)
        self._durable = survey.unreachable.get(Tier.DURABLE, "")
        listed = [one for one in view.nodes if one.state != "stranger"]
        self._member_list = (
            member_list(view.member_list_version, [one.node for one in listed])
            if view.member_list_version and listed
            else None
        )
        self._alive = frozenset(one.node.id for one in listed if one.state == "alive")
        self._without_loss = self._resolve(frozenset(), {})

    @property
    def resumable_step(self) -> int | None:
        """The step that the job would resume from without a loss."""
        return self._step(self._without_loss)

    @property
    def is_incomplete(self) -> bool:
        """Whether some node or the durable tier did not answer."""
        return bool(self._unknown or self._durable)

    def outcome_without(self, lost: Sequence[FailureDomain]) -> LossOutcome:
        """Return the outcome of losing the nodes of all these domains."""
        nodes = frozenset(node for one in lost for node in one.nodes)
        missing = self._missing(nodes)
        resolution = self._resolve(nodes, missing)
        unknown = {node: why for node, why in self._unknown.items() if node not in nodes}
        if self._durable:
            unknown["durable tier"] = self._durable
        plain = self._plain if self._step(resolution) != self._version(resolution) else None
        return LossOutcome(
            lost=tuple(lost),
            nodes=tuple(sorted(nodes)),
            resolution=resolution,
            plain_step=plain,
            step_before_loss=self.resumable_step,
            from_memory=plain is None and resolution.chosen is not None and bool(resolution.chosen.found),
            from_durable=plain is not None or self._needs_durable(resolution),
            lost_steps=self._lost_steps(resolution, plain, nodes, missing),
            lost_s=self._lost_s(resolution) if plain is None else None,
            quorum=self._quorum(nodes),
            unknown=unknown,
            uncertain_steps=self._uncertain_steps(resolution) if unknown else (),
        )

    def read_sources(self, outcome: LossOutcome) -> tuple[ReadSource, ...]:
        """Return the sources of all parts: the remaining nodes that hold them, or else the durable tier."""
        chosen = outcome.resolution.chosen
        if outcome.plain_step is not None:
            return (ReadSource((), ()),)
        if chosen is None:
            return ()
        held = self._held.get(chosen.version_id)
        if held is None or not chosen.found:
            return (ReadSource((), ()),)
        lost = frozenset(outcome.nodes)
        parts_by_nodes: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for part in chosen.found:
            parts_by_nodes[tuple(node for node in held.nodes[part] if node not in lost)].append(part)
        if self._needs_durable(outcome.resolution):
            parts_by_nodes[()] = [part for part in range(chosen.parts) if part not in chosen.found]
        reads = [ReadSource(tuple(sorted(parts)), nodes) for nodes, parts in parts_by_nodes.items() if parts]
        return tuple(sorted(reads, key=lambda one: one.parts))

    def _missing(self, lost: frozenset[str]) -> dict[VersionId, frozenset[int]]:
        """Return by version the parts that only lost nodes are known to hold."""
        missing: dict[VersionId, set[int]] = defaultdict(set)
        for node in lost:
            for group, parts in self._parts_on_node[node].items() if node in self._parts_on_node else ():
                holders = self._held[group].nodes
                missing[group].update(part for part in parts if lost.issuperset(holders[part]))
        return {group: frozenset(parts) for group, parts in missing.items() if parts}

    def _resolve(self, lost: frozenset[str], missing: Mapping[VersionId, frozenset[int]]) -> Resolution:
        candidates = [
            one for one in (self._candidate(group, missing.get(group, frozenset())) for group in self._groups) if one
        ]
        unreachable = {Tier.PEER} if self._unknown.keys() - lost else set()
        unreachable |= {Tier.DURABLE} if self._durable else set()
        return resolve_step(candidates, quarantined=self._quarantined, reluctant=self._worn, unreachable=unreachable)

    def _candidate(self, group: VersionId, missing: frozenset[int]) -> Candidate | None:
        held, seen = self._held.get(group), self._statuses.get(group)
        remaining: Mapping[int, tuple[Tier, ...]] = _RemainingParts(held.nodes if held is not None else {}, missing)
        durable = seen is not None and seen.durable
        damaged = seen.damaged if seen is not None else {}
        if not remaining and not durable and not damaged:
            return None  # no trace of the step would remain
        parts = held.parts if held is not None else seen.parts if seen is not None else 0
        return Candidate(
            group,
            parts,
            remaining,
            _base(held, seen),
            covered=durable or self._covered(group, seen, remaining, parts, missing),
            damaged=damaged,
        )

    def _covered(
        self,
        group: VersionId,
        seen: StepStatus | None,
        remaining: Mapping[int, tuple[Tier, ...]],
        parts: int,
        missing: frozenset[int],
    ) -> bool:
        if not remaining or len(remaining) >= parts:
            return False
        if seen is not None and not missing:
            return seen.covered
        return self._covers(group, remaining.keys())

    def _version(self, found: Resolution) -> int | None:
        return found.chosen.version_id.version if found.chosen is not None else None

    def _step(self, found: Resolution) -> int | None:
        """Return the chosen step, or the newest plain checkpoint if that is newer."""
        return max((one for one in (self._version(found), self._plain) if one is not None), default=None)

    def _needs_durable(self, found: Resolution) -> bool:
        chosen = found.chosen
        seen = self._statuses.get(chosen.version_id) if chosen is not None else None
        if chosen is None or seen is None or not seen.durable:
            return False
        return not chosen.found or (chosen.parts != UNKNOWN_PART_COUNT and len(chosen.found) < chosen.parts)

    def _lost_steps(
        self, found: Resolution, plain: int | None, lost: frozenset[str], missing: Mapping[VersionId, frozenset[int]]
    ) -> tuple[LostStep, ...]:
        """Return the lost steps that a load prefers to the remaining one, in the order of preference."""
        if self._without_loss.chosen is None:
            return ()
        lost_steps = []
        for candidate in (self._without_loss.chosen, *self._without_loss.alternatives):
            group = candidate.version_id
            if found.chosen is not None and group == found.chosen.version_id:
                break
            if plain is not None and group.version <= plain:
                break
            parts = missing.get(group, frozenset())
            if not parts:  # the step remains; another rule rejects it
                continue
            nodes = {node for part in parts for node in self._held[group].nodes[part]}
            lost_steps.append(LostStep(group, tuple(sorted(parts)), tuple(sorted(nodes & lost))))
        return tuple(lost_steps)

    def _lost_s(self, found: Resolution) -> float | None:
        if found.chosen is None or self._without_loss.chosen is None:
            return None
        saved, remaining = self._saved_ns(self._without_loss.chosen.version_id), self._saved_ns(found.chosen.version_id)
        return max(0.0, (saved - remaining) / 1e9) if saved and remaining else None

    def _saved_ns(self, group: VersionId) -> int:
        held, seen = self._held.get(group), self._statuses.get(group)
        return held.saved_ns if held is not None else seen.saved_ns if seen is not None else 0

    def _uncertain_steps(self, found: Resolution) -> tuple[VersionId, ...]:
        """Return newer steps that are not known to be complete."""
        chosen = self._step(found)
        groups = [group for group in self._groups if group not in self._quarantined]
        complete = {one.version_id for one in (found.chosen, *found.alternatives) if one is not None}
        newer = [group for group in groups if group not in complete and (chosen is None or group.version > chosen)]
        # A step that a later incarnation superseded remains superseded, even if a node turns out to have it.
        return tuple(group for group in newer if found.verdicts.get(group) is not StepVerdict.SUPERSEDED)

    def _quorum(self, lost: frozenset[str]) -> QuorumAfterLoss | None:
        if self._member_list is None:
            return None
        alive = self._alive - lost
        return QuorumAfterLoss(self._member_list.has_quorum(alive), len(alive), len(self._member_list.nodes))


class _RemainingParts(Mapping[int, tuple[Tier, ...]]):
    """View of the parts that remain in some node's memory.

    It omits the missing parts without copying the mapping.
    """

    def __init__(self, nodes: Mapping[int, tuple[str, ...]], missing: frozenset[int]) -> None:
        self._nodes = nodes
        self._missing = missing

    def __getitem__(self, part: int) -> tuple[Tier, ...]:
        if part in self._missing:
            raise KeyError(part)
        return (Tier.PEER,) if self._nodes[part] else ()

    def __iter__(self) -> Iterator[int]:
        return (part for part in self._nodes if part not in self._missing)

    def __len__(self) -> int:
        return len(self._nodes) - len(self._missing)


def _base(held: HeldStep | None, seen: StepStatus | None) -> int | None:
    if seen is not None and seen.base is not None:
        return seen.base
    return held.base if held is not None else None
