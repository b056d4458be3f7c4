"""Who computes which microbatches of a step. Known to every rank beforehand: nothing has to be asked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from elastic.errors import PolicyError


class Slot(NamedTuple):
    """One forward and backward of a rank."""

    id: int | None
    """Of the microbatch; ``None``: this rank only takes part in what its peers do together."""
    stand_in: int
    """Id of the microbatch to compute with: the same, or any where there is none."""
    last: bool


@dataclasses.dataclass(frozen=True)
class Share:
    """The microbatches 0 … M-1 of a step, by the rank that computes them, in the order in which it does."""

    by_rank: tuple[tuple[int, ...], ...]
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.by_rank):
            raise PolicyError(f"rank {self.rank} is not one of the {len(self.by_rank)} ranks that share the step")
        if not self.microbatches or sorted(id_ for ids in self.by_rank for id_ in ids) != [*range(self.microbatches)]:
            raise PolicyError(
                f"the ranks' microbatches {self.by_rank} are not 0 to {self.microbatches - 1}, each of them once"
            )

    @classmethod
    def contiguous(cls, quotas: Sequence[int], rank: int) -> Share:
        """The first ``quotas[0]`` microbatches are rank 0's, the next ``quotas[1]`` rank 1's, and so on."""
        by_rank, first = [], 0
        for quota in quotas:
            by_rank.append((*range(first, first + quota),))
            first += quota
        return cls((*by_rank,), rank)

    @classmethod
    def even(cls, microbatches: int, ranks: int, rank: int) -> Share:
        """Runs whose lengths differ by one at most."""
        least, more = divmod(microbatches, ranks)
        return cls.contiguous([least + (one < more) for one in range(ranks)], rank)

    @classmethod
    def dealt(cls, microbatches: int, ranks: int, rank: int) -> Share:
        """One after the other, like cards: what FSDP2 holds for the fixed tree stays smallest so."""
        return cls((*((*range(one, microbatches, ranks),) for one in range(ranks)),), rank)

    @functools.cached_property
    def microbatches(self) -> int:
        return sum(map(len, self.by_rank))

    @property
    def mine(self) -> tuple[int, ...]:
        return self.by_rank[self.rank]

    @functools.cached_property
    def most(self) -> int:
        """Microbatches of the rank that has most."""
        return max(map(len, self.by_rank))

    def id_in(self, rank: int, turn: int, turns: int) -> int | None:
        """What ``rank`` computes in one of ``turns``. Empty turns come first: what a rank ends with is its own."""
        ids = self.by_rank[rank]
        own = turn - (turns - len(ids))
        return ids[own] if own >= 0 else None

    def slots(self, turns: int) -> tuple[Slot, ...]:
        """This rank's turns, at least one for each of its microbatches."""
        turns = max(turns, len(self.mine))
        ids = [self.id_in(self.rank, turn, turns) for turn in range(turns)]
        instead = self.mine[0] if self.mine else 0
        return tuple(Slot(id_, instead if id_ is None else id_, turn == turns - 1) for turn, id_ in enumerate(ids))
