"""The step that a job would resume from if some of its nodes were lost at once. Pure.

The step is chosen by :func:`tieredckpt.resolve_step.resolve_step`, from what would still be there. A node that could
not be asked counts neither as holding anything nor as holding nothing: what follows from it is said to be unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from peerstore.membership.topology import member_list
from peerstore.shard_records import VersionId
from tieredckpt.agent.agent_api import ClusterStatus, StepInventory, StepStatus
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT
from tieredckpt.resolve_step import Candidate, Resolution, StepVerdict, Tier, resolve_step
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
"""Whether these parts of a step hold the whole state, although others are missing."""


class LossAnalysis:
    """One look at a job, to ask several times what would be lost."""

    def __init__(
        self, view: ClusterStatus, survey: StepInventory, covers: CoverageCheck, *, worn_after: int = 0
    ) -> None:
        """``worn_after``: loads of a step that ended their process, after which one prefers an older step; 0: never."""
        self._view = view
        self._covers = covers
        self._seen = {one.version_id: one for one in survey.views}
        self._held = held_steps(view)
        self._groups = sorted(self._held.keys() | self._seen.keys(), key=step_sort_key)
        self._on: dict[str, dict[VersionId, list[int]]] = defaultdict(lambda: defaultdict(list))
        for group, held in self._held.items():
            for part, nodes in held.nodes.items():
                for node in nodes:
                    self._on[node][group].append(part)
        self._bad = {one.version_id for one in survey.views if one.quarantined}
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
        self._before = self._resolve(frozenset(), {})

    @property
    def resumable_step(self) -> int | None:
        """The step the job would be resumed from if nothing were lost."""
        return self._step(self._before)

    @property
    def is_incomplete(self) -> bool:
        """Some node or the durable tier could not be asked."""
        return bool(self._unknown or self._durable)

    def outcome_without(self, lost: Sequence[FailureDomain]) -> LossOutcome:
        """What would be left without the nodes of all these domains."""
        nodes = frozenset(node for one in lost for node in one.nodes)
        missing = self._missing(nodes)
        found = self._resolve(nodes, missing)
        open_questions = {node: why for node, why in self._unknown.items() if node not in nodes}
        if self._durable:
            open_questions["durable tier"] = self._durable
        plain = self._plain if self._step(found) != self._version(found) else None
        return LossOutcome(
            lost=tuple(lost),
            nodes=tuple(sorted(nodes)),
            resolution=found,
            plain_step=plain,
            step_before_loss=self.resumable_step,
            from_memory=plain is None and found.chosen is not None and bool(found.chosen.found),
            from_durable=plain is not None or self._needs_durable(found),
            lost_steps=self._gone(found, plain, nodes, missing),
            lost_s=self._lost_s(found) if plain is None else None,
            quorum=self._quorum(nodes),
            unknown=open_questions,
            uncertain_steps=self._perhaps(found) if open_questions else (),
        )

    def read_sources(self, outcome: LossOutcome) -> tuple[ReadSource, ...]:
        """Each part from the memory of whoever would be left of its holders, else from the durable tier."""
        chosen = outcome.resolution.chosen
        if outcome.plain_step is not None:
            return (ReadSource((), ()),)
        if chosen is None:
            return ()
        held = self._held.get(chosen.version_id)
        if held is None or not chosen.found:
            return (ReadSource((), ()),)
        lost = frozenset(outcome.nodes)
        places: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for part in chosen.found:
            places[tuple(node for node in held.nodes[part] if node not in lost)].append(part)
        if self._needs_durable(outcome.resolution):
            places[()] = [part for part in range(chosen.parts) if part not in chosen.found]
        reads = [ReadSource(tuple(sorted(parts)), nodes) for nodes, parts in places.items() if parts]
        return tuple(sorted(reads, key=lambda one: one.parts))

    # -- the steps that would be left -----------------------------------------------------------------------------

    def _missing(self, lost: frozenset[str]) -> dict[VersionId, frozenset[int]]:
        """The parts by step that only lost nodes are known to hold."""
        touched: dict[VersionId, set[int]] = defaultdict(set)
        for node in lost:
            for group, parts in self._on[node].items() if node in self._on else ():
                there = self._held[group].nodes
                touched[group].update(part for part in parts if lost.issuperset(there[part]))
        return {group: frozenset(parts) for group, parts in touched.items() if parts}

    def _resolve(self, lost: frozenset[str], missing: Mapping[VersionId, frozenset[int]]) -> Resolution:
        candidates = [
            one for one in (self._candidate(group, missing.get(group, frozenset())) for group in self._groups) if one
        ]
        away = {Tier.PEER} if self._unknown.keys() - lost else set()
        away |= {Tier.DURABLE} if self._durable else set()
        return resolve_step(candidates, quarantined=self._bad, reluctant=self._worn, unreachable=away)

    def _candidate(self, group: VersionId, missing: frozenset[int]) -> Candidate | None:
        held, seen = self._held.get(group), self._seen.get(group)
        left: Mapping[int, tuple[Tier, ...]] = _Left(held.nodes if held is not None else {}, missing)
        durable = seen is not None and seen.durable
        damaged = seen.damaged if seen is not None else {}
        if not left and not durable and not damaged:
            return None  # nobody would know that it ever was
        parts = held.parts if held is not None else seen.parts if seen is not None else 0
        return Candidate(
            group,
            parts,
            left,
            _base(held, seen),
            covered=durable or self._covered(group, seen, left, parts, missing),
            damaged=damaged,
        )

    def _covered(
        self,
        group: VersionId,
        seen: StepStatus | None,
        left: Mapping[int, tuple[Tier, ...]],
        parts: int,
        missing: frozenset[int],
    ) -> bool:
        if not left or len(left) >= parts:
            return False
        if seen is not None and not missing:
            return seen.covered
        return self._covers(group, left.keys())

    # -- what follows from it -------------------------------------------------------------------------------------

    def _version(self, found: Resolution) -> int | None:
        return found.chosen.version_id.version if found.chosen is not None else None

    def _step(self, found: Resolution) -> int | None:
        """The chosen step, or the plain checkpoint that is newer."""
        return max((one for one in (self._version(found), self._plain) if one is not None), default=None)

    def _needs_durable(self, found: Resolution) -> bool:
        chosen = found.chosen
        seen = self._seen.get(chosen.version_id) if chosen is not None else None
        if chosen is None or seen is None or not seen.durable:
            return False
        return not chosen.found or (chosen.parts != UNKNOWN_PART_COUNT and len(chosen.found) < chosen.parts)

    def _gone(
        self, found: Resolution, plain: int | None, lost: frozenset[str], missing: Mapping[VersionId, frozenset[int]]
    ) -> tuple[LostStep, ...]:
        """What was preferred to what is left now: the steps before it in the order a load would take them."""
        if self._before.chosen is None:
            return ()
        gone = []
        for candidate in (self._before.chosen, *self._before.alternatives):
            group = candidate.version_id
            if found.chosen is not None and group == found.chosen.version_id:
                break
            if plain is not None and group.version <= plain:
                break
            parts = missing.get(group, frozenset())
            if not parts:  # it is there as before, and another rule decides
                continue
            nodes = {node for part in parts for node in self._held[group].nodes[part]}
            gone.append(LostStep(group, tuple(sorted(parts)), tuple(sorted(nodes & lost))))
        return tuple(gone)

    def _lost_s(self, found: Resolution) -> float | None:
        if found.chosen is None or self._before.chosen is None:
            return None
        saved, would = self._saved_ns(self._before.chosen.version_id), self._saved_ns(found.chosen.version_id)
        return max(0.0, (saved - would) / 1e9) if saved and would else None

    def _saved_ns(self, group: VersionId) -> int:
        held, seen = self._held.get(group), self._seen.get(group)
        return held.saved_ns if held is not None else seen.saved_ns if seen is not None else 0

    def _perhaps(self, found: Resolution) -> tuple[VersionId, ...]:
        """Newer steps that are not whole as far as is known."""
        chosen = self._step(found)
        groups = [group for group in self._groups if group not in self._bad]
        whole = {one.version_id for one in (found.chosen, *found.alternatives) if one is not None}
        newer = [group for group in groups if group not in whole and (chosen is None or group.version > chosen)]
        # What a later incarnation left behind stays behind, whoever has it.
        return tuple(group for group in newer if found.verdicts.get(group) is not StepVerdict.SUPERSEDED)

    def _quorum(self, lost: frozenset[str]) -> QuorumAfterLoss | None:
        if self._member_list is None:
            return None
        alive = self._alive - lost
        return QuorumAfterLoss(self._member_list.has_quorum(alive), len(alive), len(self._member_list.nodes))


class _Left(Mapping[int, tuple[Tier, ...]]):
    """The parts that would still be in some node's memory: all but the missing ones, without a copy of the others."""

    def __init__(self, nodes: Mapping[int, tuple[str, ...]], missing: frozenset[int]) -> None:
        self._nodes = nodes
        self._gone = missing

    def __getitem__(self, part: int) -> tuple[Tier, ...]:
        if part in self._gone:
            raise KeyError(part)
        return (Tier.PEER,) if self._nodes[part] else ()

    def __iter__(self) -> Iterator[int]:
        return (part for part in self._nodes if part not in self._gone)

    def __len__(self) -> int:
        return len(self._nodes) - len(self._gone)


def _base(held: HeldStep | None, seen: StepStatus | None) -> int | None:
    if seen is not None and seen.base is not None:
        return seen.base
    return held.base if held is not None else None
