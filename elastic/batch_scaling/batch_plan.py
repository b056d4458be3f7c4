"""BatchPlan: the samples and microbatches of every rank. Pure arithmetic.

::

    samples        0 1 2 3 4 5 6 7 8 9      4 ranks, at most 2 samples in a pass:
    ranks          0     1     2   3        runs that differ by at most one sample,
    microbatches   0   1 2   3 4 5 6 7      2 passes on every rank

    samples        0 1 2 3 4 5 6 7 8 9      microbatch=2: the same cuts in every world,
    microbatches   0   1   2   3   4        of which ranks have runs that differ by at most one;
    ranks          0       1   2   3        2 passes on every rank, of which ranks 1 to 3 make one without samples

Everything about one rank, sample or microbatch is arithmetic: nothing here grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from elastic.errors import PolicyError


class PlannedMicrobatch(NamedTuple):
    """Samples of one forward and backward pass. Samples count from 0 at the beginning of the step."""

    id: int
    first: int
    samples: int


class RankQuota(NamedTuple):
    """So many ranks with so many samples each."""

    ranks: int
    samples: int


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in a step."""

    rank: int
    first: int
    """The first of its samples."""
    samples: int
    microbatches: tuple[PlannedMicrobatch, ...]
    empty_passes: int
    """Passes without a sample, to make as many as every other rank: sharded models gather parameters in each pass, and
    wait for all ranks."""
    weight: float
    """Its part of the global batch. A mean over a rank's own samples counts this much in the mean over all."""


@dataclass(frozen=True)
class BatchPlan:
    """A global batch, cut into microbatches for a number of ranks; or :class:`~elastic.errors.PolicyError`.

    Without ``microbatch``, samples are shared out as evenly as they can be, in as few passes as ``max_microbatch``
    allows; microbatches are then other ones in another world. With it they are the same in every world, so that sums
    over microbatches in the order of their ids can be the same to the last bit.
    """

    global_batch: int
    """Samples in a step, whatever the world."""
    world_size: int
    """Ranks that have samples of their own: those of one tensor, pipeline or context parallel group count as one."""
    max_microbatch: int | None = None
    """The most samples that fit into a pass. ``None``: any number."""
    microbatch: int | None = None
    """Samples in every microbatch but perhaps the last."""
    allow_idle: bool = False
    """Whether there may be ranks with nothing to do but empty passes."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "world_size", "max_microbatch", "microbatch"):
            _check(name, getattr(self, name), optional=name.endswith("microbatch"))
        if self.microbatch is not None and self.max_microbatch is not None and self.microbatch > self.max_microbatch:
            raise PolicyError(
                f"microbatch is {self.microbatch}, more than max_microbatch, which is {self.max_microbatch}: "
                "what does not fit into one pass cannot be one microbatch"
            )
        if not self.allow_idle:
            self._check_busy()

    def _check_busy(self) -> None:
        world, batch = self.world_size, self.global_batch
        if world > batch:
            raise PolicyError(
                f"world_size is {world}, but global_batch has {batch} samples: {world - batch} ranks would have "
                f"nothing to do. Use at most {batch} ranks or a larger global_batch; allow_idle=True lets them idle"
            )
        if world > self.microbatch_count:
            raise PolicyError(
                f"world_size is {world}, but microbatch={self.microbatch} cuts global_batch={batch} into "
                f"{self.microbatch_count}: {world - self.microbatch_count} ranks would have nothing to do. Use at most "
                f"{self.microbatch_count} ranks or a microbatch of at most {(batch - 1) // (world - 1)}; "
                "allow_idle=True lets them idle"
            )

    @property
    def is_world_independent(self) -> bool:
        """Whether microbatches are the same ones in every world."""
        return self.microbatch is not None

    @property
    def accumulation_steps(self) -> int:
        """Passes in a step, on every rank."""
        if self.microbatch is not None:
            return _up(_up(self.global_batch, self.microbatch), self.world_size)
        largest = _up(self.global_batch, self.world_size)
        return 1 if self.max_microbatch is None else _up(largest, self.max_microbatch)

    @property
    def microbatch_count(self) -> int:
        """Microbatches with samples, of all ranks together. Their ids are 0 to this, in the order of their samples."""
        if self.microbatch is not None:
            return _up(self.global_batch, self.microbatch)
        # Only where all microbatches are of one sample can a rank have fewer samples than there are passes.
        return min(self.world_size * self.accumulation_steps, self.global_batch)

    @property
    def microbatch_size(self) -> int:
        """Samples in the largest microbatch."""
        if self.microbatch is not None:
            return min(self.microbatch, self.global_batch)
        return _up(self.max_rank_samples, self.accumulation_steps)

    @property
    def max_rank_samples(self) -> int:
        """Samples of the rank with the most."""
        return self._samples(0)[1]

    @property
    def min_rank_samples(self) -> int:
        """Samples of the rank with the fewest."""
        return self._samples(self.world_size - 1)[1]

    @property
    def quotas(self) -> tuple[RankQuota, ...]:
        """How many ranks have how many samples, in the order of ranks."""
        unit = self.global_batch if self.microbatch is None else self.microbatch_count
        last = self.rank_of_sample(self.global_batch - 1)
        edges = sorted({edge for edge in (0, unit % self.world_size, last, last + 1) if edge < self.world_size})
        found: list[RankQuota] = []
        for edge, end in zip(edges, [*edges[1:], self.world_size], strict=True):
            samples = self._samples(edge)[1]
            if found and found[-1].samples == samples:
                found[-1] = RankQuota(found[-1].ranks + end - edge, samples)
            else:
                found.append(RankQuota(end - edge, samples))
        return tuple(found)

    @property
    def empty_passes(self) -> int:
        """Passes without a sample, of all ranks together."""
        return self.world_size * self.accumulation_steps - self.microbatch_count

    @property
    def utilization(self) -> float:
        """Samples computed in the time the busiest rank takes, of those that all ranks could."""
        return self.global_batch / (self.world_size * self.max_rank_samples)

    def for_rank(self, rank: int) -> RankPlan:
        """What ``rank`` does, of the ranks that have samples of their own."""
        self._check_place("rank", rank, self.world_size, "world_size")
        first, samples = self._samples(rank)
        start, count = _run(self.microbatch_count, self.world_size, rank)
        return RankPlan(
            rank=rank,
            first=first,
            samples=samples,
            microbatches=tuple(self._microbatch(rank, one) for one in range(start, start + count)),
            empty_passes=self.accumulation_steps - count,
            weight=samples / self.global_batch,
        )

    def rank_of_microbatch(self, id: int) -> int:  # noqa: A002 - what it is called everywhere
        self._check_place("microbatch", id, self.microbatch_count, "microbatch_count")
        return _whose(self.microbatch_count, self.world_size, id)

    def rank_of_sample(self, sample: int) -> int:
        self._check_place("sample", sample, self.global_batch, "global_batch")
        if self.microbatch is not None:
            return self.rank_of_microbatch(sample // self.microbatch)
        return _whose(self.global_batch, self.world_size, sample)

    def _samples(self, rank: int) -> tuple[int, int]:
        if self.microbatch is None:
            return _run(self.global_batch, self.world_size, rank)
        start, count = _run(self.microbatch_count, self.world_size, rank)
        first = min(start * self.microbatch, self.global_batch)
        return first, min((start + count) * self.microbatch, self.global_batch) - first

    def _microbatch(self, rank: int, id: int) -> PlannedMicrobatch:  # noqa: A002
        if self.microbatch is not None:
            first = id * self.microbatch
            return PlannedMicrobatch(id, first, min(self.microbatch, self.global_batch - first))
        begin, samples = self._samples(rank)
        start, count = _run(self.microbatch_count, self.world_size, rank)
        offset, size = _run(samples, count, id - start)
        return PlannedMicrobatch(id, begin + offset, size)

    @staticmethod
    def _check_place(what: str, place: int, places: int, limit: str) -> None:
        if not 0 <= place < places:
            raise PolicyError(f"there is no {what} {place}: {limit} is {places}, they are counted from 0")


def common_microbatch(global_batch: int, worlds: Iterable[int], max_microbatch: int) -> int:
    """The largest ``microbatch`` that leaves no rank of these worlds idle, and makes no step longer than it must be."""
    worlds = sorted(set(worlds))
    _check("max_microbatch", max_microbatch)
    best = {world: BatchPlan(global_batch, world).max_rank_samples for world in worlds}
    for size in range(min(max_microbatch, global_batch), 1, -1):
        plans = (BatchPlan(global_batch, world, microbatch=size, allow_idle=True) for world in worlds)
        if all(plan.max_rank_samples == best[plan.world_size] and plan.min_rank_samples for plan in plans):
            return size
    return 1


def _check(name: str, value: object, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyError(f"{name} is {value!r}: it must be a whole number, 1 or more")


def _up(total: int, size: int) -> int:
    return -(-total // size)


def _run(total: int, parts: int, part: int) -> tuple[int, int]:
    """The first and the number of what ``part`` has, of ``total`` shared out in order, the first ones one more."""
    each, more = divmod(total, parts)
    return part * each + min(part, more), each + (part < more)


def _whose(total: int, parts: int, item: int) -> int:
    """Which part of :func:`_run` has ``item``."""
    each, more = divmod(total, parts)
    edge = more * (each + 1)
    return item // (each + 1) if item < edge else more + (item - edge) // each
