"""BatchPlan: the samples and microbatches of every rank. Pure arithmetic.

::

    samples        0 1 2 3 4 5 6 7 8 9      4 ranks, at most 2 samples in a pass:
    ranks          0     1     2   3        runs that differ by at most one sample,
    microbatches   0   1 2   3 4 5 6 7      2 passes on every rank

    samples        0 1 2 3 4 5 6 7 8 9      microbatch=2: the same microbatches in every world;
    microbatches   0   1   2   3   4        ranks have runs that differ by at most one;
    ranks          0       1   2   3        2 passes on every rank, one of them empty on ranks 1 to 3

All values of a rank, sample or microbatch are computed directly: no cost grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic.errors import PolicyError


class PlannedMicrobatch(NamedTuple):
    """Samples of one forward and backward pass, counted from 0 at the beginning of the step."""

    id: int
    first: int
    samples: int


class RankQuota(NamedTuple):
    """Number of ranks with the same number of samples."""

    ranks: int
    samples: int


@dataclass(frozen=True)
class RankPlan:
    """Work of one rank in a step, for its loader and its gradients."""

    batch_plan: BatchPlan
    """The division that it is a part of."""
    rank: int
    first: int
    """First of its samples."""
    samples: int
    microbatches: tuple[PlannedMicrobatch, ...]
    empty_passes: int
    """Passes without a sample.

    All ranks make the same number of passes, because sharded models gather parameters in each pass and wait for all
    ranks.
    """
    weight: float
    """Share of the global batch: the weight of this rank's mean in the mean over all samples."""

    @property
    def global_batch(self) -> int:
        return self.batch_plan.global_batch

    def microbatches_of(self, samples: int) -> tuple[PlannedMicrobatch, ...]:
        """Return its microbatches in a batch of ``samples``.

        A shorter batch than the global one, at the end of an epoch, may be too small for all ranks.
        """
        if samples == self.global_batch:
            return self.microbatches
        return replace(self.batch_plan, global_batch=samples, allow_idle=True).for_rank(self.rank).microbatches


@dataclass(frozen=True)
class BatchPlan:
    """Division of a global batch into microbatches for a number of ranks.

    Without ``microbatch``, samples are divided as evenly as possible, in as few passes as ``max_microbatch`` allows.
    Then microbatches depend on the world. With ``microbatch`` they are the same in every world. Then sums over
    microbatches in the order of their ids can be equal bit for bit. Raises :class:`~elastic.errors.PolicyError` for an
    impossible division.
    """

    global_batch: int
    """Samples in a step, in any world."""
    world_size: int
    """Number of ranks with different samples.

    The ranks of a tensor, pipeline or context parallel group count as one.
    """
    max_microbatch: int | None = None
    """Largest number of samples in a pass. ``None``: no limit."""
    microbatch: int | None = None
    """Samples in every microbatch; the last one may have fewer."""
    allow_idle: bool = False
    """Whether ranks may have empty passes only."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "world_size", "max_microbatch", "microbatch"):
            _check(name, getattr(self, name), optional=name.endswith("microbatch"))
        if self.microbatch is not None and self.max_microbatch is not None and self.microbatch > self.max_microbatch:
            raise PolicyError(
                f"microbatch is {self.microbatch} and must not exceed max_microbatch, which is {self.max_microbatch}: "
                "a microbatch is one forward pass"
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
        """Whether microbatches are the same in every world."""
        return self.microbatch is not None

    @property
    def accumulation_steps(self) -> int:
        """Number of passes in a step, on every rank."""
        if self.microbatch is not None:
            return _ceil_div(_ceil_div(self.global_batch, self.microbatch), self.world_size)
        largest = _ceil_div(self.global_batch, self.world_size)
        return 1 if self.max_microbatch is None else _ceil_div(largest, self.max_microbatch)

    @property
    def microbatch_count(self) -> int:
        """Number of microbatches with samples, over all ranks.

        Their ids count from 0 in the order of their samples.
        """
        if self.microbatch is not None:
            return _ceil_div(self.global_batch, self.microbatch)
        # Only if all microbatches have one sample can a rank have fewer samples than passes.
        return min(self.world_size * self.accumulation_steps, self.global_batch)

    @property
    def microbatch_size(self) -> int:
        """Samples in the largest microbatch."""
        if self.microbatch is not None:
            return min(self.microbatch, self.global_batch)
        return _ceil_div(self.max_rank_samples, self.accumulation_steps)

    @property
    def max_rank_samples(self) -> int:
        """Largest number of samples of a rank."""
        return self._samples(0)[1]

    @property
    def min_rank_samples(self) -> int:
        """Smallest number of samples of a rank."""
        return self._samples(self.world_size - 1)[1]

    @property
    def quotas(self) -> tuple[RankQuota, ...]:
        """Numbers of ranks with the same number of samples, in the order of ranks."""
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
        """Number of passes without a sample, over all ranks."""
        return self.world_size * self.accumulation_steps - self.microbatch_count

    @property
    def utilization(self) -> float:
        """Share of the ranks' capacity that is used while the busiest rank computes, from 0 to 1."""
        return self.global_batch / (self.world_size * self.max_rank_samples)

    def for_rank(self, rank: int) -> RankPlan:
        """Return the work of ``rank``.

        Raises :class:`~elastic.errors.PolicyError` for a rank outside the plan.
        """
        self._check_place("rank", rank, self.world_size, "world_size")
        first, samples = self._samples(rank)
        start, count = _range_of_part(self.microbatch_count, self.world_size, rank)
        return RankPlan(
            batch_plan=self,
            rank=rank,
            first=first,
            samples=samples,
            microbatches=tuple(self._microbatch(rank, one) for one in range(start, start + count)),
            empty_passes=self.accumulation_steps - count,
            weight=samples / self.global_batch,
        )

    def rank_of_microbatch(self, id: int) -> int:  # noqa: A002 - what it is called everywhere
        self._check_place("microbatch", id, self.microbatch_count, "microbatch_count")
        return _part_of(self.microbatch_count, self.world_size, id)

    def rank_of_sample(self, sample: int) -> int:
        self._check_place("sample", sample, self.global_batch, "global_batch")
        if self.microbatch is not None:
            return self.rank_of_microbatch(sample // self.microbatch)
        return _part_of(self.global_batch, self.world_size, sample)

    def _samples(self, rank: int) -> tuple[int, int]:
        if self.microbatch is None:
            return _range_of_part(self.global_batch, self.world_size, rank)
        start, count = _range_of_part(self.microbatch_count, self.world_size, rank)
        first = min(start * self.microbatch, self.global_batch)
        return first, min((start + count) * self.microbatch, self.global_batch) - first

    def _microbatch(self, rank: int, id: int) -> PlannedMicrobatch:  # noqa: A002
        if self.microbatch is not None:
            first = id * self.microbatch
            return PlannedMicrobatch(id, first, min(self.microbatch, self.global_batch - first))
        begin, samples = self._samples(rank)
        start, count = _range_of_part(self.microbatch_count, self.world_size, rank)
        offset, size = _range_of_part(samples, count, id - start)
        return PlannedMicrobatch(id, begin + offset, size)

    @staticmethod
    def _check_place(what: str, place: int, places: int, limit: str) -> None:
        if not 0 <= place < places:
            raise PolicyError(f"there is no {what} {place}: {limit} is {places}, they are counted from 0")


def common_microbatch(global_batch: int, worlds: Iterable[int], max_microbatch: int) -> int:
    """Return the largest ``microbatch`` that leaves no rank of ``worlds`` idle and lengthens no step."""
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


def _ceil_div(total: int, size: int) -> int:
    return -(-total // size)


def _range_of_part(total: int, parts: int, part: int) -> tuple[int, int]:
    """Return the first item and the number of items of ``part``, if ``total`` items are divided in order.

    The first parts have one item more if the division has a remainder.
    """
    per_part, remainder = divmod(total, parts)
    return part * per_part + min(part, remainder), per_part + (part < remainder)


def _part_of(total: int, parts: int, item: int) -> int:
    """Return the part of :func:`_run` that has ``item``."""
    per_part, remainder = divmod(total, parts)
    edge = remainder * (per_part + 1)
    return item // (per_part + 1) if item < edge else remainder + (item - edge) // per_part
