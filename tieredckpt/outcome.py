"""What losing some nodes comes to, in values."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.records import Group
from tieredckpt.losses import Domain
from tieredckpt.resolve import Resolution


class Fate(str, enum.Enum):
    """What would become of the job."""

    RESUMES = "resumes"
    UNKNOWN = "unknown"
    """Nothing that is known of would be left; what could not be asked may have something."""
    NOTHING = "nothing"


@dataclass(frozen=True)
class Reads:
    """Parts that would be read from the same places."""

    parts: tuple[int, ...]
    """Empty: all of them, however many there are."""
    nodes: tuple[str, ...]
    """Whose memory has them; none: the durable tier."""


@dataclass(frozen=True)
class Gone:
    """A whole step that would not be whole any more."""

    group: Group
    parts: tuple[int, ...]
    """The parts all of whose known copies would be lost."""
    nodes: tuple[str, ...]
    """The lost nodes that had them."""


@dataclass(frozen=True)
class Quorum:
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
class Outcome:
    """What losing something comes to."""

    lost: tuple[Domain, ...]
    nodes: tuple[str, ...]
    """The nodes that would be lost."""
    resolution: Resolution
    plain: int | None
    """A plain checkpoint in the durable tier that is newer than anything else left."""
    before: int | None
    """The step the job would be resumed from if nothing were lost."""
    from_memory: bool = False
    """Some of it would be read from the memory of nodes that are left."""
    from_durable: bool = False
    """Some of it would be read from the durable tier."""
    gone: tuple[Gone, ...] = ()
    """What would have been used rather than what is left, the best first."""
    lost_s: float | None = None
    """Time between the saves of the step that is there and the one that would be left, where both are known."""
    quorum: Quorum | None = None
    """None where the job has only one node."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """What could not be asked and would not be lost (nodes, the durable tier), and why."""
    perhaps: tuple[Group, ...] = ()
    """Steps that would be used if the unknown has what is missing from them."""

    @property
    def step(self) -> int | None:
        """The step the job would be resumed from, as far as is known."""
        if self.plain is not None:
            return self.plain
        return self.resolution.chosen.group.version if self.resolution.chosen is not None else None

    @property
    def fate(self) -> Fate:
        if self.step is not None:
            return Fate.RESUMES
        return Fate.UNKNOWN if self.unknown else Fate.NOTHING


def worst_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Nothing left, then what is not known, then the oldest steps; losses as bad as each other in the given order."""
    fates = (Fate.NOTHING, Fate.UNKNOWN, Fate.RESUMES)

    def badness(one: Outcome) -> tuple[int, int, bool, bool]:
        enough = one.quorum is None or one.quorum.enough
        return fates.index(one.fate), -1 if one.step is None else one.step, not one.from_durable, enough

    return sorted(outcomes, key=badness)
