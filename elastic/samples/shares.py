"""Which samples of a step's global batch this rank computes: all that samples have to do with worlds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
class EvenShares:
    """Microbatches of one size, counted through the global batch, a run of them for each rank."""

    global_batch: int
    microbatch: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.microbatch < 1:
            raise PolicyError(
                f"batches of {self.global_batch} and microbatches of {self.microbatch}: both are at least 1"
            )
        if not 0 <= self.rank < self.world:
            raise PolicyError(f"rank {self.rank} is not in a world of {self.world}")

    def slices(self, samples: int) -> list[Slice]:
        pieces = -(-samples // self.microbatch)
        mine = range(pieces * self.rank // self.world, pieces * (self.rank + 1) // self.world)
        starts = [piece * self.microbatch for piece in mine]
        return [Slice(start, min(self.microbatch, samples - start)) for start in starts]


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
