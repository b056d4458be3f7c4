"""Which step, and from where: one decision for the whole job. Pure.

Absent, unreachable and damaged stay three answers: a tier that could not be asked is named in the result, and
"nothing found" is only said when everybody was asked.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.records import Group


class Tier(str, enum.Enum):
    """Where sealed shards live, nearest first."""

    MEMORY = "memory"
    PEER = "peer"
    DURABLE = "durable"


@dataclass(frozen=True)
class Candidate:
    """One attempt to write one step, as far as anybody has seen it."""

    group: Group
    parts: int
    """How many parts a whole one has."""
    found: Mapping[int, tuple[Tier, ...]]
    """The parts that were seen, and where."""
    base: int | None = None
    """The step its incarnation was restored from, when it said so."""
    covered: bool = False
    """The parts that were seen hold the whole state although some are missing."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """The parts whose copies were found damaged and dropped, and how."""

    @property
    def whole(self) -> bool:
        return self.covered or len(self.found) >= self.parts

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers it would be read from."""
        return tuple(tier for tier in Tier if any(where[:1] == (tier,) for where in self.found.values()))


class Verdict(str, enum.Enum):
    CHOSEN = "chosen"
    OLDER = "older than the chosen one"
    TORN = "not whole"
    DAMAGED = "damaged"
    QUARANTINED = "quarantined"
    RELUCTANT = "loads of it ended their process on this node"
    SUPERSEDED = "of a past that the job has left"
    OTHER_STEP = "not the step asked for"


@dataclass(frozen=True)
class Resolution:
    """The chosen step (or none), and what was decided about every other one."""

    chosen: Candidate | None
    verdicts: Mapping[Group, Verdict]
    unreachable: tuple[Tier, ...] = ()
    """Tiers that could not be asked."""
    alternatives: tuple[Candidate, ...] = field(default=())
    """Whole steps to fall back to, best first."""

    @property
    def lost(self) -> bool:
        """There was a step that is not usable any more: that is damage, and not absence."""
        return any(verdict in (Verdict.DAMAGED, Verdict.QUARANTINED) for verdict in self.verdicts.values())

    def explain(self) -> str:
        """One line per candidate, newest first."""
        lines = [
            f"step {group.version} (epoch {group.epoch}): {verdict.value}"
            for group, verdict in sorted(self.verdicts.items(), key=lambda item: _order(item[0]), reverse=True)
        ]
        lines += [f"{tier.value} tier: could not be asked" for tier in self.unreachable]
        return "; ".join(lines) or "nothing is saved in any tier"


def resolve(
    candidates: Sequence[Candidate],
    *,
    step: int | None = None,
    quarantined: Collection[Group] = (),
    reluctant: Collection[Group] = (),
    unreachable: Collection[Tier] = (),
) -> Resolution:
    """The newest whole step, or the newest attempt at ``step`` when one is named.

    Newest means the highest step; between attempts at one step, the later incarnation. A step above the point
    where a later incarnation branched off belongs to a past that the job has left. ``reluctant`` ones are taken when
    there is no other.
    """
    verdicts: dict[Group, Verdict] = {}
    left = []
    for candidate in candidates:
        verdict = _rejection(candidate, candidates, step, quarantined)
        if verdict is None:
            left.append(candidate)
        else:
            verdicts[candidate.group] = verdict
    left.sort(key=lambda candidate: (candidate.group not in reluctant, _order(candidate.group)), reverse=True)
    for number, candidate in enumerate(left):
        other = Verdict.RELUCTANT if candidate.group in reluctant else Verdict.OLDER
        verdicts[candidate.group] = other if number else Verdict.CHOSEN
    return Resolution(left[0] if left else None, verdicts, tuple(t for t in Tier if t in unreachable), tuple(left[1:]))


def elect(votes: Sequence[Collection[Group]], *, reluctant: Collection[Group] = ()) -> Group | None:
    """The newest step that every rank can load, rather one that none is ``reluctant`` to load; each vote has all that
    one rank can.
    """
    common = set(votes[0]).intersection(*votes[1:]) if votes else set()
    return max(common, key=lambda group: (group not in reluctant, _order(group)), default=None)


def _rejection(
    candidate: Candidate, candidates: Sequence[Candidate], step: int | None, quarantined: Collection[Group]
) -> Verdict | None:
    group = candidate.group
    if step is not None and group.version != step:
        return Verdict.OTHER_STEP
    if not candidate.whole:
        return Verdict.DAMAGED if candidate.damaged else Verdict.TORN
    if group in quarantined:
        return Verdict.QUARANTINED
    if step is None and any(left_behind(candidate, other, quarantined) for other in candidates):
        return Verdict.SUPERSEDED
    return None


def left_behind(candidate: Candidate, later: Candidate, quarantined: Collection[Group]) -> bool:
    """Whether ``later`` shows that its incarnation branched off before ``candidate``'s step."""
    return (
        later.group.epoch > candidate.group.epoch
        and later.whole
        and later.group not in quarantined
        and later.base is not None
        and later.base < candidate.group.version
    )


def _order(group: Group) -> tuple[int, int, int, str]:
    return group.version, group.epoch, group.attempt, group.incarnation
