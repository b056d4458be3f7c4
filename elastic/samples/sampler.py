"""The order of samples for other people's loaders: torch's ``DataLoader``, and torchdata's ``StatefulDataLoader``.

A loader asks for indices ahead of what the model has learnt from, so that only the training loop knows what is done::

    sampler = ElasticSampler(dataset, shares, seed=0)
    for batch in DataLoader(dataset, batch_sampler=sampler.batches(), num_workers=4):
        ...
        optimizer.step()
        sampler.commit()

"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from elastic.errors import PolicyError
from elastic.samples.course import START, Course, Place
from elastic.samples.errors import StepError
from elastic.samples.feed import Portion, indices_of
from elastic.samples.order import Order
from elastic.samples.shares import Shares, checked
from elastic.samples.source import size_of


class ElasticSampler(Sampler[int]):
    """This rank's samples from the committed place to the end of the data epoch, one by one.

    By :meth:`batches` they come as microbatches, as ``batch_sampler=`` takes them; one by one, it is up to the loader's
    ``batch_size`` to meet the ends of steps.
    """

    def __init__(
        self,
        dataset: Any,
        shares: Shares,
        *,
        seed: int,
        shuffle: str = "full",
        tail: str = "wrap",
        allow: Collection[str] = (),
    ) -> None:
        """``dataset`` may be a number of samples; the rest is as in an ``ElasticDataLoader``."""
        samples = dataset if isinstance(dataset, int) else size_of(dataset)
        self.course = Course(Order(samples, seed, shuffle), shares.global_batch, tail)
        self.shares = shares
        checked(shares, shares.global_batch)
        self.allow = tuple(allow)
        self._place = START
        self._handed = START
        """Where the newest iteration is; ahead of what is committed."""
        self._exhausted = False

    @property
    def place(self) -> Place:
        """After the last committed step."""
        return self._place

    def commit(self, steps: int = 1) -> Place:
        """The model has learnt from the next so many steps."""
        if self._place.step + steps > self._handed.step:
            raise StepError(
                f"step {self._place.step + steps - 1} cannot be committed: {self._handed.step} were handed out so far"
            )
        for _ in range(steps):
            self._place = Place(self._place.step + 1, self.course.batch(self._place.cursor).after)
        self._exhausted = False
        return self._place

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: a few integers, the same on every rank."""
        return self.course.state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration begins where this was saved."""
        self.reshape(self.shares, self.course.place(state, self.allow))

    def reshape(self, shares: Shares, at: Place | None = None) -> None:
        """The next iteration has this share of every step, and begins at the committed place, or at ``at``."""
        course = Course(self.course.order, shares.global_batch, self.course.tail)
        checked(shares, shares.global_batch)
        self.course, self.shares = course, shares
        self._place = self._handed = self._place if at is None else at
        self._exhausted = False

    def __iter__(self) -> Iterator[int]:
        for piece in self.batches():
            yield from piece

    def __len__(self) -> int:
        """Samples left of this data epoch for this rank."""
        return sum(self._left(lambda size: sum(piece.size for piece in checked(self.shares, size))))

    def batches(self) -> Batches:
        """Microbatches, for ``batch_sampler=``."""
        return Batches(self)

    def portions(self, place: Place, until: int) -> Iterator[Portion]:
        """This rank's part of each step, until this data epoch begins."""
        while self.course.epoch(place.cursor) < until:
            batch = self.course.batch(place.cursor)
            yield Portion(place, batch, checked(self.shares, batch.size))
            place = Place(place.step + 1, batch.after)

    def _begin(self) -> Place:
        if self._exhausted:
            raise StepError(
                "an iteration went to the end of the epoch and none of its steps was committed, so that this one would"
                " be the same again: call commit() after each step"
            )
        self._handed = self._place
        return self._place

    def hand(self, portion: Portion) -> list[list[int]]:
        if not portion.slices:
            raise PolicyError(
                f"this rank has no samples at step {portion.place.step}, and a loader of torch's cannot hand out none:"
                " use fewer ranks or smaller microbatches, or an ElasticDataLoader"
            )
        self._handed = Place(portion.place.step + 1, portion.batch.after)
        return [indices.tolist() for indices in indices_of(self.course, portion)]

    def _left(self, measure: Callable[[int], int]) -> list[int]:
        cursor = self._place.cursor
        whole, short = self.course.until(cursor, self.course.epoch(cursor) + 1)
        return [whole * measure(self.course.global_batch), measure(short) if short else 0]


class Batches(Sampler[list[int]]):
    """Lists of indices, one for each of this rank's microbatches."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        sampler = self._sampler
        place = sampler._begin()
        for portion in sampler.portions(place, sampler.course.epoch(place.cursor) + 1):
            yield from sampler.hand(portion)
        sampler._exhausted = sampler._place == place

    def __len__(self) -> int:
        return sum(self._sampler._left(lambda size: len(checked(self._sampler.shares, size))))
