"""Same sample order for torch's DataLoader and torchdata's StatefulDataLoader.

A loader requests indices ahead of the training, so only the training loop knows which steps are complete::

    sampler = ElasticSampler(dataset, share, seed=0)
    for batch in DataLoader(dataset, batch_sampler=sampler.batches(), num_workers=4):
        ...
        optimizer.step()
        sampler.commit()

::

    loader = StatefulDataLoader(dataset, batch_sampler=StatefulMicrobatchSampler(sampler), num_workers=4)

The second example needs no commit: a state of torchdata is past its last delivered batch. If it was saved at the end of
a step, any rank of any world can load it with the same number of workers. Within a step it fits only the same
microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from elastic.batch_scaling.batch_plan import RankPlan
from elastic.errors import CursorError, PolicyError, StepOrderError
from elastic.samples.data_loader import StepPortion, portion_indices
from elastic.samples.prefetching_reader import dataset_size
from elastic.samples.sample_schedule import (
    START_POSITION,
    DataPosition,
    SampleOrder,
    SampleSchedule,
)


class ElasticSampler(Sampler[int]):
    """Sampler of this rank's samples from the committed position to the end of the data epoch.

    :meth:`batches` returns them as microbatches for ``batch_sampler=``. If they are requested one by one, the loader's
    ``batch_size`` must match the ends of steps.
    """

    def __init__(
        self,
        dataset: Any,
        share: RankPlan,
        *,
        seed: int,
        shuffle: str = "full",
        epoch_end: str = "wrap",
        allow_changes: Collection[str] = (),
    ) -> None:
        """Create a sampler.

        ``dataset`` may be a number of samples; the rest is as in an ``ElasticDataLoader``.
        """
        samples = dataset if isinstance(dataset, int) else dataset_size(dataset)
        self.schedule = SampleSchedule(SampleOrder(samples, seed, shuffle), share.global_batch, epoch_end)
        self.share = share
        self.allow_changes = tuple(allow_changes)
        self._place = START_POSITION
        self._issued = START_POSITION
        """Position of the newest iteration, ahead of the committed one."""
        self._exhausted = False

    @property
    def position(self) -> DataPosition:
        """Position after the last committed step."""
        return self._place

    def commit(self, steps: int = 1) -> DataPosition:
        """Commit the next ``steps`` steps: the model was trained with them."""
        if self._place.step + steps > self._issued.step:
            raise StepOrderError(
                f"step {self._place.step + steps - 1} cannot be committed: {self._issued.step} were handed out so far"
            )
        for _ in range(steps):
            self._place = DataPosition(self._place.step + 1, self.schedule.batch_at(self._place.cursor).end_cursor)
        self._exhausted = False
        return self._place

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a few integers, the same on every rank."""
        return self.schedule.to_state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at the saved position."""
        self.set_share(self.share, self.schedule.position_from_state(state, self.allow_changes))

    def set_share(self, share: RankPlan, at: DataPosition | None = None) -> None:
        """Use this share in the next iteration, which begins at the committed position, or at ``at``."""
        schedule = SampleSchedule(self.schedule.order, share.global_batch, self.schedule.epoch_end)
        self.schedule, self.share = schedule, share
        self._place = self._issued = self._place if at is None else at
        self._exhausted = False

    def __iter__(self) -> Iterator[int]:
        for piece in self.batches():
            yield from piece

    def __len__(self) -> int:
        """Return the number of this rank's remaining samples in this data epoch."""
        return sum(self._left(lambda size: sum(one.samples for one in self.share.microbatches_of(size))))

    def batches(self) -> MicrobatchSampler:
        """Return the microbatches, for ``batch_sampler=``."""
        return MicrobatchSampler(self)

    def portions(self, place: DataPosition, until: int) -> Iterator[StepPortion]:
        """Yield this rank's share of each step until data epoch ``until`` begins."""
        while self.schedule.epoch_at(place.cursor) < until:
            batch = self.schedule.batch_at(place.cursor)
            yield StepPortion(place, batch, self.share.microbatches_of(batch.size))
            place = DataPosition(place.step + 1, batch.end_cursor)

    def _begin(self) -> DataPosition:
        if self._exhausted:
            raise StepOrderError(
                "the last iteration reached the end of the epoch without a committed step, so this one would repeat it."
                " Call commit() after each step"
            )
        self._issued = self._place
        return self._place

    def hand_out(self, portion: StepPortion) -> list[list[int]]:
        if not portion.microbatches:
            raise PolicyError(
                f"this rank has no samples at step {portion.position.step}, and torch's DataLoader cannot return an "
                "empty batch. Use fewer ranks, smaller microbatches, or an ElasticDataLoader"
            )
        self._issued = DataPosition(portion.position.step + 1, portion.batch.end_cursor)
        return [indices.tolist() for indices in portion_indices(self.schedule, portion)]

    def _left(self, measure: Callable[[int], int]) -> list[int]:
        cursor = self._place.cursor
        whole, short = self.schedule.remaining_in_epoch(cursor, self.schedule.epoch_at(cursor) + 1)
        return [whole * measure(self.schedule.global_batch), measure(short) if short else 0]


class MicrobatchSampler(Sampler[list[int]]):
    """Sampler of index lists, one for each of this rank's microbatches."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        sampler = self._sampler
        place = sampler._begin()
        for portion in sampler.portions(place, sampler.schedule.epoch_at(place.cursor) + 1):
            yield from sampler.hand_out(portion)
        sampler._exhausted = sampler._place == place

    def __len__(self) -> int:
        return sum(self._sampler._left(lambda size: len(self._sampler.share.microbatches_of(size))))


class StatefulMicrobatchSampler(Sampler[list[int]]):
    """Sampler of index lists, one for each of this rank's microbatches.

    An iteration covers one data epoch.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler
        self.next_place = sampler.position
        """Position of the next iteration, after the previous one."""

    def __iter__(self) -> StatefulMicrobatchIterator:
        return StatefulMicrobatchIterator(self)


class StatefulMicrobatchIterator(Iterator[list[int]]):
    """Iterator over the microbatches of one data epoch, which can be saved after any of them."""

    def __init__(self, batches: StatefulMicrobatchSampler) -> None:
        self._batches = batches
        self._sampler = batches.sampler
        self._place = batches.next_place
        self._until = self._sampler.schedule.epoch_at(self._place.cursor) + 1
        self._portions = self._sampler.portions(self._place, self._until)
        self._portion: StepPortion | None = None
        """Step with remaining microbatches; ``None`` between two steps."""
        self._pending: list[list[int]] = []

    def __next__(self) -> list[int]:
        portion = self._portion or self._open()
        if portion is None:
            self._batches.next_place = self._place
            raise StopIteration
        found = self._pending.pop(0)
        if not self._pending:
            self._place = DataPosition(portion.position.step + 1, portion.batch.end_cursor)
            self._portion = None
        return found

    def state_dict(self) -> dict[str, Any]:
        own = self._portion.microbatches if self._portion is not None else ()
        read = own[: len(own) - len(self._pending)]
        return {
            **self._sampler.schedule.to_state(self._place),
            "until": self._until,
            "read": [list(one) for one in read],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        place = self._sampler.schedule.position_from_state(state, self._sampler.allow_changes)
        self._batches.next_place = self._place = place
        self._until = state["until"]
        self._portions = self._sampler.portions(place, self._until)
        self._portion, self._pending = None, []
        if read := [tuple(one) for one in state["read"]]:
            portion = self._open()
            if portion is None or list(portion.microbatches[: len(read)]) != read:
                raise CursorError(
                    f"this was saved within step {place.step}, when another share of it had been read: save at the end"
                    " of steps"
                )
            self._pending = self._pending[len(read) :]

    def _open(self) -> StepPortion | None:
        self._portion = next(self._portions, None)
        self._pending = [] if self._portion is None else self._sampler.hand_out(self._portion)
        return self._portion
