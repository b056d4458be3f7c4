"""Which samples of a step's global batch this rank computes: all that samples have to do with worlds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from elastic.batch.plan import BatchPlan
from elastic.errors import PolicyError


class Slice(NamedTuple):
    """One microbatch: a run of the global batch."""

    first: int
    """Place of its first sample in the global batch. Names the microbatch, whoever computes it."""
    size: int


class Shares(Protocol):
    """One rank's share of every step.

    Promises every plan makes: over all ranks of a world the slices cover the batch, each sample once; the slices of a
    rank ascend. Where random numbers are to be independent of the world (:mod:`elastic.samples.seeds`), the batch is
    cut at the same places in every world.
    """

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together take at a step."""

    def slices(self, samples: int) -> Sequence[tuple[int, int]]:
        """This rank's microbatches of a batch of so many samples, each as (first, size); there may be none.

        ``samples`` is the global batch, or less at the end of an epoch with ``tail="short"``.
        """


@dataclass(frozen=True)
class PlanShares:
    """What a :class:`~elastic.batch.plan.BatchPlan` gives to one rank."""

    plan: BatchPlan
    rank: int

    def __post_init__(self) -> None:
        self.plan.of(self.rank)  # so that a rank that is not in the plan says so here

    @property
    def global_batch(self) -> int:
        return self.plan.global_batch

    def slices(self, samples: int) -> list[Slice]:
        # Of a batch that is cut short at an epoch's end there may be too little for all ranks, however it was planned.
        plan = self.plan if samples == self.plan.global_batch else self._of(samples)
        return [Slice(piece.first, piece.samples) for piece in plan.of(self.rank).microbatches]

    def _of(self, samples: int) -> BatchPlan:
        return replace(self.plan, global_batch=samples, allow_idle=True)


def checked(shares: Shares, samples: int) -> tuple[Slice, ...]:
    """What a plan says this rank computes, if it can be."""
    slices = tuple(Slice(first, size) for first, size in shares.slices(samples))
    end = 0
    for piece in slices:
        if piece.first < end or piece.size < 1 or piece.first + piece.size > samples:
            raise PolicyError(
                f"{shares!r} has {list(slices)} of a batch of {samples} samples: slices have to ascend, not overlap,"
                " have samples, and end with the batch"
            )
        end = piece.first + piece.size
    return slices
